"""The arithmetic of the comparison with other recorders, which needs none of them."""

import math

import numpy as np
import pytest

from benchmarks.peers.cosines import cosine_errors, gram_cosines, pair_cosines


def test_pairs_come_in_order_with_their_cosines():
    rows = np.random.default_rng(617).standard_normal((5, 7)).astype(np.float32)
    by_hand = [
        sum(float(a) * float(b) for a, b in zip(rows[i], rows[j], strict=True))
        / (math.hypot(*map(float, rows[i])) * math.hypot(*map(float, rows[j])))
        for i in range(5)
        for j in range(i + 1, 5)
    ]
    np.testing.assert_allclose(pair_cosines(rows), by_hand, rtol=1e-12)
    gram = rows.astype(np.float64) @ rows.astype(np.float64).T
    np.testing.assert_allclose(gram_cosines(gram), by_hand, rtol=1e-12)


def test_rows_of_zeros_are_counted_not_compared():
    exact = pair_cosines([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    stored = pair_cosines([[1.0, 0.0], [0.0, 0.0], [0.6, 0.8]])
    found = cosine_errors(stored, exact)
    assert (found["pairs"], found["undefined"]) == (1, 2)
    assert found["rmse"] == pytest.approx(0.6)
    assert found["worst"] == pytest.approx(0.6)
    assert found["correlation"] is None


def test_errors_of_a_known_case():
    found = cosine_errors(np.array([0.5, 0.1, -0.2]), np.array([0.4, 0.1, 0.0]))
    assert found["rmse"] == pytest.approx(math.sqrt((0.01 + 0.04) / 3))
    assert found["worst"] == pytest.approx(0.2)
    assert found["correlation"] == pytest.approx(np.corrcoef([0.5, 0.1, -0.2], [0.4, 0.1, 0.0])[0, 1])


def test_nothing_stored_is_no_figure():
    found = cosine_errors(np.full(3, np.nan), np.zeros(3))
    assert found == {"pairs": 0, "undefined": 3, "rmse": None, "worst": None, "correlation": None}
