"""A run in a few numbers, as they stand in ``coherence.json`` and in the report: plain dictionaries, JSON as they are.

A number that is not defined is None, and ``<name>_reason`` beside it says why.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from analysis.coherence.cosines import mean_pairwise_cosine
from analysis.estimates import Estimate
from analysis.locality.redraw import find_embeddings
from analysis.run_folder.recorded import recorded_batches
from analysis.run_folder.run import Run
from sdo.errors import InputError


def run_overview(run: Run) -> dict[str, Any]:
    """Return organizer, status, the recorder's share of the time, first and last loss, within-batch cosine."""
    organizer = run.info.get("organizer")
    entry: dict[str, Any] = {"organizer": organizer.get("name") if organizer else None}
    entry["status"] = run.info.get("status")
    entry |= with_reason("recorder_share", recorder_share(run), "steps")
    entry |= _losses(run)
    return entry | with_reason("within_batch_cosine", mean_within_batch_cosine(run), "steps")


def recorder_share(run: Run) -> Estimate:
    """Return the recorder's time as a share of all steps' time, its own included; `count` is steps."""
    table = run.steps()
    own, rest = (sum(x or 0.0 for x in table.column(n).to_pylist()) for n in ("recorder_seconds", "seconds"))
    if own + rest <= 0:
        return Estimate.undefined("no step has a time")
    return Estimate.of(own / (own + rest), table.num_rows)


def mean_within_batch_cosine(run: Run) -> Estimate:
    """Return the mean over steps of the mean pairwise cosine of the embeddings in a batch; `count` is steps."""
    try:
        embeddings = find_embeddings(run)
    except InputError as error:
        return Estimate.undefined(str(error))
    _, batches, _ = recorded_batches(run)
    if any(np.any((ids < 0) | (ids >= len(embeddings))) for ids in batches):
        return Estimate.undefined("sample ids of the run are no rows of the embeddings")
    each = [mean_pairwise_cosine(embeddings.unit[ids]).value for ids in batches if len(ids)]
    defined = [value for value in each if value is not None]
    if not defined:
        return Estimate.undefined("no step has two samples with an embedding")
    return Estimate.of(float(np.mean(defined)), len(defined))


def with_reason(name: str, estimate: Estimate, unit: str) -> dict[str, Any]:
    """Return an estimate as entries of a JSON object; `unit` names what its count counts."""
    entry: dict[str, Any] = {name: estimate.value, f"{name}_{unit}": estimate.count}
    return entry if estimate.reason is None else entry | {f"{name}_reason": estimate.reason}


def _losses(run: Run) -> dict[str, Any]:
    table = run.steps()
    pairs = zip(table.column("step").to_pylist(), table.column("loss").to_pylist(), strict=True)
    known = [(step, loss) for step, loss in pairs if loss is not None and math.isfinite(loss)]
    if not known:
        return {"loss": None, "loss_reason": "no step has a finite loss"}
    (first_step, first), (last_step, last) = known[0], known[-1]
    return {"loss": {"first_step": first_step, "first": first, "last_step": last_step, "last": last}}
