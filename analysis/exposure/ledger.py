"""Exposure: how often each sample was seen, how unequally, how soon all were, and how large the pools were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from analysis.estimates import Estimate, gini_of_ascending
from analysis.run_folder.recorded import exposed_batches, steps_per_batch
from analysis.run_folder.run import Run
from sdo.checks import number_array
from sdo.errors import InputError

_PLAN_COLUMNS = ("organizer_epoch", "step", "sample_id")


@dataclass(frozen=True, eq=False)
class Exposure:
    """How often the n samples of a run or a plan were seen.

    Parameters
    ----------
    times
        (n,) int64, ascending by sample id: exposures of each sample.
    step
        (S,) int64, ascending.
    distinct
        (S,) int64, different samples seen up to and with each step.
    pools
        Pool size by organizer epoch; empty where it is not known.
    source
        ``"trained"`` for a run, ``"planned"`` for a plan.
    notes
        What a reader should know.
    """

    times: NDArray[np.int64]
    step: NDArray[np.int64]
    distinct: NDArray[np.int64]
    pools: dict[int, int]
    source: str
    notes: tuple[str, ...] = ()

    @property
    def coverage(self) -> NDArray[np.float64]:
        """(S,) float64: share of the n samples seen up to and with each step."""
        return np.asarray(self.distinct / len(self.times), dtype=np.float64)

    def histogram(self) -> dict[int, int]:
        """Return how many samples were seen 0, 1, 2, … times, up to the largest."""
        return dict(enumerate(np.bincount(self.times).tolist()))

    def gini(self) -> Estimate:
        """Return the Gini index of the exposures, see `gini`."""
        return gini(self.times)


def gini(values: ArrayLike) -> Estimate:
    """Return the Gini index of (n,) non-negative values: 0 where all are equal, (n - 1) / n where one has everything.

    Notes
    -----
    See `analysis.estimates.gini_of_ascending`. Undefined where all are zero.

    Examples
    --------
    >>> gini([0, 0, 1]).value
    0.6666666666666666
    """
    v = np.sort(number_array(values, "values"))
    n = len(v)
    if n == 0:
        return Estimate.undefined("there are no samples")
    if v[0] < 0 or not np.isfinite(v).all():
        raise ValueError("the Gini index takes finite values from 0 on")
    if not v.any():
        return Estimate.undefined("no sample was seen", n)
    return Estimate.of(float(gini_of_ascending(v[None])[0]), n)


def exposure_entry(found: Exposure) -> dict[str, Any]:
    """Return what `sdo exposure` and `sdo report` say of some exposures: plain values for JSON.

    What is undefined is None, with its reason beside it.
    """
    index = found.gini()
    entry: dict[str, Any] = {
        "counted": found.source,
        "steps": len(found.step),
        "samples": len(found.times),
        "never": int((found.times == 0).sum()),
        "min": int(found.times.min()),
        "mean": float(found.times.mean()),
        "max": int(found.times.max()),
        "gini": index.value,
        "coverage": float(found.coverage[-1]),
        "histogram": [{"times": times, "samples": samples} for times, samples in found.histogram().items()],
        "pools": [{"organizer_epoch": epoch, "size": size} for epoch, size in found.pools.items()],
        "notes": list(found.notes),
    }
    if index.reason is not None:
        entry["gini_reason"] = index.reason
    for name, share in (("half_seen_at", 0.5), ("90_percent_seen_at", 0.9)):
        reached = found.coverage >= share
        entry[name] = int(found.step[reached.argmax()]) + 1 if reached.any() else None
        if not reached.any():
            entry[f"{name}_reason"] = f"{found.coverage[-1]:.1%} of the samples were seen"
    return entry


def run_exposure(run: Run) -> Exposure:
    """Return the exposures of a run: of the batches in its ``steps/``.

    A prompt of GRPO or RLOO is exposed once a generation batch.

    Raises
    ------
    InputError
        The run recorded no steps with sample ids.
    """
    steps, batches, epochs = exposed_batches(run)
    if not any(map(len, batches)):
        raise InputError(f"{run.path}: no recorded step has sample ids, so that there is no exposure to show")
    table = run.exposure()
    names = np.unique(np.array(table.column("sample_id").to_pylist(), dtype=np.int64))
    notes = []
    if not len(names):
        rows = (run.info.get("dataset") or {}).get("rows")
        seen = np.unique(np.concatenate(batches))
        if isinstance(rows, int) and rows > seen[-1]:
            names = np.arange(rows)
            notes.append(f"the run has no organizer: coverage is of the dataset's {rows} rows")
        else:
            names = seen
            notes.append("how many samples there are is not known: coverage is of those that were seen")
    exposure = _count(steps, batches, names, "trained", run.path)
    pools: dict[int, int] = {}
    if table.num_rows:
        epoch, sample, trained, inside = (
            np.array(table.column(name).to_pylist()) for name in ("organizer_epoch", "sample_id", "trained", "in_pool")
        )
        pools = {int(e): int(inside[epoch == e].sum()) for e in np.unique(epoch)}
        last = epoch == epoch.max()
        counted = np.zeros(len(names), dtype=np.int64)
        counted[np.searchsorted(names, sample[last])] = trained[last]
        difference = int(exposure.times.sum() - counted.sum())
        if not np.array_equal(exposure.times, counted) and int(epochs.max()) == int(epoch.max()):
            unfinished = "a generation batch that was not finished, " if steps_per_batch(run) > 1 else ""
            compared = "fewer" if difference > 0 else "more"
            notes.append(
                f"the ledger in exposure/ counts {abs(difference)} exposures {compared} than the steps hold: "
                f"{unfinished}updates that were skipped, or a run that broke off; shown are the steps"
            )
    return Exposure(exposure.times, exposure.step, exposure.distinct, pools, "trained", tuple(notes))


def plan_exposure(path: Path) -> Exposure:
    """Return the exposures of a plan as ``sdo plan`` wrote it, PLAN.parquet with PLAN.json beside it.

    Raises
    ------
    InputError
        A file is missing or is not such a plan.
    """
    try:
        table = pq.read_table(path, columns=list(_PLAN_COLUMNS))
        if "weight" in pq.read_schema(path).names:  # fillers, of weight 0, are no exposure
            table = table.filter(pc.greater(pq.read_table(path, columns=["weight"]).column("weight"), 0))
        columns = [np.asarray(table.column(name).to_numpy(), dtype=np.int64) for name in _PLAN_COLUMNS]
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; expected a run folder, or a plan as sdo plan writes it") from error
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is no plan: expected Parquet with {', '.join(_PLAN_COLUMNS)}, as sdo plan writes it ({error})"
        ) from error
    _, step, sample = columns
    if not len(step):
        raise InputError(f"{path} holds no steps; expected a plan as sdo plan writes it")
    order = np.argsort(step, kind="stable")
    steps, starts = np.unique(step[order], return_index=True)
    batches = np.split(sample[order], starts[1:])
    record = path.with_suffix(".json")
    described = _read_record(record)
    count = described.get("n_samples")
    notes = []
    seen = np.unique(sample)
    if isinstance(count, int) and count > seen[-1]:
        names = np.arange(count)
    else:
        names = seen
        notes.append(f"{record.name} does not say how many samples there are: coverage is of those that were seen")
    pools = _pools(described, record)
    exposure = _count(steps, batches, names, "planned", path)
    return Exposure(exposure.times, exposure.step, exposure.distinct, pools, "planned", tuple(notes))


def _read_record(record: Path) -> Mapping[str, Any]:
    if not record.is_file():
        return {}
    try:
        described = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{record} cannot be read as JSON: {error}") from error
    return described if isinstance(described, dict) else {}


def _pools(described: Mapping[str, Any], record: Path) -> dict[int, int]:
    """Return the pool size of each organizer epoch; empty where the record has none."""
    epochs = described.get("epochs", [])
    try:
        return {int(one["organizer_epoch"]): int(one["pool"]) for one in epochs if one.get("pool") is not None}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(
            f"{record}: epochs is {json.dumps(epochs):.40}; expected a list of organizer_epoch and pool, as sdo plan "
            "writes it; fix: write the plan anew, or remove this record"
        ) from error


def _count(
    steps: NDArray[np.int64], batches: list[NDArray[np.int64]], names: NDArray[np.int64], source: str, path: Path
) -> Exposure:
    flat = np.concatenate(batches)
    place = np.minimum(np.searchsorted(names, flat), len(names) - 1)
    unknown = flat[names[place] != flat]
    if len(unknown):
        raise InputError(f"{path}: sample {unknown[0]} was seen, but is none of the {len(names)} samples")
    _, first = np.unique(place, return_index=True)
    sizes = np.array([len(batch) for batch in batches])
    new = np.bincount(np.repeat(np.arange(len(steps)), sizes)[first], minlength=len(steps))
    return Exposure(np.bincount(place, minlength=len(names)), steps, np.cumsum(new), {}, source)
