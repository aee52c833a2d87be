"""The nearest of every row among all rows, proposed in float32: each pair's product is taken once and serves both rows.

Half the arithmetic of a search that treats every row as a query of its own. Which members a float32 search puts last
depends on the machine; :func:`sdo.neighbors.exact.settle` corrects that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# 1024 x 4096 products are 16 MiB: large enough for the matrix product's full speed, small enough to stay near the CPU.
_LEFT, _RIGHT = 1024, 4096


def propose_all(
    unit: NDArray[np.float32], members: NDArray[np.int64], width: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Search in float32 for the ``width`` members nearest to each member, itself left out.

    Parameters
    ----------
    unit
        Shape ``(N, d)``, unit rows.
    members
        Shape ``(m,)``, ascending rows of ``unit``, more than ``width``.
    width
        Neighbors to propose, at least 1.

    Returns
    -------
    tuple
        Rows, int32, and cosines, float32, shape ``(m, width)``, largest cosine first. What is left out scores no more
        than the last.

    Notes
    -----
    Time grows with m² d, memory with m width. Blocks are spread evenly over the members, so that the first ones are a
    sample of all and already tell which products of the later ones need a closer look, however the rows are ordered.
    """
    best = _Best(len(members), width)
    stride = -(-len(members) // _LEFT)
    order = np.concatenate([np.arange(first, len(members), stride) for first in range(stride)])
    buffer = np.empty((_LEFT, _RIGHT), dtype=np.float32)
    for start in range(0, len(order), _LEFT):
        left = order[start : start + _LEFT]
        rows = unit[members[left]]
        own = _products(rows, rows, buffer)
        np.fill_diagonal(own, -np.inf)
        best.offer(left, own, left)
        for first in range(start + _LEFT, len(order), _RIGHT):
            right = order[first : first + _RIGHT]
            scores = _products(rows, unit[members[right]], buffer)
            best.offer(left, scores, right)
            best.offer_columns(left, scores, right)
    index, value = best.finish()
    return members[index].astype(np.int32), value


def _products(
    left: NDArray[np.float32], right: NDArray[np.float32], buffer: NDArray[np.float32]
) -> NDArray[np.float32]:
    """All dot products of two blocks of rows; a block with itself costs numpy half."""
    return np.matmul(left, right.T, out=buffer.ravel()[: len(left) * len(right)].reshape(len(left), len(right)))


class _Best:
    """The best candidates of each of m rows so far: at least the ``width`` best, and at most twice as many."""

    def __init__(self, m: int, width: int) -> None:
        self._width = width
        self._value = np.full((m, 2 * width), -np.inf, dtype=np.float32)
        self._index = np.full((m, 2 * width), -1, dtype=np.int32)
        self._fill = np.zeros(m, dtype=np.int64)
        self._floor = np.full(m, -np.inf, dtype=np.float32)  # what does not exceed it is not among the best

    def offer(self, rows: NDArray[np.int64], scores: NDArray[np.float32], candidates: NDArray[np.int64]) -> None:
        """Take what exceeds the rows' floors.

        Parameters
        ----------
        rows
            Shape ``(q,)``, each once.
        scores
            Shape ``(q, c)``, of the rows with the candidates.
        candidates
            Shape ``(c,)``.
        """
        self._raise_floors(rows, scores, axis=1)
        row, column = np.divmod(np.flatnonzero(scores > self._floor[rows, None]), len(candidates))
        self._insert(rows, row, scores[row, column], candidates[column])

    def offer_columns(
        self, candidates: NDArray[np.int64], scores: NDArray[np.float32], rows: NDArray[np.int64]
    ) -> None:
        """As :meth:`offer`, with the scores transposed: shape ``(c, q)``."""
        self._raise_floors(rows, scores, axis=0)
        column, row = np.divmod(np.flatnonzero(scores > self._floor[rows]), len(rows))
        by_row = np.argsort(row, kind="stable")
        row, column = row[by_row], column[by_row]
        self._insert(rows, row, scores[column, row], candidates[column])

    def finish(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the best candidates and their scores, shape ``(m, width)``, largest first."""
        self._compact(np.flatnonzero(self._fill > self._width))
        value, index = self._value[:, : self._width], self._index[:, : self._width]
        order = np.argsort(-value, axis=1, kind="stable")
        return np.take_along_axis(index, order, axis=1), np.take_along_axis(value, order, axis=1)

    def _raise_floors(self, rows: NDArray[np.int64], scores: NDArray[np.float32], axis: int) -> None:
        """Give rows without a floor one: the ``width``-th largest of the maxima of ``2 width`` groups of candidates.

        At least ``width`` candidates reach it; it is nearly as high as the width-th largest of all and far cheaper.
        """
        groups = 2 * self._width
        each = scores.shape[axis] // groups
        without = self._floor[rows] == -np.inf
        if each < 2 or not without.any():
            return
        if axis == 1:
            maxima = scores[without, : each * groups].reshape(-1, each, groups).max(axis=1)
        else:
            maxima = scores[: each * groups].reshape(each, groups, -1).max(axis=0).T[without]
        bound = np.partition(maxima, self._width, axis=1)[:, self._width]
        # Just below, so that the candidate that is the bound exceeds it.
        self._floor[rows[without]] = np.nextafter(bound, np.float32(-np.inf))

    def _insert(
        self,
        rows: NDArray[np.int64],
        row: NDArray[np.int64],
        values: NDArray[np.float32],
        candidates: NDArray[np.int32] | NDArray[np.int64],
    ) -> None:
        """Append candidates to ``rows[row]``; they come row by row."""
        counts = np.bincount(row, minlength=len(rows))
        if counts.max(initial=0) > self._width:
            keep = self._best_of_each(row, values, counts)
            row, values, candidates = row[keep], values[keep], candidates[keep]
            counts = np.minimum(counts, self._width)
        self._compact(rows[self._fill[rows] + counts > 2 * self._width])
        first = self._fill[rows] - (np.cumsum(counts) - counts)
        place, slot = rows[row], first[row] + np.arange(len(values))
        self._value[place, slot] = values
        self._index[place, slot] = candidates
        self._fill[rows] += counts

    def _best_of_each(
        self, row: NDArray[np.int64], values: NDArray[np.float32], counts: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return which values are among the ``width`` largest of their rows."""
        many = counts > self._width
        starts = np.cumsum(counts) - counts
        crowded = np.flatnonzero(many[row])
        line = (np.cumsum(many) - 1)[row[crowded]]
        padded = np.full((int(many.sum()), int(counts.max())), -np.inf, dtype=np.float32)
        padded[line, crowded - starts[row[crowded]]] = values[crowded]
        best = np.argpartition(padded, -self._width, axis=1)[:, -self._width :]
        among = ~many[row]
        among[starts[many][:, None] + best] = True
        return among

    def _compact(self, rows: NDArray[np.int64]) -> None:
        """Cut rows that hold at least ``width`` candidates to the best ``width``, and raise their floors."""
        if not len(rows):
            return
        best = np.argpartition(self._value[rows], -self._width, axis=1)[:, -self._width :]
        value = np.take_along_axis(self._value[rows], best, axis=1)
        self._index[rows, : self._width] = np.take_along_axis(self._index[rows], best, axis=1)
        self._value[rows, : self._width] = value
        self._value[rows, self._width :] = -np.inf
        self._fill[rows] = self._width
        self._floor[rows] = value.min(axis=1)
