"""Organizers and plans: a plan is the endless sequence of steps that an organizer decides, epoch by epoch."""

from __future__ import annotations

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdo.checks import integer_array, whole_number
from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError
from sdo.organizers.steps import EpochPlan, Layout, StepPlan, Steps
from sdo.random_keys import MAX_SEED

if TYPE_CHECKING:
    from sdo.trainers.sampler import OrganizedBatchSampler


class _HasSeed(Protocol):
    seed: int


_Seeded = TypeVar("_Seeded", bound=_HasSeed)


class Organizer(Protocol):
    """Decides what each mini-batch holds."""

    @property
    def embeddings(self) -> Embeddings | None:
        """The matrix that the organizer works on, or None where it needs none."""

    @property
    def n_samples(self) -> int:
        """Number of samples N."""

    @property
    def name(self) -> str:
        """The organizer's name, as run folders and tables show it."""

    @property
    def options(self) -> Mapping[str, Any]:
        """The constructor's keywords that shape the plan, as plain JSON, ``seed`` among them."""

    def with_seed(self, seed: int) -> Organizer:
        """Return the same organizer with another seed."""

    def plan(self, batch_size: int, rows: NDArray[np.int64] | None = None, *, layout: Layout = ...) -> Plan:
        """Bind the batch size and return the plan, over all samples or over the given ones."""


class Plan(ABC):
    """Steps of an organizer at one batch size, made epoch by epoch as they are asked for.

    An organizer of your own derives from it and writes :meth:`make_epoch`.

    Attributes
    ----------
    version
        Raised whenever the same options would give other steps.
    ragged
        Whether steps may differ in size; False promises that each holds ``batch_size`` samples.
    batch_size
        Samples per step, B; of a ragged plan what was asked for.
    ids
        Shape ``(n,)``, ascending ids of the samples that the plan serves; all N by default.
    layout
        How a step is cut into micro-batches.
    """

    version: ClassVar[int]
    ragged: ClassVar[bool] = False

    def __init__(
        self,
        organizer: Organizer,
        batch_size: int,
        rows: ArrayLike | None = None,
        *,
        layout: Layout = Layout(),
    ) -> None:
        if not isinstance(getattr(type(self), "version", None), int):
            raise TypeError(f"{type(self).__name__} has no version; expected a class attribute, a whole number")
        self.organizer = organizer
        self.ids = np.arange(organizer.n_samples) if rows is None else np.unique(integer_array(rows, "rows"))
        if len(self.ids) and (self.ids[0] < 0 or self.ids[-1] >= organizer.n_samples):
            raise InputError(
                f"sample ids reach from {self.ids[0]} to {self.ids[-1]}; expected 0 to {organizer.n_samples - 1}, "
                "the rows of the embeddings"
            )
        self.batch_size = whole_number("batch size", batch_size, 1)
        if self.batch_size > len(self.ids):
            raise InputError(
                f"batch size {batch_size} is larger than the {len(self.ids)} samples; expected at most as many, since "
                "a batch holds distinct samples; fix: lower the batch size or the accumulation"
            )
        self.layout = layout
        self._epochs: list[EpochPlan] = []
        self._first_steps: list[int] = []

    def __repr__(self) -> str:
        name, known = self.organizer.name, len(self._epochs)
        return f"<plan of {name}: {len(self.ids)} samples, batch size {self.batch_size}, {known} epochs made so far>"

    @property
    def notes(self) -> tuple[str, ...]:
        """What is unusual about the epochs made so far, a line each."""
        return ()

    @abstractmethod
    def make_epoch(self, epoch: int, first_step: int, exposure: NDArray[np.int64]) -> EpochPlan:
        """Make the next epoch; called once for each, in their order.

        Parameters
        ----------
        epoch
            e, from 0.
        first_step
            Number of the epoch's first step.
        exposure
            Shape ``(n,)``, int64, the planned ledger before the epoch, aligned with :attr:`ids`; not to be changed.
        """

    def redraw(self, seed: int) -> Plan:
        """Return the plan that the same options and samples give with another seed, 0 to 2**64 - 1."""
        return self.organizer.with_seed(seed).plan(self.batch_size, rows=self.ids, layout=self.layout)

    def epoch(self, epoch: int) -> EpochPlan:
        """Return one organizer epoch, making those before it where they were not asked for yet.

        Parameters
        ----------
        epoch
            e, from 0.
        """
        epoch = whole_number("epoch", epoch, None)
        if epoch < 0:
            raise IndexError(f"epoch is {epoch}; epochs count from 0")
        while len(self._epochs) <= epoch:
            before = self._epochs[-1] if self._epochs else None
            first = before.stop if before else 0
            exposure = before.exposure if before else np.zeros(len(self.ids), dtype=np.int64)
            made = self.make_epoch(len(self._epochs), first, exposure)
            self._check_epoch(made, len(self._epochs), first, exposure)
            self._epochs.append(made)
            self._first_steps.append(first)
        return self._epochs[epoch]

    def _check_epoch(self, made: EpochPlan, epoch: int, first_step: int, exposure: NDArray[np.int64]) -> None:
        """Refuse an epoch that breaks what everything else relies on: an organizer may come from anywhere."""
        what = f"epoch {epoch} of organizer {self.organizer.name!r}"
        if (made.organizer_epoch, made.first_step) != (epoch, first_step):
            raise InputError(
                f"{what} calls itself epoch {made.organizer_epoch} from step {made.first_step}; expected {epoch} from "
                f"step {first_step}"
            )
        if not len(made.steps):
            raise InputError(f"{what} holds no step; expected at least one")
        sizes = made.steps.sizes
        if not self.ragged and (sizes != self.batch_size).any():
            raise InputError(
                f"{what} has a step of {sizes[sizes != self.batch_size][0]} samples; expected {self.batch_size} in "
                "each; fix: ragged = True in the plan's class"
            )
        ids, offsets = made.steps.trained()
        whole = len(self.ids) == self.organizer.n_samples  # then a sample's id is its place
        places = ids if whole else np.searchsorted(self.ids, ids)
        known = (ids >= 0) & (ids < len(self.ids)) if whole else self.ids[np.minimum(places, len(self.ids) - 1)] == ids
        if not known.all():
            raise InputError(f"{what} holds sample {ids[~known][0]}; expected the samples that the plan serves")
        counts = np.bincount(places, minlength=len(self.ids))
        often = np.flatnonzero(counts[places] > 1)  # only these can be twice in a step
        step_of = np.searchsorted(offsets, often, side="right") - 1
        keys = np.sort(step_of * len(self.ids) + places[often])
        twice = np.flatnonzero(keys[1:] == keys[:-1])
        if len(twice):
            step, place = divmod(int(keys[twice[0]]), len(self.ids))
            raise InputError(
                f"{what} holds sample {self.ids[place]} twice in step {first_step + step}; expected distinct samples"
            )
        if not np.array_equal(made.exposure, exposure + counts):
            raise InputError(f"the exposure of {what} is not the ledger before it and its steps; expected their sum")

    def epoch_of(self, step: int) -> EpochPlan:
        """Return the organizer epoch that holds a step.

        Parameters
        ----------
        step
            From 0.
        """
        step = whole_number("step", step, None)
        if step < 0:
            raise IndexError(f"step is {step}; steps count from 0")
        last = self.epoch(max(0, len(self._epochs) - 1))
        while step >= last.stop:
            last = self.epoch(last.organizer_epoch + 1)
        return self._epochs[bisect_right(self._first_steps, step) - 1]

    def step(self, step: int) -> StepPlan:
        """Return what one step holds."""
        epoch = self.epoch_of(step)
        return epoch.steps[int(step) - epoch.first_step]

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the sample ids of one step, shape ``(n,)``, without fillers."""
        return self.step(step).trained

    def flat(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sample ids of steps ``start`` to ``stop - 1`` and where each step begins, without fillers.

        Returns
        -------
        ids
            Shape ``(S,)``.
        offsets
            Shape ``(stop - start + 1,)``: step ``start + t`` holds ``ids[offsets[t] : offsets[t + 1]]``.
        """
        start, stop = whole_number("start", start, None), whole_number("stop", stop, None)
        parts, ends = [np.empty(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
        while start < stop:
            epoch = self.epoch_of(start)
            ids, offsets = epoch.steps.trained()
            offsets = offsets[start - epoch.first_step : stop - epoch.first_step + 1]
            parts.append(ids[offsets[0] : offsets[-1]])
            ends.append(offsets[1:] - offsets[0] + ends[-1][-1])
            start += len(offsets) - 1
        return np.concatenate(parts), np.concatenate(ends)

    def batches(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the sample ids of steps ``start`` to ``stop - 1`` of one size, shape ``(stop - start, B)``.

        Raises
        ------
        InputError
            If the steps differ in size; see :meth:`flat`.
        """
        ids, offsets = self.flat(start, stop)
        return Steps(ids, offsets).matrix() if len(ids) else np.empty((0, self.batch_size), dtype=np.int64)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a trainer epoch, ``ceil(n / B)``; of a ragged plan B is the mean size in organizer epoch 0."""
        if not self.ragged:
            return -(-len(self.ids) // self.batch_size)
        first = self.epoch(0).steps
        return -(-len(self.ids) * len(first) // len(first.trained()[0]))

    def sampler(self, *, rank: int = 0) -> OrganizedBatchSampler:
        """Return the micro-batches of one process for a loop of your own: ``DataLoader(…, batch_sampler=…)``.

        Parameters
        ----------
        rank
            The process, from 0; how many there are says :attr:`layout`.
        """
        from sdo.trainers.sampler import OrganizedBatchSampler

        return OrganizedBatchSampler(self, rank=rank)

    def positions(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Return where sample ids stand in :attr:`ids`, which ledgers are aligned with.

        Parameters
        ----------
        ids
            Shape ``(n,)``.

        Raises
        ------
        InputError
            If the plan does not serve one of them.
        """
        wanted = integer_array(ids, "sample ids")
        place = np.searchsorted(self.ids, wanted)
        unknown = np.flatnonzero(self.ids[np.minimum(place, len(self.ids) - 1)] != wanted)
        if len(unknown):
            raise InputError(f"sample id {wanted[unknown[0]]} is none of the {len(self.ids)} that the plan serves")
        return place

    def counts(self, stop: int) -> NDArray[np.int64]:
        """Return how often each sample stands in steps 0 to ``stop - 1``, shape ``(n,)``, aligned with :attr:`ids`."""
        return np.bincount(self.positions(self.flat(0, stop)[0]), minlength=len(self.ids))

    def describe(self) -> dict[str, Any]:
        """Return what the plan is a function of, as checkpoints and run folders hold it.

        Returns
        -------
        dict
            ``name``, ``options``, ``batch_size``, ``n_samples``, ``samples`` (a digest of the ids), ``embeddings``
            (their fingerprint or None) and ``plan_version``.
        """
        embeddings = self.organizer.embeddings
        return {
            "name": self.organizer.name,
            "options": self.organizer.options,
            "batch_size": self.batch_size,
            "n_samples": len(self.ids),
            "samples": hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest(),
            "embeddings": None if embeddings is None else embeddings.fingerprint,
            "plan_version": self.version,
        }

    @property
    def fingerprint(self) -> str:
        """SHA-256 of :meth:`describe`; equal fingerprints give equal plans."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()


def with_seed(organizer: _Seeded, seed: int) -> _Seeded:
    """Return a copy of an organizer that has another `seed`, 0 to 2**64 - 1, and shares all else."""
    other = copy.copy(organizer)
    other.seed = whole_number("seed", seed, 0, MAX_SEED)
    return other


def describe_difference(saved: dict[str, Any] | None, now: dict[str, Any] | None) -> str | None:
    """Say in which respect two plans differ, given their :meth:`Plan.describe`.

    Parameters
    ----------
    saved, now
        The descriptions; None where there was no organizer.

    Returns
    -------
    str or None
        Such as ``"k = 4 then and 8 now"``, or None where they give the same batches.
    """
    old, new = saved or {"name": None}, now or {"name": None}
    for name in ("name", "batch_size", "n_samples", "samples", "embeddings", "plan_version", "options"):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            name = next(key for key in {**before, **after} if before.get(key) != after.get(key))
            before, after = before.get(name), after.get(name)
        return f"{name} = {before} then and {after} now"
    return None
