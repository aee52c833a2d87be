"""Cosine nearest neighbours inside a pool, exact and identical on every machine.

A float32 search proposes; whatever lies within its error bound of a neighbour in rank is re-ranked by exact float64 dot
products; what the bound cannot settle is searched exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

_SPARE = 8  # candidates beyond those asked for: to settle the last rank takes a look past it
_LISTS_PER_NEIGHBOR = 16  # lists over all samples hold 16 K, so that most pools leave K of them
_SEARCH_BLOCK = 16384
_PAIR_BYTES = 4 * 2**20  # of float64 rows at a time, to stay in cache
_EXACT_BYTES = 128 * 2**20

MISSING = -1


@dataclass(frozen=True, eq=False)
class CandidateLists:
    """Each sample's nearest samples over all N, built once and cut to every epoch's pool.

    Attributes
    ----------
    unit
        Shape ``(N, d)``, unit rows on the 2**-24 grid.
    valid
        Shape ``(N,)``, rows with a direction; others neither have nor are neighbours.
    lists
        Shape ``(N, width)``, int32, in the order of the float32 search; -1 in the rows of invalid samples.
    scores
        Shape ``(N, width)``, the float32 cosines of that search, descending.
    """

    unit: NDArray[np.float32]
    valid: NDArray[np.bool_]
    lists: NDArray[np.int32]
    scores: NDArray[np.float32]

    @classmethod
    def build(cls, unit: NDArray[np.float32], valid: NDArray[np.bool_], k: int) -> CandidateLists:
        """Search all samples for lists that serve ``k`` neighbours in most pools.

        Parameters
        ----------
        unit
            Shape ``(N, d)``.
        valid
            Shape ``(N,)``.
        k
            Neighbours wanted per sample in each epoch.
        """
        members = np.flatnonzero(valid)
        width = min(_LISTS_PER_NEIGHBOR * k, max(len(members) - 1, 0))
        lists = np.full((len(unit), width), MISSING, dtype=np.int32)
        scores = np.full((len(unit), width), -np.inf, dtype=np.float32)
        if width:
            for start in range(0, len(members), _SEARCH_BLOCK):
                queries = members[start : start + _SEARCH_BLOCK]
                lists[queries], scores[queries] = _propose(unit, queries, members, width)
        return cls(unit=unit, valid=valid, lists=lists, scores=scores)

    def graph(self, pool: NDArray[np.int64], k: int) -> NDArray[np.int64]:
        """Return the ``k`` nearest pool members of every pool member.

        Parameters
        ----------
        pool
            Shape ``(M,)``, ascending sample indices.
        k
            At most the number of other valid pool members.

        Returns
        -------
        NDArray[np.int64]
            Shape ``(M, k)``, sample indices, nearest first, ties to the lower index; -1 in the rows of samples without
            a direction.
        """
        graph = np.full((len(pool), k), MISSING, dtype=np.int64)
        rows = np.flatnonzero(self.valid[pool])
        if not k or not len(rows):
            return graph
        members = pool[rows]
        complete = self.lists.shape[1] == int(self.valid.sum()) - 1
        inside = np.zeros(len(self.unit) + 1, dtype=np.bool_)  # the last entry answers for MISSING
        inside[members] = True
        for start in range(0, len(rows), _SEARCH_BLOCK):
            block = rows[start : start + _SEARCH_BLOCK]
            lists, scores = self.lists[pool[block]], self.scores[pool[block]]
            graph[block] = _settle(self.unit, pool[block], lists, scores, inside[lists], k, complete=complete)
        unsettled = rows[graph[rows, 0] == MISSING]
        if len(unsettled):
            graph[unsettled] = nearest(self.unit, pool[unsettled], members, k)
        return graph


def cut_to_members(
    lists: NDArray[np.int32], inside: NDArray[np.bool_], k: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first ``k`` entries of each list that are inside, and how many were found.

    Parameters
    ----------
    lists
        Shape ``(n, w)``, sample indices or -1.
    inside
        Shape ``(N + 1,)``, membership; the last entry is False.
    k
        Entries wanted.

    Returns
    -------
    tuple
        Shapes ``(n, k)``, padded with -1, and ``(n,)``.
    """
    kept = inside[lists]
    rank = np.cumsum(kept, axis=1)
    kept &= rank <= k
    row, column = np.nonzero(kept)
    cut = np.full((len(lists), k), MISSING, dtype=np.int64)
    cut[row, rank[row, column] - 1] = lists[row, column]
    found = np.minimum(rank[:, -1], k) if lists.shape[1] else np.zeros(len(lists), dtype=np.int64)
    return cut, found


def nearest(
    unit: NDArray[np.float32], queries: NDArray[np.int64], members: NDArray[np.int64], k: int
) -> NDArray[np.int64]:
    """Return the exact ``k`` nearest members of each query, itself left out.

    Parameters
    ----------
    unit
        Shape ``(N, d)``, unit rows on the 2**-24 grid.
    queries
        Shape ``(q,)``, sample indices, all of them members.
    members
        Shape ``(m,)``, ascending sample indices, more than ``k``.
    k
        Neighbours wanted.

    Returns
    -------
    NDArray[np.int64]
        Shape ``(q, k)``, largest cosine first, ties to the lower index.
    """
    result = np.empty((len(queries), k), dtype=np.int64)
    width = min(k + _SPARE, len(members) - 1)
    for start in range(0, len(queries), _SEARCH_BLOCK):
        block = queries[start : start + _SEARCH_BLOCK]
        lists, scores = _propose(unit, block, members, width)
        everything = np.ones(lists.shape, dtype=np.bool_)
        settled = _settle(unit, block, lists, scores, everything, k, complete=width == len(members) - 1)
        unsettled = np.flatnonzero(settled[:, 0] == MISSING)
        if len(unsettled):
            settled[unsettled] = _search_exactly(unit, block[unsettled], members, k)
        result[start : start + len(block)] = settled
    return result


def _propose(
    unit: NDArray[np.float32], queries: NDArray[np.int64], members: NDArray[np.int64], width: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The float32 search: indices and cosines of the ``width`` best members, the query left out, shape (q, width)."""
    base = unit if len(members) == len(unit) else unit[members]
    score, position = faiss.knn(unit[queries], base, width + 1, metric=faiss.METRIC_INNER_PRODUCT)
    index = members[position]
    own = index == queries[:, None]
    own[~own.any(axis=1), -1] = True  # where duplicates pushed the query out of its own list, the last one goes
    shape = (len(queries), width)
    return index[~own].reshape(shape).astype(np.int32), score[~own].reshape(shape)


def _settle(
    unit: NDArray[np.float32],
    queries: NDArray[np.int64],
    lists: NDArray[np.int32],
    scores: NDArray[np.float32],
    inside: NDArray[np.bool_],
    k: int,
    *,
    complete: bool,
) -> NDArray[np.int64]:
    """Return the exact ``k`` nearest of what is inside each list, or -1 in rows that the list cannot settle.

    A float32 dot product of unit rows errs by at most ``bound``. Let v be the k-th best score inside: whatever scores
    below v - 2 bound is beaten by k others, so that only the entries above it are ranked, exactly where two of them are
    within 2 bound of each other. Samples outside an incomplete list score no more than its last entry; where that entry
    is itself not below v - 2 bound, the row stays open.
    """
    # At most d u whatever the order of summation (Higham, Accuracy and Stability of Numerical Algorithms, 3.1); 1 %
    # covers second-order terms and norms that the grid left a little above one.
    bound = 1.01 * unit.shape[1] * 2.0**-24
    settled = np.full((len(lists), k), MISSING, dtype=np.int64)
    rank = np.cumsum(inside, axis=1)
    kth = np.argmax(rank == k, axis=1)
    rows = np.arange(len(lists))
    enough = rank[:, -1] >= k
    threshold = scores[rows, kth].astype(np.float64) - 2 * bound
    closed = enough if complete else enough & (scores[:, -1] < threshold)
    candidate = inside & (scores >= threshold[:, None]) & closed[:, None]
    row, column = np.nonzero(candidate)
    if not len(row):
        return settled

    width = int(candidate.sum(axis=1).max())
    slot = (np.cumsum(candidate, axis=1) - 1)[row, column]
    index = np.full((len(lists), width), np.iinfo(np.int64).max, dtype=np.int64)
    value = np.full((len(lists), width), -np.inf, dtype=np.float64)
    index[row, slot] = lists[row, column]
    value[row, slot] = scores[row, column]

    filled = np.isfinite(value)
    with np.errstate(invalid="ignore"):
        apart = ~(value[:, :-1] - value[:, 1:] <= 2 * bound)
    group = np.zeros(value.shape, dtype=np.int64)
    np.cumsum(apart, axis=1, out=group[:, 1:])
    tied = np.zeros(value.shape, dtype=np.bool_)
    tied[:, 1:] |= ~apart
    tied[:, :-1] |= ~apart
    row, slot = np.nonzero(tied & filled)
    value[row, slot] = exact_dots(unit, queries[row], index[row, slot])
    order = np.lexsort((index, -value, group), axis=1)[:, :k]
    ranked = np.take_along_axis(index, order, axis=1)
    settled[closed] = ranked[closed]
    return settled


def exact_dots(unit: NDArray[np.float32], left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.float64]:
    """Exact cosines of pairs of rows, shape ``(p,)``: float64 sums of numbers on the grid do not round."""
    dots = np.empty(len(left), dtype=np.float64)
    block = max(1, _PAIR_BYTES // (16 * unit.shape[1]))
    for start in range(0, len(left), block):
        pairs = slice(start, start + block)
        dots[pairs] = np.einsum("ij,ij->i", unit[left[pairs]].astype(np.float64), unit[right[pairs]].astype(np.float64))
    return dots


def _search_exactly(
    unit: NDArray[np.float32], queries: NDArray[np.int64], members: NDArray[np.int64], k: int
) -> NDArray[np.int64]:
    """The slow way for rows with more near-ties than spare candidates: every dot product in float64."""
    result = np.empty((len(queries), k), dtype=np.int64)
    block = max(1, _EXACT_BYTES // (8 * len(members)))
    columns = max(1, _EXACT_BYTES // (8 * unit.shape[1]))
    for start in range(0, len(queries), block):
        rows = queries[start : start + block]
        wide = unit[rows].astype(np.float64)
        dots = np.empty((len(rows), len(members)), dtype=np.float64)
        for first in range(0, len(members), columns):
            part = members[first : first + columns]
            dots[:, first : first + columns] = wide @ unit[part].astype(np.float64).T
        for offset, row in enumerate(dots):
            row[np.searchsorted(members, rows[offset])] = -np.inf
            last = np.partition(row, len(row) - k)[len(row) - k]
            candidates = np.flatnonzero(row >= last)
            best = candidates[np.lexsort((candidates, -row[candidates]))[:k]]
            result[start + offset] = members[best]
    return result
