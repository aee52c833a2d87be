"""The step under way: what came of it so far, and the time that recording it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from diagnostics.signals.micro_batch import MicroBatch
from sdo.trainers.ids import BatchIds
from sdo.trainers.trainer_types import TrainerKind


class CurrentStep:
    """The step under way, shared by all that take part in recording it.

    Parameters
    ----------
    number
        Updates before the recording.
    kind
        The trainer's kind.
    shifts
        As for :class:`diagnostics.signals.losses.LossReader`.

    Attributes
    ----------
    number
        The step, from 0.
    micro_batches
        Those of this process so far.
    recorder_seconds
        Spent by the recorder itself since training began.
    """

    def __init__(self, number: int, kind: TrainerKind, *, shifts: bool) -> None:
        self.number = number
        self.micro_batches: list[MicroBatch] = []
        self.recorder_seconds = 0.0
        self._kind, self._shifts = kind, shifts
        self._started = time.perf_counter()
        self._recorder_seconds_before = 0.0

    def begin(self, number: int) -> None:
        """Start another step."""
        self.number, self.micro_batches = number, []
        self._started, self._recorder_seconds_before = time.perf_counter(), self.recorder_seconds

    def begin_micro_batch(self, ids: BatchIds) -> None:
        """Take the samples of the forward pass that begins."""
        self.micro_batches.append(MicroBatch.of(ids, self._kind, shifts=self._shifts))

    @property
    def seconds(self) -> float:
        """Since the step began, without the recorder's own time."""
        return time.perf_counter() - self._started - (self.recorder_seconds - self._recorder_seconds_before)

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Count the recorder's own time."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.recorder_seconds += time.perf_counter() - started
