import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdo.random_keys import distinct_positions, exponentials, order_by_keys, raw_keys
from tests import slow_sdo


def test_slow_philox_gives_the_published_vectors():
    zero = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert slow_sdo.philox4x64([0] * 4, [0] * 2) == zero
    ones = [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]
    assert slow_sdo.philox4x64([slow_sdo.MASK] * 4, [slow_sdo.MASK] * 2) == ones


@given(st.integers(0, 2**64 - 1), st.integers(1, 3), st.integers(0, 50), st.integers(0, 30))
def test_raw_keys_are_philox(seed, purpose, epoch, count):
    assert raw_keys(seed, purpose, epoch, count).tolist() == slow_sdo.raw(seed, purpose, epoch, count)


def test_uses_do_not_share_a_stream():
    streams = [raw_keys(5, purpose, epoch, 64).tolist() for purpose in (1, 2, 3) for epoch in (0, 1)]
    values = [value for stream in streams for value in stream]
    assert len(set(values)) == len(values)


def test_order_breaks_ties_by_id():
    keys = np.array([7, 3, 7, 3], dtype=np.uint64)
    assert order_by_keys(keys, np.array([10, 11, 12, 13])).tolist() == [11, 13, 10, 12]


def test_exponentials_are_minus_log_to_the_last_bits():
    keys = np.concatenate([raw_keys(1, 1, 0, 4000), np.array([0, 2**64 - 1], dtype=np.uint64)])
    expected = [-math.log(((int(key) >> 12) + 0.5) / 2**52) for key in keys]
    np.testing.assert_allclose(exponentials(keys), expected, rtol=4e-15)
    assert (exponentials(keys) > 0).all()


def test_exponentials_have_mean_and_variance_one():
    draws = exponentials(raw_keys(2, 1, 0, 200_000))
    assert draws.mean() == pytest.approx(1, abs=0.01)
    assert draws.var() == pytest.approx(1, abs=0.03)


@given(st.integers(2, 12), st.integers(0, 5), st.integers(0, 2**32))
def test_distinct_positions_follow_the_list_that_shrinks(n, k, seed):
    k = min(k, n - 1)
    keys = raw_keys(seed, 2, 0, n * k).reshape(n, k)
    drawn = distinct_positions(keys, np.arange(n), n)
    for row in range(n):
        left = [j for j in range(n) if j != row]
        expected = [left.pop(int(key) % len(left)) for key in keys[row]]
        assert drawn[row].tolist() == expected


def test_distinct_positions_are_uniform():
    n, k, rounds = 5, 2, 4000
    keys = raw_keys(3, 2, 0, rounds * k).reshape(rounds, k)
    drawn = distinct_positions(keys, np.full(rounds, 2), n)
    counts = np.bincount(drawn.ravel(), minlength=n)
    assert counts[2] == 0
    np.testing.assert_allclose(counts[[0, 1, 3, 4]] / rounds, k / (n - 1), atol=0.04)
