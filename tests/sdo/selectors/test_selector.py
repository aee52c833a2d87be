"""How many are kept and which; chance is a function of seed, step and id alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdo.errors import InputError
from sdo.selectors import Candidates, RandomSelect, Scores
from sdo.selectors.selector import choose, kept_count


def candidates(ids, micro_batch=None, step=0):
    ids = np.array(ids, np.int64)
    numbers = np.zeros(len(ids), np.int64) if micro_batch is None else np.array(micro_batch, np.int64)
    return Candidates(step, ids, numbers, np.ones(len(ids), np.int64))


class Given:
    """A selector of fixed scores."""

    name, options, needs = "given", {}, frozenset()

    def __init__(self, scores, keep, scope="micro_batch"):
        self.scores, self.keep, self.scope = np.array(scores, float), keep, scope

    def score(self, candidates):
        return Scores(self.scores)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    keep=st.floats(0.01, 1.0),
    scope=st.sampled_from(["micro_batch", "step"]),
    data=st.data(),
)
def test_what_is_kept_is_what_sorting_by_hand_keeps(sizes, keep, scope, data):
    count = sum(sizes)
    scores = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0]), min_size=count, max_size=count))
    numbers = [m for m, size in enumerate(sizes) for _ in range(size)]
    kept, _ = choose(Given(scores, keep, scope), candidates(range(count), numbers))
    groups = (
        [list(range(count))]
        if scope == "step"
        else [[i for i in range(count) if numbers[i] == m] for m in range(len(sizes))]
    )
    least = len(sizes) if scope == "step" else 1
    expected = set()
    for group in groups:
        wanted = max(least, 1, math.floor(keep * len(group) + 0.5))
        expected |= set(sorted(group, key=lambda i: (-scores[i], i))[:wanted])
    assert set(np.flatnonzero(kept).tolist()) == expected


def test_counts_round_half_up_and_never_to_none():
    assert [kept_count(0.5, n) for n in range(1, 6)] == [1, 1, 2, 2, 3]
    assert kept_count(0.001, 8) == 1
    assert kept_count(1.0, 8) == 8


def test_chance_is_a_function_of_seed_step_and_id():
    ids = [5, 900_000_000_000, 3, 17]
    first = RandomSelect(0.5, seed=3).score(candidates(ids, step=9)).total
    again = RandomSelect(0.25, seed=3).score(candidates(ids[::-1], step=9)).total
    assert first.tolist() == again[::-1].tolist()
    assert ((first >= 0) & (first < 1)).all()
    for other in (
        RandomSelect(0.5, seed=4).score(candidates(ids, step=9)),
        RandomSelect(0.5, seed=3).score(candidates(ids, step=8)),
    ):
        assert not set(other.total.tolist()) & set(first.tolist())


def test_stored_choices():
    """The same on every machine: numbers that were kept."""
    kept, scores = choose(RandomSelect(0.25, seed=617), candidates(range(8), step=2))
    assert np.flatnonzero(kept).tolist() == [0, 2]
    assert scores.total[:2].tolist() == [0.9151479469809263, 0.13419742810615143]


def test_every_sample_is_kept_as_often_as_chance_says():
    total = np.zeros(16)
    for step in range(500):
        total += choose(RandomSelect(0.25), candidates(range(16), step=step))[0]
    assert total.sum() == 500 * 4
    assert abs(total - 125).max() < 5 * math.sqrt(500 * 0.25 * 0.75)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep is 0; expected a number above 0"),
        ({"keep": 1.5}, "keep is 1.5"),
        ({"keep": "half"}, "keep is 'half'"),
        ({"keep": 0.5, "scope": "epoch"}, "scope is 'epoch'; expected 'micro_batch' or 'step'"),
        ({"keep": 0.5, "seed": -1}, "seed is -1; expected a whole number from 0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        RandomSelect(**options)


@pytest.mark.parametrize("scores", [[0.0, np.nan], [1.0, np.inf], [0.5]])
def test_scores_that_cannot_be_compared_are_refused(scores):
    with pytest.raises(
        InputError, match=r"selector 'given' gave scores of shape .*; expected a finite one for each of 2"
    ):
        choose(Given(scores, 0.5), candidates([1, 2]))
