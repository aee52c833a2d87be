"""An organizer as a torch Sampler: an endless stream of planned batches, handed out in slices of constant length."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from diagnostics.processes import Processes
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
    A trainer epoch is ``ceil(n / B)`` steps, whatever the length of an organizer epoch, so that schedules, step
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
        self._positions = positions
        self._epoch = 0
        self._trainer_epoch = trainer_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one trainer epoch, see :attr:`Plan.steps_per_epoch`."""
        return self.plan.steps_per_epoch

    def __len__(self) -> int:
        if not self.plan.ragged:
            return self.steps_per_epoch * self.plan.batch_size
        start = self._first_step()
        return len(self.plan.flat(start, start + self.steps_per_epoch)[0])

    def set_epoch(self, epoch: int) -> None:
        """Choose the slice that the next ``iter()`` hands out; calling it twice with one value changes nothing.

        Parameters
        ----------
        epoch
            Trainer epoch, from 0.
        """
        self._epoch = epoch

    def _first_step(self) -> int:
        return (self._epoch if self._trainer_epoch is None else self._trainer_epoch()) * self.steps_per_epoch

    def steps(self) -> Iterator[NDArray[np.int64]]:
        """Yield the dataset positions of each step of the trainer epoch, shape ``(n,)`` each.

        Raises
        ------
        InputError
            If the plan cuts its steps itself or weighs its samples, which a stream of positions cannot carry.
        """
        start = self._first_step()
        for number in range(start, start + self.steps_per_epoch):
            step = self.plan.step(number)
            if step.micro_batch is not None or step.weight is not None:
                raise InputError(
                    f"step {number} of organizer {self.plan.organizer.name!r} has micro-batches or weights of its own; "
                    "expected steps that are cut evenly, of samples that weigh 1"
                )
            ids = step.sample_ids
            yield ids if self._positions is None else self._positions[self.plan.positions(ids)]

    def __iter__(self) -> Iterator[int]:
        for positions in self.steps():
            yield from positions.tolist()


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
