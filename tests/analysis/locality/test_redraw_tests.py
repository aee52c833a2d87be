import time

import numpy as np
import pytest

from analysis.locality.redraw import Redraws
from analysis.locality.redraw_tests import MIN_STEPS, ordered_map, outcome, redraw_p, run_tests, thin
from sdo import SDO, Embeddings


def test_p_counts_re_draws_as_far_from_their_mean():
    rng = np.random.default_rng(0)
    for inflation in (1.0, 1.7):
        others, value = rng.normal(0.3, 1, 99), 1.4
        center = sum(others) / 99
        far = sum(abs(one - center) >= abs(value - center) / inflation for one in others)
        assert redraw_p(value, others, inflation) == (1 + far) / 100
    assert redraw_p(1e9, np.arange(999)) == 1 / 1000
    assert redraw_p(-1e9, np.arange(999)) == 1 / 1000
    assert redraw_p(float(np.mean(np.arange(9))), np.arange(9)) == 1.0


def test_p_is_uniform_where_the_run_is_one_of_the_draws():
    rng = np.random.default_rng(1)
    p = np.array([redraw_p(one[0], one[1:]) for one in rng.exponential(size=(4000, 40))])
    for level in (0.05, 0.2, 0.5):
        assert np.mean(p <= level + 1e-12) == pytest.approx(level, abs=0.025)


@pytest.mark.parametrize(("T", "most", "expected"), [(5, 5, 5), (6, 5, 3), (11, 5, 4), (3001, 3000, 1501), (0, 5, 0)])
def test_thinning_is_even_and_keeps_the_limit(T, most, expected):
    kept = thin(np.arange(T) * 2, most)
    assert len(kept) == expected <= most
    assert len(set(np.diff(kept).tolist())) <= 1


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_their_order(workers):
    def slow(number):
        time.sleep(0.002 * (number % 3))
        return number * number

    assert list(ordered_map(slow, 17, workers)) == [n * n for n in range(17)]


def test_an_outcome_says_why_it_has_no_p():
    others = np.random.default_rng(0).normal(size=50)
    whole = outcome(0.4, others, 1.2, MIN_STEPS)
    assert (whole.value, whole.redraws, whole.inflation, whole.reason) == (0.4, 50, 1.2, None)
    assert whole.p == redraw_p(0.4, others, 1.2)
    assert whole.spread == pytest.approx(others.std(ddof=1))
    for result, reason in (
        (outcome(0.4, others, 1.0, MIN_STEPS - 1), "found valid from"),
        (outcome(0.4, np.full(9, 0.4), 1.0, MIN_STEPS), "all give the same"),
        (outcome(0.4, np.array([0.1, np.nan]), 1.0, MIN_STEPS), "undefined in 1 of 2"),
        (outcome(0.4, np.zeros(0), 1.0, MIN_STEPS), "not drawn anew"),
        (outcome(0.4, others[:1], 1.0, MIN_STEPS), "all give the same"),
    ):
        assert result.p is None
        assert reason in result.reason
        assert result.value == 0.4


class Mean:
    """A test that averages l_t, and counts how often its design is made."""

    made = 0

    def __init__(self, steps):
        self.steps = steps

    @staticmethod
    def design(draw):
        Mean.made += 1
        return draw

    def of(self, design, number):
        return number, float(design.cosine.mean())

    def result(self, observed, redrawn):
        return observed, list(redrawn)


def test_tests_of_equal_steps_share_their_draws_and_threads_change_nothing():
    embeddings = Embeddings.from_array(np.random.default_rng(0).normal(size=(30, 4)))
    tests = [Mean(np.arange(8)), Mean(np.arange(8)), Mean(np.array([2, 5]))]
    done = []
    Mean.made = 0
    first = run_tests(Redraws(SDO(embeddings).plan(4), embeddings), tests, 6, progress=done.append)
    assert Mean.made == 2 * 7
    assert done == [1, 2, 3, 4, 5, 6]
    assert [one[0] for one in first[0][1]] == [0, 1, 2, 3, 4, 5]
    assert first[0][0][0] == -1
    assert first[0] == first[1]
    assert run_tests(Redraws(SDO(embeddings).plan(4), embeddings), tests, 6, workers=3) == first
