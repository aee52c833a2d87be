import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdo.organizers.exposure import draw_inverse_exposure, retained_count, split_by_exposure
from sdo.random_keys import raw_keys


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 5), st.sampled_from([1, 2, 3, 0.5]))
def test_split_is_strictly_below_the_threshold(exposure, epoch, delta_tau):
    split = split_by_exposure(np.array(exposure), epoch, delta_tau)
    assert split.threshold == (epoch + 1) * delta_tau
    assert split.cold.tolist() == [i for i, u in enumerate(exposure) if u < split.threshold]
    assert split.hot.tolist() == [i for i, u in enumerate(exposure) if u >= split.threshold]


@pytest.mark.parametrize(
    ("retain", "hot", "expected"),
    [
        (0.07, 100, 7),
        (0.2, 15, 3),
        (0.2, 16, 4),
        (0.1, 1, 1),
        (0.0, 9, 0),
        (1, 9, 9),
        (0.29, 100, 29),
        (0.5, 0, 0),
    ],
)
def test_retained_count_reads_decimals_as_written(retain, hot, expected):
    assert retained_count(retain, hot) == expected


def inclusion(weights, count):
    """Exact inclusion probabilities of successive draws, by going through every order."""
    result = [Fraction(0)] * len(weights)
    for order in itertools.permutations(range(len(weights)), count):
        probability, left = Fraction(1), sum(weights)
        for i in order:
            probability *= weights[i] / left
            left -= weights[i]
        for i in order:
            result[i] += probability
    return [float(p) for p in result]


def test_draw_has_the_inclusion_probabilities_of_successive_draws():
    exposure = np.array([1, 1, 2, 4, 8])
    hot = np.array([3, 10, 11, 40, 41])
    rounds = 20_000
    keys = raw_keys(11, 3, 0, rounds * 5).reshape(rounds, 5)
    counts = dict.fromkeys(hot.tolist(), 0)
    for row in keys:
        for i in draw_inverse_exposure(hot, exposure, row, 2):
            counts[int(i)] += 1
    expected = inclusion([Fraction(1, int(u)) for u in exposure], 2)
    for i, p in zip(hot.tolist(), expected, strict=True):
        assert counts[i] / rounds == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / rounds))


def test_draw_takes_each_once_and_all_when_asked():
    hot = np.array([2, 5, 6])
    keys = raw_keys(1, 3, 0, 3)
    assert draw_inverse_exposure(hot, np.array([3, 2, 9]), keys, 3).tolist() == [2, 5, 6]
    assert draw_inverse_exposure(hot, np.array([3, 2, 9]), keys, 0).tolist() == []
