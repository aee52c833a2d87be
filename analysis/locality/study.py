"""Everything about the locality of one run: series, matrix and pairs of samples, with what their pictures need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.coherence.cosines import batch_coherence
from analysis.locality.association import MatrixDesign, MatrixTest, SeriesDesign, SeriesTest
from analysis.locality.redraw import PlanDraw, Redraws, find_embeddings, recorded_plan
from analysis.locality.redraw_tests import MIN_STEPS, Association, RedrawTest, run_tests, thin
from analysis.locality.sample_pairs import BinnedMean, SamplePairs, Slope, binned_pairs, pair_slope, pairs_within_steps
from analysis.run_folder.recorded import Recorded, flat_batches, recorded_batches, steps_per_batch
from analysis.run_folder.run import Run
from sdo.checks import whole_number
from sdo.embeddings.matrix import Embeddings, within_batch_cosine
from sdo.errors import InputError, counted

_BINS = 10
# The picture's band and cloud: plenty for the eye, and cheap beside the test.
_BAND_DRAWS = 199
_BAND_STEPS = 700
_BAND_LEAST = 39  # fewer re-draws have no tail of 2.5 %


@dataclass(frozen=True, eq=False)
class Cloud:
    """Points of a picture, their mean in bins, and where re-draws put that mean.

    Parameters
    ----------
    x, y
        (P,) float64.
    binned
        Mean of y in bins of equally many points. For tests its interval is the middle 95 % of the same mean in re-draws
        of the plan, widened by the test's lambda: what gradients that do not follow embeddings would give. For pairs of
        samples it is jackknifed over samples. NaN where there is none.
    """

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    binned: BinnedMean


@dataclass(frozen=True, eq=False)
class SignalLocality:
    """Locality of one signal; what is missing is None, and `reasons` says why.

    Parameters
    ----------
    series, matrix
        l_t with c_t, and E_ts with C_ts.
    slope
        Pairs of samples within steps.
    between
        Whose gradients c_t compares: ``"samples"`` or ``"micro-batches"``.
    step, coherence
        (T,) of c_t.
    clouds
        By ``"series"``, ``"matrix"`` and ``"pairs"``.
    reasons
        By the same names.
    """

    series: Association | None = None
    matrix: Association | None = None
    slope: Slope | None = None
    between: str | None = None
    step: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    coherence: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    clouds: dict[str, Cloud] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RunLocality:
    """Locality of a run.

    Parameters
    ----------
    step
        (S,) int64, recorded steps.
    cosine
        (S,) float64, l_t; NaN where undefined.
    signals
        By name.
    redraws
        Plans drawn anew; 0 where the plan cannot be.
    reason
        Why not.
    """

    step: NDArray[np.int64]
    cosine: NDArray[np.float64]
    signals: dict[str, SignalLocality]
    redraws: int
    reason: str | None


def run_locality(
    run: Run,
    *,
    embeddings: Path | None = None,
    signals: Sequence[str] | None = None,
    redraws: int = 999,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> RunLocality:
    """Measure and test the locality of a run.

    Parameters
    ----------
    run
        The run folder.
    embeddings
        Where the embeddings are, if no longer where run.json says.
    signals
        All by default.
    redraws
        How often the plan is drawn anew.
    workers
        Threads; they change no result.
    progress
        Called with the number of re-draws done.

    Raises
    ------
    InputError
        The embeddings are missing or are not the run's, the run recorded no steps, or a number is out of range.
    """
    whole_number("redraws", redraws, 0)
    whole_number("workers", workers, 1)
    matrix = find_embeddings(run, embeddings)
    steps, batches, epochs = recorded_batches(run)
    known = np.array([len(ids) > 0 for ids in batches], dtype=bool)
    if not known.any():
        raise InputError(f"{run.path}: no recorded step has sample ids; expected the ids that GradientRecorder writes")
    if any(np.any((ids < 0) | (ids >= len(matrix))) for ids in batches):
        raise InputError(f"{run.path}: sample ids of the run are no rows of the embeddings")
    cosine = within_batch_cosine(matrix.unit, matrix.valid, *flat_batches(batches))
    source: Redraws | None = None
    reason = None
    each = steps_per_batch(run)
    try:
        plan = recorded_plan(run, matrix)
        if each == 1:
            source = Redraws(plan, matrix)
        else:
            reason = (
                f"{each} optimizer steps train from each batch of the plan: a step is no batch of its own, so that "
                "another draw of the plan is no valid comparison"
            )
    except InputError as error:
        reason = str(error)
    if redraws < 1:
        reason = reason or "no re-draws were asked for"
    names = run.signals if signals is None else signals
    parts = {name: _SignalTests(run, name, steps[known], matrix) for name in names}
    results = {}
    compared: list[RedrawTest] = []
    if source is not None and redraws > 0:
        compared = [one for part in parts.values() for one in part.compared()]
    outcomes = iter(
        run_tests(source, compared, redraws, workers=workers, progress=progress) if compared and source else ()
    )
    for name, part in parts.items():
        found: dict[str, Association] = {}
        pictures: dict[str, tuple[Cloud, NDArray[np.float64]]] = {}
        for which, test in part.tests.items():
            if test in compared:
                found[which], pictures[which] = next(outcomes), next(outcomes)
            else:
                few = f"{counted(len(test.steps), 'step')}; the test was found valid from {MIN_STEPS} steps on"
                why = few if reason is None else reason
                found[which] = _without_redraws(test, source, (steps, batches, epochs), each, matrix, why)
        results[name] = part.result(found, pictures)
    return RunLocality(steps, cosine, results, redraws if compared else 0, reason)


class _SignalTests:
    """What one signal of one run brings to the tests."""

    def __init__(self, run: Run, signal: str, steps: NDArray[np.int64], embeddings: Embeddings) -> None:
        self.reasons: dict[str, str] = {}
        self.tests: dict[str, RedrawTest] = {}
        self.pairs: SamplePairs | None = None
        counts = run.kinds(signal)
        kind = next((one for one in ("sample", "micro_batch") if counts.get(one)), None)
        self.between = {"sample": "samples", "micro_batch": "micro-batches", None: None}[kind]
        self.step, self.coherence = np.zeros(0, dtype=np.int64), np.zeros(0)
        if kind is None:
            self.reasons["series"] = "the run recorded no gradients of samples or micro-batches for this signal"
        else:
            series = batch_coherence(run.iter_steps(signal, kind))
            usable = series.defined & np.isin(series.step, steps)
            self.step, self.coherence = series.step[usable], series.value[usable]
            if len(self.step) < 2:
                self.reasons["series"] = f"{counted(len(self.step), 'step')} with a batch coherence; two are needed"
            else:
                chosen = thin(self.step)
                self.tests["series"] = SeriesTest(self.step[chosen], self.coherence[chosen])
        self._matrix(run, signal, steps)
        if kind == "sample":
            self.pairs = pairs_within_steps(run.iter_steps(signal, kind), embeddings)
        else:
            self.reasons["pairs"] = "the run recorded no gradients of samples for this signal"

    def _matrix(self, run: Run, signal: str, steps: NDArray[np.int64]) -> None:
        rows = run.gradients(signal, "step")
        usable = np.flatnonzero(rows.defined & np.isin(rows.step, steps) & np.any(rows.sketch != 0, axis=1))
        if len(usable) < 3:
            self.reasons["matrix"] = (
                f"{counted(len(usable), 'step')} with a gradient that has a direction; three are needed"
            )
            return
        chosen = usable[thin(rows.step[usable])]
        self.tests["matrix"] = MatrixTest(rows.step[chosen], rows.sketch[chosen])

    def compared(self) -> list[RedrawTest]:
        """Return the tests that have steps enough, each followed by its picture."""
        enough = [test for test in self.tests.values() if len(test.steps) >= MIN_STEPS]
        return [one for test in enough for one in (test, _Picture(test))]

    def result(
        self, outcomes: dict[str, Association], pictures: dict[str, tuple[Cloud, NDArray[np.float64]]]
    ) -> SignalLocality:
        clouds = {}
        for name, (cloud, others) in pictures.items():
            if outcomes[name].p is not None:
                clouds[name] = _with_band(cloud, others, outcomes[name].inflation or 1.0)
        slope = None
        if self.pairs is not None:
            slope = pair_slope(self.pairs)
            if slope.value is not None:
                x, y = self.pairs.within_steps()
                clouds["pairs"] = Cloud(x, y, binned_pairs(self.pairs, _BINS))
        return SignalLocality(
            series=outcomes.get("series"),
            matrix=outcomes.get("matrix"),
            slope=slope,
            between=self.between,
            step=self.step,
            coherence=self.coherence,
            clouds=clouds,
            reasons=self.reasons,
        )


def _without_redraws(
    test: RedrawTest,
    source: Redraws | None,
    recorded: Recorded,
    each: int,
    embeddings: Embeddings,
    reason: str,
) -> Association:
    """Return the statistic alone, of the plan or else of the recorded batches."""
    steps, batches, epochs = recorded
    if source is not None:
        draw = source.draws(-1, [test.steps])[0]
    else:
        # Exposure so far is known where steps are recorded from 0 on.
        whole = np.array_equal(steps, np.arange(len(steps))) and all(map(len, batches))
        if not whole or any(len(np.unique(ids)) < len(ids) for ids in batches):
            why = f"{reason}; nor are its steps recorded from 0 on, in batches of distinct samples"
            return Association(None, None, why, len(test.steps))
        ids, offsets = flat_batches(batches)
        draw = PlanDraw.of(ids, offsets, epochs, test.steps, embeddings, steps_per_batch=each)
        paired = np.flatnonzero(~np.isnan(draw.cosine))
        if isinstance(test, SeriesTest) and len(paired) < len(draw):  # a step may train completions of one prompt only
            if len(paired) < 2:
                why = (
                    f"{counted(len(paired), 'step')} with two different samples that have an embedding; two are needed"
                )
                return Association(None, None, why, len(paired))
            test = SeriesTest(test.steps[paired], test.coherence[paired])
            draw = PlanDraw.of(ids, offsets, epochs, test.steps, embeddings, steps_per_batch=each)
    outcome: Association = test.result(test.of(test.design(draw), -1), [])
    return outcome if outcome.value is None else replace(outcome, reason=reason)


class _Picture:
    """The points of a test's picture, and their mean in bins in the first re-draws."""

    def __init__(self, test: Any) -> None:
        self._matrix = isinstance(test, MatrixTest)
        keep = thin(test.steps, _BAND_STEPS) if self._matrix else np.arange(len(test.steps))
        self.steps = test.steps[keep]
        self.design: Callable[[PlanDraw], Any] = MatrixDesign if self._matrix else SeriesDesign
        if self._matrix:
            self._gradients = test.gradients.cosine[np.ix_(keep, keep)].astype(np.float64)
            self._upper = np.triu(np.ones(self._gradients.shape, dtype=bool), 1)
        else:
            self._coherence = test.coherence
        self._edges = np.zeros(0)

    def of(self, design: Any, number: int) -> Any:
        """Return the points of the run, and mean y by bin of a re-draw; None beyond the first re-draws."""
        if number >= _BAND_DRAWS:
            return None
        x, y = self._points(design)
        if number >= 0:
            return _bin_means([y], *_bins(x, self._edges))[0]
        if not len(x):  # every pair of steps shares a sample
            return x, y
        self._edges = np.unique(np.quantile(x, np.linspace(0, 1, _BINS + 1)))
        if len(self._edges) < 2:
            self._edges = np.array([x.min() - 1e-9, x.max() + 1e-9])
        return x, y

    def result(self, observed: Any, redrawn: Sequence[Any]) -> tuple[Cloud, NDArray[np.float64]]:
        """Return the picture without its band, and the re-draws' means by bin."""
        x, y = observed
        place, count = _bins(x, self._edges)
        mean_x, mean_y = _bin_means([x, y], place, count)
        nothing = np.full(len(mean_x), np.nan)
        cloud = Cloud(x, y, BinnedMean(self._edges, mean_x, mean_y, nothing, nothing, count))
        return cloud, np.stack([one for one in redrawn if one is not None])

    def _points(self, design: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if not self._matrix:
            return design.residual, self._coherence - design.basis @ (design.basis.T @ self._coherence)
        apart = self._upper.copy()
        apart[design.rows, design.columns] = False
        places = np.flatnonzero(apart)
        products = design.centroid @ design.centroid.T
        return products.take(places).astype(np.float64), self._gradients.take(places)


def _with_band(cloud: Cloud, others: NDArray[np.float64], inflation: float) -> Cloud:
    """Return the picture with the middle 95 % of re-draws, widened by lambda about its middle."""
    n = len(cloud.binned.count)
    low, high = np.full(n, np.nan), np.full(n, np.nan)
    for b in range(n):
        known = others[np.isfinite(others[:, b]), b]
        if len(known) >= _BAND_LEAST:
            middle = known.mean()
            low[b], high[b] = middle + inflation * (np.quantile(known, [0.025, 0.975]) - middle)
    return replace(cloud, binned=replace(cloud.binned, low=low, high=high))


def _bins(x: NDArray[np.float64], edges: NDArray[np.float64]) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Return the bin of each x and the count in each; the outer bins are open, and without edges there are none."""
    place = np.zeros(len(x), dtype=np.int8)
    for edge in edges[1:-1]:  # few: a comparison with each is faster than a search
        place += x >= edge
    return place, np.bincount(place, minlength=len(edges) - 1) if len(edges) > 1 else np.zeros(0, dtype=np.int64)


def _bin_means(
    values: Sequence[NDArray[np.float64]], place: NDArray[np.int8], count: NDArray[np.int64]
) -> list[NDArray[np.float64]]:
    """Return the mean of each of some values in each bin; NaN where there is nothing."""
    some = np.where(count > 0, count, 1)
    return [np.where(count > 0, np.bincount(place, one, len(count))[: len(count)] / some, np.nan) for one in values]


def locality_entry(found: RunLocality) -> dict[str, Any]:
    """Return a run's locality as plain values for JSON: None where undefined, with the reason beside it."""
    known = found.cosine[~np.isnan(found.cosine)]
    entry: dict[str, Any] = {
        "steps": len(found.step),
        "within_batch_cosine": float(known.mean()) if len(known) else None,
        "redraws": found.redraws,
    }
    if not len(known):
        entry["within_batch_cosine_reason"] = "no batch has two samples whose embeddings have a direction"
    if found.reason is not None:
        entry["redraws_reason"] = found.reason
    signals: dict[str, Any] = {}
    for name, one in found.signals.items():
        parts = {"series": one.series, "matrix": one.matrix, "pairs": one.slope}
        signals[name] = {"batch_coherence_between": one.between}
        for part, value in parts.items():
            signals[name][part] = None if value is None else asdict(value)
            if value is None:
                signals[name][f"{part}_reason"] = one.reasons[part]
            elif part in one.clouds:
                signals[name][part]["binned_mean"] = _binned_entry(one.clouds[part].binned)
    return entry | {"signals": signals}


def _binned_entry(binned: BinnedMean) -> list[dict[str, Any]]:
    def number(value: float) -> float | None:
        return float(value) if np.isfinite(value) else None

    return [
        {
            "from": float(binned.edges[b]),
            "to": float(binned.edges[b + 1]),
            "points": int(binned.count[b]),
            **{name: number(getattr(binned, name)[b]) for name in ("x", "y", "low", "high")},
        }
        for b in range(len(binned.count))
    ]
