import numpy as np
import pytest
from scipy import stats

from analysis.locality.pair_line import fit_line
from analysis.locality.sample_pairs import all_pairs, pair_slope


def some_pairs(n=15, seed=0):
    rng = np.random.default_rng(seed)
    unit = rng.normal(size=(n, 4))
    ids = rng.choice(100, n, replace=False)
    return all_pairs(unit, unit @ rng.normal(size=(4, 6)) + rng.normal(size=(n, 6)), ids)


def slow_fits(pairs):
    """The fit to all pairs, and that without each sample in turn."""
    fits = [np.polyfit(pairs.embedding, pairs.gradient, 1)]
    for sample in sorted({*pairs.first.tolist(), *pairs.second.tolist()}):
        kept = (pairs.first != sample) & (pairs.second != sample)
        fits.append(np.polyfit(pairs.embedding[kept], pairs.gradient[kept], 1))
    return fits


def slow_interval(value, without):
    n = len(without)
    error = np.sqrt((n - 1) / n * sum((one - np.mean(without)) ** 2 for one in without))
    half = stats.t.ppf(0.975, n - 1) * error
    return value, value - half, value + half


def test_predictions_equal_the_slow_ones():
    pairs = some_pairs()
    line, reason = fit_line(pairs)
    assert reason is None
    assert line.samples.tolist() == sorted({*pairs.first.tolist(), *pairs.second.tolist()})
    whole, *without = slow_fits(pairs)
    for x in (-0.3, 0.2, 0.9):
        found = line.predict(x)
        expected = slow_interval(np.polyval(whole, x), [np.polyval(one, x) for one in without])
        assert (found.value, found.low, found.high) == pytest.approx(expected, abs=1e-12)
        found = line.change(x, 0.1)
        expected = slow_interval(whole[0] * (x - 0.1), [one[0] * (x - 0.1) for one in without])
        assert (found.value, found.low, found.high) == pytest.approx(expected, abs=1e-12)


def test_its_slope_is_the_one_that_is_reported():
    pairs = some_pairs(seed=1)
    line, _ = fit_line(pairs)
    slope, change = pair_slope(pairs), line.change(1.0, 0.0)
    assert (change.value, change.low, change.high) == pytest.approx((slope.value, slope.low, slope.high), abs=1e-12)


def test_where_there_is_no_line_there_is_a_reason():
    assert fit_line(some_pairs(n=6)) == (None, "6 samples; an interval takes 10")
    line, reason = fit_line(all_pairs(np.ones((12, 2)), np.random.default_rng(0).normal(size=(12, 3))))
    assert line is None
    assert "do not vary" in reason
