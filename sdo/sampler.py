"""An organizer as a torch Sampler: an endless stream of planned batches, handed out in slices of constant length."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from diagnostics.processes import Processes
from sdo.checks import integer_array, whole_number
from sdo.errors import InputError
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
    a pure function of ``t``, which is all that resuming needs. Every process hands out the whole stream; the loader
    deals its micro-batches out in turn, see :func:`process_share`.

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
        if positions is not None:
            positions = integer_array(positions, "positions", low=0)
            if len(positions) != len(plan.ids):
                raise InputError(f"there are {len(positions)} positions; expected one for each of {len(plan.ids)} ids")
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
        self._epoch = whole_number("epoch", epoch, 0)

    def __iter__(self) -> Iterator[int]:
        epoch = self._epoch if self._trainer_epoch is None else self._trainer_epoch()
        start = epoch * self.steps_per_epoch
        for step in range(start, start + self.steps_per_epoch):
            ids = self.plan.batch(step)
            if self._positions is not None:
                ids = self._positions[self.plan.positions(ids)]
            yield from ids.tolist()


def process_share(batch: NDArray[np.int64], micro_batch: int, processes: Processes) -> NDArray[np.int64]:
    """Return what one process trains of a step's batch, in order.

    Parameters
    ----------
    batch
        Shape ``(B,)``, the step's samples.
    micro_batch
        Samples of one forward pass of one process; ``processes.count`` times it divides B.
    processes
        Which process.

    Returns
    -------
    numpy.ndarray
        Shape ``(B / processes.count,)``. Micro-batch m of process r is number ``m * count + r`` of the batch's, which
        is how accelerate's ``BatchSamplerShard`` deals them out.

    Examples
    --------
    >>> import numpy as np
    >>> from diagnostics.processes import Processes
    >>> process_share(np.arange(8), 2, Processes(rank=1, count=2))
    array([2, 3, 6, 7])
    """
    if processes.count == 1:
        return batch
    return batch.reshape(-1, processes.count, micro_batch)[:, processes.rank].ravel()
