"""Gradients as unit rows, in tiles of float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

TILE = 512  # rows or columns in float64 at once: 32 MiB at k = 8192


def as_matrix(rows: ArrayLike, defined: NDArray[np.bool_] | None) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the rows as an array and the (n,) mask of those that are given; all by default."""
    array = np.asarray(rows)
    if array.ndim != 2:
        raise ValueError(f"expected a matrix with one gradient a row, not an array of shape {array.shape}")
    given = np.ones(len(array), dtype=bool) if defined is None else np.asarray(defined, dtype=bool)
    if given.shape != (len(array),):
        raise ValueError(f"defined has shape {given.shape}; expected ({len(array)},)")
    return array, given


def unit_rows(rows: NDArray[Any], given: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return (n, k) unit rows, zero where undefined, and the (n,) mask of the defined ones."""
    peak, length, ok = lengths(rows, given)
    unit = np.where(ok[:, None], rows, 0.0) / peak[:, None] / length[:, None]
    return unit, ok


def lengths(
    rows: NDArray[Any], given: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return largest |entry| and length of row / largest entry, (n,) and 1 where undefined, and the mask.

    Dividing by the largest entry first keeps squares from overflowing and underflowing.
    """
    peak, length = np.ones(len(rows)), np.ones(len(rows))
    ok = given.copy()
    for start in range(0, len(rows), TILE):
        part = slice(start, start + TILE)
        block = np.asarray(rows[part], dtype=np.float64)
        largest = np.abs(block).max(axis=1, initial=0.0)
        ok[part] &= np.isfinite(largest) & (largest > 0)
        block = np.where(ok[part][:, None], block, 1.0)
        peak[part] = np.where(ok[part], largest, 1.0)
        block = block / peak[part][:, None]
        length[part] = np.where(ok[part], np.sqrt(np.einsum("ij,ij->i", block, block)), 1.0)
    return peak, length, ok
