"""An organizer as a torch Sampler: an endless stream of planned batches, handed out in slices of constant length."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from sdo.plan import Plan


class OrganizedSampler(Sampler[int]):
    """Yields dataset positions in the order of a plan.

    Parameters
    ----------
    plan
        What to hand out.
    positions
        Shape ``(n,)``, the dataset position of each of ``plan.ids``; the ids themselves by default.
    trainer_epoch
        Returns the trainer epoch to start from, at each ``iter()``. By default the value given to :meth:`set_epoch`.

    Notes
    -----
    A trainer epoch is ``ceil(n / B) * B`` samples, whatever the length of an organizer epoch, so that schedules, step
    counts and evaluation keep their meaning. Epoch ``t`` is the slice of the stream from batch ``t * ceil(n / B)`` on,
    a pure function of ``t``, which is all that resuming needs.

    It derives from Sampler and not from RandomSampler, which accelerate would replace.

    Examples
    --------
    >>> from sdo import OrganizedSampler, Uniform
    >>> sampler = OrganizedSampler(Uniform(10, seed=1).plan(batch_size=4))
    >>> len(sampler), len(list(sampler))
    (12, 12)
    """

    def __init__(
        self,
        plan: Plan,
        positions: NDArray[np.int64] | None = None,
        *,
        trainer_epoch: Callable[[], int] | None = None,
    ) -> None:
        self.plan = plan
        self._positions = positions
        self._epoch = 0
        self._trainer_epoch = trainer_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one trainer epoch, ``ceil(n / B)``."""
        return -(-len(self.plan.ids) // self.plan.batch_size)

    def __len__(self) -> int:
        return self.steps_per_epoch * self.plan.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the slice that the next ``iter()`` hands out; calling it twice with one value changes nothing.

        Parameters
        ----------
        epoch
            Trainer epoch, from 0.
        """
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        epoch = self._epoch if self._trainer_epoch is None else self._trainer_epoch()
        start = epoch * self.steps_per_epoch
        for step in range(start, start + self.steps_per_epoch):
            ids = self.plan.batch(step)
            if self._positions is not None:
                ids = self._positions[self.plan.positions(ids)]
            yield from ids.tolist()
