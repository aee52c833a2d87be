import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sdo.neighbors.exact import MISSING
from sdo.organizers.walk import fill, least_exposed, walk
from tests import slow_sdo


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 5), st.integers(1, 9), st.booleans())
def test_walk_is_the_normative_loop(seed, n, k, size, cover):
    rng = np.random.default_rng(seed)
    pool = np.sort(rng.choice(2 * n, n, replace=False))
    k = min(k, n - 1)
    order = rng.permutation(pool)
    graph = {i: rng.choice(pool[pool != i], k, replace=False).tolist() for i in pool.tolist()}
    cut = {i: [j for j in row if rng.random() > 0.2] for i, row in graph.items()}
    rows = np.full((n, k), MISSING, dtype=np.int64)
    for position, i in enumerate(order.tolist()):
        rows[position, : len(cut[i])] = cut[i]
    walked = walk(order, rows, 2 * n, size, cover=cover)
    batches, rest, last = slow_sdo.walk(order.tolist(), cut, size, cover)
    assert walked.batches.tolist() == batches
    assert walked.rest.tolist() == rest
    assert walked.last_anchor == last


def test_walk_longer_than_a_chunk():
    n = 20_000
    order = np.random.default_rng(0).permutation(n)
    rows = (order[:, None] + np.array([1, 2])) % n
    walked = walk(order, rows, n, 8, cover=True)
    batches, rest, last = slow_sdo.walk(
        order.tolist(), {int(i): row.tolist() for i, row in zip(order, rows, strict=True)}, 8, True
    )
    assert (walked.batches == np.array(batches)).all()
    assert walked.rest.tolist() == rest
    assert walked.last_anchor == last


def test_least_exposed_orders_by_exposure_tie_and_index():
    candidates = np.array([3, 5, 8, 9])
    exposure = np.array([2, 1, 1, 1])
    assert least_exposed(candidates, exposure, 3).tolist() == [5, 8, 9]
    assert least_exposed(candidates, exposure, 3, np.array([0.0, 5.0, 1.0, 1.0])).tolist() == [8, 9, 5]


def test_fill_never_repeats_a_sample():
    pool = np.arange(10)
    filled = fill(np.array([0, 1]), pool, np.array([0, 0, 3, 1, 1, 2, 2, 2, 2, 2]), 5, None)
    assert filled.tolist() == [0, 1, 3, 4, 5]
