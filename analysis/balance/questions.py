"""Scored questions in clusters, and the two ways in which chance deals them anew: permuting and swapping.

A *unit* is what counts as one question: duplicates within a cluster form one, whose weight is their number and whose
score is their mean, so that raw values stay those of the file and chance deals whole units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdo.checks import whole_number
from sdo.random_keys import MAX_SEED

# One number per use, so that no two draws of an analysis share a stream.
PERMUTE = 101
BOOTSTRAP = 102
SWAP = 103

TIE = 1e-12  # scores and sums closer than this differ by the order of their sums alone

_MANY_VALUES = 32  # distinct scores above which values are permuted one by one rather than counted
_CHUNK = 2**22  # numbers in one array of draws: 32 MiB


@dataclass(frozen=True, eq=False)
class QuestionUnits:
    """U units in C clusters, sorted by cluster; every cluster holds at least one.

    Attributes
    ----------
    cluster
        Shape ``(U,)``, int64, 0 … C - 1, ascending.
    weight
        Shape ``(U,)``, int64, questions in the unit.
    score
        Shape ``(U,)``, float64, mean score of the unit, in [0, 1].
    names
        Shape ``(C,)``, the label of each cluster.
    """

    cluster: NDArray[np.int64]
    weight: NDArray[np.int64]
    score: NDArray[np.float64]
    names: NDArray[np.int64]

    @classmethod
    def of(cls, score: ArrayLike, label: ArrayLike, group: ArrayLike | None = None) -> QuestionUnits:
        """Put questions into units.

        Parameters
        ----------
        score
            Shape ``(n,)``, in [0, 1].
        label
            Shape ``(n,)``, int; questions with -1 (noise) are left out.
        group
            Shape ``(n,)``, int; questions of one cluster with the same number are duplicates. None: there are none.
        """
        scores, labels = np.asarray(score, dtype=np.float64), np.asarray(label, dtype=np.int64)
        groups = np.arange(len(scores)) if group is None else np.asarray(group, dtype=np.int64)
        kept = labels >= 0
        names, cluster = np.unique(labels[kept], return_inverse=True)
        order = np.lexsort((groups[kept], cluster))
        cluster, groups, scores = cluster[order], groups[kept][order], scores[kept][order]
        new = np.ones(len(cluster), dtype=bool)
        new[1:] = (np.diff(cluster) != 0) | (np.diff(groups) != 0)
        starts = np.flatnonzero(new)
        weight = np.diff(np.append(starts, len(cluster)))
        total = np.add.reduceat(scores, starts) if len(starts) else scores
        return cls(cluster[starts].astype(np.int64), weight, total / weight, names)

    def __len__(self) -> int:
        return len(self.cluster)

    @property
    def clusters(self) -> int:
        """Number of clusters C."""
        return len(self.names)

    @property
    def count(self) -> NDArray[np.int64]:
        """Shape ``(C,)``: units of each cluster."""
        return np.bincount(self.cluster, minlength=self.clusters)

    @property
    def size(self) -> NDArray[np.int64]:
        """Shape ``(C,)``: questions of each cluster."""
        return np.bincount(self.cluster, self.weight, self.clusters).astype(np.int64)

    @property
    def effective(self) -> NDArray[np.float64]:
        """Shape ``(C,)``: ``(Σ w)² / Σ w²``, the number of equally weighted units with the same variance (Kish 1965).

        It is the number of questions where there are no duplicates.
        """
        return self.size**2 / np.bincount(self.cluster, self.weight**2, self.clusters)

    @property
    def effective_questions(self) -> float:
        """The same over all clusters together."""
        return float(self.weight.sum() ** 2 / np.square(self.weight).sum())

    @property
    def binary(self) -> bool:
        """Whether all scores are 0 or 1."""
        return bool(np.isin(self.score, (0.0, 1.0)).all())

    def total(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Shape ``(C,)``: sum over each cluster of the (U,) values."""
        return np.bincount(self.cluster, values, self.clusters).astype(np.float64)

    def sums(self) -> Sums:
        """The sums of the scores as they are: one draw."""
        weighted = self.total(self.weight * self.score)
        plain = self.total(self.score)
        return Sums(weighted[None], plain[None], np.array([np.square(self.score).sum()]))


@dataclass(frozen=True, eq=False)
class Sums:
    """What every balance metric is computed from, for R draws of scores.

    Attributes
    ----------
    weighted
        Shape ``(R, C)``: sum of weight · score over the units of each cluster.
    plain
        Shape ``(R, C)``: sum of scores.
    squares
        Shape ``(R,)``: sum of squared scores over all units.
    """

    weighted: NDArray[np.float64]
    plain: NDArray[np.float64]
    squares: NDArray[np.float64]


def generator(seed: int, use: int) -> np.random.Generator:
    """Return the random numbers of one use; the same for the same seed and numpy release.

    Raises
    ------
    ValueError
        If the seed is not in 0 … 2**64 - 1.
    """
    whole_number("seed", seed, 0, MAX_SEED)
    return np.random.Generator(np.random.Philox(key=np.array([seed, use], dtype=np.uint64)))


def permuted(units: QuestionUnits, draws: int, rng: np.random.Generator) -> Iterator[Sums]:
    """Deal the scores to the units in random order, `draws` times; cluster sizes and weights stay.

    Few distinct scores are dealt by counts: how many units of each kind get each score is multivariate
    hypergeometric, which is the same draw in far less time.

    Yields
    ------
    Sums
        Some of the draws at a time.
    """
    values, kind = np.unique(units.score, return_inverse=True)
    squares = np.square(units.score).sum()
    if len(values) > _MANY_VALUES:
        starts = np.searchsorted(units.cluster, np.arange(units.clusters))
        equal = bool((units.weight == 1).all())
        for rows in chunks(draws, max(len(units) // 8, units.clusters)):
            plain = np.empty((rows, units.clusters))
            weighted = plain if equal else np.empty_like(plain)
            for row in range(rows):
                dealt = rng.permutation(units.score)
                plain[row] = np.add.reduceat(dealt, starts)
                if not equal:
                    weighted[row] = np.add.reduceat(dealt * units.weight, starts)
            yield Sums(weighted, plain, np.full(rows, squares))
        return
    cells, cell = np.unique(np.stack([units.cluster, units.weight]), axis=1, return_inverse=True)
    size = np.bincount(cell.ravel())
    counts = np.bincount(kind.ravel())
    for rows in chunks(draws, len(size)):
        total = np.zeros((rows, len(size)))
        for row, dealt in enumerate(_dealt_counts(size, counts, rows, rng)):
            total[row] = values @ dealt
        yield _by_cluster(total, cells, units, np.full(rows, squares))


def _dealt_counts(
    size: NDArray[np.int64], counts: NDArray[np.int64], draws: int, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Yield for each draw the (values, cells) numbers of units of a cell that got a value."""
    if len(counts) == 2:
        for second in rng.multivariate_hypergeometric(size, counts[1], size=draws, method="marginals"):
            yield np.stack([size - second, second])
        return
    for _ in range(draws):
        left, rows = size, []
        for count in counts[:-1]:
            rows.append(rng.multivariate_hypergeometric(left, count, method="marginals"))
            left = left - rows[-1]
        yield np.stack([*rows, left])


def _by_cluster(
    total: NDArray[np.float64], cells: NDArray[np.int64], units: QuestionUnits, squares: NDArray[np.float64]
) -> Sums:
    """Add up (R, cells) sums of scores; a cell is a cluster and a weight."""
    starts = np.searchsorted(cells[0], np.arange(units.clusters))
    plain = np.add.reduceat(total, starts, axis=1)
    if (cells[1] == 1).all():
        return Sums(plain, plain, squares)
    return Sums(np.add.reduceat(total * cells[1], starts, axis=1), plain, squares)


def swapped(
    baseline: QuestionUnits, run: QuestionUnits, draws: int, rng: np.random.Generator
) -> Iterator[tuple[Sums, Sums]]:
    """Swap the two scores of each unit with probability one half, `draws` times.

    Parameters
    ----------
    baseline, run
        The same units, scored twice.
    draws
        How many.
    rng
        Source of randomness.

    Yields
    ------
    tuple of Sums
        Of the baseline and of the run, some of the draws at a time. Units with the same pair of scores in the same
        cluster are counted together: how many of them are swapped is binomial.
    """
    low, high = np.minimum(baseline.score, run.score), np.maximum(baseline.score, run.score)
    differ = high - low > TIE
    keys = np.stack([baseline.cluster, baseline.weight, low, high])[:, differ]
    cells, count = np.unique(keys, axis=1, return_counts=True)
    cluster, weight, small, large = cells[0].astype(np.int64), cells[1], cells[2], cells[3]
    there, starts = np.unique(cluster, return_index=True)
    both = low + high  # a pair's two scores, whoever has which
    plain = baseline.total(both)
    weighted = baseline.total(both * baseline.weight)
    squares = float((np.square(low) + np.square(high)).sum())
    alike = ~differ
    fixed = baseline.total(np.where(alike, low, 0.0))
    fixed_weighted = baseline.total(np.where(alike, low * baseline.weight, 0.0))
    fixed_squares = float(np.square(low[alike]).sum())
    equal = bool((baseline.weight == 1).all())
    for rows in chunks(draws, max(len(count), baseline.clusters)):
        got_large = rng.binomial(count, 0.5, size=(rows, len(count)))
        total = got_large * large + (count - got_large) * small
        own_plain = np.tile(fixed, (rows, 1))
        own_weighted = own_plain if equal else np.tile(fixed_weighted, (rows, 1))
        if len(count):
            own_plain[:, there] += np.add.reduceat(total, starts, axis=1)
            if not equal:
                own_weighted[:, there] += np.add.reduceat(total * weight, starts, axis=1)
        own_squares = fixed_squares + got_large @ np.square(large) + (count - got_large) @ np.square(small)
        other = plain - own_plain
        yield (
            Sums(other if equal else weighted - own_weighted, other, squares - own_squares),
            Sums(own_weighted, own_plain, own_squares),
        )


def chunks(draws: int, width: int) -> Iterator[int]:
    """Yield numbers of draws that add up to `draws` and keep (draws, width) arrays small."""
    most = max(1, _CHUNK // max(1, width))
    for start in range(0, draws, most):
        yield min(most, draws - start)
