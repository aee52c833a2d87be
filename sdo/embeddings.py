"""The embedding matrix: read, check, normalise, fingerprint.

Rows are normalised and rounded to multiples of 2**-24. Such numbers fit float32, their products are multiples of
2**-48, and sums of products of two unit rows stay below 2: float64 dot products are exact in any order. Neighbours,
and so whole plans, are therefore identical on every machine and thread count.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdo.errors import InputError

_GRID_BITS = 24
_BLOCK = 4096
_NAMED_ROWS = 8


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Unit rows of an embedding matrix; row ``i`` belongs to sample ``i``.

    Build it with :meth:`from_array` or :meth:`read`.

    Attributes
    ----------
    unit
        Shape ``(N, d)``, float32, rows of norm 1 rounded to multiples of 2**-24; unusable rows are zero.
    valid
        Shape ``(N,)``, False where a row holds NaN or infinity, or is zero: it has no direction.
    fingerprint
        SHA-256 of the rounded rows; equal fingerprints give equal plans.
    path
        Where the matrix was read from, or None.
    """

    unit: NDArray[np.float32]
    valid: NDArray[np.bool_]
    fingerprint: str
    path: str | None = None

    def __len__(self) -> int:
        return int(self.unit.shape[0])

    @property
    def dim(self) -> int:
        """Number of columns d."""
        return int(self.unit.shape[1])

    @classmethod
    def from_array(cls, array: ArrayLike, *, path: str | None = None) -> Embeddings:
        """Check and normalise a matrix; the input is not modified.

        Parameters
        ----------
        array
            Shape ``(N, d)``, float16, float32 or float64, contiguous or not.
        path
            Recorded as the matrix's origin.

        Raises
        ------
        InputError
            If the array is not 2-D, is empty, or does not hold floating-point numbers.
        """
        matrix = np.asarray(array)
        what = f"embeddings {path}" if path else "embeddings"
        if matrix.dtype not in (np.float16, np.float32, np.float64):
            raise InputError(
                f"{what} hold {matrix.dtype}; expected float16, float32 or float64; "
                "mend: save the matrix with array.astype('float32')"
            )
        if matrix.ndim != 2:
            raise InputError(
                f"{what} have shape {matrix.shape}; expected (N, d), one row a sample; mend: reshape to two dimensions"
            )
        if 0 in matrix.shape:
            raise InputError(f"{what} are empty, shape {matrix.shape}; expected at least one row and one column")
        unit = np.empty(matrix.shape, dtype=np.float32)
        valid = np.empty(matrix.shape[0], dtype=np.bool_)
        for start in range(0, len(matrix), _BLOCK):
            rows = slice(start, start + _BLOCK)
            unit[rows], valid[rows] = unit_rows(matrix[rows])
        return cls(unit=unit, valid=valid, fingerprint=_fingerprint(unit, valid), path=path)

    @classmethod
    def read(cls, path: str | Path) -> Embeddings:
        """Read a ``.npy`` file.

        Parameters
        ----------
        path
            A file written by ``numpy.save``; pickled objects are refused.

        Raises
        ------
        InputError
            If the file is missing, is no ``.npy`` file, holds objects, or :meth:`from_array` refuses the matrix.
        """
        file = Path(path)
        if not file.is_file():
            raise InputError(f"embeddings {path}: no such file; expected a .npy matrix; mend: sdo embed makes one")
        try:
            matrix = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            why = "holds Python objects" if "objects in dtype" in str(error) else "is not a readable .npy file"
            raise InputError(
                f"embeddings {path} {why}; expected a float matrix written by numpy.save; "
                "mend: numpy.save(path, array.astype('float32'))"
            ) from error
        if not isinstance(matrix, np.ndarray):
            raise InputError(f"embeddings {path} is an archive of arrays; expected one .npy matrix")
        return cls.from_array(matrix, path=str(path))

    def require_valid(self) -> None:
        """Refuse rows without a direction.

        Raises
        ------
        InputError
            Naming the first such rows and their number.
        """
        bad = np.flatnonzero(~self.valid)
        if not len(bad):
            return
        named = ", ".join(str(i) for i in bad[:_NAMED_ROWS]) + (", …" if len(bad) > _NAMED_ROWS else "")
        raise InputError(
            f"{len(bad)} of {len(self)} embedding rows hold NaN or infinity or are zero: {named}; "
            "expected finite, non-zero rows; mend: embed these samples again, or pass on_invalid='isolate' "
            "to organise them without neighbours"
        )


def unit_rows(rows: NDArray[np.floating]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Normalise rows to multiples of 2**-24, with the same bits on every machine.

    Parameters
    ----------
    rows
        Shape ``(n, d)``, any floating type.

    Returns
    -------
    tuple
        Unit rows, shape ``(n, d)``, float32, and which rows were usable, shape ``(n,)``; the others are zero.

    Notes
    -----
    A row is scaled by a power of two (exact) and rounded to integers of at most 25 bits, whose squares sum exactly in
    int64; square root and division are correctly rounded by IEEE 754. No step depends on an order of summation. The
    integer rounding moves a unit row by less than half of the final grid.
    """
    wide = np.asarray(rows, dtype=np.float64)
    finite: NDArray[np.bool_] = np.asarray(np.isfinite(wide).all(axis=1))
    wide = np.where(finite[:, None], wide, 0.0)
    peak = np.abs(wide).max(axis=1)
    valid = finite & (peak > 0)
    _, exponent = np.frexp(peak)
    # d squares of b-bit integers fit int64 as long as 2 b + log2(d) < 63.
    bits = min(_GRID_BITS + 1, (62 - int(np.ceil(np.log2(wide.shape[1])))) // 2)
    whole = np.rint(np.ldexp(wide, (bits - exponent)[:, None])).astype(np.int64)
    norm = np.sqrt(np.einsum("ij,ij->i", whole, whole).astype(np.float64))
    norm[~valid] = 1.0
    unit = np.rint(whole / norm[:, None] * 2.0**_GRID_BITS) * 2.0**-_GRID_BITS
    return unit.astype(np.float32), valid


def as_embeddings(source: Embeddings | ArrayLike | str | Path) -> Embeddings:
    """Return embeddings from a matrix, a path to a ``.npy`` file, or embeddings themselves."""
    if isinstance(source, Embeddings):
        return source
    if isinstance(source, str | Path):
        return Embeddings.read(source)
    return Embeddings.from_array(source)


def within_batch_cosine(
    unit: NDArray[np.float32], valid: NDArray[np.bool_], batches: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Mean pairwise cosine of the rows in each batch.

    Parameters
    ----------
    unit
        Shape ``(N, d)``, unit rows; zero where they have no direction.
    valid
        Shape ``(N,)``, rows with a direction; the others are left out.
    batches
        Shape ``(T, B)``, row numbers.

    Returns
    -------
    NDArray[np.float64]
        Shape ``(T,)``: ``(|sum z|**2 - sum |z|**2) / (b (b - 1))`` over the b rows with a direction; NaN where b < 2.
    """
    cosine = np.full(len(batches), np.nan)
    block = max(1, _BLOCK // batches.shape[1])
    for start in range(0, len(batches), block):
        part = batches[start : start + block]
        rows = unit[part].astype(np.float64)
        own = np.square(rows).sum(axis=(1, 2))
        count = valid[part].sum(axis=1)
        pairs = count * (count - 1)
        total = np.square(rows.sum(axis=1)).sum(axis=1)
        np.divide(total - own, pairs, out=cosine[start : start + block], where=pairs > 0)
    return cosine


def _fingerprint(unit: NDArray[np.float32], valid: NDArray[np.bool_]) -> str:
    digest = hashlib.sha256(f"sdo-embeddings-1 {unit.shape[0]} {unit.shape[1]} ".encode())
    for start in range(0, len(unit), _BLOCK):
        # Adding zero turns -0.0 into 0.0: equal numbers, equal bytes.
        digest.update((unit[start : start + _BLOCK] + np.float32(0)).astype("<f4").tobytes())
    digest.update(valid.tobytes())
    return digest.hexdigest()
