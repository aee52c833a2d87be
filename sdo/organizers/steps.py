"""What the steps of a plan hold, and how a step is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdo.checks import whole_number
from sdo.errors import InputError


@dataclass(frozen=True)
class Layout:
    """How an optimizer step is cut into micro-batches.

    Attributes
    ----------
    processes
        W, processes that train together.
    accumulation
        A, micro-batches of one process in a step. Micro-batch m of a step's W A belongs to process m % W, its turn
        m // W.
    """

    processes: int = 1
    accumulation: int = 1

    def __post_init__(self) -> None:
        whole_number("processes", self.processes, 1)
        whole_number("accumulation", self.accumulation, 1)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step over all processes, M = W A."""
        return self.processes * self.accumulation


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What one optimizer step holds.

    Attributes
    ----------
    sample_ids
        Shape ``(n,)``, int64, in the order of the micro-batches.
    micro_batch
        Shape ``(n,)``, int32, non-decreasing: which of the step's micro-batches a sample is in. None: cut evenly.
    weight
        Shape ``(n,)``, float64, factor of the sample's loss; 0 marks a filler, a sample of the step again that trains
        nothing. None: all 1.
    group
        Shape ``(n,)``, int32, the group that a sample stands for, -1 is noise. None: no groups.
    """

    sample_ids: NDArray[np.int64]
    micro_batch: NDArray[np.int32] | None = None
    weight: NDArray[np.float64] | None = None
    group: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def trained(self) -> NDArray[np.int64]:
        """The ids without fillers: what counts as exposure."""
        return self.sample_ids if self.weight is None else self.sample_ids[self.weight > 0]


@dataclass(frozen=True, eq=False)
class Steps:
    """Consecutive steps, which may differ in size.

    Attributes
    ----------
    ids
        Shape ``(S,)``, int64, sample ids of all steps, one step after the other.
    offsets
        Shape ``(T + 1,)``, int64: step t holds ``ids[offsets[t] : offsets[t + 1]]``; no step is empty.
    micro_batch, weight, group
        Shape ``(S,)`` or None, see :class:`StepPlan`.

    Raises
    ------
    InputError
        If the arrays do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> steps = Steps(np.array([4, 0, 2, 1, 3]), np.array([0, 2, 5]))
    >>> len(steps), steps[1].sample_ids.tolist(), steps.sizes.tolist()
    (2, [2, 1, 3], [2, 3])
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    micro_batch: NDArray[np.int32] | None = None
    weight: NDArray[np.float64] | None = None
    group: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        ids, offsets = self.ids, self.offsets
        for name, array in (("ids", ids), ("offsets", offsets)):
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != np.int64:
                raise InputError(f"{name} of Steps are {_seen(array)}; expected a one-dimensional array of int64")
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 1).any():
            raise InputError(
                f"offsets of Steps do not cut {len(ids)} ids into steps; expected ascending integers from 0 to "
                f"{len(ids)}, since no step is empty"
            )
        for name, dtype in (("micro_batch", np.int32), ("weight", np.float64), ("group", np.int32)):
            array = getattr(self, name)
            if array is not None and (
                not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != ids.shape
            ):
                raise InputError(
                    f"{name} of Steps is {_seen(array)}; expected {np.dtype(dtype)} of shape ({len(ids)},), or None"
                )
        if self.micro_batch is not None:
            falls = np.flatnonzero(np.diff(self.micro_batch) < 0) + 1
            if not np.isin(falls, offsets).all() or (self.micro_batch[offsets[:-1]] != 0).any():
                raise InputError("micro_batch of Steps falls within a step; expected 0, 0, …, 1, 1, … in each step")
        if self.weight is not None and not (np.isfinite(self.weight).all() and (self.weight >= 0).all()):
            raise InputError("weight of Steps holds a value that is negative or not finite; expected numbers from 0")

    @classmethod
    def of(cls, matrix: NDArray[np.int64]) -> Steps:
        """Return steps of one size from their ids, shape ``(T, B)``."""
        T, B = matrix.shape
        return cls(np.ascontiguousarray(matrix, dtype=np.int64).ravel(), np.arange(T + 1, dtype=np.int64) * B)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, t: int) -> StepPlan:
        if not 0 <= t < len(self):
            raise IndexError(f"step {t} of {len(self)} steps")
        part = slice(self.offsets[t], self.offsets[t + 1])
        micro, weight, group = (None if one is None else one[part] for one in self._columns)
        return StepPlan(self.ids[part], micro, weight, group)

    def __iter__(self) -> Iterator[StepPlan]:
        return (self[t] for t in range(len(self)))

    @property
    def _columns(self) -> tuple[Any, Any, Any]:
        return self.micro_batch, self.weight, self.group

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Shape ``(T,)``, samples of each step."""
        return np.diff(self.offsets)

    def matrix(self) -> NDArray[np.int64]:
        """Return the sample ids as a matrix, shape ``(T, B)``.

        Raises
        ------
        InputError
            If the steps differ in size.
        """
        sizes = self.sizes
        if len(sizes) and (sizes != sizes[0]).any():
            raise InputError(
                f"these steps hold {sizes.min()} to {sizes.max()} samples; expected steps of one size; fix: read them "
                "by step, or by ids and offsets"
            )
        return self.ids.reshape(len(sizes), -1)

    def trained(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ids and offsets without fillers, whose weight is 0."""
        if self.weight is None or (self.weight > 0).all():
            return self.ids, self.offsets
        kept = self.weight > 0
        return self.ids[kept], np.concatenate([[0], np.cumsum(kept)])[self.offsets]


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """One organizer epoch.

    Attributes
    ----------
    organizer_epoch
        e, from 0.
    first_step
        Number of the epoch's first step; steps count from 0 over the whole plan.
    steps
        What each of its T steps holds; the trained ids of a step are distinct.
    pool
        Shape ``(M,)``, ascending sample ids: the epoch's pool.
    exposure
        Shape ``(n,)``, int64, the planned ledger after the epoch, aligned with :attr:`Plan.ids`.
    figures
        The organizer's own numbers of the epoch; those of SDO are ``cold`` and ``hot``, the sizes of the split after
        it, over all samples.
    """

    organizer_epoch: int
    first_step: int
    steps: Steps
    pool: NDArray[np.int64]
    exposure: NDArray[np.int64]
    figures: Mapping[str, int | float] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """Number of the first step after the epoch."""
        return self.first_step + len(self.steps)

    @property
    def batches(self) -> NDArray[np.int64]:
        """Shape ``(T, B)``, the sample ids of steps of one size; see :meth:`Steps.matrix`."""
        return self.steps.matrix()


def _seen(value: object) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
