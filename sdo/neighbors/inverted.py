"""Approximate neighbors for many samples: inverted lists whose every decision is exact, and so the same everywhere.

Spherical k-means groups the samples; a sample's neighbors are looked for in the groups nearest to it. Which rows are
looked at is decided by exact arithmetic alone: sums of numbers on the 2**-24 grid do not round in float64, centroids
are put back on the grid, and what lies within the error of the float32 search is settled exactly. The result is
approximate in that a neighbor in a group that was not looked into is missed, never in that it depends on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdo.embeddings.matrix import unit_rows
from sdo.neighbors.exact import MISSING, SEARCH_BLOCK, exact_dots, float_search, settle
from sdo.random_keys import CENTROIDS, raw_keys

_GROUPS_PER_ROOT = 4  # groups per square root of the samples
_PROBES = 32  # groups that a sample looks into
_ROWS_PER_CENTROID = 64  # rows that k-means trains on, per centroid
_ITERATIONS = 4
_SPARE = 8  # candidates beyond those asked for: to settle the last rank takes a look past it
_SCAN_BLOCK = 131_072  # queries at a time, which bounds the memory of who looks where
_SUM_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class InvertedLists:
    """Samples by group, and the groups that each sample looks into.

    A sample's *universe* is all members of the groups whose centroids are nearest to it. Its neighbors are the exact
    nearest of its universe.

    Attributes
    ----------
    unit
        Shape ``(N, d)``, unit rows on the 2**-24 grid.
    members
        Shape ``(n,)``, samples with a direction, sorted by group, then index.
    starts
        Shape ``(C + 1,)``, where each group begins in ``members``.
    probes
        Shape ``(N, p)``, int32, the groups that each sample looks into, nearest first; -1 for samples without a
        direction.
    """

    unit: NDArray[np.float32]
    members: NDArray[np.int64]
    starts: NDArray[np.int64]
    probes: NDArray[np.int32]

    @classmethod
    def build(cls, unit: NDArray[np.float32], valid: NDArray[np.bool_]) -> InvertedLists:
        """Group the valid samples.

        Parameters
        ----------
        unit
            Shape ``(N, d)``.
        valid
            Shape ``(N,)``.

        Notes
        -----
        ``C = 4 sqrt(n)`` groups for n valid samples, of which each sample looks into 32.
        """
        rows = np.flatnonzero(valid)
        n_groups = min(len(rows), int(_GROUPS_PER_ROOT * len(rows) ** 0.5))
        centroids = _train(unit, rows, n_groups)
        probes = np.full((len(unit), min(_PROBES, n_groups)), MISSING, dtype=np.int32)
        probes[rows] = _nearest_centroids(unit, rows, centroids, probes.shape[1])
        members = rows[np.argsort(probes[rows, 0], kind="stable")]
        starts = np.searchsorted(probes[members, 0], np.arange(n_groups + 1))
        return cls(unit, members, starts, probes)

    def scan(
        self, queries: NDArray[np.int64], inside: NDArray[np.bool_], width: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Search each query's universe, cut to a pool, in float32.

        Parameters
        ----------
        queries
            Shape ``(q,)``, samples with a direction.
        inside
            Shape ``(N,)``, pool membership.
        width
            Candidates per query.

        Returns
        -------
        tuple
            Indices, int32, and cosines, float32, shape ``(q, width)``, largest cosine first, the query left out; -1 and
            -inf behind the last where the universe holds fewer.
        """
        lists = np.full((len(queries), width), MISSING, dtype=np.int32)
        scores = np.full((len(queries), width), -np.inf, dtype=np.float32)
        for start in range(0, len(queries), _SCAN_BLOCK):
            block = slice(start, start + _SCAN_BLOCK)
            self._scan_block(queries[block], inside, lists[block], scores[block])
        return lists, scores

    def _scan_block(
        self,
        queries: NDArray[np.int64],
        inside: NDArray[np.bool_],
        lists: NDArray[np.int32],
        scores: NDArray[np.float32],
    ) -> None:
        """Go through the groups; each one's members are compared with all queries that look into it, in one product."""
        wanted = self.probes[queries]
        by_group = np.argsort(wanted, axis=None, kind="stable")
        asked = wanted.ravel()[by_group]
        asking = by_group // wanted.shape[1]
        bounds = np.searchsorted(asked, np.arange(len(self.starts)))
        width = lists.shape[1]
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            group_members = self.members[self.starts[group] : self.starts[group + 1]]
            group_members = group_members[inside[group_members]]
            if not len(group_members):
                continue
            part = asking[bounds[group] : bounds[group + 1]]
            count = min(width + 1, len(group_members))
            score, position = float_search(self.unit[queries[part]], self.unit[group_members], count)
            index = group_members[position].astype(np.int32)
            score[index == queries[part, None]] = -np.inf
            value = np.concatenate([scores[part], score], axis=1)
            best = np.argpartition(value, -width, axis=1)[:, -width:]
            scores[part] = np.take_along_axis(value, best, axis=1)
            lists[part] = np.take_along_axis(np.concatenate([lists[part], index], axis=1), best, axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")
        lists[:] = np.take_along_axis(lists, order, axis=1)
        scores[:] = np.take_along_axis(scores, order, axis=1)
        lists[scores == -np.inf] = MISSING

    def nearest(self, queries: NDArray[np.int64], inside: NDArray[np.bool_], k: int) -> NDArray[np.int64]:
        """Return the exact ``k`` nearest of each query's universe that are inside the pool.

        Parameters
        ----------
        queries
            Shape ``(q,)``, samples with a direction.
        inside
            Shape ``(N,)``, pool membership.
        k
            Neighbors wanted.

        Returns
        -------
        NDArray[np.int64]
            Shape ``(q, k)``, largest cosine first, ties to the lower index; -1 behind the last where the universe holds
            fewer.
        """
        lists, scores = self.scan(queries, inside, k + _SPARE)
        nearest = settle(self.unit, queries, self.unit, lists, scores, lists != MISSING, k, complete=False)
        for position in np.flatnonzero(nearest[:, 0] == MISSING).tolist():
            query = int(queries[position])
            groups = [self.members[self.starts[g] : self.starts[g + 1]] for g in self.probes[query]]
            candidates = np.sort(np.concatenate(groups))
            candidates = candidates[inside[candidates] & (candidates != query)]
            exact = exact_dots(self.unit, np.full(len(candidates), query), self.unit, candidates)
            found = candidates[np.lexsort((candidates, -exact))[:k]]
            nearest[position, : len(found)] = found
        return nearest


def _train(unit: NDArray[np.float32], rows: NDArray[np.int64], n_groups: int) -> NDArray[np.float32]:
    """Spherical k-means on a random share of the rows; seeds and share are drawn by a fixed key.

    Not the k-means of `analysis.balance.kmeans`: that one draws its first centers by k-means++, ends when no label
    changes, rounds centers to a grid and moves empty ones. Either in the other's place would change plans or labels.
    """
    keys = raw_keys(0, CENTROIDS, 0, len(unit))[rows]
    chosen = np.argsort(keys, kind="stable")[: _ROWS_PER_CENTROID * n_groups]
    centroids = unit[rows[chosen[:n_groups]]]
    sample = np.sort(rows[chosen])
    for _ in range(_ITERATIONS):
        label = _nearest_centroids(unit, sample, centroids, 1)[:, 0]
        order = np.argsort(label, kind="stable")
        starts = np.searchsorted(label[order], np.arange(n_groups + 1))
        block = max(1, _SUM_BYTES // (8 * unit.shape[1]) // max(1, len(sample) // n_groups))
        for first in range(0, n_groups, block):
            groups = np.arange(first, min(first + block, n_groups))
            groups = groups[starts[groups + 1] > starts[groups]]  # an empty group keeps its centroid
            if not len(groups):
                continue
            low = starts[groups[0]]
            part = unit[sample[order[low : starts[groups[-1] + 1]]]].astype(np.float64)
            sums, usable = unit_rows(np.add.reduceat(part, starts[groups] - low, axis=0))
            centroids[groups[usable]] = sums[usable]
    return centroids


def _nearest_centroids(
    unit: NDArray[np.float32], rows: NDArray[np.int64], centroids: NDArray[np.float32], count: int
) -> NDArray[np.int32]:
    """The nearest centroids of each row, exactly, ties to the lower; shape (len(rows), count)."""
    nearest = np.empty((len(rows), count), dtype=np.int32)
    proposed = min(count + _SPARE, len(centroids))
    for start in range(0, len(rows), SEARCH_BLOCK):
        block = rows[start : start + SEARCH_BLOCK]
        scores, lists = float_search(unit[block], centroids, proposed)
        inside = np.ones(lists.shape, dtype=np.bool_)
        best = settle(unit, block, centroids, lists, scores, inside, count, complete=proposed == len(centroids))
        for i in np.flatnonzero(best[:, 0] == MISSING).tolist():
            exact = centroids.astype(np.float64) @ unit[block[i]].astype(np.float64)
            best[i] = np.lexsort((np.arange(len(centroids)), -exact))[:count]
        nearest[start : start + len(block)] = best
    return nearest
