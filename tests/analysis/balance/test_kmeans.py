import hashlib
from fractions import Fraction

import numpy as np
import pytest

from analysis.balance import kmeans
from sdo.embeddings.matrix import Embeddings
from sdo.random_keys import exponentials, raw_keys


def exact_centers(rows, centers):
    """Lloyd's algorithm in fractions: assignment to the nearest center, means rounded to multiples of 2**-24."""
    centers = [[Fraction(float(x)) for x in c] for c in centers]
    rows = [[Fraction(float(x)) for x in r] for r in rows]
    labels = None
    while True:
        distances = [[sum((x - y) ** 2 for x, y in zip(r, c, strict=True)) for c in centers] for r in rows]
        new = [min(range(len(centers)), key=lambda c: (row[c], c)) for row in distances]
        empty = [c for c in range(len(centers)) if c not in new]
        far = sorted(range(len(rows)), key=lambda i: (-distances[i][new[i]], i))
        for c, i in zip(empty, far, strict=False):
            new[i] = c
        if new == labels:
            return np.array([[float(x) for x in c] for c in centers])
        labels = new
        for c in range(len(centers)):
            members = [rows[i] for i in range(len(rows)) if labels[i] == c]
            if members:
                mean = [float(sum(column)) / len(members) for column in zip(*members, strict=True)]
                centers[c] = [Fraction(round(x * 2**24), 2**24) for x in mean]


@pytest.mark.parametrize("few", [0, 10**9])  # all products one by one, and all at once
@pytest.mark.parametrize("seed", range(10))
def test_lloyd_in_fractions_finds_the_same_labels(monkeypatch, seed, few):
    monkeypatch.setattr(kmeans, "_FEW_PAIRS", few)
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((40, 4))
    if seed % 2:
        rows = rows[rng.integers(6, size=40)]  # few distinct rows: equal distances, and centers that lose all rows
    unit = Embeddings.from_array(rows).unit.astype(np.float64)
    k = 7 if seed < 6 else 15
    start = unit[rng.choice(40, k, replace=False)]
    if seed == 4:
        start[1] = start[0]  # a center that loses all its rows to the lower one
    centers, iterations = kmeans.lloyd(unit, start)
    assert iterations >= 1
    assert centers.tolist() == exact_centers(unit, start).tolist()


def test_labels_follow_their_centers_wherever_those_go():
    rng = np.random.default_rng(2)
    rows = Embeddings.from_array(rng.standard_normal((300, 3))).unit.astype(np.float64)
    centers = rows[rng.choice(300, 40, replace=False)]
    own = (rows**2).sum(axis=1)
    label, squared = kmeans.nearest(rows, centers)
    for _ in range(60):
        before, centers = centers, centers.copy()
        moved = rng.choice(40, rng.integers(0, 12), replace=False)
        target = rows[rng.choice(300, len(moved))] if rng.random() < 0.5 else centers[(moved + 1) % 40]
        centers[moved] = np.rint((0.7 * centers[moved] + 0.3 * target) * 2**24) / 2**24
        moved = np.flatnonzero((centers != before).any(axis=1))
        kmeans._follow(rows, own, centers, moved, label, squared)
        away = ((rows[:, None] - centers) ** 2).sum(axis=2)  # exact: numbers on the grid
        assert label.tolist() == away.argmin(axis=1).tolist()
        assert squared.tolist() == away.min(axis=1).tolist()


@pytest.mark.parametrize("few", [0, 32, 10**9])
def test_first_centers_follow_the_words_of_their_definition(monkeypatch, few):
    monkeypatch.setattr(kmeans, "_FEW_PAIRS", few)
    rng = np.random.default_rng(5)
    unit = Embeddings.from_array(rng.standard_normal((60, 3))).unit.astype(np.float64)
    k, seed = 9, 11
    found = kmeans.first_centers(unit, k, seed)
    order = np.sort(
        np.unique([hashlib.blake2b(r.tobytes(), digest_size=16).digest() for r in unit], return_index=True)[1]
    )
    rows = unit[order]

    def waiting(turn):
        return exponentials(raw_keys(seed, kmeans.CLUSTERS, turn, len(rows)))

    chosen = [min(range(len(rows)), key=lambda i: waiting(1)[i])]
    for turn in range(2, k + 1):
        squared = [min(((r - rows[c]) ** 2).sum() for c in chosen) for r in rows]
        times = waiting(turn)
        free = [i for i in range(len(rows)) if i not in chosen]
        tried = sorted(free, key=lambda i: times[i] / squared[i])[: 2 + int(np.ceil(np.log2(k)))]
        left = [sum(min(s, ((r - rows[i]) ** 2).sum()) for r, s in zip(rows, squared, strict=True)) for i in tried]
        chosen.append(tried[int(np.argmin(left))])
    assert found.tolist() == rows[sorted(chosen)].tolist()


def test_distances_are_told_apart_to_the_last_bit_and_ties_go_to_the_lower():
    step = 2.0**-24
    rows = np.array([[1.0, 0.0]], dtype=np.float32)
    centers = np.array([[0.5, 0.5], [0.5, 0.5 - step], [0.5, step - 0.5]])
    label, squared = kmeans.nearest(rows, centers)
    assert label.tolist() == [1]
    assert Fraction(squared[0]) == Fraction(1, 4) + (Fraction(1, 2) - Fraction(step)) ** 2


@pytest.mark.parametrize("few", [0, 10**9])
def test_centers_closer_to_each_other_than_float32_can_tell(monkeypatch, few):
    monkeypatch.setattr(kmeans, "_FEW_PAIRS", few)
    rng = np.random.default_rng(1)
    rows = Embeddings.from_array(rng.standard_normal(300) + 0.3 * rng.standard_normal((100, 300))).unit
    whole = np.rint(rows[:1].astype(np.float64) * 2**24) + rng.integers(-1, 2, (30, 300))
    label, squared = kmeans.nearest(rows, whole / 2**24)
    parts = np.rint(rows.astype(np.float64) * 2**24).astype(np.int64)
    away = ((parts[:, None] - whole.astype(np.int64)) ** 2).sum(axis=2)
    assert label.tolist() == away.argmin(axis=1).tolist()
    assert (squared * 2.0**48).tolist() == away.min(axis=1).tolist()
