"""One optimizer step over all of its micro-batches and processes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from diagnostics.signals.base import StepFacts, StepGradient
from diagnostics.signals.captures import Captures
from diagnostics.signals.micro_batch import MicroBatch
from sdo.trainers.processes import Processes

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class StepTotal:
    """A step as its row tells it; equal in every process but for what only process 0 writes.

    Attributes
    ----------
    micro_batches
        Their number over all processes.
    sample_ids
        The step's samples, in the order of the batch.
    tokens
        Tokens that carry a loss.
    tied
        Whether all samples are completions of groups whose rewards tie, so that gradients are zero but for rounding.
    loss
        Mean negative log-likelihood per such token, in nats; None where a forward pass did not tell. The trainer's own
        loss, in its unit, where that is written.
    gradients
        By the name of a signal, of those that fired.
    saving
        Whether a checkpoint is about to be written.
    """

    micro_batches: int
    sample_ids: list[int]
    tokens: int
    tied: bool
    loss: float | None
    gradients: dict[str, StepGradient]
    saving: bool

    @property
    def clipped(self) -> bool | None:
        """Whether the optimizer was given a shorter gradient; None where no signal can tell."""
        return next((one.clipped for one in self.gradients.values() if one.clipped is not None), None)

    @property
    def same_direction(self) -> bool:
        """False where the processes' shares do not add up to what the optimizer was given."""
        return all(one.same_direction for one in self.gradients.values())

    @property
    def figures(self) -> dict[str, float]:
        """Numbers about the step for the trainer's log."""
        return {name: value for one in self.gradients.values() for name, value in one.figures.items()}

    @property
    def sketch_norm(self) -> float | None:
        """2-norm of a signal's sketch, not finite where the gradient is not; None where no signal fired."""
        found = next(iter(self.gradients.values()), None)
        return None if found is None else float(found.sketch.double().norm())


def total_step(
    processes: Processes,
    micros: list[MicroBatch],
    captures: Captures,
    loss_scale: float,
    *,
    losses: Sequence[torch.Tensor] | None,
    saving: bool,
) -> StepTotal:
    """Put the parts of a step together; with several processes a collective call.

    Parameters
    ----------
    processes
        Whose parts.
    micros
        The micro-batches of this one.
    captures
        Of the signals that are recorded.
    loss_scale
        Of the step: the optimizer's gradient is free of it, what was caught in backward is not.
    losses
        This process's micro-batches' losses as the trainer adds them up, where its own loss is written; None where it
        is read off `micros`.
    saving
        Whether this process is about to see a checkpoint written.
    """
    ids, tokens, micro_batches = _decode(processes.lists(list(_encode(micros))))
    own = _losses(micros) if losses is None else {"loss": _sum_of(losses), "unknown": torch.tensor(0)}
    apart = sum(not tied for micro in micros for tied in micro.tied)
    own |= {"apart": torch.tensor(apart), "saving": torch.tensor(saving)}
    parts: dict[tuple[str, str], torch.Tensor] = {("", name): value for name, value in own.items()}
    total = _sum_all(processes, parts | captures.parts(micros))
    # A loss per token is summed over tokens; of the trainer's own losses DDP takes the mean.
    divisor = tokens if losses is None else processes.count
    return StepTotal(
        micro_batches=micro_batches,
        sample_ids=ids,
        tokens=tokens,
        tied=not total["", "apart"],
        loss=float(total["", "loss"]) / divisor if divisor and not total["", "unknown"] else None,
        gradients=captures.steps(total, micros, StepFacts(processes.count, loss_scale)),
        saving=bool(total["", "saving"]),
    )


def _losses(micros: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Sum the negative log-likelihoods that forward passes told, and count the passes that did not."""
    known = [micro.losses.total for micro in micros if micro.losses is not None and micro.losses.total is not None]
    return {"loss": _sum_of(known), "unknown": torch.tensor(len(micros) - len(known))}


def _sum_of(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(sum(float(loss) for loss in losses), dtype=torch.float64)


def _sum_all(processes: Processes, parts: Mapping[_Key, torch.Tensor]) -> dict[_Key, torch.Tensor]:
    """Sum the parts of all processes in one call: float64, on the CPU, numbers as tensors of one entry."""
    flat = [part.detach().double().cpu().reshape(-1) for part in parts.values()]
    total = processes.sum(torch.cat(flat))
    return dict(zip(parts, torch.split(total, [len(part) for part in flat]), strict=True))


def _encode(micros: Sequence[MicroBatch]) -> Iterator[int]:
    """Number of samples, their ids and the sum of their tokens, micro-batch by micro-batch.

    A batch without padding is one row, so that tokens are known of all of its samples together alone.
    """
    for micro in micros:
        yield len(micro.sample_ids)
        yield from micro.sample_ids
        yield sum(micro.tokens)


def _decode(encoded: list[list[int]]) -> tuple[list[int], int, int]:
    """The step's ids in the order of the batch, its tokens, and its number of micro-batches."""
    found: list[tuple[int, int, list[int]]] = []
    tokens = 0
    for rank, values in enumerate(encoded):
        at, number = 0, 0
        while at < len(values):
            size = values[at]
            found.append((number, rank, values[at + 1 : at + 1 + size]))
            tokens += values[at + 1 + size]
            at, number = at + 2 + size, number + 1
    # Loaders deal micro-batches out in turn: number m of process r is number m * count + r of the batch's.
    return [i for _, _, ids in sorted(found) for i in ids], tokens, len(found)
