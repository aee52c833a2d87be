import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.balance.metrics import (
    METRICS,
    largest_difference,
    lorenz_curves,
    paired_interval,
    raw_metrics,
    score_interval,
    wilson,
)

accuracy_lists = st.lists(st.integers(0, 20).map(lambda k: k / 20), min_size=1, max_size=31)


def slow_metrics(a):
    """The definitions, word for word."""
    C, mean = len(a), sum(a) / len(a)
    lowest = sorted(a)[: max(1, math.ceil(C / 5))]
    values = {"mean": mean, "b20": sum(lowest) / len(lowest), "gap": max(a) - min(a), "cv": math.nan, "gini": math.nan}
    if mean > 0:
        values["cv"] = math.sqrt(sum((x - mean) ** 2 for x in a) / C) / mean
        values["gini"] = sum(abs(x - y) for x in a for y in a) / (2 * C * C * mean)
    return values


@given(accuracy_lists)
def test_metrics_follow_their_definitions(a):
    found = raw_metrics(np.array([a]))
    for name, value in slow_metrics(a).items():
        assert found[name][0] == pytest.approx(value, abs=1e-12, nan_ok=True), name


@given(accuracy_lists, st.randoms(use_true_random=False))
def test_metrics_ignore_order_and_gini_has_its_bounds(a, random):
    shuffled = random.sample(a, len(a))
    found, other = raw_metrics(np.array([a])), raw_metrics(np.array([shuffled]))
    for name in found:
        assert found[name][0] == pytest.approx(other[name][0], nan_ok=True)
    if any(a):
        assert 0 <= found["gini"][0] <= (len(a) - 1) / len(a) + 1e-12


def test_all_zero_is_undefined_and_never_balanced():
    found = raw_metrics(np.zeros((1, 7)))
    assert math.isnan(found["cv"][0])
    assert math.isnan(found["gini"][0])
    assert found["gap"][0] == found["b20"][0] == 0


@pytest.mark.parametrize(("C", "lowest"), [(1, 1), (4, 1), (5, 1), (6, 2), (15, 3), (16, 4), (64, 13), (164, 33)])
def test_lowest_fifth_is_rounded_up(C, lowest):
    a = np.arange(C) / C
    assert raw_metrics(a[None])["b20"][0] == pytest.approx(a[:lowest].mean())


def test_rows_are_independent():
    rng = np.random.default_rng(0)
    a = rng.random((6, 9))
    whole = raw_metrics(a)
    assert set(whole) == set(METRICS) - {"spread"}
    for row in range(6):
        for name, one in raw_metrics(a[row : row + 1]).items():
            assert whole[name][row] == pytest.approx(one[0])


def test_lorenz_curve_and_gini_agree():
    a = np.sort(np.random.default_rng(1).random(30))
    curve = lorenz_curves(a[None])[0]
    assert curve[0] == 0
    assert curve[-1] == pytest.approx(1)
    area = ((curve[1:] + curve[:-1]) / 2).mean()
    assert 1 - 2 * area == pytest.approx(raw_metrics(a[None])["gini"][0])
    assert np.isnan(lorenz_curves(np.zeros((1, 3)))).all()


def test_wilson_intervals_that_are_known():
    assert wilson([1.0], [1])[0] == pytest.approx([0.2065, 1], abs=1e-4)
    assert wilson([1.0], [20])[0] == pytest.approx([0.8389, 1], abs=1e-4)
    assert wilson([0.0], [10])[0] == pytest.approx([0, 0.2775], abs=1e-4)


@pytest.mark.parametrize(("k", "n"), [(0, 3), (1, 3), (3, 3), (7, 19), (400, 1000)])
def test_wilson_solves_its_equation(k, n):
    z = 1.959963984540054
    for end in wilson([k / n], [n])[0]:
        # The ends are those p whose score test just rejects k of n.
        assert abs(k / n - end) == pytest.approx(z * math.sqrt(end * (1 - end) / n), abs=1e-9)


def test_paired_interval_of_newcombes_example():
    # Newcombe 1998, table II, method 10: a, b, c, d = 36, 12, 2, 0 gives 0.0569 to 0.3404.
    table = ((1, 1, 36), (1, 0, 12), (0, 1, 2), (0, 0, 0))
    one, other = (np.repeat([row[i] for row in table], [row[2] for row in table]) for i in (0, 1))
    assert paired_interval(other, one, np.ones(50)) == pytest.approx((0.0569, 0.3404), abs=1e-4)
    assert paired_interval(one, other, np.ones(50)) == pytest.approx((-0.3404, -0.0569), abs=1e-4)
    assert paired_interval(other, one, np.full(50, 3)) == pytest.approx((0.0569, 0.3404), abs=1e-4)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30))
def test_paired_interval_holds_the_difference_and_stays_in_its_range(pairs):
    a, b = np.array(pairs).T / 4
    low, high = paired_interval(a, b, np.ones(len(a)))
    assert -1 <= low <= b.mean() - a.mean() + 1e-12
    assert b.mean() - a.mean() - 1e-12 <= high <= 1
    assert low < high


@given(st.floats(-1, 1), st.floats(1e-6, 2))
def test_score_interval_solves_its_equation(difference, half):
    low, high = score_interval(difference, half)
    assert -1 <= low <= difference + 1e-12
    assert difference - 1e-12 <= high <= 1
    for end in (low, high):
        assert abs(difference - end) == pytest.approx(half * math.sqrt(1 - end * end), abs=1e-6)


def test_largest_differences_are_reached():
    for clusters in (2, 5, 20):
        one = raw_metrics(np.eye(clusters)[:1])
        for name in ("cv", "gini", "gap"):
            assert one[name][0] == pytest.approx(largest_difference(name, clusters))
    assert largest_difference("logit", 5) == math.inf
