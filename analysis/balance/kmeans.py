"""K-means whose labels are the same on every machine and thread count.

scikit-learn's and faiss' k-means sum floating-point numbers in an order that depends on threads and processor, so that
a question between two centers may fall to either. Here rows and centers are multiples of 2**-24: products, sums and
distances are then exact in float64, in any order, whichever library computes them.

Not the k-means of `sdo.neighbors.inverted`, which says in what they differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.balance.duplicates import digests
from sdo.neighbors.exact import exact_dots
from sdo.random_keys import exponentials, raw_keys

CLUSTERS = 11  # the use of sdo.random_keys' random numbers
ITERATIONS = 100
_ROUNDS = 512  # at most, in which the first centers are drawn
_ROWS_TO_START = 32  # rows that the first centers are drawn from, per center
_COARSE = 2.0**28  # squared distances are at most 4: below 2**23 of them sum exactly
_BLOCK = 2**20  # numbers in a block of distances: 8 MiB of float64
_FEW_PAIRS = 32  # below one pair in so many, single exact products are faster than a whole exact matrix product
_GRID = 2.0**24
_NONE = -1  # no label yet


def first_centers(rows: NDArray[np.float64], k: int, seed: int) -> NDArray[np.float64]:
    """Draw k of the distinct rows, or all if there are fewer.

    Of a handful of rows drawn with probability proportional to the squared distance to the centers so far, the one that
    leaves the least distance becomes a center. Successive weighted draws without replacement are the smallest of
    exponential variates divided by their weights.
    """
    distinct = np.unique(digests(row.tobytes() for row in rows), return_index=True)[1]
    candidates = rows[np.sort(distinct)[: max(k, _ROWS_TO_START * k)]]
    if len(candidates) <= k:
        return candidates
    pairs = _Pairs(candidates)
    waiting = exponentials(raw_keys(seed, CLUSTERS, 1, len(candidates)))
    chosen = [int(waiting.argmin())]
    squared = np.full(len(candidates), np.inf)
    pairs.shorten(squared, np.array(chosen))
    at_once, trials = -(-k // _ROUNDS), 2 + (k - 1).bit_length()
    turn = 1
    while len(chosen) < k:
        turn += 1
        wanted = min(at_once, k - len(chosen))
        waiting = exponentials(raw_keys(seed, CLUSTERS, turn, len(candidates)))
        free = np.flatnonzero(squared > 0)
        drawn = free[np.argsort(waiting[free] / squared[free], kind="stable")[: trials * wanted]]
        gain = np.zeros(len(drawn))
        for row, column, away in pairs.nearer(squared, drawn):
            # On a coarse grid sums are exact, so that every machine finds the same largest one.
            less = np.rint(squared[row] * _COARSE) - np.rint(away * _COARSE)
            gain += np.bincount(column, less, len(drawn))
        groups = np.array_split(np.arange(len(drawn)), wanted)
        winners = drawn[[group[gain[group].argmax()] for group in groups]]
        chosen += winners.tolist()
        pairs.shorten(squared, winners)
    return np.asarray(candidates[np.sort(chosen)])


class _Pairs:
    """Exact squared distances between (n, d) rows, of which products in float32 say which matter."""

    def __init__(self, rows: NDArray[np.float64]) -> None:
        self.rows = rows
        self.narrow = rows.astype(np.float32)
        self.own = _square_lengths(rows)

    def nearer(
        self, squared: NDArray[np.float64], others: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]]:
        """Yield the pairs of a row and one of the others, by position, less than `squared` apart, and how far."""
        centers, length = self.rows[others], self.own[others]
        # Whatever is nearer has a product above this.
        least = (self.own + length.min() - squared) / 2 - _product_error(self.own, length, self.rows.shape[1])
        narrow_least = least.astype(np.float32)
        block = max(1, _BLOCK // len(others))
        for start in range(0, len(self.rows), block):
            part = slice(start, start + block)
            products = self.narrow[part] @ self.narrow[others].T
            row, column = np.divmod(np.flatnonzero(products >= narrow_least[part, None]), len(others))
            if len(row) * _FEW_PAIRS < products.size:
                dots = exact_dots(self.rows, row + start, centers, column)
            else:
                dots = (self.rows[part] @ centers.T)[row, column]
            row += start
            away = self.own[row] + length[column] - 2.0 * dots
            inside = away < squared[row]
            yield row[inside], column[inside], away[inside]

    def shorten(self, squared: NDArray[np.float64], others: NDArray[np.int64]) -> None:
        """Lower `squared`, in place, to the distances from the others where those are less."""
        for row, _, away in self.nearer(squared, others):
            np.minimum.at(squared, row, away)


def _square_lengths(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.einsum("ij,ij->i", rows, rows))


def _product_error(left: NDArray[np.float64], right: NDArray[np.float64], d: int) -> float:
    """Return by how much a float32 product of two rows of d entries errs at most, rounding the rows included.

    `left` and `right` hold squared lengths; see `sdo.neighbors.exact.error_bound`.
    """
    return float(1.01 * (d + 4) * 2.0**-24 * np.sqrt(left.max() * right.max()))


def nearest(
    rows: NDArray[Any], centers: NDArray[np.float64], some: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the nearest center of each row, or of some, ties to the lower, and the squared distance; all exact."""
    n = len(rows) if some is None else len(some)
    label = np.empty(n, dtype=np.int64)
    squared = np.empty(n)
    length = _square_lengths(centers)
    narrow, narrow_length = centers.astype(np.float32), length.astype(np.float32)
    block = max(1, _BLOCK // max(len(centers), rows.shape[1]))
    for start in range(0, n, block):
        stop = min(start + block, n)
        part = rows[start:stop] if some is None else rows[some[start:stop]]
        away = part.astype(np.float32) @ narrow.T
        part = part.astype(np.float64)
        own = _square_lengths(part)
        away *= -2
        away += narrow_length
        # The least and another may both err, by twice the product's error and the rounding of sums.
        slack = np.float32(4 * (_product_error(own, length, rows.shape[1]) + 2.0**-22 * length.max()))
        row, column = np.divmod(np.flatnonzero(away <= away.min(axis=1)[:, None] + slack), len(centers))
        if len(row) * _FEW_PAIRS < away.size:
            distance = length[column] - 2.0 * exact_dots(part, row, centers, column)
            # Rows ascend, and within them centers: of the least of a row the first comes first.
            order = np.lexsort((distance, row))
            best = order[np.flatnonzero(np.diff(row, prepend=-1))]
            label[start:stop], squared[start:stop] = column[best], own + distance[best]
        else:
            exact = length - 2.0 * (part @ centers.T)
            first = exact.argmin(axis=1)
            label[start:stop], squared[start:stop] = first, own + exact[np.arange(len(part)), first]
    return label, squared


def lloyd(rows: NDArray[np.float64], centers: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """Move centers to the means of their rows until no label changes; centers, and how often they moved."""
    before = np.full(len(rows), _NONE)
    own = _square_lengths(rows)
    label, squared = nearest(rows, centers)
    for iteration in range(ITERATIONS):
        counts = np.bincount(label, minlength=len(centers))
        empty = np.flatnonzero(counts == 0)
        if len(empty):
            far = np.argsort(-squared, kind="stable")[: len(empty)]
            label[far] = empty
            squared[far] = -np.inf  # maybe not the nearest center: compared with all next time
            counts = np.bincount(label, minlength=len(centers))
        if np.array_equal(label, before):
            return centers, iteration
        before = label.copy()
        order = np.argsort(label, kind="stable")
        there = np.flatnonzero(counts)
        # Sums of multiples of 2**-24 are exact below 2**29 rows, in any order.
        sums = np.add.reduceat(rows[order], np.searchsorted(label[order], there), axis=0)
        last, centers = centers, centers.copy()
        centers[there] = np.rint(sums / counts[there, None] * _GRID) / _GRID
        if iteration + 1 < ITERATIONS:
            _follow(rows, own, centers, np.flatnonzero((centers != last).any(axis=1)), label, squared)
    return centers, ITERATIONS


def _follow(
    rows: NDArray[np.float64],
    own: NDArray[np.float64],
    centers: NDArray[np.float64],
    moved: NDArray[np.int64],
    label: NDArray[np.int64],
    squared: NDArray[np.float64],
) -> None:
    """Bring each row's nearest center, and the squared distance to it, up to date in place, after some centers moved.

    Where a row's own center is no farther than before, no center that stayed can have become its nearest, and the row
    is compared with those that moved alone; else with all. Late iterations move few centers.
    """
    going = np.zeros(len(centers), dtype=np.bool_)
    going[moved] = True
    with_it = np.flatnonzero(going[label] | np.isneginf(squared))
    dots = exact_dots(rows, with_it, centers, label[with_it])
    now = own[with_it] + _square_lengths(centers)[label[with_it]] - 2.0 * dots
    left = np.zeros(len(rows), dtype=np.bool_)
    left[with_it] = now > squared[with_it]
    squared[with_it] = now
    if len(moved):
        others = np.flatnonzero(~left)
        found, away = nearest(rows, centers[moved], others)
        found = moved[found]
        better = (away < squared[others]) | ((away == squared[others]) & (found < label[others]))
        label[others[better]], squared[others[better]] = found[better], away[better]
    alone = np.flatnonzero(left)
    label[alone], squared[alone] = nearest(rows, centers, alone)
