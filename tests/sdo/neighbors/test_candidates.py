import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdo.embeddings.matrix import unit_rows
from sdo.neighbors import all_pairs as allpairs
from sdo.neighbors.candidates import CandidateLists
from sdo.neighbors.exact import MISSING, exact_dots, exact_dots_with, nearest, propose, settle
from tests import slow_sdo


def rows_with_duplicates(seed, n, d, kinds):
    """Few distinct rows, tiny perturbations and exact copies: the hardest case for a float32 search."""
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((kinds, d))
    matrix = base[rng.integers(kinds, size=n)]
    matrix += rng.choice([0, 0, 1e-7, 1e-4], size=(n, 1)) * rng.standard_normal((n, d))
    return unit_rows(matrix)[0]


def slow_graph(unit, valid, pool, k):
    graph = slow_sdo.neighbors(slow_sdo.whole_rows(unit), list(valid), list(pool), k)
    return [graph[i] for i in pool]


@given(st.integers(0, 2**32), st.integers(3, 40), st.integers(1, 12), st.integers(1, 12), st.integers(1, 6))
def test_nearest_is_exact(seed, n, d, kinds, k):
    unit = rows_with_duplicates(seed, n, d, kinds)
    k = min(k, n - 1)
    everyone = np.arange(n)
    got = nearest(unit, everyone, everyone, k)
    assert got.tolist() == slow_graph(unit, np.ones(n, bool), everyone, k)


@given(st.integers(0, 2**32), st.integers(4, 60), st.integers(1, 10), st.integers(1, 3), st.data())
def test_lists_cut_to_a_pool_equal_rebuilding(seed, n, kinds, k, data):
    unit = rows_with_duplicates(seed, n, 6, kinds)
    valid = np.random.default_rng(seed).random(n) > 0.1
    unit[~valid] = 0
    lists = CandidateLists.build(unit, valid, k)
    for _ in range(3):
        pool = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))))
        kk = max(0, min(k, int(valid[pool].sum()) - 1))
        graph = lists.graph(pool, kk)
        rebuilt = slow_graph(unit, valid, pool, kk)
        for row, expected in zip(graph.tolist(), rebuilt, strict=True):
            assert [i for i in row if i != MISSING] == expected


def test_lists_that_cannot_settle_a_row_leave_it_open():
    """Ties reach past the end of narrow lists: a guess there would depend on the float32 search."""
    unit = rows_with_duplicates(3, 300, 8, 14)
    everyone = np.arange(300)
    lists, scores = propose(unit, everyone, everyone, 16)
    settled = settle(unit, everyone, unit, lists, scores, np.ones(lists.shape, bool), 4, complete=False)
    open_rows = settled[:, 0] == MISSING
    assert 0 < open_rows.sum() < 300
    exact = np.array(slow_graph(unit, np.ones(300, bool), everyone, 4))
    assert (settled[~open_rows] == exact[~open_rows]).all()


def test_a_float32_search_that_errs_within_its_bound_changes_nothing(monkeypatch):
    """The proof of machine independence: any other order of summation is such an error."""
    rng = np.random.default_rng(8)
    unit = unit_rows(rng.standard_normal((120, 3)))[0]
    expected = CandidateLists.build(unit, np.ones(120, bool), 3).graph(np.arange(120), 3)

    def noisy(queries, base, count, metric):
        similarity = queries.astype(np.float64) @ base.astype(np.float64).T
        similarity += rng.uniform(-1, 1, similarity.shape) * 0.99 * 3 * 2.0**-24
        order = np.argsort(-similarity, axis=1)[:, :count]
        return np.take_along_axis(similarity, order, axis=1).astype(np.float32), order

    def noisy_products(left, right, buffer):
        products = left.astype(np.float64) @ right.astype(np.float64).T
        return (products + rng.uniform(-1, 1, products.shape) * 0.99 * 3 * 2.0**-24).astype(np.float32)

    monkeypatch.setattr(faiss, "knn", noisy)
    monkeypatch.setattr(allpairs, "_products", noisy_products)
    for _ in range(5):
        lists = CandidateLists.build(unit, np.ones(120, bool), 3)
        assert (lists.graph(np.arange(120), 3) == expected).all()
        pool = np.arange(0, 120, 2)
        assert lists.graph(pool, 3).tolist() == slow_graph(unit, np.ones(120, bool), pool, 3)


def test_many_identical_rows_are_ordered_by_index():
    unit = unit_rows(np.ones((50, 3)))[0]
    graph = nearest(unit, np.arange(50), np.arange(50), 3)
    assert graph[0].tolist() == [1, 2, 3]
    assert graph[40].tolist() == [0, 1, 2]


def test_real_embeddings_match_the_exact_search(gsm8k):
    unit = unit_rows(np.load(gsm8k / "train_minilm.npy")[:1500])[0]
    wide = unit.astype(np.float64)
    similarity = wide @ wide.T
    np.fill_diagonal(similarity, -np.inf)
    expected = np.lexsort((np.broadcast_to(np.arange(1500), similarity.shape), -similarity), axis=1)[:, :4]
    lists = CandidateLists.build(unit, np.ones(1500, bool), 4)
    assert (lists.graph(np.arange(1500), 4) == expected).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_the_lists(threads):
    unit = rows_with_duplicates(9, 400, 24, 40)
    before = faiss.omp_get_max_threads()
    lists = CandidateLists.build(unit, np.ones(400, bool), 3).graph(np.arange(400), 3)
    faiss.omp_set_num_threads(threads)
    try:
        again = CandidateLists.build(unit, np.ones(400, bool), 3).graph(np.arange(400), 3)
    finally:
        faiss.omp_set_num_threads(before)
    assert (lists == again).all()


@pytest.mark.parametrize("n", [1, 7, 3000])
def test_products_with_one_row_are_the_exact_ones(n):
    unit, _ = unit_rows(np.random.default_rng(n).normal(size=(n, 300)))
    others = np.random.default_rng(1).permutation(n)[: max(1, n // 2)]
    one = n // 3
    expected = exact_dots(unit, np.full(len(others), one), unit, others)
    assert np.array_equal(exact_dots_with(unit, one, others), expected)
    whole = (unit.astype(object) * 2**24).astype(float).astype(int).astype(object)
    assert exact_dots_with(unit, one, others).tolist() == [int(whole[i] @ whole[one]) / 2**48 for i in others]
