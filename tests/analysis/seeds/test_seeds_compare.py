import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from analysis import Run, compare_paired, compare_seeds, compare_unpaired, pair_runs
from analysis.seeds.differences import label_p, sign_flip_p, smallest_label_p, smallest_sign_flip_p
from sdo import InputError


@pytest.mark.parametrize("n", [2, 3, 7])
def test_comparison_equals_scipy_and_all_flips(n):
    rng = np.random.default_rng(n)
    a, b = rng.normal(size=n), rng.normal(0.7, 1, size=n)
    found = compare_paired(a, b)
    expected = stats.ttest_rel(b, a)
    d = b - a
    assert (found.t, found.p) == pytest.approx((expected.statistic, expected.pvalue))
    interval = expected.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.cohens_d_paired == pytest.approx(d.mean() / d.std(ddof=1))
    assert found.mean == pytest.approx(d.mean())
    far = [abs(np.dot(signs, d)) >= abs(d.sum()) - 1e-12 for signs in itertools.product((1, -1), repeat=n)]
    assert found.sign_flip_p == pytest.approx(np.mean(far))
    assert found.smallest_sign_flip_p == 2 / 2**n
    assert found.n == n


def test_smallest_sign_flip_p_is_reached_and_six_pairs_are_the_least_below_five_percent():
    for n in (2, 5, 6, 12):
        assert sign_flip_p(np.arange(1.0, n + 1)) == smallest_sign_flip_p(n)
    assert smallest_sign_flip_p(5) > 0.05 > smallest_sign_flip_p(6)
    many = np.ones(30) + 0.01 * np.arange(30)
    assert sign_flip_p(many) == smallest_sign_flip_p(30) == 1e-4
    assert sign_flip_p(np.array([1.0, -1.0] * 10)) == 1.0


def test_random_flips_agree_with_all_of_them():
    d = np.random.default_rng(0).normal(0.3, 1, size=17)
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=16)))
    exact = np.mean(np.abs(d[0] + signs @ d[1:]) >= abs(d.sum()) - 1e-12)
    assert sign_flip_p(d) == pytest.approx(exact, abs=0.015)


def test_equal_differences_are_undefined_not_infinite():
    found = compare_paired([0.1, 0.2, 0.3], [0.2, 0.3, 0.4])
    assert (found.t, found.p, found.cohens_d_paired, found.low) == (None, None, None, None)
    assert found.reason == "all differences are equal"
    assert found.mean == pytest.approx(0.1)
    assert found.sign_flip_p == 0.25


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match="one seed gives no verdict"):
        compare_paired([1.0], [2.0])
    with pytest.raises(ValueError, match="expected n values each"):
        compare_paired([1.0, 2.0], [2.0])
    with pytest.raises(ValueError, match="not finite"):
        compare_paired([1.0, 2.0], [2.0, np.nan])


@pytest.fixture
def make_scored(make_run):
    """Write a run of a seed with scores: (name, step) -> {sample: score}."""

    def make(name, seed, scores):
        writer = make_run(name).info(seeds={"seed": seed})
        rows = [(step, label, i, value) for (label, step), one in scores.items() for i, value in one.items()]
        folder = writer.path / "evaluations"
        folder.mkdir()
        columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
        types = (pa.int64(), pa.string(), pa.int64(), pa.float64())
        arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
        table = pa.table(dict(zip(("step", "name", "sample_id", "score"), arrays, strict=True)))
        pq.write_table(table, folder / "part-00000000-00000000.parquet")
        return Run.open(writer.path)

    return make


@pytest.mark.parametrize(("n", "m"), [(2, 2), (2, 5), (4, 3), (5, 5)])
def test_two_groups_equal_scipy_and_all_labels(n, m):
    rng = np.random.default_rng(10 * n + m)
    a, b = rng.normal(size=n), rng.normal(0.7, 2, size=m)
    found = compare_unpaired(a, b)
    expected = stats.ttest_ind(b, a, equal_var=False)
    assert (found.t, found.p) == pytest.approx((expected.statistic, expected.pvalue))
    assert found.degrees_of_freedom == pytest.approx(expected.df)
    interval = expected.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    pooled = np.sqrt(((n - 1) * a.var(ddof=1) + (m - 1) * b.var(ddof=1)) / (n + m - 2))
    assert found.cohens_d == pytest.approx((b.mean() - a.mean()) / pooled)
    every = np.concatenate([a, b])
    far = []
    for chosen in itertools.combinations(range(n + m), n):
        rest = np.setdiff1d(np.arange(n + m), chosen)
        t = stats.ttest_ind(every[rest], every[list(chosen)], equal_var=False).statistic
        far.append(abs(t) >= abs(expected.statistic) * (1 - 1e-9))
    assert found.permutation_p == pytest.approx(np.mean(far))
    assert found.permutation_p >= found.smallest_permutation_p
    assert (found.n_baseline, found.n_against, found.sizes) == (n, m, f"{n} and {m} runs")


def test_the_order_of_runs_has_no_say_in_two_groups():
    rng = np.random.default_rng(1)
    for n, m in ((3, 4), (12, 13)):  # all labels, random ones
        a, b = rng.normal(size=n), rng.normal(0.5, 1, size=m)
        found = compare_unpaired(a, b)
        for _ in range(5):
            assert compare_unpaired(rng.permutation(a), rng.permutation(b)) == found
        other = compare_unpaired(b, a)
        assert (other.mean, other.p) == pytest.approx((-found.mean, found.p))


def test_the_smallest_p_of_two_groups_is_reached_and_four_of_each_are_the_least_below_five_percent():
    for n, m in ((2, 2), (3, 4), (4, 4), (2, 9)):
        far = compare_unpaired(0.01 * np.arange(n), 100.0 + 0.01 * np.arange(m) ** 2)
        assert far.permutation_p == far.smallest_permutation_p == smallest_label_p(n, m)
    assert smallest_label_p(3, 3) == 2 / 20
    assert smallest_label_p(4, 4) == 2 / 70
    assert smallest_label_p(12, 12) == 1e-4


def test_random_labels_agree_with_all_of_them(monkeypatch):
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=6), rng.normal(0.8, 1, size=7)
    exact = label_p(np.sort(a), np.sort(b))
    monkeypatch.setattr("analysis.seeds.differences._EXACT_LABELS", 10)
    assert label_p(np.sort(a), np.sort(b)) == pytest.approx(exact, abs=0.015)


def test_groups_without_spread_are_undefined_not_infinite():
    found = compare_unpaired([0.5, 0.5, 0.5, 0.5], [0.7, 0.7, 0.7, 0.7])
    assert (found.t, found.p, found.cohens_d, found.low, found.degrees_of_freedom) == (None,) * 5
    assert found.reason == "the runs of each side are all equal"
    assert found.mean == pytest.approx(0.2)
    assert found.permutation_p == 2 / 70
    for wrong, message in ((([1.0], [1.0, 2.0]), "one seed gives no verdict"), (([1, np.inf], [1, 2]), "not finite")):
        with pytest.raises(ValueError, match=message):
            compare_unpaired(*wrong)


def test_runs_are_paired_by_seed_or_else_compared_as_groups(make_scored):
    a = [make_scored(f"a{seed}", seed, {("loss", 4): {0: float(seed)}}) for seed in (1, 2, 3)]
    b = [make_scored(f"b{seed}", seed, {("loss", 4): {0: seed + 0.5 + 0.1 * seed}}) for seed in (3, 1, 2)]
    pairing = pair_runs(a, b)
    assert (pairing.by, pairing.reason) == ("seed", None)
    assert [run.name for run in pairing.against] == ["b1", "b2", "b3"]
    (found,) = compare_seeds(pairing)
    assert (found.measure, found.steps) == ("loss", (4,))
    assert (found.against - found.baseline)[0] == pytest.approx([0.6, 0.7, 0.8])
    assert found.comparisons[0].mean == pytest.approx(0.7)
    c = [make_scored(f"c{i}", 1, {("loss", 4): {0: 1.0 + i * i}}) for i in range(3)]
    for other in (c, c[::-1], c[:2]):
        pairing = pair_runs(a, other)
        assert (pairing.by, pairing.reason) == (None, "a side has a seed twice")
        (found,) = compare_seeds(pairing)
        assert found.comparisons[0] == compare_unpaired([1, 2, 3], [1.0, 2.0, 5.0][: len(other)])
    unknown = [make_scored(f"d{i}", None, {("loss", 4): {0: 1.0}}) for i in range(2)]
    assert pair_runs(a, unknown).reason == "a run does not say its seed"
    for sides in ((a[:1], b[:1]), (a, b[:1])):
        with pytest.raises(InputError, match="at least two of each kind"):
            pair_runs(*sides)


def test_of_different_seeds_the_common_ones_are_paired(make_scored):
    a = [make_scored(f"a{seed}", seed, {("loss", 4): {0: float(seed)}}) for seed in (1, 2, 3, 4)]
    b = [make_scored(f"b{seed}", seed, {("loss", 4): {0: seed + 0.5}}) for seed in (9, 3, 1)]
    pairing = pair_runs(a, b)
    assert pairing.by == "seed"
    assert [run.name for run in pairing.baseline] == ["a1", "a3"]
    assert [run.name for run in pairing.against] == ["b1", "b3"]
    assert [run.name for run in pairing.left_out] == ["a2", "a4", "b9"]
    alone = pair_runs(a[1:], b)
    assert (alone.by, alone.reason) == (None, "the sides have one seed in common")
    assert (len(alone.baseline), len(alone.against), alone.left_out) == (3, 3, ())
    as_many = pair_runs(a[:3], b)
    assert ([run.name for run in as_many.against], [run.name for run in as_many.left_out]) == (
        ["b1", "b3"],
        ["a2", "b9"],
    )
    assert pair_runs(a[1::2], b[::2]).reason == "the sides have no seed in common"


def test_only_common_steps_and_samples_are_compared(make_scored):
    scores = [
        {("loss", 2): {0: 1.0, 1: 3.0}, ("loss", 4): {0: 1.0}, ("acc", 2): {0: 1.0}},
        {("loss", 2): {0: 2.0, 1: 5.0}, ("loss", 6): {0: 1.0}},
        {("loss", 2): {0: 4.0, 2: 7.0}, ("loss", 4): {0: 1.0}},
        {("loss", 2): {0: 3.0, 1: np.nan}, ("loss", 4): {0: 2.0}},
    ]
    runs = [make_scored(f"r{i}", i % 2, one) for i, one in enumerate(scores)]
    (found,) = compare_seeds(pair_runs(runs[:2], runs[2:]))
    assert found.steps == (2,)
    assert found.baseline.tolist() == [[1.0, 2.0]]
    assert found.against.tolist() == [[4.0, 3.0]]
    assert "steps 4, 6 are not in all runs" in found.notes[0]
    assert "1 of 3 samples" in found.notes[1]


def test_runs_without_common_evaluations_are_refused(make_scored):
    runs = [make_scored(f"r{i}", i % 2, {("loss", i): {0: 1.0}}) for i in range(4)]
    with pytest.raises(InputError, match="no evaluation in common"):
        compare_seeds(pair_runs(runs[:2], runs[2:]))
    empty = [make_scored(f"e{i}", i % 2, {}) for i in range(4)]
    with pytest.raises(InputError, match="no evaluation in common"):
        compare_seeds(pair_runs(empty[:2], empty[2:]))
