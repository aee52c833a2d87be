"""Whether the grid that rows are rounded to tells a sample's neighbors apart.

Rounding a unit row to multiples of 2**-24 changes its length by some 2**-26, and with it every dot product of the row.
Where the cosines of a sample's neighbors differ by less, as in embeddings that all but point one way, the lengths
decide who is a neighbor. The angles between the rounded rows are far finer: dividing by the lengths shows what the
rows themselves would have given, down to 1 - cosine of about 1e-12.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdo.neighbors.exact import MISSING

TOLERATED = 0.02  # share of neighbors: at 1 - cosine 1e-4 it is 0.005, at 1e-5 0.05, at 1e-6 0.3, at 1e-7 0.95

_ROWS = 1024  # looked at, evenly spaced
_FEWEST_ROWS = 16
_WORK = 2**33  # products of numbers that looking may take: about a second
_FAR = 1e-3  # 1 - cosine of the last neighbor beyond which rounding decides nothing worth a look
_SAME = 1e-11  # of the mean 1 - cosine: copies of a text differ by as much where the encoder rounded otherwise
_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Resolution:
    """How well the grid resolves the neighbors of some rows.

    Attributes
    ----------
    rows
        Rows looked at.
    k
        Neighbors of each.
    exchanged
        Share of their neighbors, 0 to 1, for which a nearer row was passed over.
    nearest
        Median 1 - cosine of the nearest other row, over the rows with a neighbor that was exchanged; None without.
    """

    rows: int
    k: int
    exchanged: float
    nearest: float | None

    def note(self, merged: int, total: int) -> str | None:
        """Return what a user has to know, on one line; None where the grid resolves nearly everything.

        Parameters
        ----------
        merged
            Rows that became equal to another one by rounding, of `total`.
        total
            Number of rows.
        """
        found = []
        if self.exchanged > TOLERATED:
            found.append(
                f"of the {self.k} nearest of each of {self.rows} rows, {self.exchanged:.0%} were passed over for rows "
                f"farther away (median 1 - cosine of the nearest {self.nearest:.1e})"
            )
        if merged > TOLERATED * total:
            found.append(f"{merged} of {total} rows differ from another one, and are equal to it once rounded")
        if not found:
            return None
        return (
            f"the embeddings are so nearly parallel that rounding to multiples of 2**-24 decides who is a neighbor: "
            f"{'; '.join(found)}; expected 1 - cosine of neighbors above about 1e-5; fix: subtract the mean row "
            "(E - E.mean(axis=0)) in float64, or use a model whose embeddings are spread out"
        )


def measure_resolution(unit: NDArray[np.float32], valid: NDArray[np.bool_], graph: NDArray[np.int64]) -> Resolution:
    """Compare the neighbors by rounded rows with those by the angles between them.

    Parameters
    ----------
    unit
        Shape ``(N, d)``, unit rows on the 2**-24 grid.
    valid
        Shape ``(N,)``, rows with a direction.
    graph
        Shape ``(N, k)``, the k nearest of each row by dot product, nearest first; -1 where there is none.

    Returns
    -------
    Resolution
        The same on every machine: dot products are exact, and division and square root correctly rounded. Rows whose
        last neighbor is far away are not compared, so that ordinary embeddings cost nothing.

    Notes
    -----
    A neighbor counts as exchanged if its cosine is below the k-th largest by more than 1e-11 of the mean of 1 - cosine
    over all rows. Equal rows, and copies of a text that differ by the rounding of float32 alone, are thus as good as
    each other.
    """
    members = np.flatnonzero(valid)
    k = graph.shape[1]
    most = max(_FEWEST_ROWS, min(_ROWS, _WORK // max(1, len(members) * unit.shape[1])))
    rows = members[:: max(1, -(-len(members) // most))]
    rows = rows[(graph[rows] != MISSING).all(axis=1)] if k else rows[:0]
    if not len(rows):
        return Resolution(0, k, 0.0, None)
    last = _unit_length(unit, rows) - _unit_length(unit, graph[rows, -1])
    close = rows[np.square(last).sum(axis=1) / 2 < _FAR]
    exchanged, nearest = 0, []
    block = max(1, _BLOCK_BYTES // (8 * max(1, len(members))))
    for start in range(0, len(close), block):
        part = close[start : start + block]
        cosine = _cosines(unit, part, members)
        cosine[np.arange(len(part)), np.searchsorted(members, part)] = -np.inf
        kth = np.partition(cosine, len(members) - k, axis=1)[:, len(members) - k]
        chosen = np.take_along_axis(cosine, np.searchsorted(members, graph[part]), axis=1)
        largest = cosine.max(axis=1)
        cosine[np.isinf(cosine)] = 1.0  # a row with itself, which has no part in the mean
        spread = (1 - cosine).mean(axis=1)
        farther = (chosen < (kth - _SAME * spread)[:, None]).sum(axis=1)
        exchanged += int(farther.sum())
        nearest += np.maximum(1 - largest[farther > 0], 0).tolist()
    return Resolution(len(rows), k, exchanged / (k * len(rows)), float(np.median(nearest)) if nearest else None)


def _unit_length(unit: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    wide = unit[rows].astype(np.float64)
    return np.asarray(wide / np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None])


def _cosines(unit: NDArray[np.float32], rows: NDArray[np.int64], members: NDArray[np.int64]) -> NDArray[np.float64]:
    """Cosines of some rows with all members, shape (len(rows), len(members)), from exact products and lengths."""
    wide = unit[rows].astype(np.float64)
    own = np.sqrt(np.einsum("ij,ij->i", wide, wide))
    cosine = np.empty((len(rows), len(members)), dtype=np.float64)
    step = max(1, _BLOCK_BYTES // (8 * unit.shape[1]))
    for first in range(0, len(members), step):
        other = unit[members[first : first + step]].astype(np.float64)
        length = np.sqrt(np.einsum("ij,ij->i", other, other))
        cosine[:, first : first + step] = (wide @ other.T) / length / own[:, None]
    return cosine
