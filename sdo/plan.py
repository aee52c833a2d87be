"""A plan: the endless sequence of batches that an organizer decides, epoch by epoch."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdo.checks import integer_array, whole_number
from sdo.errors import InputError

if TYPE_CHECKING:
    from sdo.organizer import Organizer

# Raised whenever the same options would give other batches.
PLAN_VERSION = 1


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """One organizer epoch.

    Attributes
    ----------
    organizer_epoch
        e, from 0.
    first_step
        Step of the epoch's first batch; steps count from 0 over the whole plan.
    batches
        Shape ``(T, B)``, sample ids, distinct within a row.
    pool
        Shape ``(M,)``, ascending sample ids: the epoch's pool.
    exposure
        Shape ``(n,)``, int64, the planned ledger after the epoch, aligned with :attr:`Plan.ids`.
    cold, hot
        Sizes of the split after the epoch, over all samples; None where the organizer does not split.
    """

    organizer_epoch: int
    first_step: int
    batches: NDArray[np.int64]
    pool: NDArray[np.int64]
    exposure: NDArray[np.int64]
    cold: int | None
    hot: int | None

    @property
    def steps(self) -> int:
        """Number of batches T."""
        return len(self.batches)


class Plan(ABC):
    """Batches of an organizer at one batch size, made epoch by epoch as they are asked for.

    Attributes
    ----------
    batch_size
        Samples per batch, B.
    ids
        Shape ``(n,)``, ascending ids of the samples that the plan serves; all N by default.
    """

    def __init__(self, organizer: Organizer, batch_size: int, rows: ArrayLike | None) -> None:
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
                "a batch holds distinct samples; mend: lower the batch size or the accumulation"
            )
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
    def _make_epoch(self, epoch: int, first_step: int, exposure: NDArray[np.int64]) -> EpochPlan:
        """Make the next epoch from the ledger before it."""

    @abstractmethod
    def redraw(self, seed: int) -> Plan:
        """Return the plan that the same options and samples give with another seed.

        Parameters
        ----------
        seed
            0 to 2**64 - 1.

        Raises
        ------
        InputError
            If the seed is out of range.
        """

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
            first = before.first_step + before.steps if before else 0
            exposure = before.exposure if before else np.zeros(len(self.ids), dtype=np.int64)
            self._epochs.append(self._make_epoch(len(self._epochs), first, exposure))
            self._first_steps.append(first)
        return self._epochs[epoch]

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
        while step >= last.first_step + last.steps:
            last = self.epoch(last.organizer_epoch + 1)
        return self._epochs[bisect_right(self._first_steps, step) - 1]

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the sample ids of one step, shape ``(B,)``."""
        epoch = self.epoch_of(step)
        ids: NDArray[np.int64] = epoch.batches[int(step) - epoch.first_step]
        return ids

    def batches(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the sample ids of steps ``start`` to ``stop - 1``, shape ``(stop - start, B)``."""
        start, stop = whole_number("start", start, None), whole_number("stop", stop, None)
        parts = []
        while start < stop:
            epoch = self.epoch_of(start)
            part = epoch.batches[start - epoch.first_step : stop - epoch.first_step]
            parts.append(part)
            start += len(part)
        return np.concatenate(parts) if parts else np.empty((0, self.batch_size), dtype=np.int64)

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
        return np.bincount(self.positions(self.batches(0, stop).ravel()), minlength=len(self.ids))

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
            "plan_version": PLAN_VERSION,
        }

    @property
    def fingerprint(self) -> str:
        """SHA-256 of :meth:`describe`; equal fingerprints give equal plans."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()


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
