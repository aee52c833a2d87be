from fractions import Fraction

import numpy as np
import pytest

from analysis.balance import duplicates
from analysis.balance.duplicates import duplicate_groups, text_keys
from sdo.embeddings.matrix import Embeddings


def slow_groups(labels, rows, keys, threshold):
    """Connected components by repeated search."""
    n = len(labels)
    unit = [[Fraction(float(x)) for x in r] for r in rows]

    def linked(i, j):
        if labels[i] != labels[j] or labels[i] < 0:
            return False
        dot = sum(a * b for a, b in zip(unit[i], unit[j], strict=True))
        return dot >= Fraction(threshold) or unit[i] == unit[j] or keys[i] == keys[j]

    groups = list(range(n))
    while True:
        new = [min(groups[j] for j in range(n) if j == i or linked(i, j)) for i in range(n)]
        if new == groups:
            return groups
        groups = new


@pytest.mark.parametrize("seed", range(5))
def test_duplicates_are_the_connected_rows_of_a_cluster(seed):
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((30, 3))
    rows[5], rows[9] = rows[2], 3 * rows[2]
    labels = rng.integers(-1, 3, 30)
    texts = [f"Text  {rng.integers(12)}" for _ in range(30)]
    embeddings = Embeddings.from_array(rows)
    keys = text_keys(texts)
    found = duplicate_groups(labels, embeddings=embeddings, text_keys=keys, threshold=0.97)
    assert found.tolist() == slow_groups(labels.tolist(), embeddings.unit, keys.tolist(), 0.97)
    assert (found[labels < 0] == np.flatnonzero(labels < 0)).all()


@pytest.mark.parametrize("block", [1, 40, 10**6])
def test_many_near_duplicates_in_blocks_of_any_size(monkeypatch, block):
    monkeypatch.setattr(duplicates, "_BLOCK", block)
    rng = np.random.default_rng(block)
    # Chains along a circle: neighbors are near, the ends are not.
    angle = np.sort(rng.random(60) * 4)
    rows = np.stack([np.cos(angle), np.sin(angle)], axis=1)[rng.permutation(60)]
    labels = rng.integers(-1, 2, 60)
    embeddings = Embeddings.from_array(rows)
    keys = text_keys([f"{n % 25}" for n in range(60)])
    found = duplicate_groups(labels, embeddings=embeddings, text_keys=keys, threshold=0.998)
    assert found.tolist() == slow_groups(labels.tolist(), embeddings.unit, keys.tolist(), 0.998)
    assert 5 < len(np.unique(found[labels >= 0])) < (labels >= 0).sum()


def test_equal_texts_of_two_clusters_are_no_duplicates():
    keys = text_keys(["same"] * 5)
    assert duplicate_groups(np.array([1, 0, 1, 0, -1]), text_keys=keys).tolist() == [0, 1, 0, 1, 4]


def test_exact_duplicates_alone():
    embeddings = Embeddings.from_array(np.array([[1, 0], [1, 1e-4], [1, 0], [0, 0], [0, 0]]))
    labels = np.zeros(5, dtype=np.int64)
    assert duplicate_groups(labels, embeddings=embeddings, threshold=2).tolist() == [0, 1, 0, 3, 4]
    assert duplicate_groups(labels, embeddings=embeddings).tolist() == [0, 0, 0, 3, 4]
    assert duplicate_groups(labels).tolist() == [0, 1, 2, 3, 4]


def test_text_keys_ignore_case_and_white_space_alone():
    one, two, other, odd = text_keys(["A  b\n", "a B", "a b.", "\ud800"])
    assert one == two
    assert len({one, other, odd}) == 3
