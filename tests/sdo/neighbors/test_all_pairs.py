"""All pairs against a plain sort of every row's products."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdo.neighbors import all_pairs as allpairs
from sdo.neighbors.all_pairs import propose_all


def slow(unit, members, width):
    """Each member's products with all others, sorted: the largest scores, and all products by pair."""
    rows = unit[members].astype(np.float64)
    products = rows @ rows.T
    np.fill_diagonal(products, -np.inf)
    return -np.sort(-products, axis=1)[:, :width], products


def check(unit, members, width):
    lists, scores = propose_all(unit, members, width)
    best, products = slow(unit, members, width)
    assert lists.dtype == np.int32
    assert scores.dtype == np.float32
    assert lists.shape == scores.shape == (len(members), width)
    position = np.searchsorted(members, lists)
    assert (members[position] == lists).all()
    # Products of whole numbers are exact in float32, so that not even ties blur the comparison.
    assert (scores == best).all()
    assert (np.take_along_axis(products, position, axis=1) == scores).all()
    assert all(len(set(row)) == width for row in lists.tolist())


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(allpairs, "_LEFT", 8)
    monkeypatch.setattr(allpairs, "_RIGHT", 20)


@given(st.integers(0, 2**32), st.integers(2, 90), st.integers(1, 30), st.sampled_from(["random", "sorted", "equal"]))
def test_lists_are_the_largest_products(seed, n, width, kind):
    """Sorted rows are the worst order: each block brings better candidates than all before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allpairs, "_LEFT", 8)
        patch.setattr(allpairs, "_RIGHT", 20)
        rng = np.random.default_rng(seed)
        unit = rng.integers(-9, 10, (n + 5, 4)).astype(np.float32)
        if kind == "sorted":
            unit = np.sort(np.abs(unit), axis=0)
        elif kind == "equal":
            unit[:] = 1.0
        members = np.sort(rng.choice(n + 5, n, replace=False))
        check(unit, members, min(width, n - 1))


@pytest.mark.parametrize("order", ["random", "sorted"])
def test_blocks_of_true_size(order):
    """Several blocks on both sides, floors estimated from groups, rows whose candidates overflow."""
    rng = np.random.default_rng(4)
    unit = rng.integers(-40, 41, (5400, 3)).astype(np.float32)
    if order == "sorted":
        unit = unit[np.argsort(unit.sum(axis=1))]
    check(unit, np.arange(len(unit)), 64)


def test_few_candidates_are_all_listed(small_blocks):
    unit = np.random.default_rng(1).integers(-9, 10, (13, 4)).astype(np.float32)
    check(unit, np.arange(13), 12)


def test_a_floor_is_never_above_the_width_th_best():
    rng = np.random.default_rng(2)
    scores = rng.integers(0, 50, (30, 100)).astype(np.float32)
    for axis, given_scores in ((1, scores), (0, np.ascontiguousarray(scores.T))):
        best = allpairs._Best(40, 5)
        rows = np.arange(30) + 7
        best._raise_floors(rows, given_scores, axis)
        above = scores > best._floor[rows, None]
        assert (above.sum(axis=1) >= 5).all()
        assert above.sum() < 30 * 40
        assert (best._floor[:7] == -np.inf).all()
