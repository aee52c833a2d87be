"""Approximate neighbors against the words of their definition, and their independence of the machine's arithmetic."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdo import SDO
from sdo.embeddings.matrix import unit_rows
from sdo.neighbors import candidates as neighbors
from sdo.neighbors import inverted as ivf
from sdo.neighbors.candidates import CandidateLists
from sdo.neighbors.exact import MISSING
from sdo.neighbors.inverted import InvertedLists
from tests import slow_sdo


def clustered(seed, n, d=5, kinds=9, duplicates=False):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((kinds, d))[rng.integers(kinds, size=n)]
    matrix = matrix + (0 if duplicates else 0.4) * rng.standard_normal((n, d))
    return unit_rows(matrix)[0]


def nearest_first(rows, i, candidates):
    return sorted((j for j in candidates if j != i), key=lambda j: (-slow_sdo.dot(rows[i], rows[j]), j))


def slow_universes(unit, valid, probes):
    """Each sample's universe, by the docstrings of the module, in Python integers but for the normalization of sums."""
    rows = slow_sdo.whole_rows(unit)
    samples = [i for i in range(len(rows)) if valid[i]]
    groups = min(len(samples), int(4 * len(samples) ** 0.5))
    keys = slow_sdo.raw(0, 4, 0, len(rows))
    chosen = sorted(samples, key=lambda i: (keys[i], i))[: 64 * groups]
    centroids = [rows[i] for i in chosen[:groups]]

    def assign(i):
        return max(range(groups), key=lambda c: (slow_sdo.dot(rows[i], centroids[c]), -c))

    for _ in range(4):
        labels = {i: assign(i) for i in chosen}
        for c in range(groups):
            inside = [i for i in chosen if labels[i] == c]
            if inside:
                total = [sum(rows[i][x] for i in inside) for x in range(unit.shape[1])]
                if any(total):
                    centroids[c] = slow_sdo.whole_rows(unit_rows(np.array([total], dtype=np.float64) * 2.0**-24)[0])[0]
    order = {i: sorted(range(groups), key=lambda c: (-slow_sdo.dot(rows[i], centroids[c]), c)) for i in samples}
    return {i: {j for j in samples if order[j][0] in order[i][:probes]} for i in samples}


def make_small(patch):
    """Approximate from the first sample on, with few probes, so that the result differs from the exact one."""
    patch.setattr(neighbors, "EXACT_LIMIT", 1)
    patch.setattr(ivf, "_PROBES", 3)


@pytest.fixture
def small(monkeypatch):
    make_small(monkeypatch)


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(8, 70), st.integers(1, 3), st.booleans())
def test_graph_is_the_exact_nearest_of_each_universe(seed, n, k, duplicates):
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        unit = clustered(seed, n, duplicates=duplicates)
        valid = np.random.default_rng(seed).random(n) > 0.1
        valid[:4] = True
        unit[~valid] = 0
        lists = CandidateLists.build(unit, valid, k)
        assert lists.inverted is not None
        universes = slow_universes(unit, valid, 3)
        rows = slow_sdo.whole_rows(unit)
        for share in (1.0, 0.5):
            pool = np.flatnonzero(np.random.default_rng(seed + 1).random(n) < share) if share < 1 else np.arange(n)
            kk = max(0, min(k, int(valid[pool].sum()) - 1))
            graph = lists.graph(pool, kk)
            for i, found in zip(pool.tolist(), graph.tolist(), strict=True):
                inside = universes.get(i, set()) & set(pool.tolist())
                expected = nearest_first(rows, i, inside)[:kk] if valid[i] else []
                assert [j for j in found if j != MISSING] == expected


def test_a_float32_search_that_errs_within_its_bound_changes_nothing(small, monkeypatch):
    unit = clustered(3, 400, d=3, kinds=40, duplicates=False)
    unit[::7] = unit[0]
    valid = np.ones(400, bool)
    pools = [np.arange(400), np.arange(0, 400, 2), np.arange(0, 400, 3)]
    expected = CandidateLists.build(unit, valid, 3)
    graphs = [expected.graph(pool, 3) for pool in pools]
    rng = np.random.default_rng(8)
    error = 0.99 * 3 * 2.0**-24

    def noisy(queries, base, count, metric):
        similarity = queries.astype(np.float64) @ base.astype(np.float64).T
        similarity += rng.uniform(-error, error, similarity.shape)
        order = np.argsort(-similarity, axis=1)[:, :count]
        return np.take_along_axis(similarity, order, axis=1).astype(np.float32), order

    monkeypatch.setattr(faiss, "knn", noisy)
    again = CandidateLists.build(unit, valid, 3)
    for pool, graph in zip(pools, graphs, strict=True):
        assert (again.graph(pool, 3) == graph).all()


def test_plan_over_approximate_neighbors_keeps_what_is_always_true(small):
    plan = SDO(clustered(1, 300), k=3, seed=5).plan(7)
    counts = np.zeros(300, dtype=np.int64)
    for e in range(4):
        epoch = plan.epoch(e)
        assert set(epoch.batches.ravel().tolist()) == set(epoch.pool.tolist())
        assert all(len(set(batch)) == 7 for batch in epoch.batches.tolist())
        counts += np.bincount(epoch.batches.ravel(), minlength=300)
        assert (epoch.exposure == counts).all()


def test_recall_on_real_embeddings(gsm8k, monkeypatch):
    """Far below the size where it is used, where groups are small and neighbors far: a floor, not the figure."""
    monkeypatch.setattr(neighbors, "EXACT_LIMIT", 1)
    unit = unit_rows(np.load(gsm8k / "train_minilm.npy"))[0]
    everyone, valid = np.arange(len(unit)), np.ones(len(unit), bool)
    found = CandidateLists.build(unit, valid, 4).graph(everyone, 4)
    monkeypatch.undo()
    exact = CandidateLists.build(unit, valid, 4).graph(everyone, 4)
    recall = np.mean([len(set(a) & set(b)) / 4 for a, b in zip(found.tolist(), exact.tolist(), strict=True)])
    assert recall > 0.9


def test_groups_hold_every_valid_sample_once():
    unit = clustered(2, 200)
    valid = np.ones(200, bool)
    valid[[3, 50]] = False
    inverted = InvertedLists.build(unit, valid)
    assert sorted(inverted.members.tolist()) == np.flatnonzero(valid).tolist()
    assert (inverted.probes[[3, 50]] == MISSING).all()
    for group in range(len(inverted.starts) - 1):
        part = inverted.members[inverted.starts[group] : inverted.starts[group + 1]]
        assert (inverted.probes[part, 0] == group).all()
    lists, scores = inverted.scan(inverted.members, valid, 6)
    for i, row in zip(inverted.members.tolist(), lists.tolist(), strict=True):
        known = [j for j in row if j != MISSING]
        assert len(set(known)) == len(known)
        assert i not in known
    assert (np.diff(scores, axis=1) <= 0).all()
