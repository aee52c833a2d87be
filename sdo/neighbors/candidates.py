"""Cosine nearest neighbors inside a pool: candidate lists over all samples, cut to each epoch's pool.

Up to ``EXACT_LIMIT`` samples the neighbors are exact. Beyond, candidates come from ``inverted`` lists, and a
sample's neighbors are the nearest among those. Either way they are the same on every machine and thread count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdo.neighbors.all_pairs import propose_all
from sdo.neighbors.exact import MISSING, SEARCH_BLOCK, nearest, settle
from sdo.neighbors.inverted import InvertedLists

# Above this, comparing all pairs takes longer than users like to wait: at 384 dimensions on two cores about a minute.
EXACT_LIMIT = 131_072

_LISTS_PER_NEIGHBOR = 16  # lists over all samples hold 16 K, so that nearly all pools leave K of them
_APPROXIMATE_LISTS_PER_NEIGHBOR = 6  # and 6 K where memory counts


@dataclass(frozen=True, eq=False)
class CandidateLists:
    """Each sample's nearest samples over all N, built once and cut to every epoch's pool.

    Attributes
    ----------
    unit
        Shape ``(N, d)``, unit rows on the 2**-24 grid.
    valid
        Shape ``(N,)``, rows with a direction; others neither have nor are neighbors.
    lists
        Shape ``(N, width)``, int32, in the order of the float32 search; -1 in the rows of invalid samples.
    scores
        Shape ``(N, width)``, the float32 cosines of that search, descending.
    inverted
        Where candidates came from, or None where they are exact.
    """

    unit: NDArray[np.float32]
    valid: NDArray[np.bool_]
    lists: NDArray[np.int32]
    scores: NDArray[np.float32]
    inverted: InvertedLists | None = None

    @classmethod
    def build(cls, unit: NDArray[np.float32], valid: NDArray[np.bool_], k: int) -> CandidateLists:
        """Search all samples for lists that serve ``k`` neighbors in most pools.

        Parameters
        ----------
        unit
            Shape ``(N, d)``.
        valid
            Shape ``(N,)``.
        k
            Neighbors wanted per sample in each epoch.
        """
        members = np.flatnonzero(valid)
        if len(members) > EXACT_LIMIT:
            inverted = InvertedLists.build(unit, valid)
            width = _APPROXIMATE_LISTS_PER_NEIGHBOR * k
            lists = np.full((len(unit), width), MISSING, dtype=np.int32)
            scores = np.full((len(unit), width), -np.inf, dtype=np.float32)
            lists[members], scores[members] = inverted.scan(members, valid, width)
            return cls(unit=unit, valid=valid, lists=lists, scores=scores, inverted=inverted)
        width = min(_LISTS_PER_NEIGHBOR * k, max(len(members) - 1, 0))
        lists = np.full((len(unit), width), MISSING, dtype=np.int32)
        scores = np.full((len(unit), width), -np.inf, dtype=np.float32)
        if width:
            lists[members], scores[members] = propose_all(unit, members, width)
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
            a direction, and behind the last where an approximate search found fewer.
        """
        graph = np.full((len(pool), k), MISSING, dtype=np.int64)
        rows = np.flatnonzero(self.valid[pool])
        if not k or not len(rows):
            return graph
        members = pool[rows]
        complete = self.inverted is None and self.lists.shape[1] == int(self.valid.sum()) - 1
        inside = np.zeros(len(self.unit) + 1, dtype=np.bool_)  # the last entry answers for MISSING
        inside[members] = True
        for start in range(0, len(rows), SEARCH_BLOCK):
            block = rows[start : start + SEARCH_BLOCK]
            lists, scores = self.lists[pool[block]], self.scores[pool[block]]
            graph[block] = settle(self.unit, pool[block], self.unit, lists, scores, inside[lists], k, complete=complete)
        unsettled = rows[graph[rows, 0] == MISSING]
        if len(unsettled):
            if self.inverted is None:
                graph[unsettled] = nearest(self.unit, pool[unsettled], members, k)
            else:
                graph[unsettled] = self.inverted.nearest(pool[unsettled], inside[:-1], k)
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
