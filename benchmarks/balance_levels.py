"""Does the inference of `sdo balance` hold? False positives and coverage by simulation, against their nominal values.

164 clusters, of 8 questions each or of uneven sizes as k-means makes them, accuracy about 0.83. A level is the share of
simulations in which something is found that is not there (nominal 5 %); a coverage the share of 95 % intervals that
hold the true value. With 300 simulations their standard error is 1.3 points. What is not offered stands below, with
its error.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, expit, logit, ndtr

from analysis import cluster_balance, compare_balance
from analysis.balance.latent_spread import beta_shape, underlying
from analysis.balance.metrics import METRICS, raw_metrics

_CLUSTERS = 164
_MEAN = 0.83
_RESAMPLES = 199
_CORRELATION = 0.6  # of the two runs' answers to a question, before they are cut into right and wrong
_METRICS = list(METRICS)
Array = NDArray[np.float64]


def main(simulations: int = 300) -> None:
    """Print the five tables; about five minutes on one core."""
    print(f"{simulations} simulations a cell, {_RESAMPLES} resamples each")
    _bands(simulations)
    _latent(simulations)
    _swaps(simulations)
    _questions(simulations)
    _refused(simulations)


def _sizes(uneven: bool) -> NDArray[np.int64]:
    """Eight each, or many small and few large clusters, 1,312 questions in all."""
    if not uneven:
        return np.full(_CLUSTERS, 8)
    share = np.random.default_rng(0).gamma(2.0, size=_CLUSTERS)
    extra = np.floor(share / share.sum() * 7 * _CLUSTERS).astype(np.int64)
    return 1 + extra


def _spread_out(mean: float, spread: float, place: Array) -> Array:
    """Accuracies of a beta distribution at the quantiles `place`; all equal without spread."""
    if spread == 0:
        return np.full(len(place), mean)
    a, b = (float(shape) for shape in beta_shape(mean, spread))
    return np.asarray(betaincinv(a, b, place))


def _line(name: str, values: list[str]) -> None:
    print(f"  {name:<44}" + "".join(f"{value:>9}" for value in values))


def _rates(found: list[list[bool]]) -> list[str]:
    return [f"{share:.3f}" for share in np.mean(np.array(found, dtype=float), axis=0)]


def _bands(simulations: int) -> None:
    print("\nEqual clusters: share of raw values outside the band, homogeneity rejected (nominal 0.050)")
    _line("", [*_METRICS, "test"])
    for uneven in (False, True):
        label = np.repeat(np.arange(_CLUSTERS), _sizes(uneven))
        for answers in (1, 4):
            rng = np.random.default_rng([1, uneven, answers])
            found = []
            for number in range(simulations):
                # Questions differ in difficulty; clusters do not.
                ease = rng.beta(4, 4 * (1 - _MEAN) / _MEAN, len(label))
                score = rng.binomial(answers, ease) / answers
                one = cluster_balance(score, label, resamples=_RESAMPLES, seed=number)
                found.append([*_outside(one.metrics), one.homogeneity.p < 0.05])
            kind = "uneven sizes" if uneven else "8 each"
            _line(f"{kind}, {'single answers' if answers == 1 else f'means of {answers}'}", _rates(found))
    label = np.repeat(np.arange(_CLUSTERS), 8)
    rng = np.random.default_rng(5)
    copies = np.arange(len(label)) // 2  # every question is there twice
    for grouped in (True, False):
        found = []
        for number in range(simulations):
            score = (rng.random(len(label)) < _MEAN).astype(float)[copies]
            group = copies if grouped else None
            one = cluster_balance(score, label, group=group, resamples=_RESAMPLES, seed=number)
            found.append([*_outside(one.metrics), one.homogeneity.p < 0.05])
        how = "dealt as one" if grouped else "not grouped: wrong"
        _line(f"8 each, every question twice, {how}", _rates(found))


def _outside(metrics: object) -> list[bool]:
    # The band of the spread begins at 0 where many permutations have none: only its upper end can be crossed.
    values = [metrics[name] for name in _METRICS]  # type: ignore[index]
    # A mean that no permutation changes has no band, and lies where it must.
    bands = [one.equal_band or (one.value, one.value) for one in values]
    return [not low - 1e-9 <= one.value <= high + 1e-9 for one, (low, high) in zip(values, bands, strict=True)]


def _latent(simulations: int) -> None:
    print("\nLatent values: coverage of the 95 % interval (nominal 0.950), and mean estimate / truth")
    _line("", _METRICS)
    for spread in (0.0, 0.05, 0.10, 0.15):
        for uneven in (False, True):
            label = np.repeat(np.arange(_CLUSTERS), _sizes(uneven))
            truth = {name: one[0] for name, one in raw_metrics(underlying(_MEAN, spread, _CLUSTERS)).items()}
            truth["spread"] = spread
            rng = np.random.default_rng([2, int(100 * spread), uneven])
            covered, estimates = [], []
            for number in range(simulations):
                p = _spread_out(_MEAN, spread, rng.random(_CLUSTERS))
                score = (rng.random(len(label)) < p[label]).astype(float)
                metrics = cluster_balance(score, label, resamples=_RESAMPLES, seed=number).metrics
                # No interval: the clusters lie closer together than any spread puts them, so 0 is the nearest.
                ends = [metrics[name].latent_interval or (0.0, 0.0) for name in _METRICS]
                covered.append(
                    [low - 1e-9 <= truth[name] <= high + 1e-9 for name, (low, high) in zip(_METRICS, ends, strict=True)]
                )
                estimates.append([metrics[name].latent for name in _METRICS])
            kind = "uneven sizes" if uneven else "8 each"
            _line(f"spread {spread:.2f}, {kind}", _rates(covered))
            mean = np.mean(estimates, axis=0)
            _line("  estimate", [f"{value:.3f}" for value in mean])
            _line("  truth", [f"{truth[name]:.3f}" for name in _METRICS])


def _pairs(place: Array, effect: Array) -> Iterator[tuple[str, Array, Array]]:
    """Yield situations of two runs: their clusters' accuracies."""
    flat = np.ones(_CLUSTERS)
    yield "no cluster effects, same mean", _MEAN * flat, _MEAN * flat
    yield "no cluster effects, means 0.80 and 0.86", 0.80 * flat, 0.86 * flat
    yield "no cluster effects, means 0.40 and 0.56", 0.40 * flat, 0.56 * flat
    yield "same effects, same mean", expit(logit(_MEAN) + effect), expit(logit(_MEAN) + effect)
    yield "equal on log-odds, means 0.80 and 0.86", expit(logit(0.80) + effect), expit(logit(0.86) + effect)
    yield "equal on log-odds, means 0.40 and 0.56", expit(logit(0.40) + effect), expit(logit(0.56) + effect)
    yield "equal spread 0.10, means 0.80 and 0.86", _spread_out(0.80, 0.1, place), _spread_out(0.86, 0.1, place)
    yield "power: spread 0.15 and 0.05, same mean", _spread_out(_MEAN, 0.15, place), _spread_out(_MEAN, 0.05, place)


def _swaps(simulations: int) -> None:
    print("\nTwo runs, swap test: share with p < 0.05 (nominal 0.050 for the spread; the raw four move with the mean)")
    _line("", [*_METRICS, "log-odds", "verdict"])
    label = np.repeat(np.arange(_CLUSTERS), _sizes(False))
    rng = np.random.default_rng(3)
    found: dict[str, list[list[bool]]] = {}
    for number in range(simulations):
        for name, first, second in _pairs(rng.random(_CLUSTERS), rng.normal(0, 0.6, _CLUSTERS)):
            shared, own = rng.standard_normal(len(label)), rng.standard_normal((2, len(label)))
            place = ndtr(np.sqrt(_CORRELATION) * shared + np.sqrt(1 - _CORRELATION) * own)
            a, b = ((place[run] < p[label]).astype(float) for run, p in enumerate((first, second)))
            one = compare_balance(a, b, label, resamples=_RESAMPLES, seed=number)
            tested = [one.metrics[metric].p < 0.05 for metric in _METRICS]
            found.setdefault(name, []).append([*tested, one.logit.p < 0.05, one.verdict != "undetermined"])
    for name, one in found.items():
        _line(name, _rates(one))
    mixed = []
    for number in range(simulations):
        ease = rng.beta(2, 2 * (1 - _MEAN) / _MEAN, len(label))
        one = compare_balance(
            rng.binomial(1, ease), rng.binomial(4, ease) / 4, label, resamples=_RESAMPLES, seed=number
        )
        tested = [one.metrics[metric].p < 0.05 for metric in _METRICS]
        mixed.append([*tested, one.logit.p < 0.05, one.verdict != "undetermined"])
    _line("single answers against means of 4: not alike", _rates(mixed))


def _questions(simulations: int) -> None:
    print("\nAccuracy over questions, two runs: share with p < 0.05, coverage of the interval (nominal 0.950)")
    _line("", ["p < 0.05", "coverage"])
    rng = np.random.default_rng(6)
    n = 8 * _CLUSTERS
    for first, second in ((0.83, 0.83), (0.98, 0.98), (0.80, 0.86), (0.99, 0.995)):
        found = []
        for number in range(simulations):
            shared, own = rng.standard_normal(n), rng.standard_normal((2, n))
            place = ndtr(np.sqrt(_CORRELATION) * shared + np.sqrt(1 - _CORRELATION) * own)
            a, b = (place[0] < first).astype(float), (place[1] < second).astype(float)
            # One cluster and few resamples: neither matters here.
            one = compare_balance(a, b, np.zeros(n, dtype=np.int64), resamples=99, seed=number).question_accuracy
            assert one.interval is not None
            low, high = one.interval
            found.append([one.p is not None and one.p < 0.05, low <= second - first <= high])
        _line(f"accuracies {first} and {second}", _rates(found))


def _refused(simulations: int) -> None:
    print("\nNot offered: coverage of the bootstrap interval of the raw value, clusters of 8 (nominal 0.950)")
    names = [name for name in _METRICS if name not in ("mean", "spread")]
    _line("", names)
    rng = np.random.default_rng(4)
    for spread in (0.05, 0.15):
        truth = raw_metrics(underlying(_MEAN, spread, _CLUSTERS))
        covered = []
        for _ in range(simulations):
            p = _spread_out(_MEAN, spread, rng.random(_CLUSTERS))
            right = rng.binomial(8, p) / 8
            again = raw_metrics(rng.binomial(8, right, (_RESAMPLES, _CLUSTERS)) / 8)
            ends = {name: np.quantile(again[name], [0.025, 0.975]) for name in names}
            covered.append([bool(ends[name][0] <= truth[name][0] <= ends[name][1]) for name in names])
        _line(f"spread {spread:.2f}, resampled within clusters", _rates(covered))


if __name__ == "__main__":
    main()
