"""A plan as a torch Sampler: one of positions for trainers, one of micro-batches for a loop of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from sdo.checks import integer_array, whole_number
from sdo.errors import InputError
from sdo.organizers.plan import Plan, describe_difference
from sdo.organizers.steps import StepPlan

if TYPE_CHECKING:
    from sdo.trainers.processes import Processes


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
        self._positions = _checked(positions, plan)
        self._epoch = 0
        self._drawn = 0  # positions that the latest iterator handed out
        self._skip = 0  # of them, those that the next iterator leaves out
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
        epoch = whole_number("epoch", epoch, 0)
        if epoch != self._epoch:
            self._epoch, self._skip = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest iterator stands, as torchdata's ``StatefulDataLoader`` keeps it.

        Returns
        -------
        dict
            ``epoch``, ``drawn`` (positions handed out in it) and ``plan``. A plain ``DataLoader`` with workers draws
            ahead of what was trained; ``StatefulDataLoader`` keeps the state of what it gave.
        """
        return {"epoch": self._epoch, "drawn": self._drawn, "plan": self.plan.describe()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iterator go on where another one stood.

        Parameters
        ----------
        state
            From :meth:`state_dict`.

        Raises
        ------
        InputError
            If it is that of another plan.
        """
        _require_same(state, self.plan)
        self._epoch, self._skip = int(state["epoch"]), int(state["drawn"])

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
            yield _rows(self.plan, self._positions, step.sample_ids)

    def _stream(self) -> Iterator[int]:
        for positions in self.steps():
            yield from positions.tolist()

    def __iter__(self) -> Iterator[int]:
        skip, self._skip = self._skip, 0
        self._drawn = 0
        for position in self._stream():
            self._drawn += 1
            if self._drawn > skip:
                yield position


class OrganizedBatchSampler(Sampler[list[int]]):
    """Yields the micro-batches of a plan's steps, for the ``batch_sampler`` of a ``DataLoader``.

    Parameters
    ----------
    plan
        What to hand out. Its layout says into how many micro-batches a step is cut, over how many processes.
    positions
        Shape ``(n,)``, the dataset position of each of ``plan.ids``; the ids themselves by default.
    rank
        This process. Micro-batch m of a step belongs to process m % processes.

    Raises
    ------
    InputError
        While iterating, where a step holds fewer samples than it has micro-batches.

    Notes
    -----
    A pass is :attr:`Plan.steps_per_epoch` steps, and the next pass goes on behind it: no ``set_epoch`` is needed. A
    pass that was left half read is begun again. Where the plan does not cut a step itself, its samples are dealt out in
    their order, in parts whose sizes differ by one at most.

    Examples
    --------
    >>> from sdo import Uniform
    >>> from sdo.organizers.plan import Layout
    >>> sampler = Uniform(6, seed=1).plan(batch_size=4, layout=Layout(accumulation=2)).sampler()
    >>> len(sampler), [len(micro_batch) for micro_batch in sampler]
    (4, [2, 2, 2, 2])
    """

    def __init__(self, plan: Plan, positions: NDArray[np.int64] | None = None, *, rank: int = 0) -> None:
        rank = whole_number("rank", rank, 0, plan.layout.processes - 1)
        self.plan = plan
        self._positions = _checked(positions, plan)
        self._rank = rank
        self._next = (0, 0)  # step and turn from which the next iterator goes on
        self._at = (0, 0)  # those of the latest one

    def __len__(self) -> int:
        return self.plan.steps_per_epoch * self.plan.layout.accumulation

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest iterator stands: ``step``, ``turn`` (micro-batches of it handed out) and ``plan``."""
        return {"step": self._at[0], "turn": self._at[1], "plan": self.plan.describe()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iterator go on where another one stood; see :meth:`OrganizedSampler.load_state_dict`."""
        _require_same(state, self.plan)
        self._next = self._at = int(state["step"]), int(state["turn"])

    def __iter__(self) -> Iterator[list[int]]:
        step, turn = self._at = self._next
        layout, per_epoch = self.plan.layout, self.plan.steps_per_epoch
        stop = (step // per_epoch + 1) * per_epoch
        while step < stop:
            every = micro_batches(self.plan.step(step), layout.micro_batches)
            own = every[self._rank :: layout.processes]
            for ids in own[turn:]:
                turn += 1
                self._at = (step, turn) if turn < len(own) else (step + 1, 0)
                yield _rows(self.plan, self._positions, ids).tolist()
            step, turn = step + 1, 0
        self._next = self._at = (stop, 0)


def micro_batches(step: StepPlan, count: int) -> list[NDArray[np.int64]]:
    """Return the sample ids of each micro-batch of a step: as it cuts itself, else in even parts.

    Parameters
    ----------
    step
        What it holds.
    count
        Micro-batches of a step over all processes, M.

    Raises
    ------
    InputError
        If one of them would be empty.
    """
    if step.micro_batch is None:
        parts = np.array_split(step.sample_ids, count)
    else:
        parts = [step.sample_ids[step.micro_batch == m] for m in range(count)]
    if min(map(len, parts)) == 0:
        raise InputError(
            f"a step of {len(step)} samples cannot fill {count} micro-batches; expected one sample in each"
        )
    return parts


def _checked(positions: NDArray[np.int64] | None, plan: Plan) -> NDArray[np.int64] | None:
    if positions is None:
        return None
    positions = integer_array(positions, "positions", low=0)
    if len(positions) != len(plan.ids):
        raise InputError(f"there are {len(positions)} positions; expected one for each of {len(plan.ids)} ids")
    return positions


def _rows(plan: Plan, positions: NDArray[np.int64] | None, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return ids if positions is None else positions[plan.positions(ids)]


def _require_same(state: Mapping[str, Any], plan: Plan) -> None:
    difference = describe_difference(state.get("plan"), plan.describe())
    if difference is not None:
        raise InputError(
            f"the state of the sampler is that of another plan: {difference}; expected the same, since the "
            "batches would differ"
        )


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
    >>> from sdo.trainers.processes import Processes
    >>> process_share(np.arange(8), 2, Processes(rank=1, count=2))
    array([2, 3, 6, 7])
    """
    if processes.count == 1:
        return batch
    return batch.reshape(-1, processes.count, micro_batch)[:, processes.rank].ravel()
