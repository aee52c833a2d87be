"""What one forward and backward pass left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from diagnostics.signals.losses import SampleLosses
from sdo.trainers.ids import BatchIds
from sdo.trainers.trainer_types import TrainerKind


@dataclass(eq=False)
class MicroBatch:
    """What one forward and backward pass left behind.

    Attributes
    ----------
    ids
        The b samples of the micro-batch, and their tokens.
    losses
        Their losses, where the forward pass gave them.
    caught
        What each signal's :class:`~diagnostics.signals.base.Capture` found in the pass, by the name of the signal; the
        capture alone knows what it is. Gradients are shares of the step's gradient.
    """

    ids: BatchIds
    losses: SampleLosses | None = None
    caught: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, ids: BatchIds, kind: TrainerKind, *, shifts: bool = True) -> MicroBatch:
        """Begin a micro-batch; a trainer's kind may know what the batch does not tell of its tokens.

        ``shifts`` is as for :class:`diagnostics.signals.losses.LossReader`.
        """
        if not shifts and ids.labels is not None:
            ids = replace(ids, tokens=ids.labels)
        if ids.tokens is None and kind.positions is not None:
            ids = replace(ids, tokens=(kind.positions,) * len(ids.sample_ids))
        return cls(ids)

    @property
    def sample_ids(self) -> list[int]:
        """The b samples."""
        return list(self.ids.sample_ids)

    @property
    def tokens(self) -> list[int]:
        """Tokens of each sample that carry a loss; zeros where nothing tells."""
        if self.losses is not None:
            counts: list[int] = self.losses.tokens.tolist()
            return counts
        return list(self.ids.tokens or [0] * len(self.ids.sample_ids))

    @property
    def tied(self) -> list[bool]:
        """Which samples have a gradient of zero because the rewards of their group tie."""
        return list(self.ids.tied or [False] * len(self.ids.sample_ids))


Current = Callable[[], tuple[int, list[MicroBatch]]]  # the step under way and its micro-batches so far
Clock = Callable[[], Any]  # a context that counts the time spent in it
