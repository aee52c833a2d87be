"""Held-out scores, read off an evaluation's own forward passes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import SequentialSampler

from diagnostics.signals.losses import LossReader, held_out_scores
from sdo.trainers.processes import Processes
from sdo.trainers.trainer_types import TrainerKind

_FLATTENED = "the evaluation's batches are single rows of several samples, without padding"
_OUT_OF_ORDER = "the evaluation did not go through its rows once and in order"
_FIX = {
    _FLATTENED: "padding_free=False",
    _OUT_OF_ORDER: "do not group by length, and no other forward passes while it runs",
}


class HeldOut:
    """The scores of the evaluation that is under way.

    Parameters
    ----------
    kind
        Says how a score is read off the model's output.
    processes
        Each holds the scores of its own batches.
    reader
        Reads losses off an evaluation's forward passes.
    """

    def __init__(self, kind: TrainerKind, processes: Processes, reader: LossReader) -> None:
        self._kind = kind
        self._processes = processes
        self.reader = reader
        self._warned = False
        self.forget()

    def forget(self) -> None:
        """Drop what was read off forward passes since the last evaluation, a prediction's for instance."""
        self._scores: list[tuple[int, float]] = []
        self._seen = 0
        self._passes = 0
        self._input: Any = None
        self._flattened = False

    def hold(self, output: Any, kwargs: Mapping[str, Any]) -> None:
        """Take the scores of a forward pass.

        Evaluation goes through its dataset in order, so that the count of samples so far is the position.
        """
        # After one that told scores, a second pass over the same batch is the reference's: the model with its adapters
        # off. Before it, one may tell nothing: for label smoothing TRL's trainer first calls the model without labels.
        batch = kwargs.get("input_ids")
        if batch is not None and batch is self._input:
            return
        self._passes += 1
        found = held_out_scores(output, kwargs, self._kind, self.reader)
        if found is None:
            return
        self._input = batch
        self._flattened |= _is_flattened(kwargs)
        for score in found:
            if score is not None:
                self._scores.append((self._seen, score))
            self._seen += 1

    def end(self, loader: Any) -> dict[int, float]:
        """Return the scores of all processes by row of the evaluation's dataset; a collective call.

        Parameters
        ----------
        loader
            The evaluation's data loader. Where it does not go through its dataset in order, nothing is returned, since
            nobody could tell whose scores they are.

        Returns
        -------
        dict
            Ascending by row; empty too where nothing was read off.
        """
        positions = _positions(loader, self._seen)
        found = [] if positions is None else [(positions[at], score) for at, score in self._scores]
        lost = bool(self._scores) and (positions is None or self._flattened)
        why = _FLATTENED if self._flattened else _OUT_OF_ORDER
        self._warn_of_nothing()
        self.forget()
        parts = self._processes.numbers(np.array([lost, *(value for pair in found for value in pair)], np.float64))
        if any(part[0] for part in parts):
            warnings.warn(f"{why}, so its losses per sample are not recorded; fix: {_FIX[why]}", stacklevel=3)
            return {}
        # The last batches are filled up with rows from the beginning, so that every process has as many.
        scores = {int(at): float(score) for part in parts for at, score in zip(part[1::2], part[2::2], strict=True)}
        return dict(sorted(scores.items()))

    def _warn_of_nothing(self) -> None:
        """Say once why an evaluation leaves no scores behind, where the trainer's kind has some."""
        if self._warned or self._scores or not self._passes or self._kind.score_from is None:
            return
        self._warned = True
        why = "none of its samples has a token that carries a loss" if self._seen else self.reader.reason
        warnings.warn(
            f"the evaluation's losses per sample are not recorded: {why or 'its forward passes do not tell them'}",
            stacklevel=4,
        )


def _positions(loader: Any, seen: int) -> list[int] | None:
    """Which row each sample of an evaluation was, in this process; None where the loader does not go in order."""
    inner = getattr(loader, "base_dataloader", loader)
    batches: Any = getattr(inner, "batch_sampler", None)
    sampler = batches
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    if not isinstance(getattr(sampler, "sampler", None), SequentialSampler):
        return None
    positions = [position for batch in batches for position in batch]  # a shard of batches deals itself out again
    return positions if len(positions) == seen else None


def _is_flattened(inputs: Mapping[str, Any]) -> bool:
    """Whether a batch is one row in which several sequences begin, as with TRL's ``padding_free``."""
    positions = inputs.get("position_ids")
    return positions is not None and positions.shape[0] == 1 and int((positions == 0).sum()) > 1
