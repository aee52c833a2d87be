"""Gradients as unit rows, in tiles of float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.run_folder.mapped import let_go
from sdo.checks import as_array, real_array
from sdo.errors import InputError

TILE = 512  # rows in float64 at once: 32 MiB at k = 8192
_COLUMNS_BYTES = 64 * 2**20


def as_matrix(rows: ArrayLike, defined: NDArray[np.bool_] | None) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the rows as an array and the (n,) mask of those that are given; all by default.

    Raises
    ------
    InputError
        If the rows make no matrix of real numbers, entries are masked, or the mask is none of (n,) bool.
    """
    array = real_array(rows, "gradients")
    if array.ndim != 2:
        raise InputError(f"expected a matrix with one gradient a row, not an array of shape {array.shape}")
    given = np.ones(len(array), dtype=bool) if defined is None else as_array(defined, "entries of defined")
    if given.shape != (len(array),) or (given.size and given.dtype != bool):
        raise InputError(f"defined has shape {given.shape} and type {given.dtype}; expected ({len(array)},) bool")
    return array, given.astype(bool)


@dataclass(frozen=True, eq=False)
class UnitRows:
    """Unit rows of a matrix, made block by block, so that only the matrix itself is held whole.

    Attributes
    ----------
    rows
        (n, k), the matrix; may be mapped from a file.
    peak, length
        (n,), as :func:`lengths` returns them.
    ok
        (n,), rows with a direction; the others are zero.
    """

    rows: NDArray[Any]
    peak: NDArray[np.float64]
    length: NDArray[np.float64]
    ok: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: NDArray[Any], given: NDArray[np.bool_]) -> UnitRows:
        """Measure all rows once."""
        return cls(rows, *lengths(rows, given))

    def block(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return rows ``start`` to ``stop - 1``, (n, k) float64."""
        part = slice(start, stop)
        unit = self.rows[part].astype(np.float64)
        self._divide(unit, part)
        let_go(self.rows)
        return unit

    def columns(self) -> Iterator[NDArray[np.float64]]:
        """Yield the columns of all rows, (n, c) float64, a few at a time."""
        width = max(16, _COLUMNS_BYTES // (8 * max(len(self.rows), 1)))
        for start in range(0, self.rows.shape[1], width):
            part = slice(start, min(start + width, self.rows.shape[1]))
            unit = np.empty((len(self.rows), part.stop - start))
            for first in range(0, len(self.rows), TILE):
                unit[first : first + TILE] = self.rows[first : first + TILE, part]
                let_go(self.rows)  # a page holds more columns than these
            self._divide(unit, slice(None))
            yield unit

    def _divide(self, unit: NDArray[np.float64], part: slice) -> None:
        if not self.ok[part].all():
            unit[~self.ok[part]] = 0.0
        if np.any(self.peak[part] != 1.0):
            unit /= self.peak[part, None]
        unit /= self.length[part, None]


def unit_rows(rows: NDArray[Any], given: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return (n, k) unit rows, zero where undefined, and the (n,) mask of the defined ones."""
    units = UnitRows.of(rows, given)
    return units.block(0, len(rows)), units.ok


def lengths(
    rows: NDArray[Any], given: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return a scale and the length of row / scale, (n,) and 1 where undefined, and the mask of the defined rows.

    Squares of float32 neither overflow nor vanish in float64, and the scale is 1; other rows are divided by their
    largest |entry| first.
    """
    peak, length = np.ones(len(rows)), np.ones(len(rows))
    ok = given.copy()
    narrow = rows.dtype in (np.float32, np.float16)
    for start in range(0, len(rows), TILE):
        part = slice(start, start + TILE)
        block = np.asarray(rows[part], dtype=np.float64)
        largest = np.maximum(block.max(axis=1, initial=0.0), -block.min(axis=1, initial=0.0))
        ok[part] &= np.isfinite(largest) & (largest > 0)
        if not ok[part].all():
            block = np.where(ok[part][:, None], block, 1.0)
        if not narrow:
            peak[part] = np.where(ok[part], largest, 1.0)
            block = block / peak[part][:, None]
        length[part] = np.where(ok[part], np.sqrt(np.einsum("ij,ij->i", block, block)), 1.0)
        let_go(rows)
    return peak, length, ok
