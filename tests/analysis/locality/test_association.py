import itertools

import numpy as np
import pytest

from analysis.locality.association import (
    MatrixDesign,
    MatrixTest,
    SeriesDesign,
    SeriesTest,
    StepGradients,
    drift_basis,
    matrix_inflation,
    series_inflation,
)
from analysis.locality.redraw import PlanDraw, Redraws
from analysis.locality.redraw_tests import run_tests
from sdo import SDO, Embeddings, Uniform

N = 60


@pytest.fixture(scope="module")
def embeddings():
    return Embeddings.from_array(np.random.default_rng(2).normal(size=(N, 8)))


def draw_of(embeddings, T, seed=1, uniform=False):
    organizer = Uniform(embeddings, seed=seed) if uniform else SDO(embeddings, seed=seed)
    return Redraws(organizer.plan(4), embeddings).draws(-1, [np.arange(T)])[0]


def slow_basis(draw):
    """The columns, one by one, as the reference lists them."""
    T = len(draw)
    x = np.linspace(-1, 1, T)
    columns = []
    for epoch in sorted(set(draw.organizer_epoch.tolist())):
        inside = draw.organizer_epoch == epoch
        columns.append(inside * 1.0)
        if inside.sum() >= 20:
            columns.append(np.where(inside, np.arange(T), 0.0))
    columns += [x, (3 * x**2 - 1) / 2, (5 * x**3 - 3 * x) / 2, (35 * x**4 - 30 * x**2 + 3) / 8]
    columns += [draw.exposure[:, 0], draw.exposure[:, 0] ** 2, draw.exposure[:, 1]]
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("T", [12, 30, 90])
def test_basis_spans_drift_and_exposure(embeddings, T, uniform):
    draw = draw_of(embeddings, T, uniform=uniform)
    basis, slow = drift_basis(draw), slow_basis(draw)
    assert basis.T @ basis == pytest.approx(np.eye(basis.shape[1]), abs=1e-10)
    assert basis.shape[1] == np.linalg.matrix_rank(slow / np.maximum(np.linalg.norm(slow, axis=0), 1e-300), tol=1e-7)
    y = np.random.default_rng(T).normal(size=T)
    fitted = slow @ np.linalg.lstsq(slow, y, rcond=1e-10)[0]
    assert basis @ (basis.T @ y) == pytest.approx(fitted, abs=1e-6)


def test_series_statistics_equal_the_slow_ones(embeddings):
    T = 80
    draw = draw_of(embeddings, T)
    design = SeriesDesign(draw)
    series = np.random.default_rng(0).normal(size=(T, 3)).cumsum(axis=0)
    r, z = design.correlate(series)
    slow = slow_basis(draw)
    pairs = list(zip(*(one.tolist() for one in draw.sharing), strict=True))
    assert pairs
    for column in range(3):
        x, y = (
            values - slow @ np.linalg.lstsq(slow, values, rcond=1e-10)[0] for values in (draw.cosine, series[:, column])
        )
        scale = np.sqrt((x @ x) * (y @ y))
        assert r[column] == pytest.approx(x @ y / scale, abs=1e-8)
        s = x * y - np.mean(x * y)
        linked = sum(one**2 for one in s) + 2 * sum(s[a] * s[b] for a, b in pairs)
        assert z[column] == pytest.approx(np.sqrt(max(linked, 0)) / scale, abs=1e-8)


def test_series_without_variation_are_undefined(embeddings):
    draw = draw_of(embeddings, 40)
    design = SeriesDesign(draw)
    r, _ = design.correlate(np.stack([np.ones(40), np.arange(40.0), draw.exposure[:, 0]], axis=1))
    assert np.isnan(r).all()
    few = SeriesDesign(draw_of(embeddings, 9))
    assert np.isnan(few.correlate(np.random.default_rng(0).normal(size=(9, 1)))[0]).all()
    flat = Embeddings.from_array(np.eye(12))
    test = SeriesTest(np.arange(25), np.random.default_rng(0).normal(size=25))
    (result,) = run_tests(Redraws(Uniform(flat).plan(3), flat), [test], 9)
    assert result.value is None
    assert "does not vary" in result.reason


def slow_matrix(draw, sketch):
    """Covariance over pairs apart, over deviations of all pairs; the pairs' values by loops."""
    T = len(draw)
    g = sketch / np.linalg.norm(sketch, axis=1, keepdims=True)
    g, e = g - g.mean(axis=0), draw.centroid.astype(float) - draw.centroid.astype(float).mean(axis=0)
    shared = set(zip(*(one.tolist() for one in draw.sharing), strict=True))
    all_pairs = list(itertools.combinations(range(T), 2))
    apart = [pair for pair in all_pairs if pair not in shared]

    def values(pairs):
        return np.array([e[t] @ e[s] for t, s in pairs]), np.array([g[t] @ g[s] for t, s in pairs])

    left, right = values(all_pairs)
    x, y = values(apart)
    scale = left.std() * right.std()
    products = dict(zip(apart, (x - x.mean()) * (y - y.mean()), strict=True))
    return np.mean(list(products.values())) / scale, products, shared, scale


@pytest.mark.parametrize("k", [3, 40])  # one below half the steps, one above: two ways through
@pytest.mark.parametrize("uniform", [False, True])
def test_matrix_statistic_equals_the_slow_one(embeddings, k, uniform):
    draw = draw_of(embeddings, 35, uniform=uniform)
    assert len(draw.sharing[0])
    sketch = np.random.default_rng(k).normal(size=(35, k)) + 0.5
    gradients = StepGradients(sketch)
    assert (gradients.factor is not None) == (k == 3)
    value = MatrixDesign(draw).statistic(gradients)
    assert value == pytest.approx(slow_matrix(draw, sketch)[0], abs=2e-6)
    scaled = StepGradients(sketch * np.random.default_rng(0).uniform(1e-6, 1e6, size=(35, 1)))
    assert MatrixDesign(draw).statistic(scaled) == pytest.approx(value, abs=2e-6)


def test_matrices_of_several_tiles_give_the_same(embeddings, monkeypatch):
    draw = draw_of(embeddings, 35)
    sketch = np.random.default_rng(1).normal(size=(35, 40))
    whole = MatrixDesign(draw).statistic(StepGradients(sketch))
    monkeypatch.setattr("analysis.locality.association.TILE", 8)
    assert MatrixDesign(draw).statistic(StepGradients(sketch)) == pytest.approx(whole, abs=1e-6)


def test_linked_variance_equals_a_sum_over_pairs_of_pairs(embeddings):
    T = 14
    draw = draw_of(embeddings, T)
    sketch = np.random.default_rng(4).normal(size=(T, 6))
    mean, products, shared, scale = slow_matrix(draw, sketch)
    linked = {(t, s) for pair in shared for t, s in (pair, pair[::-1])} | {(t, t) for t in range(T)}
    centered = {pair: value - mean * scale for pair, value in products.items()}
    total = 0.0
    for (a, b), (c, d) in itertools.product(centered, repeat=2):
        # Two pairs of steps are linked if their steps are, one by one, in either order.
        ways = ((a, c) in linked and (b, d) in linked) + ((a, d) in linked and (b, c) in linked)
        total += ways * centered[a, b] * centered[c, d]
    expected = total / (len(products) * scale) ** 2
    assert MatrixDesign(draw).linked_variance(StepGradients(sketch)) == pytest.approx(expected, rel=2e-4)


def test_inflations_are_those_of_the_reference():
    assert series_inflation(0.3, np.array([0.1, 0.3])) == pytest.approx(1.5)
    assert series_inflation(0.1, np.array([0.1, 0.3])) == 1.0
    assert series_inflation(0.1, np.zeros(3)) == 1.0
    others = np.array([1.0, 2.0, 3.0])
    assert matrix_inflation(5.0, 2.0, others) == pytest.approx(2.0)
    assert matrix_inflation(1.0, 2.0, others) == 1.0
    assert matrix_inflation(1.0, 2.0, np.ones(3)) == 1.0


@pytest.mark.parametrize("uniform", [False, True])
def test_planted_effects_are_found_and_noise_is_not(embeddings, uniform):
    T = 150
    plan = (Uniform(embeddings, seed=3) if uniform else SDO(embeddings, seed=3)).plan(4)
    source = Redraws(plan, embeddings)
    draw = source.draws(-1, [np.arange(T)])[0]
    rng = np.random.default_rng(0)
    drift = rng.normal(size=(T, 5)).cumsum(axis=0) / 10
    follows = np.hstack([draw.centroid @ rng.normal(size=(8, 8)), drift, 0.3 * rng.normal(size=(T, 8))])
    unrelated = np.hstack([drift, rng.normal(size=(T, 8))])
    residual = SeriesDesign(draw).residual
    planted = drift[:, 0] + 0.5 * residual / residual.std() + rng.normal(size=T)
    tests = [
        MatrixTest(np.arange(T), follows),
        MatrixTest(np.arange(T), unrelated),
        SeriesTest(np.arange(T), planted),
        SeriesTest(np.arange(T), drift[:, 0] + rng.normal(size=T)),
    ]
    strong, null, series, noise = run_tests(source, tests, 99)
    assert strong.p == 0.01
    assert strong.value > 0.1
    assert series.p <= 0.02
    assert null.p > 0.05
    assert noise.p > 0.05
    assert all(one.inflation >= 1 and one.redraws == 99 for one in (strong, null, series, noise))


def test_shared_samples_alone_are_no_association(embeddings):
    """The danger that the reference names: gradients of samples, embeddings that mean nothing."""
    T = 150
    plan = SDO(embeddings, seed=3).plan(4)
    own = np.random.default_rng(0).normal(size=(N, 30))
    gradients = own[plan.batches(0, T)].mean(axis=1)
    draw = Redraws(plan, embeddings).draws(-1, [np.arange(T)])[0]
    assert MatrixDesign(draw).statistic(StepGradients(gradients)) < 0.1
    e, g = (rows - rows.mean(axis=0) for rows in (draw.centroid, gradients))
    upper = np.triu_indices(T, 1)
    assert np.corrcoef((e @ e.T)[upper], (g @ g.T)[upper])[0, 1] > 0.3
    (result,) = run_tests(Redraws(plan, embeddings), [MatrixTest(np.arange(T), gradients)], 99)
    assert result.p > 0.05


def test_a_draw_in_which_all_steps_share_a_sample_has_no_statistic():
    small = Embeddings.from_array(np.random.default_rng(0).normal(size=(5, 3)))
    plan = Uniform(small).plan(4)
    test = MatrixTest(np.arange(20), np.random.default_rng(0).normal(size=(20, 3)))
    (result,) = run_tests(Redraws(plan, small), [test], 5)
    assert result.value is None
    assert "common sample" in result.reason


def test_undefined_cosines_give_no_series():
    draw = PlanDraw(
        step=np.arange(30),
        organizer_epoch=np.zeros(30, dtype=int),
        cosine=np.where(np.arange(30) == 7, np.nan, np.sin(np.arange(30))),
        centroid=np.ones((30, 2), dtype=np.float32),
        exposure=np.zeros((30, 2)),
        sharing=(np.zeros(0, dtype=int), np.zeros(0, dtype=int)),
    )
    r, _ = SeriesDesign(draw).correlate(np.cos(np.arange(30.0))[:, None])
    assert np.isnan(r).all()
