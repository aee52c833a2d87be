"""The neighborhood walk: anchors in random order, each followed by its neighbors, cut into batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdo.neighbors.exact import MISSING, exact_dots_with

_CHUNK = 512  # anchors looked at together: those already covered by then are never turned into Python objects


@dataclass(frozen=True, eq=False)
class Walk:
    """What one walk emitted.

    Attributes
    ----------
    batches
        Shape ``(T, B)``, sample indices of the full batches.
    rest
        Shape ``(r,)``, ``r < B``, what was left in the buffer.
    last_anchor
        The last sample that was activated.
    """

    batches: NDArray[np.int64]
    rest: NDArray[np.int64]
    last_anchor: int


def walk(
    order: NDArray[np.int64], neighbors: NDArray[np.int64], n_samples: int, batch_size: int, *, cover: bool
) -> Walk:
    """Walk the anchors and cut what they bring into batches of distinct samples.

    Parameters
    ----------
    order
        Shape ``(M,)``, the pool in the order of the anchors.
    neighbors
        Shape ``(M, K)``, the neighbors of ``order[i]``, nearest first; -1 where there is none.
    n_samples
        Number of samples N; every index is below it.
    batch_size
        Samples per batch, B.
    cover
        Whether a neighbor that was brought no longer becomes an anchor (``visit="cover"``).

    Notes
    -----
    The buffer carries over from anchor to anchor; a sample that is in the buffer already is not appended again. A
    sample may stand in several batches: borders of neighborhoods overlap.
    """
    visited = bytearray(n_samples)
    covered = np.frombuffer(visited, dtype=np.bool_)  # the same bytes
    emitted: list[int] = []
    append = emitted.append
    buffer: set[int] = set()
    last = MISSING
    for start in range(0, len(order), _CHUNK):
        left = start + np.flatnonzero(~covered[order[start : start + _CHUNK]])
        for anchor, row in zip(order[left].tolist(), neighbors[left].tolist(), strict=True):
            if visited[anchor]:
                continue
            visited[anchor] = 1
            last = anchor
            if MISSING in row:
                row = [i for i in row if i != MISSING]
            for i in (anchor, *row):
                if i in buffer:
                    continue
                append(i)
                buffer.add(i)
                if len(buffer) == batch_size:
                    buffer.clear()
            if cover:
                for i in row:
                    visited[i] = 1
    flat = np.array(emitted, dtype=np.int64)
    full = len(flat) - len(flat) % batch_size
    return Walk(batches=flat[:full].reshape(-1, batch_size), rest=flat[full:], last_anchor=last)


def least_exposed(
    candidates: NDArray[np.int64],
    exposure: NDArray[np.int64],
    count: int,
    tie: NDArray[np.float64] | None = None,
) -> NDArray[np.int64]:
    """Return the ``count`` least exposed candidates.

    Parameters
    ----------
    candidates
        Shape ``(m,)``, ascending sample indices, ``m >= count``.
    exposure
        Shape ``(m,)``, their exposures.
    count
        How many.
    tie
        Shape ``(m,)``, decides between equal exposures, smaller first; then the lower index.

    Returns
    -------
    NDArray[np.int64]
        Shape ``(count,)``, least exposed first.
    """
    keys = (candidates, exposure) if tie is None else (candidates, tie, exposure)
    return candidates[np.lexsort(keys)[:count]]


def fill(
    rest: NDArray[np.int64],
    pool: NDArray[np.int64],
    exposure: NDArray[np.int64],
    batch_size: int,
    tie: NDArray[np.float64] | None,
) -> NDArray[np.int64]:
    """Fill the last batch of an epoch with the least exposed pool members that it does not hold.

    Parameters
    ----------
    rest
        Shape ``(r,)``, what the walk left, ``0 < r < batch_size``.
    pool
        Shape ``(M,)``, ascending, at least ``batch_size`` members.
    exposure
        Shape ``(M,)``, exposures of the pool members, this epoch's batches counted.
    batch_size
        Samples per batch.
    tie
        Shape ``(M,)`` or None, see :func:`least_exposed`.

    Returns
    -------
    NDArray[np.int64]
        Shape ``(batch_size,)``: the rest, then the fill.
    """
    free = ~np.isin(pool, rest)
    added = least_exposed(pool[free], exposure[free], batch_size - len(rest), None if tie is None else tie[free])
    return np.concatenate([rest, added])


def distance_to_anchor(
    unit: NDArray[np.float32], valid: NDArray[np.bool_], pool: NDArray[np.int64], anchor: int
) -> NDArray[np.float64]:
    """Minus the cosine to the last anchor, shape ``(M,)``; infinite where either has no direction."""
    if not valid[anchor]:
        return np.full(len(pool), np.inf)
    return np.where(valid[pool], -exact_dots_with(unit, anchor, pool), np.inf)
