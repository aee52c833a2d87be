import itertools

import numpy as np
import pytest
from scipy import stats

from analysis import GradientRows, SamplePairs, all_pairs, binned_pairs, mantel_test, pair_slope, pairs_within_steps
from sdo import Embeddings


def cosine(a, b):
    return a @ b / np.sqrt((a @ a) * (b @ b))


def rows_of(step, ids, sketch):
    n = len(ids)
    norm = np.linalg.norm(sketch, axis=1)
    return GradientRows(
        signal="hidden",
        kind="sample",
        step=np.full(n, step),
        rank=np.zeros(n, dtype=int),
        micro_batch=np.zeros(n, dtype=int),
        sample_ids=tuple(np.array([i]) for i in ids),
        tokens=np.ones(n, dtype=int),
        norm=norm,
        norm_state=("raw",) * n,
        reason=tuple(None if one else "zero gradient" for one in norm),
        sketch=sketch.astype(np.float32),
    )


def training(seed=0, steps=9, batch=4, samples=14, effect=1.0, drift=0.0):
    rng = np.random.default_rng(seed)
    embeddings = Embeddings.from_array(rng.normal(size=(samples, 6)))
    turn = rng.normal(size=(6, 10))
    groups = []
    for step in range(steps):
        ids = rng.choice(samples, batch, replace=False)
        sketch = effect * embeddings.unit[ids] @ turn + rng.normal(size=(batch, 10)) + drift * step
        groups.append(rows_of(step, ids, sketch))
    return embeddings, groups


def slow_slope(pairs, left_out=None):
    """Least squares with a dummy variable for each step, of the pairs without one sample."""
    kept = [p for p in range(len(pairs)) if left_out is None or left_out not in (pairs.first[p], pairs.second[p])]
    steps = sorted({int(pairs.step[p]) for p in kept})
    design = np.array([[pairs.embedding[p], *(float(pairs.step[p] == s) for s in steps)] for p in kept])
    return np.linalg.lstsq(design, pairs.gradient[kept], rcond=None)[0][0]


def test_pairs_are_those_of_the_step_without_undefined_rows():
    embeddings, groups = training(steps=3)
    groups[1].sketch[2] = 0
    groups[1] = rows_of(1, [int(i[0]) for i in groups[1].sample_ids], groups[1].sketch)
    pairs = pairs_within_steps(groups, embeddings)
    expected = []
    for rows in groups:
        usable = [i for i in range(4) if rows.norm[i] > 0]
        for i, j in itertools.combinations(usable, 2):
            a, b = int(rows.sample_ids[i][0]), int(rows.sample_ids[j][0])
            values = (cosine(embeddings.unit[a], embeddings.unit[b]), cosine(rows.sketch[i], rows.sketch[j]))
            expected.append((a, b, int(rows.step[0]), *values))
    assert len(pairs) == len(expected) == 6 + 3 + 6
    found = zip(pairs.first, pairs.second, pairs.step, pairs.embedding, pairs.gradient, strict=True)
    for got, want in zip(found, expected, strict=True):
        assert tuple(map(float, got)) == pytest.approx(want, abs=1e-6)


def test_a_sample_is_never_paired_with_itself():
    rng = np.random.default_rng(0)
    pairs = all_pairs(rng.normal(size=(5, 3)), rng.normal(size=(5, 4)), np.array([7, 8, 7, 9, 8]))
    assert len(pairs) == 10 - 2
    assert (pairs.first != pairs.second).all()


@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_slope_and_interval_equal_the_slow_ones(drift):
    embeddings, groups = training(drift=drift)
    pairs = pairs_within_steps(groups, embeddings)
    found = pair_slope(pairs)
    assert found.value == pytest.approx(slow_slope(pairs), abs=1e-9)
    samples = sorted(set(pairs.first.tolist()) | set(pairs.second.tolist()))
    without = np.array([slow_slope(pairs, sample) for sample in samples])
    n = len(samples)
    error = np.sqrt((n - 1) / n * np.sum((without - without.mean()) ** 2))
    reach = stats.t.ppf(0.975, n - 1) * error
    assert (found.low, found.high) == pytest.approx((found.value - reach, found.value + reach), abs=1e-9)
    assert (found.pairs, found.samples, found.steps, found.reason) == (54, n, 9, None)


def test_drift_between_steps_makes_no_slope():
    """All of a step's gradients agree more as training goes on, and so do its embeddings: no slope within steps."""
    rng = np.random.default_rng(0)
    first, second = np.triu_indices(8, 1)
    parts = [
        (
            first + 8 * s,
            second + 8 * s,
            np.full(28, s),
            0.05 * s + 0.1 * rng.random(28),
            0.05 * s + 0.1 * rng.random(28),
        )
        for s in range(10)
    ]
    pairs = SamplePairs(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    assert np.polyfit(pairs.embedding, pairs.gradient, 1)[0] > 0.8
    found = pair_slope(pairs)
    assert found.low < 0 < found.high
    assert abs(found.value) < 0.2
    binned = binned_pairs(pairs)
    assert np.ptp(binned.y) < 0.06


def test_bins_hold_equally_many_pairs_and_their_interval_leaves_samples_out():
    rng = np.random.default_rng(5)
    pairs = all_pairs(rng.normal(size=(20, 4)), rng.normal(size=(20, 5)))
    binned = binned_pairs(pairs, 4)
    place = np.digitize(pairs.embedding, np.quantile(pairs.embedding, [0.25, 0.5, 0.75]))
    for b in range(4):
        inside = np.flatnonzero(place == b)
        assert binned.count[b] == len(inside)
        assert binned.x[b] == pytest.approx(pairs.embedding[inside].mean())
        assert binned.y[b] == pytest.approx(pairs.gradient[inside].mean())
        without = []
        for sample in range(20):
            kept = [p for p in inside if sample not in (pairs.first[p], pairs.second[p])]
            without.append(pairs.gradient[kept].mean())
        touched = len(set(pairs.first[inside]) | set(pairs.second[inside]))
        error = np.sqrt(19 / 20 * np.sum((np.array(without) - np.mean(without)) ** 2))
        reach = stats.t.ppf(0.975, touched - 1) * error
        assert binned.high[b] - binned.low[b] == pytest.approx(2 * reach, rel=1e-9)


def test_interval_covers_the_truth_and_the_one_over_pairs_does_not():
    """A small copy of the reference's table: gradients follow embeddings, and pairs are far more than samples."""
    rng = np.random.default_rng(0)

    def draw(n):
        unit = rng.normal(loc=[1.0, 0.0, 0.0], size=(n, 3))
        return all_pairs(unit, unit + 0.7 * rng.normal(size=(n, 3)))

    truth = pair_slope(draw(1500)).value
    covered = naive = 0
    for _ in range(150):
        pairs = draw(40)
        found = pair_slope(pairs)
        covered += found.low <= truth <= found.high
        error = stats.linregress(pairs.embedding, pairs.gradient).stderr
        naive += abs(found.value - truth) <= 1.96 * error
    assert covered / 150 >= 0.88
    assert naive / 150 < 0.6


def test_too_little_gives_a_reason():
    rng = np.random.default_rng(0)
    nothing = pair_slope(pairs_within_steps([], Embeddings.from_array(np.eye(3))))
    assert (nothing.value, nothing.pairs) == (None, 0)
    assert "two are needed" in nothing.reason
    assert len(binned_pairs(pairs_within_steps([], Embeddings.from_array(np.eye(3)))).count) == 0
    few = pair_slope(all_pairs(rng.normal(size=(5, 3)), rng.normal(size=(5, 3))))
    assert few.value is not None
    assert few.low is None
    assert "5 samples" in few.reason
    flat = pair_slope(all_pairs(np.eye(12), rng.normal(size=(12, 3))))
    assert flat.value is None
    assert "do not vary" in flat.reason
    mantel = mantel_test(rng.normal(size=(5, 3)), rng.normal(size=(5, 3)))
    assert mantel.p is None
    assert "5 samples" in mantel.reason
    assert mantel_test(np.ones((12, 3)), rng.normal(size=(12, 3))).reason == "all cosines are equal"


def test_mantel_equals_the_slow_correlation_and_finds_what_is_there():
    rng = np.random.default_rng(1)
    unit = rng.normal(size=(25, 5))
    related = unit @ rng.normal(size=(5, 6)) + 0.5 * rng.normal(size=(25, 6))
    i, j = np.triu_indices(25, 1)
    x, y = (np.array([cosine(m[a], m[b]) for a, b in zip(i, j, strict=True)]) for m in (unit, related))
    found = mantel_test(unit, related, permutations=199)
    assert found.value == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-9)
    assert found.p == 1 / 200
    assert mantel_test(unit, rng.normal(size=(25, 6)), permutations=199).p > 0.05
    assert mantel_test(unit, related, permutations=0).p is None


def test_mantel_keeps_its_level():
    rng = np.random.default_rng(2)
    p = [mantel_test(rng.normal(size=(15, 3)), rng.normal(size=(15, 3)), permutations=19).p for _ in range(400)]
    assert np.mean(np.array(p) <= 0.05) == pytest.approx(0.05, abs=0.033)
