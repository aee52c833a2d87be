"""The plan of a recorded run, and the same plan from other seeds: what tests of locality compare a run with.

A run's batches are one draw of its organizer. Under the hypothesis that gradients do not follow embeddings, another
draw would have done as well: the gradients stay, the plan is drawn anew, the statistic is computed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from analysis.run_folder.recorded import recorded_batches, steps_per_batch
from analysis.run_folder.run import Run
from sdo import Embeddings
from sdo.errors import InputError
from sdo.organizers.plan import Plan, describe_difference
from sdo.organizers.registry import OrganizerInputs, make_organizer
from sdo.random_keys import REDRAW, raw_keys


@dataclass(frozen=True, eq=False)
class PlanDraw:
    """What a test needs to know of T batches of one plan.

    Parameters
    ----------
    step
        (T,) int64, ascending.
    organizer_epoch
        (T,) int64.
    cosine
        (T,) float64, l_t, mean pairwise embedding cosine of the batch; NaN where fewer than two of its samples have a
        direction.
    centroid
        (T, d) float32, unit vectors: the direction of the batch's mean embedding; zero where there is none.
    exposure
        (T, 2) float64: mean over the batch of u and of log(1 + u), u how often a sample was trained before.
    sharing
        Two (P,) int64 arrays, positions t < s of the pairs of steps that have a sample in common.
    """

    step: NDArray[np.int64]
    organizer_epoch: NDArray[np.int64]
    cosine: NDArray[np.float64]
    centroid: NDArray[np.float32]
    exposure: NDArray[np.float64]
    sharing: tuple[NDArray[np.int64], NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def of(
        cls,
        ids: NDArray[np.int64],
        offsets: NDArray[np.int64],
        epoch: NDArray[np.int64],
        steps: NDArray[np.int64],
        embeddings: Embeddings,
        *,
        steps_per_batch: int = 1,
    ) -> PlanDraw:
        """Describe the batches of some steps.

        Parameters
        ----------
        ids
            Rows of the embeddings of S steps, from step 0 on; distinct within a step.
        offsets
            (S + 1,): step s holds ``ids[offsets[s] : offsets[s + 1]]``; those described are not empty.
        epoch
            (S,) organizer epoch of each step.
        steps
            (T,) ascending steps below S, those whose gradients are there.
        embeddings
            The N rows.
        steps_per_batch
            Steps that train from one generation batch, in which a sample is exposed once.
        """
        sizes, flat = np.diff(offsets), ids
        place_step = np.repeat(np.arange(len(sizes)), sizes)
        seen = _seen_before(flat, place_step // steps_per_batch)
        T, size = len(steps), sizes[steps]
        ends = np.concatenate([[0], np.cumsum(size)])
        # Places of the chosen steps: where each of them begins, and on from there.
        places = np.repeat((np.cumsum(sizes) - sizes)[steps] - ends[:-1], size) + np.arange(ends[-1])
        chosen, row = flat[places], np.repeat(np.arange(T), size)
        among = np.zeros(len(embeddings), dtype=np.bool_)
        among[chosen] = True
        used = np.flatnonzero(among)
        place = (np.cumsum(among) - 1)[chosen]
        incidence = sp.csr_array((np.ones(len(chosen)), place, ends), shape=(T, len(used)))
        unit = embeddings.unit[used].astype(np.float64)
        total = np.asarray(incidence @ unit)
        square = np.einsum("ij,ij->i", total, total)
        count = np.bincount(row, embeddings.valid[chosen], minlength=T)
        own = np.asarray(incidence @ np.einsum("ij,ij->i", unit, unit))
        cosine = np.full(T, np.nan)
        np.divide(square - own, count * (count - 1), out=cosine, where=count > 1)
        length = np.sqrt(square)
        length[length < 1e-9] = np.inf  # embeddings that cancel leave rounding, which has no direction
        return cls(
            step=np.asarray(steps, dtype=np.int64),
            organizer_epoch=np.asarray(epoch, dtype=np.int64)[steps],
            cosine=cosine,
            centroid=(total / length[:, None]).astype(np.float32),
            exposure=np.stack(
                [np.bincount(row, u, minlength=T) / size for u in (seen[places], np.log1p(seen[places]))], axis=1
            ),
            sharing=_sharing(chosen, row, T),
        )

    def take(self, positions: NDArray[np.int64]) -> PlanDraw:
        """Return the draw of some of its steps, (n,) ascending positions."""
        if len(positions) == len(self):
            return self
        place = np.full(len(self), -1)
        place[positions] = np.arange(len(positions))
        left, right = (place[side] for side in self.sharing)
        both = (left >= 0) & (right >= 0)
        return PlanDraw(
            step=self.step[positions],
            organizer_epoch=self.organizer_epoch[positions],
            cosine=self.cosine[positions],
            centroid=self.centroid[positions],
            exposure=self.exposure[positions],
            sharing=(left[both], right[both]),
        )


@dataclass(frozen=True, eq=False)
class Redraws:
    """A run's plan, and the same from other seeds.

    Parameters
    ----------
    plan
        The plan whose batches the run trained.
    embeddings
        Its embeddings.
    """

    plan: Plan
    embeddings: Embeddings

    def draws(self, number: int, steps: Sequence[NDArray[np.int64]]) -> list[PlanDraw]:
        """Return one draw of the plan, described at several choices of steps.

        Parameters
        ----------
        number
            -1 for the draw that the run trained; 0, 1, … for re-draws, which are the same for equal plans on every
            machine.
        steps
            Ascending steps, (T,) each; equal arrays give one object.
        """
        plan = self.plan
        if number >= 0:
            own = plan.organizer.options["seed"]
            seeds = raw_keys(own, REDRAW, number, 2).tolist()
            plan = plan.redraw(seeds[0] if seeds[0] != own else seeds[1])
        stop = max(int(one[-1]) for one in steps) + 1
        ids, offsets = plan.flat(0, stop)
        epochs: list[NDArray[np.int64]] = []
        while sum(map(len, epochs)) < stop:
            epochs.append(np.full(len(plan.epoch(len(epochs)).steps), len(epochs)))
        epoch = np.concatenate(epochs)[:stop]
        every = np.zeros(stop, dtype=np.bool_)
        for one in steps:
            every[one] = True
        whole = PlanDraw.of(ids, offsets, epoch, np.flatnonzero(every), self.embeddings)
        place = np.cumsum(every) - 1
        known: dict[bytes, PlanDraw] = {}
        for one in steps:
            if one.tobytes() not in known:
                known[one.tobytes()] = whole.take(place[one])
        return [known[one.tobytes()] for one in steps]


def find_embeddings(run: Run, given: Path | None = None) -> Embeddings:
    """Return the embeddings of a run.

    Parameters
    ----------
    run
        The run folder.
    given
        Where they are now, if no longer where run.json says.

    Raises
    ------
    InputError
        The run notes none, the file is missing or unreadable, or it is not the matrix that the run used.
    """
    noted = run.info.get("embeddings") or {}
    file = given
    if file is None:
        path = noted.get("path")
        if not path:
            raise InputError("the run notes no embeddings file")
        file = next((one for one in (Path(path), run.path / path) if one.is_file()), None)
        if file is None:
            raise InputError(
                f"the embeddings file {path} is not there; fix: say where it is now, by --embeddings of "
                "sdo locality or --run-embeddings of sdo report"
            )
    embeddings = Embeddings.read(file)
    if noted.get("fingerprint") not in (None, embeddings.fingerprint):
        raise InputError(f"{file} is not the matrix that the run used, or has changed since: its fingerprint differs")
    return embeddings


def recorded_plan(run: Run, embeddings: Embeddings) -> Plan:
    """Return the plan that a run trained, made again from run.json and checked against the recorded batches.

    Parameters
    ----------
    run
        The run folder.
    embeddings
        The run's, see `find_embeddings`.

    Raises
    ------
    InputError
        The run had no organizer, or its plan cannot be made again: other samples, another version of the plan, or
        batches that are not the plan's.

    Notes
    -----
    Where several steps train from one batch of the plan, each may train some of its prompts only.
    """
    noted = run.info.get("organizer")
    if not noted:
        raise InputError("the run had no organizer, so that its plan cannot be drawn anew")
    if run.info.get("selector") is not None:
        raise InputError(
            f"{run.path}: selector {run.info['selector'].get('name')!r} kept a part of each batch; re-draws of the "
            "plan keep all of it"
        )
    try:
        options, size, count = dict(noted["options"]), noted["batch_size"], noted["n_samples"]
        organizer = make_organizer(noted["name"], OrganizerInputs(len(embeddings), embeddings), options)
    except (KeyError, TypeError, InputError) as error:
        raise InputError(
            f"the organizer {noted.get('name')!r} of {run.path} is not known to this version: {error}"
        ) from error
    rows = np.arange(count)
    if _digest(rows) != noted.get("samples"):
        rows = np.unique(np.array(run.exposure().column("sample_id").to_pylist(), dtype=np.int64))
    plan = organizer.plan(size, rows=rows)
    described = plan.describe()
    compared = {name: value for name, value in noted.items() if name in described}
    difference = describe_difference(compared, described)
    if difference:
        raise InputError(f"the plan of {run.path} cannot be made again: {difference}")
    steps, batches, _ = recorded_batches(run)
    each = steps_per_batch(run)
    for step, ids in zip(steps.tolist(), batches, strict=True):
        planned = plan.batch(step // each)
        alike = np.array_equal(np.sort(ids), np.sort(planned)) if each == 1 else np.isin(ids, planned).all()
        if len(ids) and not alike:
            raise InputError(f"{run.path}: step {step} did not train the batch that its plan gives")
    return plan


def _digest(ids: NDArray[np.int64]) -> str:
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


def _seen_before(samples: NDArray[np.int64], batch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each of (n,) places, ascending by batch, how many earlier batches hold its sample."""
    order = _by_sample(samples)
    starts = np.flatnonzero(np.diff(samples[order], prepend=-1))
    fresh = np.diff(batch[order], prepend=-1) != 0
    fresh[starts] = True
    count = np.cumsum(fresh)
    seen = np.empty(len(samples), dtype=np.int64)
    seen[order] = count - np.repeat(count[starts], np.diff(np.append(starts, len(samples))))
    return seen


def _sharing(samples: NDArray[np.int64], row: NDArray[np.int64], T: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the pairs t < s of T batches that have a sample in common, each once; `row` says whose a sample is."""
    order = _by_sample(samples)
    ids, step = samples[order], row[order]
    found = []
    # A sample that stands in n batches makes pairs at distances 1 to n - 1 in the sorted list.
    distance = 1
    while True:
        same = np.flatnonzero(ids[:-distance] == ids[distance:]) if distance < len(ids) else np.zeros(0, dtype=np.int64)
        if not len(same):
            break
        found.append(step[same] * T + step[same + distance])
        distance += 1
    if not found:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    pairs = np.sort(np.concatenate(found))
    pairs = pairs[np.diff(pairs, prepend=-1) != 0]
    return pairs // T, pairs % T


def _by_sample(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order of (n,) places by sample, then by place: a stable argsort, at the speed of a plain sort."""
    keys = samples * len(samples) + np.arange(len(samples))
    keys.sort()
    return keys % len(samples)
