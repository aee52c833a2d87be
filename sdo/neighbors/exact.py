"""Nearest rows by cosine, exactly: a float32 search proposes, float64 dot products settle what is within its error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MISSING = -1
SEARCH_BLOCK = 16384  # queries at a time

_SPARE = 8  # candidates beyond those asked for: to settle the last rank takes a look past it
_PAIR_BYTES = 4 * 2**20  # of float64 rows at a time, to stay in cache
_EXACT_BYTES = 128 * 2**20


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
        Neighbors wanted.

    Returns
    -------
    NDArray[np.int64]
        Shape ``(q, k)``, largest cosine first, ties to the lower index.
    """
    result = np.empty((len(queries), k), dtype=np.int64)
    width = min(k + _SPARE, len(members) - 1)
    for start in range(0, len(queries), SEARCH_BLOCK):
        block = queries[start : start + SEARCH_BLOCK]
        lists, scores = propose(unit, block, members, width)
        everything = np.ones(lists.shape, dtype=np.bool_)
        settled = settle(unit, block, unit, lists, scores, everything, k, complete=width == len(members) - 1)
        unsettled = np.flatnonzero(settled[:, 0] == MISSING)
        if len(unsettled):
            settled[unsettled] = search_exactly(unit, block[unsettled], members, k)
        result[start : start + len(block)] = settled
    return result


def float_search(
    queries: NDArray[np.float32], base: NDArray[np.float32], count: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the largest dot products of each query with the rows of `base`, in float32, and where they stand.

    Shapes ``(q, count)``, largest first.
    """
    import faiss  # loaded where something is searched: most commands do not

    score, position = faiss.knn(queries, base, count, metric=faiss.METRIC_INNER_PRODUCT)
    return score, position


def propose(
    unit: NDArray[np.float32], queries: NDArray[np.int64], members: NDArray[np.int64], width: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Search in float32 for the ``width`` members nearest to each query, itself left out.

    Parameters
    ----------
    unit
        Shape ``(N, d)``.
    queries
        Shape ``(q,)``, rows of ``unit``, all of them members.
    members
        Shape ``(m,)``, ascending rows of ``unit``, more than ``width``.
    width
        Neighbors to propose.

    Returns
    -------
    tuple
        Rows, int32, and cosines, float32, shape ``(q, width)``, largest cosine first; the order of near-ties depends on
        the machine, which :func:`settle` corrects.
    """
    base = unit if len(members) == len(unit) else unit[members]
    score, position = float_search(unit[queries], base, width + 1)
    index = members[position]
    own = index == queries[:, None]
    own[~own.any(axis=1), -1] = True  # where duplicates pushed the query out of its own list, the last one goes
    shape = (len(queries), width)
    return index[~own].reshape(shape).astype(np.int32), score[~own].reshape(shape)


def settle(
    left: NDArray[np.float32],
    queries: NDArray[np.int64],
    right: NDArray[np.float32],
    lists: NDArray[np.integer],
    scores: NDArray[np.float32],
    inside: NDArray[np.bool_],
    k: int,
    *,
    complete: bool,
) -> NDArray[np.int64]:
    """Return the exact ``k`` nearest of what is inside each list, or -1 in rows that the list cannot settle.

    Parameters
    ----------
    left
        Shape ``(N, d)``, unit rows on the grid, among them the queries.
    queries
        Shape ``(q,)``, rows of ``left``.
    right
        Shape ``(M, d)``, the rows that lists name; ``left`` itself where samples look for samples.
    lists, scores
        Shape ``(q, w)``, rows of ``right`` and their float32 cosines, descending.
    inside
        Shape ``(q, w)``, which entries count.
    k
        Neighbors wanted.
    complete
        Whether each list holds all there is.

    Returns
    -------
    NDArray[np.int64]
        Shape ``(q, k)``, largest cosine first, ties to the lower row.

    Notes
    -----
    A float32 dot product of unit rows errs by at most ``bound``. Let v be the k-th best score inside: whatever scores
    below v - 2 bound is beaten by k others, so that only the entries above it are ranked, exactly where two of them are
    within 2 bound of each other. Samples outside an incomplete list score no more than its last entry; where that entry
    is itself not below v - 2 bound, the row stays open.
    """
    bound = error_bound(left)
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
    value[row, slot] = exact_dots(left, queries[row], right, index[row, slot])
    order = np.lexsort((index, -value, group), axis=1)[:, :k]
    ranked = np.take_along_axis(index, order, axis=1)
    settled[closed] = ranked[closed]
    return settled


def error_bound(unit: NDArray[np.float32]) -> float:
    """Return by how much a float32 dot product of two unit rows errs at most, whatever the order of summation.

    Notes
    -----
    d u (Higham, Accuracy and Stability of Numerical Algorithms, 3.1); 1 % covers second-order terms and norms that the
    grid left a little above one.
    """
    return float(1.01 * unit.shape[1] * 2.0**-24)


def exact_dots(
    left: NDArray[np.floating], rows: NDArray[np.int64], right: NDArray[np.floating], columns: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the cosines of pairs of rows, exactly: float64 sums of numbers on the grid do not round.

    Parameters
    ----------
    left, right
        Shapes ``(N, d)`` and ``(M, d)``, unit rows on the 2**-24 grid.
    rows, columns
        Shape ``(p,)``, rows of ``left`` and of ``right``.

    Returns
    -------
    NDArray[np.float64]
        Shape ``(p,)``.
    """
    dots = np.empty(len(rows), dtype=np.float64)
    block = max(1, _PAIR_BYTES // (16 * left.shape[1]))
    for start in range(0, len(rows), block):
        pairs = slice(start, start + block)
        dots[pairs] = np.einsum(
            "ij,ij->i", left[rows[pairs]].astype(np.float64), right[columns[pairs]].astype(np.float64)
        )
    return dots


def exact_dots_with(unit: NDArray[np.float32], one: int, others: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the cosines of one row with some others, as :func:`exact_dots` does.

    Parameters
    ----------
    unit
        Shape ``(N, d)``, unit rows on the 2**-24 grid.
    one
        A row.
    others
        Shape ``(p,)``, rows.

    Returns
    -------
    NDArray[np.float64]
        Shape ``(p,)``.
    """
    dots = np.empty(len(others), dtype=np.float64)
    wide = unit[one].astype(np.float64)
    block = max(1, _PAIR_BYTES // (16 * unit.shape[1]))
    for start in range(0, len(others), block):
        part = slice(start, start + block)
        dots[part] = unit[others[part]].astype(np.float64) @ wide
    return dots


def search_exactly(
    unit: NDArray[np.float32], queries: NDArray[np.int64], members: NDArray[np.int64], k: int
) -> NDArray[np.int64]:
    """Find the ``k`` nearest members of each query the slow way, every dot product in float64.

    Parameters
    ----------
    unit, queries, members
        As in :func:`propose`.
    k
        Neighbors wanted, fewer than members.

    Returns
    -------
    NDArray[np.int64]
        Shape ``(q, k)``, largest cosine first, ties to the lower row.
    """
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
