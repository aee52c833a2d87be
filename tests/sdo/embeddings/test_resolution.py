import warnings

import numpy as np
import pytest

from sdo import SDO, Embeddings
from sdo.embeddings.resolution import Resolution, measure_resolution

RANDOM = np.random.default_rng(0)
NOISE = RANDOM.standard_normal((400, 96))
TEXTS = RANDOM.standard_normal((40, 96))
PARALLEL = "so nearly parallel that rounding"


def parallel(spread, dtype=np.float32):
    """Rows that all but point one way, as anisotropic models give them."""
    return (1 + spread * NOISE).astype(dtype)


def graph_of(rows, k=4):
    """The plan's neighbors over all samples, with what was warned."""
    embeddings = Embeddings.from_array(rows)
    plan = SDO(embeddings, k=k).plan(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.epoch(0)
    return embeddings, plan, plan._graph(0, np.arange(len(rows))), [str(entry.message) for entry in caught]


def exact(rows):
    """1 - cosine of all pairs in float64, from differences, so that nothing cancels."""
    wide = np.asarray(rows, dtype=np.float64)
    wide /= np.linalg.norm(wide, axis=1)[:, None]
    away = np.array([np.square(wide - row).sum(axis=1) / 2 for row in wide])
    np.fill_diagonal(away, np.inf)
    return away


def exchanged(rows, graph):
    """Share of neighbors that are none of the exact nearest, the slow way."""
    best = np.argsort(exact(rows), axis=1, kind="stable")[:, : graph.shape[1]]
    return 1 - np.mean([len(set(a) & set(b)) / len(a) for a, b in zip(best, graph, strict=True)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("spread", "nearest", "low"), [(3e-3, 6e-6, 0.02), (1e-3, 6e-7, 0.2), (3e-4, 6e-8, 0.8), (1e-4, 6e-9, 0.95)]
)
def test_rows_that_the_grid_does_not_tell_apart_are_warned_of_with_the_exact_figure(spread, nearest, low, dtype):
    rows = parallel(spread, dtype)
    embeddings, plan, graph, warned = graph_of(rows)
    right = exchanged(rows, graph)
    assert right > low
    found = measure_resolution(embeddings.unit, embeddings.valid, graph)
    assert found.rows == len(rows)
    assert found.exchanged == pytest.approx(right, abs=0.005)
    away = exact(rows).min(axis=1)
    best = np.argsort(exact(rows), axis=1, kind="stable")[:, :4]
    wrong = [set(one) != set(other) for one, other in zip(best, graph, strict=True)]
    assert found.nearest == pytest.approx(np.median(away[wrong]), rel=0.02)
    assert found.nearest == pytest.approx(nearest, rel=0.3)
    assert warned == list(plan.notes)
    (note,) = warned
    assert PARALLEL in note
    assert f"{found.exchanged:.0%} were passed over" in note
    assert f"1 - cosine of the nearest {found.nearest:.1e}" in note
    assert "\n" not in note


@pytest.mark.parametrize(
    "rows",
    [
        parallel(1e-2),  # 1 - cosine 6e-5
        parallel(1e-2, np.float64),
        parallel(1e-1),
        NOISE,
        np.repeat(TEXTS, 10, axis=0),
        np.repeat(TEXTS, 10, axis=0).astype(np.float16),
        np.repeat(TEXTS, 10, axis=0) * RANDOM.uniform(1, 3, (400, 1)),  # one direction, other lengths
        (np.repeat(TEXTS, 10, axis=0) * (1 + 1e-7 * NOISE)).astype(np.float32),  # as encoders give one text twice
        np.ones((30, 4)),
        NOISE[:, :1],
    ],
    ids=["close", "close64", "near", "far", "copies", "copies16", "lengths", "rounded", "equal", "line"],
)
def test_ordinary_rows_and_copies_are_not_warned_of(rows):
    embeddings, plan, graph, warned = graph_of(rows)
    assert warned == []
    assert plan.notes == ()
    assert embeddings.merged == 0
    assert measure_resolution(embeddings.unit, embeddings.valid, graph).exchanged < 0.02


def test_real_embeddings_of_float16_are_not_warned_of(gsm8k):
    _, plan, _, warned = graph_of(np.load(gsm8k / "train_minilm.npy")[:1500])
    assert warned == []
    assert plan.notes == ()


def test_tight_groups_far_from_each_other_are_warned_of():
    rows = np.repeat(TEXTS[:8], 50, axis=0) * (1 + 3e-4 * NOISE)
    _, _, graph, warned = graph_of(rows)
    right = exchanged(rows, graph)
    assert right > 0.5
    assert f"{right:.0%} were passed over" in warned[0]


@pytest.mark.parametrize(("rows", "merged"), [(parallel(1e-9, np.float64), 399), (parallel(1e-9), 0)])
def test_rows_that_rounding_makes_equal_are_counted_where_they_differed(rows, merged):
    """Of float32 the second are equal, but for the rounding of the type itself, before anything is rounded here."""
    embeddings, _, _, warned = graph_of(rows)
    assert embeddings.merged == merged
    assert len(warned) == (merged > 0)
    if merged:
        assert "399 of 400 rows differ from another one, and are equal to it once rounded" in warned[0]


def test_rows_that_differ_below_the_grid_are_counted_beside_copies():
    rows = np.array([[1, 0.5], [1, 0.5], [1, 0.5 + 1e-12], [0.5, 1], [1, -1]])
    assert Embeddings.from_array(rows).merged == 1
    assert Embeddings.from_array(rows[:, ::-1].copy()).merged == 1
    rows[3] = np.nan
    assert Embeddings.from_array(rows).merged == 1


def test_subtracting_the_mean_row_mends_it():
    rows = parallel(1e-3, np.float64)
    _, _, graph, warned = graph_of(rows - rows.mean(axis=0))
    assert warned == []
    assert exchanged(rows - rows.mean(axis=0), graph) < 0.001


def test_one_warning_for_each_embeddings_and_none_without_neighbors():
    embeddings = Embeddings.from_array(parallel(1e-3))
    first = SDO(embeddings, seed=1).plan(8)
    assert first.notes == ()
    SDO(embeddings, locality="random").plan(8).epoch(0)
    with pytest.warns(UserWarning, match=PARALLEL):
        first.epoch(0)
    assert len(first.notes) == 1
    again = SDO(embeddings, seed=2, k=3, graph="static").plan(8)
    again.epoch(1)
    assert "of the 3 nearest" in again.notes[0]
    assert first.redraw(5).notes == first.notes


def test_rows_without_direction_and_plans_of_some_rows():
    rows = parallel(3e-4)
    rows[7] = 0
    embeddings = Embeddings.from_array(rows)
    plan = SDO(embeddings, on_invalid="isolate").plan(8, rows=np.arange(100))
    with pytest.warns(UserWarning, match=r"of each of 99 rows, 7\d%"):
        plan.epoch(0)


def test_nothing_to_look_at():
    unit = Embeddings.from_array(np.eye(2)).unit
    valid = np.ones(2, dtype=bool)
    assert measure_resolution(unit, valid, np.empty((2, 0), dtype=np.int64)) == Resolution(0, 0, 0.0, None)
    assert measure_resolution(unit, valid, np.full((2, 1), -1)) == Resolution(0, 1, 0.0, None)
    assert measure_resolution(unit, valid, np.array([[1], [0]])) == Resolution(2, 1, 0.0, None)
