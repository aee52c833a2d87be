import itertools
from collections import Counter

import numpy as np
import pytest

from analysis.balance.questions import BOOTSTRAP, PERMUTE, SWAP, QuestionUnits, chunks, generator, permuted, swapped

LABEL = np.array([0, 0, 0, 2, 2, -1, 5])


def joined(draws):
    parts = list(draws)
    return [np.concatenate([getattr(part, name) for part in parts]) for name in ("weighted", "plain", "squares")]


def slow_sums(units, score):
    """The three sums, one unit after the other."""
    weighted, plain = [0.0] * units.clusters, [0.0] * units.clusters
    for c, w, s in zip(units.cluster, units.weight, score, strict=True):
        weighted[c] += w * s
        plain[c] += s
    return tuple(np.round(weighted, 9)), tuple(np.round(plain, 9)), round(sum(s * s for s in score), 9)


def test_units_without_duplicates():
    units = QuestionUnits.of([1, 0, 0.5, 1, 1, 0, 0.25], LABEL)
    assert units.names.tolist() == [0, 2, 5]
    assert units.clusters == 3
    assert len(units) == 6
    assert units.count.tolist() == units.size.tolist() == units.effective.tolist() == [3, 2, 1]
    assert not units.binary
    sums = units.sums()
    assert sums.weighted.tolist() == sums.plain.tolist() == [[1.5, 2, 0.25]]
    assert sums.squares.tolist() == [1 + 0.25 + 2 + 0.0625]


def test_duplicates_of_a_cluster_are_one_unit_of_their_weight():
    # 7 is in clusters 0 and 2: grouped within each, not across.
    group = np.array([7, 7, 7, 7, 1, 2, 3])
    units = QuestionUnits.of([1, 0, 1, 1, 0, 0, 1], LABEL, group)
    assert units.weight.tolist() == [3, 1, 1, 1]
    assert units.score[0] == pytest.approx(2 / 3)
    assert units.size.tolist() == [3, 2, 1]
    assert units.count.tolist() == [1, 2, 1]
    # Kish: three copies say as much as one, whatever their weight.
    assert units.effective.tolist() == [1, 2, 1]
    assert QuestionUnits.of([1, 0, 1], [0, 0, 0], [0, 0, 1]).effective.tolist() == [pytest.approx(9 / 5)]


def test_units_of_noise_alone_are_empty():
    assert len(QuestionUnits.of([1, 0], [-1, -1])) == 0


@pytest.mark.parametrize("weights", [[1] * 6, [2, 1, 1, 1, 1, 3]])
@pytest.mark.parametrize("score", [[1, 1, 0, 0, 0, 1], [0, 0.5, 1, 0.5, 0, 1]])
def test_permutations_by_counts_have_the_law_of_all_permutations(score, weights):
    label = np.repeat([0, 0, 0, 1, 1, 2], weights)
    group = np.repeat(np.arange(6), weights)
    units = QuestionUnits.of(np.repeat(score, weights), label, group)
    expected = Counter(slow_sums(units, dealt) for dealt in itertools.permutations(units.score))
    total = sum(expected.values())
    draws = 15_000
    weighted, plain, squares = joined(permuted(units, draws, generator(0, PERMUTE)))
    assert len(plain) == draws
    seen = Counter(
        (tuple(np.round(w, 9)), tuple(np.round(p, 9)), round(s, 9))
        for w, p, s in zip(weighted, plain, squares, strict=True)
    )
    assert set(seen) <= set(expected)
    for outcome, count in expected.items():
        share = count / total
        # Five standard errors: one in a million draws of a right program fails.
        assert abs(seen[outcome] / draws - share) < 5 * np.sqrt(share / draws) + 1e-9


def test_many_distinct_scores_are_permuted_one_by_one():
    rng = np.random.default_rng(1)
    label = np.repeat(np.arange(5), 10)
    group = np.arange(50)
    group[:3] = 0
    units = QuestionUnits.of(rng.random(50), label, group)
    weighted, plain, squares = joined(permuted(units, 4000, generator(3, PERMUTE)))
    assert plain.sum(axis=1) == pytest.approx(np.full(4000, units.score.sum()))
    assert squares == pytest.approx(np.full(4000, np.square(units.score).sum()))
    # Each cluster's sum has the mean and variance of drawing without replacement.
    n, N = units.count, len(units)
    assert plain.mean(axis=0) == pytest.approx(n * units.score.mean(), abs=0.1)
    variance = n * units.score.var() * (N - n) / (N - 1)
    assert plain.var(axis=0) == pytest.approx(variance, rel=0.15)
    assert weighted[:, 1:] == pytest.approx(plain[:, 1:])
    assert (weighted[:, 0] > plain[:, 0]).all()


@pytest.mark.parametrize("weights", [[1] * 5, [2, 1, 1, 3, 1]])
def test_swaps_have_the_law_of_all_swaps(weights):
    first = np.array([0, 1, 0.5, 1, 0])
    second = np.array([1, 1, 0.25, 0, 1])
    label, group = np.repeat([0, 0, 0, 1, 1], weights), np.repeat(np.arange(5), weights)
    a = QuestionUnits.of(np.repeat(first, weights), label, group)
    b = QuestionUnits.of(np.repeat(second, weights), label, group)
    expected = Counter()
    for swap in itertools.product([False, True], repeat=5):
        x, y = np.where(swap, second, first), np.where(swap, first, second)
        expected[slow_sums(a, x) + slow_sums(b, y)] += 1
    draws = 15_000
    seen = Counter()
    for x, y in swapped(a, b, draws, generator(0, SWAP)):
        for row in range(len(x.squares)):
            key = ()
            for one in (x, y):
                key += (
                    tuple(np.round(one.weighted[row], 9)),
                    tuple(np.round(one.plain[row], 9)),
                    round(one.squares[row], 9),
                )
            seen[key] += 1
    assert sum(seen.values()) == draws
    assert set(seen) <= set(expected)
    for outcome, count in expected.items():
        share = count / 32
        assert abs(seen[outcome] / draws - share) < 5 * np.sqrt(share / draws)


def test_swaps_of_equal_runs_change_nothing():
    units = QuestionUnits.of([1, 0, 1], [0, 0, 1])
    for x, y in swapped(units, units, 100, generator(0, SWAP)):
        assert (x.weighted == units.sums().weighted).all()
        assert (y.weighted == x.weighted).all()
        assert (x.squares == y.squares).all()


def test_streams_differ_by_use_and_seed():
    first = [generator(seed, use).random() for seed in (0, 1) for use in (PERMUTE, BOOTSTRAP, SWAP)]
    assert len(set(first)) == 6
    assert generator(0, PERMUTE).random() == first[0]
    with pytest.raises(ValueError, match="seed is -1"):
        generator(-1, PERMUTE)


def test_chunks_add_up():
    assert list(chunks(10, 2**22)) == [1] * 10
    assert sum(chunks(999, 70_000)) == 999
    assert list(chunks(5, 0)) == [5]


def test_scores_that_differ_by_rounding_are_not_swapped():
    one, other = QuestionUnits.of([0.1 + 0.2, 1], [0, 0]), QuestionUnits.of([0.3, 0], [0, 0])
    assert one.score[0] != other.score[0]
    (_, own), *_ = swapped(one, other, 400, generator(0, SWAP))
    assert set((own.plain[:, 0] - 0.3).round(12).tolist()) == {0, 1}
    assert len(np.unique(own.plain)) == 2
