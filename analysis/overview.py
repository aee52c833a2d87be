"""A run in a few numbers, as they stand in ``coherence.json`` and in the report: plain dictionaries, JSON as they are.

A number that is not defined is None, and ``<name>_reason`` beside it says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from analysis.coherence import BatchCoherence, StepSummary, batch_coherence, mean_pairwise_cosine
from analysis.estimates import Estimate, describe
from analysis.gradient_rows import GradientRows
from analysis.gram import gram_matrix, gram_measures
from analysis.recorded import recorded_batches
from analysis.redraw import find_embeddings
from analysis.runs import Run
from sdo.errors import InputError

_BETWEEN = {"sample": "samples", "micro_batch": "micro-batches"}


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


def step_coherence_overview(summary: StepSummary) -> dict[str, Any]:
    """Return step coherence in a few means over pairs of steps, and how many steps have a direction."""
    entry: dict[str, Any] = {"steps": summary.rows, "defined": summary.defined}
    entry["undefined"] = summary.rows - summary.defined
    for field in ("mean", "lag_one", "sharing", "disjoint"):
        entry |= with_reason(field, getattr(summary, field), "pairs")
    return entry


def batch_coherence_overview(run: Run, signal: str) -> tuple[dict[str, Any], BatchCoherence]:
    """Return batch coherence over the steps: its spread and, of samples, the measures of each step's Gram matrix.

    Rows of single samples are taken where the run has some, else those of micro-batches, as ``"between"`` says.
    """
    recorded = run.kinds(signal)
    kind = next((kind for kind in _BETWEEN if recorded.get(kind)), None)
    measures: list[dict[str, Estimate]] = []

    def groups() -> Iterator[GradientRows]:
        for rows in run.iter_steps(signal, kind) if kind else ():
            if kind == "sample":
                measures.append(gram_measures(gram_matrix(rows.sketch, rows.norm, rows.defined)))
            yield rows

    result = batch_coherence(groups())
    spread = asdict(result.spread())
    if kind is None:
        spread["reason"] = "the run recorded no sample and no micro-batch gradients"
    entry: dict[str, Any] = {"between": _BETWEEN.get(kind or ""), "steps": spread.pop("count")}
    entry |= {"undefined_steps": int((~result.defined).sum())} | spread
    if spread["reason"] is None:
        del entry["reason"]
    if kind == "sample":
        entry["one_step_measures"] = {}
        for name in measures[0] if measures else ():
            values = [step[name].value for step in measures]
            known = [value for value in values if value is not None]
            described = asdict(describe(known, "it is undefined in every step"))
            described["undefined"] = len(values) - len(known)
            entry["one_step_measures"][name] = described
    return entry, result


def sketch_check(run: Run, signal: str) -> dict[str, Any]:
    """Return how far the sketched cosines of a signal were from the exact ones, as the recorder measured it."""
    check = (run.info.get("sketch_check") or {}).get(signal)
    if check:
        return {"sketch_check": check}
    return {"sketch_check": None, "sketch_check_reason": "the run compared no sketches with exact gradients"}


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
