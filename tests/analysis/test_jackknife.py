import numpy as np
import pytest
from scipy import stats

from analysis.jackknife import IntervalEstimate, jackknife_error, jackknife_interval


def test_of_a_mean_it_is_the_t_interval():
    """Leaving one out of n values gives the mean's own standard error, s / sqrt(n)."""
    values = np.random.default_rng(0).normal(size=17)
    without = (values.sum() - values) / 16
    assert jackknife_error(without) == pytest.approx(values.std(ddof=1) / np.sqrt(17))
    found = jackknife_interval(float(values.mean()), without)
    expected = stats.t.interval(0.95, 16, loc=values.mean(), scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)
    assert found.half_width == pytest.approx((expected[1] - expected[0]) / 2)
    assert (found.count, found.reason) == (17, None)


def test_undefined_has_a_reason_and_nothing_else():
    found = IntervalEstimate.undefined("no pairs", 3)
    assert (found.value, found.low, found.high, found.count, found.reason) == (None, None, None, 3, "no pairs")
    assert found.half_width is None
