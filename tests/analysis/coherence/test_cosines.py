"""Every number against a slow, obvious computation of the same."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from analysis import (
    Estimate,
    GradientRows,
    batch_coherence,
    conflict_share,
    describe,
    gradient_confusion,
    gradient_diversity,
    gram_matrix,
    gram_measures,
    m_coherence,
    mean_pairwise_cosine,
    noise_scale,
    step_coherence,
    step_coherence_blocks,
    step_summary,
)
from analysis.coherence.plots import block_means


def cosine(a, b):
    a, b = [float(x) for x in a], [float(x) for x in b]
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(math.fsum(x * x for x in a)) / math.sqrt(math.fsum(x * x for x in b))


def rows_of(sketch, sample_ids=None, step=None, reason=None, kind="step"):
    sketch = np.asarray(sketch, dtype=np.float32)
    T = len(sketch)
    return GradientRows(
        signal="hidden",
        kind=kind,
        step=np.arange(T) if step is None else np.asarray(step),
        rank=np.zeros(T, dtype=np.int64),
        micro_batch=np.full(T, -1),
        sample_ids=tuple(np.asarray(ids) for ids in (sample_ids or [[i] for i in range(T)])),
        tokens=np.ones(T, dtype=np.int64),
        norm=np.linalg.norm(sketch.astype(float), axis=1),
        norm_state=("raw",) * T,
        reason=tuple(reason or (None,) * T),
        sketch=sketch,
    )


@pytest.fixture(params=[2, 512])
def tile(request, monkeypatch):
    monkeypatch.setattr("analysis.coherence.cosines._BLOCK", request.param)
    monkeypatch.setattr("analysis.coherence.unit_rows.TILE", request.param)


gradients = arrays(
    np.float32,
    st.tuples(st.integers(2, 7), st.integers(1, 5)),
    elements=st.floats(-100, 100, width=32).map(lambda x: x if abs(x) > 1e-3 else 0.0),
)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("T", [0, 1, 2, 5, 9])
def test_step_coherence_is_the_cosine_of_each_pair(T):
    g = np.random.default_rng(T).normal(size=(T, 4)).astype(np.float32)
    C = step_coherence(g)
    assert C.shape == (T, T)
    assert C.dtype == np.float32
    np.testing.assert_array_equal(C, C.T)
    np.testing.assert_array_equal(np.diag(C), np.ones(T))
    expected = [[1.0 if t == s else cosine(g[t], g[s]) for s in range(T)] for t in range(T)]
    np.testing.assert_allclose(C, np.reshape(expected, (T, T)), atol=1e-6)


@pytest.mark.usefixtures("tile")
def test_undefined_steps_are_undefined_and_alone():
    g = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    g[1], g[4, 0], g[5, 1] = 0, np.nan, np.inf
    defined = np.array([True, True, True, False, True, True, True])
    C = step_coherence(g, defined)
    bad = np.array([False, True, False, True, True, True, False])
    np.testing.assert_array_equal(np.isnan(C), bad[:, None] | bad[None, :])
    np.testing.assert_allclose(C[np.ix_(~bad, ~bad)], step_coherence(g[~bad]), atol=1e-7)


@pytest.mark.parametrize("scale", [1e-300, 1e-38, 1e30, 1e300])
def test_cosines_do_not_depend_on_length(scale):
    g = np.random.default_rng(1).normal(size=(4, 3))
    np.testing.assert_allclose(step_coherence(g * scale), step_coherence(g), atol=1e-7)
    assert mean_pairwise_cosine(g * scale).value == pytest.approx(mean_pairwise_cosine(g).value)


def test_parallel_gradients_stay_within_one():
    g = np.outer([1.0, 3.3, -0.7, 1e-20], np.random.default_rng(2).normal(size=50))
    C = step_coherence(g)
    assert np.abs(C).max() == 1.0
    assert mean_pairwise_cosine(g[:2]).value <= 1.0


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("window", [1, 2, 3, 20])
def test_smoothing_averages_the_last_unit_gradients(window):
    g = np.random.default_rng(3).normal(size=(9, 4)).astype(np.float32)
    g[4] = 0
    means = np.zeros((9, 4))
    for t in range(9):
        for s in range(max(0, t - window + 1), t + 1):
            if s != 4:
                means[t] += g[s] / np.linalg.norm(g[s].astype(float))
    C = step_coherence(g, smooth=window)
    for t in range(9):
        for s in range(9):
            if 4 in (t, s):
                assert np.isnan(C[t, s])
            else:
                assert C[t, s] == pytest.approx(cosine(means[t], means[s]), abs=1e-6)


def test_smoothed_gradients_that_cancel_are_undefined():
    C = step_coherence([[1.0, 2.0], [-1.0, -2.0], [3.0, 1.0]], smooth=2)
    assert np.isnan(C[1]).all()
    assert np.isfinite(C[np.ix_([0, 2], [0, 2])]).all()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="smooth is 0"):
        step_coherence(np.ones((2, 2)), smooth=0)
    with pytest.raises(ValueError, match="one gradient a row"):
        step_coherence(np.ones(3))
    with pytest.raises(ValueError, match="defined has shape"):
        step_coherence(np.ones((2, 2)), np.ones(3, dtype=bool))


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize(("T", "size"), [(1, 4), (4, 4), (9, 4), (11, 3), (23, 5)])
@pytest.mark.parametrize("smooth", [None, 3])
def test_blocks_are_the_means_of_the_matrix(T, size, smooth):
    g = np.random.default_rng(T).normal(size=(T, 6)) + 0.2
    if T > 4:
        g[[1, 4]] = 0
    C = step_coherence(g, smooth=smooth)
    blocks = step_coherence_blocks(g, smooth=smooth, size=size)
    cells, block = block_means(C, size)
    assert (blocks.block, blocks.rows) == (block, T)
    np.testing.assert_allclose(blocks.cells, cells, atol=1e-6)


def test_blocks_without_a_defined_step_are_undefined():
    g = np.ones((6, 2))
    g[2:4] = 0
    cells = step_coherence_blocks(g, size=3).cells
    np.testing.assert_array_equal(np.isnan(cells), [[False, True, False], [True, True, True], [False, True, False]])


@pytest.mark.usefixtures("tile")
def test_sharing_pairs_are_the_same_by_dense_products(monkeypatch):
    """Where nearly all pairs of steps share a sample, tiles take the place of the sparse matrix of pairs."""
    rng = np.random.default_rng(6)
    g = rng.normal(size=(14, 5)) + 0.5
    g[3] = 0
    rows = rows_of(g, [rng.choice(9, size=3, replace=False) for _ in range(14)])
    sparse = step_summary(rows)
    monkeypatch.setattr("analysis.coherence.cosines._SHARING_PAIRS", 0)
    dense = step_summary(rows)
    assert dense.sharing.count == sparse.sharing.count > 0
    assert dense.sharing.value == pytest.approx(sparse.sharing.value)
    assert dense.disjoint.value == pytest.approx(sparse.disjoint.value)


def slow_summary(rows):
    sums = {name: [] for name in ("mean", "lag_one", "sharing", "disjoint")}
    good = [i for i in range(len(rows)) if rows.defined[i]]
    for a, i in enumerate(good):
        for j in good[a + 1 :]:
            c = cosine(rows.sketch[i], rows.sketch[j])
            sums["mean"].append(c)
            if rows.step[j] - rows.step[i] == 1:
                sums["lag_one"].append(c)
            common = set(rows.sample_ids[i].tolist()) & set(rows.sample_ids[j].tolist())
            sums["sharing" if common else "disjoint"].append(c)
    return sums


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("T", [1, 2, 3, 8, 12])
def test_step_summary_is_the_mean_over_pairs(T):
    rng = np.random.default_rng(T)
    g = rng.normal(size=(T, 5)) + 0.5
    if T > 3:
        g[2] = 0
    ids = [rng.choice(10, size=3, replace=False) for _ in range(T)]
    step = np.arange(T) + (np.arange(T) > 5)
    reason = [None] * (T - 1) + ["overflow" if T > 8 else None]
    rows = rows_of(g, ids, step, reason)
    summary, expected = step_summary(rows), slow_summary(rows)
    assert summary.rows == T
    assert summary.defined == int(rows.defined.sum())
    for name, values in expected.items():
        estimate = getattr(summary, name)
        assert estimate.count == len(values)
        if values:
            assert estimate.value == pytest.approx(np.mean(values), abs=1e-9)
            assert estimate.reason is None
        else:
            assert estimate.value is None
            assert estimate.reason


def test_step_summary_says_why_a_part_is_undefined():
    g = np.random.default_rng(0).normal(size=(3, 4))
    assert step_summary(rows_of(g)).sharing.reason == "no two steps have a sample in common"
    assert step_summary(rows_of(g, [[1], [1], [1]])).disjoint.reason == "every two steps have a sample in common"
    nameless = step_summary(rows_of(g, [[], [1], [1]]))
    assert nameless.sharing == nameless.disjoint == Estimate(None, "1 step without sample ids")
    assert "successive" in step_summary(rows_of(g, step=[0, 2, 4])).lag_one.reason
    assert "0 of 0" in step_summary(rows_of(np.zeros((0, 4)))).mean.reason
    assert "0 of 2" in step_summary(rows_of(np.zeros((2, 4)))).mean.reason


@given(gradients)
def test_summary_matrix_and_loops_agree(g):
    rows = rows_of(g)
    C = step_coherence(rows.sketch, rows.defined)
    off = C[np.triu_indices(len(C), 1)]
    off = off[~np.isnan(off)]
    mean = step_summary(rows).mean
    assert mean.count == len(off)
    if len(off):
        assert mean.value == pytest.approx(off.mean(dtype=float), abs=1e-5)
        assert mean_pairwise_cosine(rows.sketch).value == pytest.approx(mean.value, abs=1e-9)


def test_batch_coherence_is_the_mean_cosine_within_each_step():
    rng = np.random.default_rng(5)
    g = rng.normal(size=(12, 4))
    step = np.repeat([0, 1, 3, 4], [4, 3, 1, 4])
    g[5] = 0
    reason = [None] * 8 + ["not finite"] * 3 + [None]
    rows = rows_of(g, step=step, reason=reason, kind="sample")
    result = batch_coherence(rows.by_step())
    assert result.step.tolist() == [0, 1, 3, 4]
    assert result.rows.tolist() == [4, 3, 1, 4]
    assert result.used.tolist() == [4, 2, 1, 1]
    assert result.defined.tolist() == [True, True, False, False]
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    assert result.value[0] == pytest.approx(np.mean([cosine(rows.sketch[a], rows.sketch[b]) for a, b in pairs]))
    assert result.value[1] == pytest.approx(cosine(rows.sketch[4], rows.sketch[6]))
    assert result.reason[:2] == (None, None)
    assert result.reason[3] == "1 of 4 gradients have a direction; two are needed"
    spread = result.spread()
    assert spread.count == 2
    assert spread.mean == pytest.approx(result.value[:2].mean())
    assert spread.maximum == result.value[:2].max()


def test_batch_coherence_of_nothing():
    result = batch_coherence([])
    assert len(result.step) == 0
    assert result.spread().mean is None
    assert "no step has two" in result.spread().reason


def test_describe_gives_quartiles():
    spread = describe([4.0, 1.0, 3.0, 2.0, 5.0])
    numbers = (spread.minimum, spread.lower_quartile, spread.median, spread.upper_quartile, spread.maximum)
    assert numbers == (1, 2, 3, 4, 5)
    assert describe([]).reason == "there are no values"


def slow_measures(g):
    g = [np.array(row, dtype=float) for row in g]
    m = len(g)
    squares = sum(row @ row for row in g)
    whole = sum(g) @ sum(g)
    products = [g[i] @ g[j] for i in range(m) for j in range(m) if i != j]
    mean = sum(g) / m
    scatter = sum((row - mean) @ (row - mean) for row in g) / (m - 1)
    return {
        "m_coherence": whole / squares,
        "gradient_diversity": squares / whole,
        "noise_scale": scatter / (mean @ mean - scatter / m),
        "conflict_share": sum(p < 0 for p in products) / len(products),
        "gradient_confusion": max(0.0, -min(products)),
    }


@pytest.mark.parametrize("scale", [1e-100, 1.0, 1e15, 1e100])
def test_measures_of_one_step(scale):
    g = (np.random.default_rng(7).normal(size=(6, 5)) + 0.9) * scale
    measured = gram_measures(gram_matrix(g))
    for name, value in slow_measures(g).items():
        assert measured[name].value == pytest.approx(value, rel=1e-9), name


def test_gram_uses_exact_norms_and_defined_rows():
    g = np.array([[3.0, 0.0], [0.0, 0.0], [3.0, 4.0], [1.0, 1.0], [2.0, 2.0]])
    K = gram_matrix(g, norm=[2.0, 0.0, 10.0, 1.0, np.nan], defined=np.array([True, True, True, False, True]))
    np.testing.assert_allclose(K, [[4.0, 12.0], [12.0, 100.0]])
    np.testing.assert_allclose(gram_matrix(g[[0, 2]]), [[9.0, 9.0], [9.0, 25.0]])


@given(gradients)
@settings(max_examples=200)
def test_identities(g):
    K = gram_matrix(g)
    m, diversity, noise = m_coherence(K), gradient_diversity(K), noise_scale(K)
    assert len(K) == int(np.any(g != 0, axis=1).sum())
    for estimate in gram_measures(K).values():
        assert (estimate.value is None) == (estimate.reason is not None)
        assert estimate.value is None or math.isfinite(estimate.value)
    if m.value is not None:
        assert -1e-9 <= m.value <= len(K) + 1e-9
    if diversity.value is not None:
        assert m.value * diversity.value == pytest.approx(1.0)
    if noise.value is not None:
        n = len(K)
        off = (K.sum() - np.trace(K)) / (n * (n - 1))
        assert off / np.diag(K).mean() == pytest.approx(1 / (1 + noise.value), rel=1e-6)
        # McCandlish with b = 1 and B = m is the Bessel form.
        small, large = np.trace(K) / n, K.sum() / n**2
        signal, scatter = (n * large - small) / (n - 1), (small - large) / (1 - 1 / n)
        if signal > 1e-6 * small:
            assert noise.value == pytest.approx(scatter / signal, rel=1e-5, abs=1e-6)


def test_what_is_undefined_says_why():
    none, one = gram_matrix(np.zeros((3, 2))), gram_matrix([[1.0, 2.0]])
    for estimate in gram_measures(none).values():
        assert estimate.value is None
        assert "0 gradients" in estimate.reason
    assert m_coherence(one).value == gradient_diversity(one).value == 1.0
    for measure in (noise_scale, conflict_share, gradient_confusion):
        assert measure(one).reason == "1 gradients have a direction; 2 are needed"
    cancel = gram_matrix([[1.0, 0.5], [-1.0, -0.5]])
    assert gradient_diversity(cancel).reason == "the gradients cancel"
    assert m_coherence(cancel).value == pytest.approx(0.0)
    assert noise_scale(cancel).reason == "the estimate of the squared mean gradient is not positive"
    assert conflict_share(cancel) == Estimate(1.0, None, 1)
    assert gradient_confusion(cancel).value == pytest.approx(1.25)
    assert "too large" in m_coherence(gram_matrix(np.full((2, 2), 1e200))).reason
    assert m_coherence(np.zeros((2, 2))).reason == "all gradients are zero"
    assert Estimate.of(float("nan"), 3) == Estimate(None, "the value is not finite", 3)


def test_orthogonal_and_equal_gradients():
    assert m_coherence(gram_matrix(np.eye(5))).value == pytest.approx(1.0)
    assert gradient_confusion(gram_matrix(np.eye(5))).value == 0.0
    same = gram_matrix(np.tile([1.0, 2.0], (5, 1)))
    assert m_coherence(same).value == pytest.approx(5.0)
    assert noise_scale(same).value == pytest.approx(0.0, abs=1e-12)
    assert conflict_share(same) == Estimate(0.0, None, 10)


def test_rows_are_told_apart_by_the_mask():
    rows = rows_of(np.eye(3))
    assert replace(rows, norm=np.array([1.0, 0.0, np.inf])).defined.tolist() == [True, False, False]
