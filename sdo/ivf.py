"""Approximate neighbours for many samples: inverted lists whose every decision is exact, and so the same everywhere.

Spherical k-means groups the samples; a sample's neighbours are looked for among the groups nearest to its own. Which
rows are looked at is decided by exact arithmetic alone: sums of numbers on the 2**-24 grid do not round in float64,
centroids are put back on the grid, and assignments within the error of the float32 search are settled exactly. The
result is approximate in that a neighbour in a group that was not probed is missed, never in that it depends on the
machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

from sdo.embeddings import unit_rows
from sdo.keys import CENTROIDS, raw_keys
from sdo.search import MISSING, nearest, propose, search_exactly, settle

_GROUPS_PER_ROOT = 4  # groups per square root of the samples
_PROBES = 64  # groups that a sample's candidates come from
_REFILL_PROBES = 8  # and where a pool left too few of them
_ROWS_PER_CENTROID = 64  # rows that k-means trains on, per centroid
_ITERATIONS = 4
_SPARE = 4
_BLOCK = 16384
_SUM_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class InvertedLists:
    """Samples by group, and the groups to probe from each group.

    Attributes
    ----------
    unit
        Shape ``(N, d)``, unit rows on the 2**-24 grid.
    label
        Shape ``(N,)``, int32, each sample's group; -1 for samples without a direction.
    members
        Shape ``(n,)``, samples sorted by group, then index.
    starts
        Shape ``(C + 1,)``, where each group begins in ``members``.
    probes
        Shape ``(C, p)``, groups to look into, nearest first, the group itself in front.
    """

    unit: NDArray[np.float32]
    label: NDArray[np.int32]
    members: NDArray[np.int64]
    starts: NDArray[np.int64]
    probes: NDArray[np.int64]

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
        ``C = 4 sqrt(n)`` groups for n valid samples, of which 64 are probed.
        """
        rows = np.flatnonzero(valid)
        n_groups = max(2, int(_GROUPS_PER_ROOT * len(rows) ** 0.5))
        n_probes = min(_PROBES, n_groups)
        centroids = _train(unit, rows, n_groups)
        label = np.full(len(unit), MISSING, dtype=np.int32)
        label[rows] = _assign(unit, rows, centroids)
        members = rows[np.argsort(label[rows], kind="stable")]
        starts = np.searchsorted(label[members], np.arange(n_groups + 1))
        everyone = np.arange(n_groups)
        near = search_exactly(centroids, everyone, everyone, n_probes - 1)
        return cls(unit, label, members, starts, np.concatenate([everyone[:, None], near], axis=1))

    def candidates(self, width: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return each sample's best candidates in the order of a float32 search.

        Parameters
        ----------
        width
            Candidates per sample.

        Returns
        -------
        tuple
            Indices, int32, and cosines, float32, shape ``(N, width)``; -1 and -inf where there are none.
        """
        lists = np.full((len(self.unit), width), MISSING, dtype=np.int32)
        scores = np.full((len(self.unit), width), -np.inf, dtype=np.float32)
        for group in range(len(self.probes)):
            queries = self.members[self.starts[group] : self.starts[group + 1]]
            universe = self._universe(group, self.probes.shape[1])
            count = min(width, len(universe) - 1)
            if len(queries) and count > 0:
                lists[queries, :count], scores[queries, :count] = propose(self.unit, queries, universe, count)
        return lists, scores

    def nearest(self, queries: NDArray[np.int64], inside: NDArray[np.bool_], k: int) -> NDArray[np.int64]:
        """Return the nearest samples among the pool members of the few groups nearest to each query.

        Parameters
        ----------
        queries
            Shape ``(q,)``, pool members with a direction.
        inside
            Shape ``(N,)``, pool membership.
        k
            Neighbours wanted.

        Returns
        -------
        NDArray[np.int64]
            Shape ``(q, k)``, largest cosine first, ties to the lower index; -1 behind the last where those groups hold
            fewer.
        """
        result = np.full((len(queries), k), MISSING, dtype=np.int64)
        labels = self.label[queries]
        order = np.argsort(labels, kind="stable")
        groups, first = np.unique(labels[order], return_index=True)
        for group, part in zip(groups.tolist(), np.split(order, first[1:]), strict=True):
            universe = self._universe(group, _REFILL_PROBES)
            universe = universe[inside[universe]]
            count = min(k, len(universe) - 1)
            if count > 0:
                result[part, :count] = nearest(self.unit, queries[part], universe, count)
        return result

    def _universe(self, group: int, n_probes: int) -> NDArray[np.int64]:
        """The samples that are looked at from a group, ascending."""
        parts = [self.members[self.starts[g] : self.starts[g + 1]] for g in self.probes[group, :n_probes]]
        return np.sort(np.concatenate(parts))


def _train(unit: NDArray[np.float32], rows: NDArray[np.int64], n_groups: int) -> NDArray[np.float32]:
    """Spherical k-means on a random share of the rows; seeds and share are drawn by a fixed key."""
    keys = raw_keys(0, CENTROIDS, 0, len(unit))[rows]
    chosen = np.argsort(keys, kind="stable")[: _ROWS_PER_CENTROID * n_groups]
    centroids = unit[rows[chosen[:n_groups]]]
    sample = np.sort(rows[chosen])
    for _ in range(_ITERATIONS):
        label = _assign(unit, sample, centroids)
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


def _assign(unit: NDArray[np.float32], rows: NDArray[np.int64], centroids: NDArray[np.float32]) -> NDArray[np.int32]:
    """The nearest centroid of each row, exactly, ties to the lower; shape (len(rows),)."""
    label = np.empty(len(rows), dtype=np.int32)
    count = min(1 + _SPARE, len(centroids))
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK]
        scores, lists = faiss.knn(unit[block], centroids, count, metric=faiss.METRIC_INNER_PRODUCT)
        inside = np.ones(lists.shape, dtype=np.bool_)
        best = settle(unit, block, centroids, lists, scores, inside, 1, complete=count == len(centroids))[:, 0]
        for i in np.flatnonzero(best == MISSING):
            best[i] = int(np.argmax(centroids.astype(np.float64) @ unit[block[i]].astype(np.float64)))
        label[start : start + len(block)] = best
    return label
