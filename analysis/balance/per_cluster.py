"""How evenly correctness is spread over clusters of questions, and whether two runs differ in it.

Cluster accuracies differ by chance alone, the more the smaller the clusters. So beside each raw metric stand the band
that equally good clusters would give (scores permuted over the questions), and the latent value: the metric of the
clusters' underlying accuracies, from a beta distribution fitted to what the noise leaves (see `latent_spread`). A
comparison of two runs swaps their scores question by question. What chance cannot move has neither band nor interval
nor p. Bootstrap intervals of raw metrics are not offered:
a resample adds noise to noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.balance.duplicates import NOISE
from analysis.balance.latent_spread import (
    accuracies,
    between_squares,
    latent_spread,
    logit_spread,
    refitted,
    spread_interval,
    underlying,
    within_variance,
)
from analysis.balance.metrics import (
    LOWER,
    METRICS,
    RAW,
    largest_difference,
    lorenz_curves,
    paired_interval,
    raw_metrics,
    score_interval,
    wilson,
)
from analysis.balance.questions import BOOTSTRAP, PERMUTE, SWAP, TIE, QuestionUnits, Sums, generator, permuted, swapped
from analysis.balance.results import Balance, BalanceComparison, Difference, Homogeneity, Interval, MetricBalance
from sdo.checks import integer_array, number_array, whole_number

Array = NDArray[np.float64]

LEVEL = 0.05  # two-sided; intervals and bands are at 1 - LEVEL
MOVES = "moves with the mean: no verdict on balance"
_FEWEST_CLUSTERS = 2  # one has nothing to be compared with
_ONE_CLUSTER = "it needs at least two clusters"
UNMOVED = "no deal of the scores over the questions changes it"
_FEWEST_RESAMPLES = 99  # p cannot fall below 1/(resamples + 1)


def cluster_balance(
    score: ArrayLike,
    label: ArrayLike,
    *,
    group: ArrayLike | None = None,
    resamples: int = 999,
    seed: int = 0,
) -> Balance:
    """Describe how evenly one run does over clusters.

    Parameters
    ----------
    score
        Shape ``(n,)``, correctness of each question: 0, 1 or a score in [0, 1].
    label
        Shape ``(n,)``, integers from -1, the cluster of each question; -1 is noise and left out.
    group
        Shape ``(n,)``, equal numbers for duplicates (see `duplicate_groups`); duplicates in one cluster are permuted as
        one question. None: there are none.
    resamples
        Permutations, and bootstrap draws; at least 99.
    seed
        0 … 2**64 - 1.

    Raises
    ------
    ValueError
        For scores outside [0, 1], labels or groups that are no integers, masked entries, shapes that differ, no
        question in a cluster, or too few resamples.

    Notes
    -----
    With one cluster all but the mean is undefined: nothing is even or uneven.

    Examples
    --------
    >>> import numpy as np
    >>> label = np.repeat(np.arange(20), 10)
    >>> result = cluster_balance(np.tile([1, 1, 1, 0], 50), label)
    >>> round(result.metrics["mean"].value, 2), result.metrics["spread"].latent
    (0.75, 0.0)
    """
    _check(resamples)
    units = _units(score, label, group)
    sums = units.sums()
    a = accuracies(units, sums)
    values = _values(units, sums)
    null: dict[str, list[Array]] = {name: [] for name in METRICS}
    ranked, squares = [], []
    for drawn in permuted(units, resamples, generator(seed, PERMUTE)):
        for name, one in _values(units, drawn).items():
            null[name].append(one)
        dealt = accuracies(units, drawn)
        squares.append(between_squares(units, dealt))
        ranked.append(np.sort(dealt, axis=1).astype(np.float32))
    whole = np.concatenate(ranked)
    tail = [LEVEL / 2, 1 - LEVEL / 2]
    dealt_values = {name: np.concatenate(one) for name, one in null.items()}
    accuracy = float(units.weight @ units.score / units.weight.sum())
    low, high = wilson(accuracy, units.effective_questions).tolist()
    return Balance(
        n=int(units.size.sum()),
        distinct=len(units),
        names=units.names,
        size=units.size,
        accuracy=a[0],
        interval=wilson(a[0], units.effective),
        question_accuracy=accuracy,
        question_interval=(low, high),
        metrics=_described(units, sums, values, dealt_values, resamples, seed),
        homogeneity=_homogeneity(units, between_squares(units, a), np.concatenate(squares)),
        logit=_finite(logit_spread(values["mean"][0], values["spread"][0])),
        ranked_band=np.quantile(whole, tail, axis=0),
        lorenz_band=np.quantile(lorenz_curves(whole), tail, axis=0),
    )


def compare_balance(
    baseline: ArrayLike,
    run: ArrayLike,
    label: ArrayLike,
    *,
    group: ArrayLike | None = None,
    resamples: int = 999,
    seed: int = 0,
) -> BalanceComparison:
    """Compare two runs on the same questions: their two scores of a question are swapped at random.

    Parameters
    ----------
    baseline, run
        Shape ``(n,)``, scores of the same questions in the same order.
    label, group, resamples, seed
        As for `cluster_balance`.

    Notes
    -----
    ``b20``, ``cv``, ``gini`` and ``gap`` move with the mean, so their verdicts are on these numbers, not on balance.
    The verdict on balance is that of ``spread``. It needs p below 0.05 for the spread of accuracies and for that of
    their log-odds, in the same direction: where two runs differ in the mean, equal spread on one scale is unequal on
    the other, and either test alone then errs in up to a third of the cases (``python -m benchmarks balance-levels``).

    Raises
    ------
    ValueError
        As `cluster_balance`.
    """
    _check(resamples)
    first, second = _units(baseline, label, group), _units(run, label, group)
    if len(first) != len(second):
        raise ValueError("baseline and run must score the same questions")
    observed = {name: float(one[0]) for name, one in _differences(first, first.sums(), second, second.sums()).items()}
    parts = [_differences(first, x, second, y) for x, y in swapped(first, second, resamples, generator(seed, SWAP))]
    found = {
        name: _difference(name, observed[name], np.concatenate([part[name] for part in parts]), first.clusters)
        for name in observed
    }
    if first.clusters < _FEWEST_CLUSTERS:
        nothing = Difference(None, None, None, "undetermined", _ONE_CLUSTER)
        found |= dict.fromkeys([name for name in found if name != "mean"], nothing)
    logit = found.pop("logit")
    found["spread"] = _on_both_scales(found["spread"], logit)
    a, b = accuracies(first, first.sums())[0], accuracies(second, second.sums())[0]
    return BalanceComparison(
        n=int(first.size.sum()),
        distinct=len(first),
        names=first.names,
        size=first.size,
        baseline=a,
        run=b,
        question_accuracy=_question_accuracy(first, second),
        metrics=found,
        logit=logit,
        cluster_p=_sign_tests(first, second),
    )


def _check(resamples: int) -> None:
    if whole_number("resamples", resamples, None) < _FEWEST_RESAMPLES:
        raise ValueError(f"resamples is {resamples}; expected at least {_FEWEST_RESAMPLES}, or p could not be small")


def _units(score: ArrayLike, label: ArrayLike, group: ArrayLike | None) -> QuestionUnits:
    scores, labels = number_array(score, "scores"), integer_array(label, "labels", low=NOISE)
    group = None if group is None else integer_array(group, "groups")
    if labels.shape != scores.shape or (group is not None and group.shape != scores.shape):
        raise ValueError(f"scores have shape {scores.shape}, labels {labels.shape}; expected one of each a question")
    if not ((scores >= 0) & (scores <= 1)).all():
        raise ValueError("scores must lie in [0, 1]")
    units = QuestionUnits.of(scores, labels, group)
    if not len(units):
        raise ValueError("no question is in a cluster")
    return units


def _values(units: QuestionUnits, sums: Sums) -> dict[str, Array]:
    values = raw_metrics(accuracies(units, sums)) | {"spread": latent_spread(units, sums)}
    if units.clusters < _FEWEST_CLUSTERS:  # what compares clusters would be 0, as if they were even
        values |= {name: np.full_like(values["mean"], np.nan) for name in METRICS if name != "mean"}
    return values


def _finite(value: ArrayLike) -> float | None:
    number = float(np.asarray(value))
    return number if np.isfinite(number) else None


def _band(values: Array) -> Interval | None:
    """Return where the middle 95 % of the draws lie; None where one is undefined, or all are the same."""
    if np.isnan(values).any() or np.ptp(values) <= TIE:
        return None
    low, high = np.quantile(values, [LEVEL / 2, 1 - LEVEL / 2])
    return float(low), float(high)


def _undefined(units: QuestionUnits, name: str) -> str | None:
    """Say why a metric has no value, or None if it has."""
    if name != "mean" and units.clusters < _FEWEST_CLUSTERS:
        return _ONE_CLUSTER
    if name in ("cv", "gini") and not units.score.any():
        return "the mean is 0"
    if name == "spread" and len(units) == units.clusters:
        return "every cluster holds one distinct question: noise and spread cannot be told apart"
    return None


def _described(
    units: QuestionUnits, sums: Sums, values: dict[str, Array], dealt: dict[str, Array], resamples: int, seed: int
) -> dict[str, MetricBalance]:
    """Put raw values, the bands of dealt scores, and latent values together."""
    mean, spread = float(values["mean"][0]), float(values["spread"][0])
    within = float(within_variance(units, sums)[0])
    why = _undefined(units, "spread")
    latent: dict[str, float | None] = dict.fromkeys(METRICS)
    intervals: dict[str, Interval | None] = dict.fromkeys(METRICS)
    if why is None:
        latent = {name: _finite(one[0]) for name, one in raw_metrics(underlying(mean, spread, units.clusters)).items()}
        latent["spread"] = spread
        if not within > 0:
            why = "no cluster has both right and wrong answers: the noise cannot be told"
        else:
            means, spreads = refitted(units, mean, spread, within, resamples, generator(seed, BOOTSTRAP))
            drawn = raw_metrics(underlying(means, spreads, units.clusters))
            intervals |= {name: _band(drawn[name]) for name in RAW}
            low, high = spread_interval(units)
            intervals["spread"] = (low, high) if high > 0 else None
    described = {}
    for name in METRICS:
        reasons = [_undefined(units, name)]
        if reasons == [None]:
            if _band(dealt[name]) is None:
                undefined = np.isnan(dealt[name]).any()
                reasons.append("no band: " + ("it is undefined in some permutations" if undefined else UNMOVED))
            if latent[name] is None or intervals[name] is None:
                reasons.append(f"no latent interval: {why or _no_latent(name, latent[name])}")
        told = "; ".join(reason for reason in reasons if reason) or None
        value, band = _finite(values[name][0]), _band(dealt[name])
        described[name] = MetricBalance(value, band, latent[name], intervals[name], told)
    return described


def _no_latent(name: str, latent: float | None) -> str:
    if name == "spread":
        return "the clusters lie closer together than chance alone puts them"
    return "it is undefined in some draws" if latent is None or name in ("cv", "gini") else "all draws are the same"


def _homogeneity(units: QuestionUnits, observed: Array, null: Array) -> Homogeneity:
    """Pearson's χ² of equal proportions, ``Q / (Σ (v - v̄)²/U)``, by permutation."""
    if units.clusters < _FEWEST_CLUSTERS:
        return Homogeneity(None, None, _ONE_CLUSTER)
    if len(units) == units.clusters:
        return Homogeneity(None, None, "every cluster holds one distinct question: any deal looks the same")
    variance = float(units.score.var())
    if variance == 0:
        return Homogeneity(None, None, "all scores are alike")
    if np.ptp(null) <= TIE * observed[0]:
        return Homogeneity(float(observed[0] / variance), None, UNMOVED)
    at_least = int((null >= observed[0] * (1 - TIE)).sum())
    return Homogeneity(float(observed[0] / variance), (1 + at_least) / (1 + len(null)))


def _differences(first: QuestionUnits, x: Sums, second: QuestionUnits, y: Sums) -> dict[str, Array]:
    a, b = _values(first, x), _values(second, y)
    differences = {name: b[name] - a[name] for name in METRICS}
    differences["logit"] = logit_spread(b["mean"], b["spread"]) - logit_spread(a["mean"], a["spread"])
    return differences


def _difference(name: str, observed: float, null: Array, clusters: int) -> Difference:
    """Judge one difference against its values under swapping, which are symmetric about 0."""
    if np.isnan(observed):
        return Difference(None, None, None, "undetermined", "the metric is undefined in one of the runs")
    # A swap that leaves a metric undefined counts as extreme: it never helps a verdict.
    size = np.sort(np.where(np.isnan(null), np.inf, np.abs(null)))
    if max(size[-1], abs(observed)) <= TIE:
        return Difference(observed, None, None, "undetermined", "no swap of the two runs' answers makes a difference")
    p = (1 + int((size >= abs(observed) - TIE).sum())) / (1 + len(size))
    # p < LEVEL exactly where |observed| is above this one of the sorted sizes.
    half = float(size[len(size) - 1 - (int(np.ceil(LEVEL * (len(size) + 1))) - 2)])
    significant = p < LEVEL
    half = min(half, abs(observed)) if significant else max(half, abs(observed))
    verdict = "undetermined"
    if significant:
        verdict = "better" if (observed < 0) == (name in LOWER or name == "logit") else "worse"
    if not np.isfinite(half):
        return Difference(observed, None, p, verdict, "too many swaps leave the metric undefined")
    if half <= TIE:
        return Difference(observed, None, p, verdict, "nearly all swaps leave no difference: no interval")
    low, high = score_interval(observed, half) if name == "mean" else (observed - half, observed + half)
    most = largest_difference(name, clusters)
    low, high = max(low, -most), min(high, most)
    if not significant:  # but for rounding
        low, high = min(low, 0.0), max(high, 0.0)
    return Difference(observed, (low, high), p, verdict)


def _question_accuracy(first: QuestionUnits, second: QuestionUnits) -> Difference:
    """Compare the accuracies over questions, all of them together."""
    w = first.weight
    interval = paired_interval(first.score, second.score, w)
    difference = float(w @ (second.score - first.score) / w.sum())
    up, down = (int((one > TIE).sum()) for one in (second.score - first.score, first.score - second.score))
    if up + down == 0:
        why = "the runs score every question alike: nothing to test"
        return Difference(difference, interval, None, "undetermined", why)
    p = float(_sign_test(up, down))
    if p >= LEVEL:
        return Difference(difference, interval, p, "undetermined")
    verdict = "better" if up > down else "worse"
    if (interval[0] > 0) if up > down else (interval[1] < 0):
        return Difference(difference, interval, p, verdict)
    return Difference(difference, interval, p, "undetermined", "the interval does not agree with the test")


def _on_both_scales(spread: Difference, logit: Difference) -> Difference:
    """Keep a verdict on the spread of accuracies only if that of their log-odds agrees."""
    if spread.verdict == "undetermined" or logit.verdict == spread.verdict:
        return spread
    seen = "is undefined" if logit.p is None else f"has p = {logit.p:.3g}"
    reason = f"the spread of log-odds {seen} and does not agree: the difference may be that of the means"
    return Difference(spread.difference, spread.interval, spread.p, "undetermined", reason)


def _sign_tests(first: QuestionUnits, second: QuestionUnits) -> Array:
    """Exact two-sided sign test of each cluster's units, p adjusted by Holm's method."""
    C = first.clusters
    up = np.bincount(first.cluster, second.score - first.score > TIE, C)
    down = np.bincount(first.cluster, first.score - second.score > TIE, C)
    p = _sign_test(up, down)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(C)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate((C - np.arange(C)) * p[order]))
    return adjusted


def _sign_test(up: ArrayLike, down: ArrayLike) -> Array:
    """Exact two-sided p of so many units going up and down, each as likely."""
    from scipy.stats import binom

    up, down = np.asarray(up), np.asarray(down)
    return np.asarray(np.minimum(1.0, 2.0 * binom.cdf(np.minimum(up, down), up + down, 0.5)))
