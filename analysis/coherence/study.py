"""Everything that a run's gradients say about coherence, signal by signal: for the command, the report and the demo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.coherence.cosines import (
    BatchCoherence,
    CoherenceBlocks,
    StepSummary,
    batch_coherence,
    step_coherence,
    step_coherence_blocks,
    step_summary,
)
from analysis.coherence.gram import gram_matrix, gram_measures
from analysis.estimates import Estimate, describe
from analysis.run_folder.gradient_rows import GradientRows
from analysis.run_folder.overview import with_reason
from analysis.run_folder.run import Run

_BETWEEN = {"sample": "samples", "micro_batch": "micro-batches"}


@dataclass(frozen=True, eq=False)
class BetweenSteps:
    """Step coherence of one signal of one run.

    Parameters
    ----------
    step
        (T,) int64, the steps whose gradients were recorded, ascending.
    summary
        Means over pairs of steps.
    matrix
        (T, T) float32, the cosine of each pair of steps; None where it was not asked for, T is too large, or no row is
        that of a step.
    blocks
        The same averaged over blocks of steps, where that was asked for or `matrix` is too large.
    """

    step: NDArray[np.int64]
    summary: StepSummary
    matrix: NDArray[np.float32] | None = None
    blocks: CoherenceBlocks | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the means as plain JSON, None with a reason."""
        summary = self.summary
        entry: dict[str, Any] = {"steps": summary.rows, "defined": summary.defined}
        entry["undefined"] = summary.rows - summary.defined
        for name in ("mean", "lag_one", "sharing", "disjoint"):
            entry |= with_reason(name, getattr(summary, name), "pairs")
        return entry


@dataclass(frozen=True, eq=False)
class WithinSteps:
    """Batch coherence of one signal of one run.

    Parameters
    ----------
    series
        Step by step.
    between
        What it compares: ``"samples"``, ``"micro-batches"``, or None where neither was recorded.
    measures
        The measures of a step's Gram matrix, described over the steps; None unless samples were recorded.
    """

    series: BatchCoherence
    between: str | None
    measures: dict[str, dict[str, Any]] | None

    def to_dict(self) -> dict[str, Any]:
        """Return spread and measures as plain JSON, None with a reason."""
        spread = asdict(self.series.spread())
        if self.between is None:
            spread["reason"] = "the run recorded no sample and no micro-batch gradients"
        entry: dict[str, Any] = {"between": self.between, "steps": spread.pop("count")}
        entry |= {"undefined_steps": int((~self.series.defined).sum())} | spread
        if spread["reason"] is None:
            del entry["reason"]
        return entry if self.measures is None else entry | {"one_step_measures": self.measures}


@dataclass(frozen=True, eq=False)
class SignalCoherence:
    """Step and batch coherence of one signal of one run.

    Parameters
    ----------
    between_steps, within_steps
        The two, never one word for both.
    check
        How far sketched cosines were from the exact ones: ``sketch_check``, None with a reason where nobody measured.
    """

    between_steps: BetweenSteps
    within_steps: WithinSteps
    check: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return all as plain JSON: ``sketch_check``, ``step_coherence`` and ``batch_coherence``."""
        parts = {"step_coherence": self.between_steps.to_dict(), "batch_coherence": self.within_steps.to_dict()}
        return self.check | parts


def run_coherence(
    run: Run,
    signals: Sequence[str] | None = None,
    *,
    smooth: int | None = None,
    matrix_steps: int = 0,
    cells: int = 0,
) -> dict[str, SignalCoherence]:
    """Compute step and batch coherence of a run.

    Parameters
    ----------
    run
        The run folder.
    signals
        Names of signals; all that the run holds by default.
    smooth
        Average the directions of the last so many steps before the cosine, in matrix and blocks only.
    matrix_steps
        Up to so many steps the matrix of all pairs is computed (float32, T * T * 4 bytes).
    cells
        Most cells a side of the blocks; 0 for none. Where the matrix is asked for and has too many steps, blocks of 256
        cells a side stand for it.

    Returns
    -------
    dict
        By signal.

    Notes
    -----
    Rows of single samples are compared within a step where the run has some, else those of micro-batches.
    """
    return {
        signal: SignalCoherence(
            between_steps(run, signal, smooth=smooth, matrix_steps=matrix_steps, cells=cells),
            within_steps(run, signal),
            sketch_check(run, signal),
        )
        for signal in (run.signals if signals is None else signals)
    }


def between_steps(
    run: Run, signal: str, *, smooth: int | None = None, matrix_steps: int = 0, cells: int = 0
) -> BetweenSteps:
    """Compute step coherence of one signal; see :func:`run_coherence`."""
    rows = run.gradients(signal, "step")
    summary = step_summary(rows)
    if not len(rows):  # `samples` has rows of single samples alone
        return BetweenSteps(rows.step, summary)
    if len(rows) <= matrix_steps:
        matrix = step_coherence(rows.sketch, rows.defined, smooth=smooth)
        return BetweenSteps(rows.step, summary, matrix=matrix)
    if not cells and not matrix_steps:
        return BetweenSteps(rows.step, summary)
    blocks = step_coherence_blocks(rows.sketch, rows.defined, smooth=smooth, size=cells or 256)
    return BetweenSteps(rows.step, summary, blocks=blocks)


def within_steps(run: Run, signal: str) -> WithinSteps:
    """Compute batch coherence of one signal; see :func:`run_coherence`."""
    recorded = run.kinds(signal)
    kind = next((kind for kind in _BETWEEN if recorded.get(kind)), None)
    each: list[dict[str, Estimate]] = []

    def groups() -> Iterator[GradientRows]:
        for rows in run.iter_steps(signal, kind) if kind else ():
            if kind == "sample":
                each.append(gram_measures(gram_matrix(rows.sketch, rows.norm, rows.defined)))
            yield rows

    series = batch_coherence(groups())
    if kind != "sample":
        return WithinSteps(series, _BETWEEN.get(kind or ""), None)
    measures = {}
    for name in each[0] if each else ():
        values = [step[name].value for step in each]
        known = [value for value in values if value is not None]
        described = asdict(describe(known, "it is undefined in every step"))
        measures[name] = described | {"undefined": len(values) - len(known)}
    return WithinSteps(series, "samples", measures)


def sketch_check(run: Run, signal: str) -> dict[str, Any]:
    """Return how far the sketched cosines of a signal were from the exact ones, as the recorder measured it."""
    check = (run.info.get("sketch_check") or {}).get(signal)
    if check:
        return {"sketch_check": check}
    return {"sketch_check": None, "sketch_check_reason": "the run compared no sketches with exact gradients"}
