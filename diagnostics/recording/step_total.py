"""One optimizer step over all of its micro-batches and processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from diagnostics.signals.taps import Taps
from diagnostics.signals.weight import MicroBatch, Update, WeightTap
from sdo.trainers.processes import Processes

# A clipped gradient is shorter than the raw one by more than rounding can explain.
_CLIP_TOLERANCE = 1e-5
# The reduced sketch and that of the optimizer's gradient differ by a factor, and by no more than this in direction.
_SAME_DIRECTION = 0.99


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
    weight
        Shape ``(k,)``, float64, sketch of the gradient before clipping; None where the signal did not fire.
    weight_norm
        Its exact 2-norm; None where it is not known.
    clipped
        Whether the optimizer was given a shorter one; None where that cannot be told.
    same_direction
        False where the processes' shares do not add up to what the optimizer was given.
    hidden
        Shape ``(H,)``, float64; None where the signal did not fire.
    head
        Shape ``(k,)``, float64, sketch of the head's own gradient; None where the signal did not fire.
    head_norm
        Its exact 2-norm; None where it is not known.
    coherence
        Mean pairwise cosine of the samples' ``hidden`` gradients, in [-1, 1]; None where it is undefined or was not
        asked for.
    saving
        Whether a checkpoint is about to be written.
    """

    micro_batches: int
    sample_ids: list[int]
    tokens: int
    tied: bool
    loss: float | None
    weight: torch.Tensor | None
    weight_norm: float | None
    clipped: bool | None
    same_direction: bool
    hidden: torch.Tensor | None
    head: torch.Tensor | None
    head_norm: float | None
    coherence: float | None
    saving: bool

    @property
    def sketch_norm(self) -> float | None:
        """2-norm of a signal's sketch, not finite where the gradient is not; None where no signal fired."""
        found = next((one for one in (self.weight, self.hidden, self.head) if one is not None), None)
        return None if found is None else float(found.norm())


def total_step(
    processes: Processes,
    micros: list[MicroBatch],
    taps: Taps,
    update: Update | None,
    loss_scale: float,
    *,
    losses: Sequence[torch.Tensor] | None,
    with_samples: bool,
    saving: bool,
) -> StepTotal:
    """Put the parts of a step together; with several processes a collective call.

    Parameters
    ----------
    processes
        Whose parts.
    micros
        The micro-batches of this one.
    taps
        Of the signals that are recorded.
    update
        What :meth:`~diagnostics.signals.weight.WeightTap.look_at_update` saw.
    loss_scale
        Of the step; `update` is free of it, the rest is not.
    losses
        This process's micro-batches' losses as the trainer adds them up, where its own loss is written; None where it
        is read off `micros`.
    with_samples
        Whether the coherence of the samples is wanted.
    saving
        Whether this process is about to see a checkpoint written.
    """
    weight, hidden, head = taps.weight, taps.hidden, taps.head
    ids, tokens, micro_batches = _decode(processes.lists(list(_encode(micros))))
    parts = _losses(micros) if losses is None else {"loss": _sum_of(losses), "unknown": torch.tensor(0)}
    apart = sum(not tied for micro in micros for tied in micro.tied)
    parts |= {"apart": torch.tensor(apart), "saving": torch.tensor(saving)}
    if weight is not None:
        fired = torch.tensor(weight.fired(micros))
        squares = torch.stack([_square(weight.step_norm), _square(None if update is None else update.norm)])
        parts |= {"weight fired": fired, "squares": squares, "weight": weight.step_sketch(micros)}
    if hidden is not None:
        parts |= _fired_sum("hidden", [micro.hidden for micro in micros], hidden.sketch.shape[0])
        unit, units = _unit_sum(micros) if with_samples else (None, 0)
        parts |= {"units": torch.tensor(units), "unit": torch.zeros(hidden.sketch.shape) if unit is None else unit}
    if head is not None:
        parts |= _fired_sum("head", [micro.head_only for micro in micros], head.sketch.stored)
    total = _sum_all(processes, parts)
    norm, clipped, same_direction = None, None, True
    if weight is not None and total["weight fired"]:
        if weight.place is not None or processes.count == 1:
            norm, clipped = _compare(weight, update, total["squares"].tolist(), loss_scale)
        elif update is not None and update.sketch is not None:
            norm, clipped, same_direction = _unclip(total["weight"], update, loss_scale)
    # A loss per token is summed over tokens; of the trainer's own losses DDP takes the mean.
    divisor = tokens if losses is None else processes.count
    return StepTotal(
        micro_batches=micro_batches,
        sample_ids=ids,
        tokens=tokens,
        tied=not total["apart"],
        loss=float(total["loss"]) / divisor if divisor and not total["unknown"] else None,
        weight=_where_fired(total, "weight"),
        weight_norm=norm,
        clipped=clipped,
        same_direction=same_direction,
        hidden=_where_fired(total, "hidden"),
        head=_where_fired(total, "head"),
        head_norm=head.step_norm(micros) if head is not None and processes.count == 1 else None,
        coherence=None if hidden is None else _mean_cosine(total["unit"], int(total["units"])),
        saving=bool(total["saving"]),
    )


def _losses(micros: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Sum the negative log-likelihoods that forward passes told, and count the passes that did not."""
    known = [micro.losses.total for micro in micros if micro.losses is not None and micro.losses.total is not None]
    return {"loss": _sum_of(known), "unknown": torch.tensor(len(micros) - len(known))}


def _sum_of(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(sum(float(loss) for loss in losses), dtype=torch.float64)


def _sum_all(processes: Processes, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum the parts of all processes in one call: float64, on the CPU, numbers as tensors of one entry."""
    flat = [part.detach().double().cpu().reshape(-1) for part in parts.values()]
    total = processes.sum(torch.cat(flat))
    return dict(zip(parts, torch.split(total, [len(part) for part in flat]), strict=True))


def _fired_sum(name: str, rows: Sequence[torch.Tensor | None], width: int) -> dict[str, torch.Tensor]:
    """Sum a signal's rows, shapes (b, width), over this process's micro-batches, and tell whether there were any."""
    sums = [part.double().sum(dim=0) for part in rows if part is not None]
    return {
        f"{name} fired": torch.tensor(bool(sums)),
        name: torch.stack(sums).sum(dim=0) if sums else torch.zeros(width),
    }


def _where_fired(total: Mapping[str, torch.Tensor], name: str) -> torch.Tensor | None:
    return total[name] if name in total and total[f"{name} fired"] else None


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


def _unit_sum(micros: list[MicroBatch]) -> tuple[torch.Tensor | None, int]:
    """Sum of the samples' unit ``hidden`` gradients, shape (H,), float64, and how many have a direction."""
    rows = [micro.hidden[~torch.tensor(micro.tied)].double() for micro in micros if micro.hidden is not None]
    if not rows:
        return None, 0
    norms = torch.linalg.vector_norm(torch.cat(rows), dim=1)
    usable = torch.isfinite(norms) & (norms > 0)
    unit = torch.cat(rows)[usable] / norms[usable, None]
    return unit.sum(dim=0), len(unit)


def _mean_cosine(total: torch.Tensor, count: int) -> float | None:
    """Mean pairwise cosine of m unit vectors u: ``(|sum u|**2 - m) / (m (m - 1))``, None with fewer than two.

    `analysis.batch_coherence` says the same of a stored run; source as there.
    """
    if count < 2:
        return None
    return min(1.0, max(-1.0, (float(total.square().sum()) - count) / (count * (count - 1))))


def _square(norm: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(()).double() if norm is None else norm.double().square().cpu()


def _compare(
    weight: WeightTap, update: Update | None, squares: list[float], loss_scale: float
) -> tuple[float | None, bool | None]:
    """Norm of the raw gradient, known before the update, and whether the optimizer was given a shorter one."""
    if weight.step_norm is None:
        return None, None
    # A norm's square overflows where the norm does not; with one process it is not needed.
    norm = math.sqrt(squares[0]) if weight.place is not None else float(weight.step_norm)
    if update is None or not norm:
        return norm, None
    given = math.sqrt(squares[1]) if weight.place is not None else float(update.norm)
    return norm, given < norm / loss_scale * (1 - _CLIP_TOLERANCE)


def _unclip(sketch: torch.Tensor, update: Update, loss_scale: float) -> tuple[float | None, bool | None, bool]:
    """Norm of the raw reduced gradient under DDP, whether it was clipped, and whether the directions agree.

    No process ever holds the raw reduced gradient g outside its backward pass: when callbacks are asked again it is
    clipped. Clipping multiplies it by some c, and as sketches are linear c is <S(cg), S(g)> / |S(g)|**2, with S(g) the
    sum of the processes' sketches; then |g| = |cg| / c.
    """
    given, norm = update.sketch, float(update.norm)
    if given is None or not norm:
        return (0.0 if not norm else None), None, True
    given = given.double().cpu()
    square, product = float(sketch @ sketch), float(sketch @ given)
    if not (math.isfinite(square) and math.isfinite(product)) or not square > 0:
        return None, None, True
    factor = product / square
    aligned = product >= _SAME_DIRECTION * math.sqrt(square) * float(given.norm())
    if factor <= 0:
        return None, None, aligned
    return norm / factor, factor * loss_scale < 1 - _CLIP_TOLERANCE, aligned
