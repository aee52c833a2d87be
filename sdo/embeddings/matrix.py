"""The embedding matrix: read, check, normalize, fingerprint, and the ids of its rows.

Rows are normalized and rounded to multiples of 2**-24. Such numbers fit float32, their products are multiples of
2**-48, and sums of products of two unit rows stay below 2: float64 dot products are exact in any order. Neighbors,
and so whole plans, are therefore identical on every machine and thread count.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdo.checks import as_array, integer_array
from sdo.embeddings.files import normalize_ids, read_matrix_file
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
        SHA-256 of the rounded rows; equal fingerprints give equal plans. Ids are left out: a plan depends on the rows
        alone, and ids only name them.
    path
        Where the matrix was read from, or None.
    ids
        Shape ``(N,)``, int64 or strings, each once: the key of each row; None where rows are known by their number.
    merged
        How many rows point elsewhere than another one, beyond the precision of their type, and are equal to it once
        rounded. Rows that were equal before are not among them.
    """

    unit: NDArray[np.float32]
    valid: NDArray[np.bool_]
    fingerprint: str
    path: str | None = None
    ids: NDArray[Any] | None = None
    merged: int = 0

    def __len__(self) -> int:
        return int(self.unit.shape[0])

    @property
    def dim(self) -> int:
        """Number of columns d."""
        return int(self.unit.shape[1])

    @classmethod
    def from_array(cls, array: Any, *, ids: ArrayLike | None = None, path: str | None = None) -> Embeddings:
        """Check and normalize a matrix; the input is not modified.

        Parameters
        ----------
        array
            Shape ``(N, d)``, float16, float32, float64 or bfloat16 (ml_dtypes), contiguous or not; or a torch tensor of
            these types, on any device.
        ids
            Shape ``(N,)``, integers or strings, each once: what a dataset's column may name the rows by.
        path
            Recorded as the matrix's origin.

        Raises
        ------
        InputError
            If the array is not 2-D, is empty, has masked entries, or does not hold floating-point numbers, or the ids
            do not fit it.
        """
        return cls._normalized(as_array(array, "embeddings"), ids, path, bfloat16_bits=False)

    @classmethod
    def read(cls, path: str | Path) -> Embeddings:
        """Read a ``.npy``, ``.npz`` or ``.safetensors`` file.

        Parameters
        ----------
        path
            ``.npy``: the matrix. ``.npz``: arrays ``embeddings`` and, where rows have keys, ``ids``; other names serve
            if they leave no doubt. ``.safetensors``: tensor ``embeddings`` or the only 2-D one, bfloat16 among the
            types; ids in an int64 tensor ``ids`` or as a JSON list under the metadata key ``ids``. Pickled objects are
            refused.

        Raises
        ------
        InputError
            If the file is missing, is not what its name says, holds objects, or :meth:`from_array` refuses the matrix.
        """
        held = read_matrix_file(path)
        return cls._normalized(held.matrix, held.ids, str(path), bfloat16_bits=held.bfloat16)

    @classmethod
    def _normalized(
        cls, matrix: NDArray[Any], ids: ArrayLike | None, path: str | None, *, bfloat16_bits: bool
    ) -> Embeddings:
        what = f"embeddings {path}" if path else "embeddings"
        if not bfloat16_bits and matrix.dtype.name not in ("float16", "float32", "float64", "bfloat16"):
            lost = "numpy.save loses the type bfloat16; " if matrix.dtype.kind == "V" else ""
            raise InputError(
                f"{what} hold {matrix.dtype}; expected float16, float32, float64 or bfloat16; "
                f"fix: {lost}save the matrix with array.astype('float32')"
            )
        if matrix.ndim != 2:
            raise InputError(
                f"{what} have shape {matrix.shape}; expected (N, d), one row a sample; fix: reshape to two dimensions"
            )
        if 0 in matrix.shape:
            raise InputError(f"{what} are empty, shape {matrix.shape}; expected at least one row and one column")
        names = None if ids is None else normalize_ids(ids, len(matrix), what)
        unit = np.empty(matrix.shape, dtype=np.float32)
        valid = np.empty(matrix.shape[0], dtype=np.bool_)
        for start in range(0, len(matrix), _BLOCK):
            rows = slice(start, start + _BLOCK)
            block = _block_of(matrix, start, min(start + _BLOCK, len(matrix)))
            unit[rows], valid[rows] = unit_rows(_from_bfloat16(block) if bfloat16_bits else block)
        merged = _merged_rows(matrix, unit, valid, bfloat16_bits=bfloat16_bits)
        return cls(unit, valid, _fingerprint(unit, valid), path, names, merged)

    def rows_of(self, keys: ArrayLike, what: str = "keys") -> NDArray[np.int64]:
        """Return the row numbers that keys stand for.

        Parameters
        ----------
        keys
            Shape ``(n,)``, of the same kind as :attr:`ids`.
        what
            Where the keys come from; named in errors.

        Returns
        -------
        NDArray[np.int64]
            Shape ``(n,)``.

        Raises
        ------
        InputError
            If the embeddings bring no ids, the kinds differ, or a key is unknown; the first such key is named. Also for
            keys that are masked or not one-dimensional.
        """
        if self.ids is None:
            raise InputError(f"{what} are to be looked up, but the embeddings bring no ids; expected ids beside them")
        wanted = as_array(keys, what)
        if wanted.shape == (0,):
            return np.empty(0, dtype=np.int64)
        kinds = {"i": "integers", "u": "integers", "U": "strings"}
        came, here = kinds.get(wanted.dtype.kind, str(wanted.dtype)), kinds[self.ids.dtype.kind]
        if came != here:
            raise InputError(
                f"{what} hold {came}, the ids of the embeddings are {here}; expected the same kind; "
                f"fix: write the column as {here}, or embed again with ids that are {came}"
            )
        if wanted.ndim != 1:
            raise InputError(f"{what} have shape {wanted.shape}; expected (n,), one dimension of keys")
        wanted = integer_array(wanted, what) if came == "integers" else wanted
        order = np.argsort(self.ids, kind="stable")
        place = np.minimum(np.searchsorted(self.ids, wanted, sorter=order), len(order) - 1)
        rows = order[place]
        unknown = np.flatnonzero(self.ids[rows] != wanted)
        if len(unknown):
            raise InputError(
                f"{what}: {wanted[unknown[0]].item()!r} (row {unknown[0]}) is not among the {len(self)} ids of the "
                f"embeddings, nor are {len(unknown) - 1} others; expected keys that they hold; "
                "fix: embed the same data with its --id-column"
            )
        return rows.astype(np.int64)

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
            "expected finite, non-zero rows; fix: embed these samples again, or organize them without "
            "neighbors by on_invalid='isolate' (sdo plan: --on-invalid isolate; sdo sft: "
            "--organizer.on_invalid isolate)"
        )


def unit_rows(rows: NDArray[np.floating]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Normalize rows to multiples of 2**-24, with the same bits on every machine.

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
    with np.errstate(invalid="ignore"):  # signalling NaN: named later, as any other NaN
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
    """Return embeddings from a matrix, a tensor, a path that :meth:`Embeddings.read` takes, or themselves."""
    if isinstance(source, Embeddings):
        return source
    if isinstance(source, str | Path):
        return Embeddings.read(source)
    return Embeddings.from_array(source)


def within_batch_cosine(
    unit: NDArray[np.float32], valid: NDArray[np.bool_], ids: NDArray[np.int64], offsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Mean pairwise cosine of the rows in each batch.

    Parameters
    ----------
    unit
        Shape ``(N, d)``, unit rows; zero where they have no direction.
    valid
        Shape ``(N,)``, rows with a direction; the others are left out.
    ids
        Shape ``(S,)``, row numbers of all batches, one batch after the other.
    offsets
        Shape ``(T + 1,)``: batch t holds ``ids[offsets[t] : offsets[t + 1]]``, which may be empty.

    Returns
    -------
    NDArray[np.float64]
        Shape ``(T,)``: ``(|sum z|**2 - sum |z|**2) / (b (b - 1))`` over the b rows with a direction; NaN where b < 2.
    """
    T = len(offsets) - 1
    cosine = np.full(T, np.nan)
    start = 0
    while start < T:
        # As many whole batches as fill a block, at least one.
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + _BLOCK, side="right")) - 1)
        part = ids[offsets[start] : offsets[stop]]
        filled = start + np.flatnonzero(np.diff(offsets[start : stop + 1]))
        if len(filled):
            first = offsets[filled] - offsets[start]
            rows = unit[part].astype(np.float64)
            own = np.add.reduceat(np.einsum("ij,ij->i", rows, rows), first)
            total = np.square(np.add.reduceat(rows, first, axis=0)).sum(axis=1)
            count = np.add.reduceat(valid[part].astype(np.int64), first)
            pairs = count * (count - 1)
            several = pairs > 0
            cosine[filled[several]] = (total - own)[several] / pairs[several]
        start = stop
    return cosine


def _block_of(matrix: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    """Rows ``start`` to ``stop - 1``; where :func:`read_matrix_file` mapped a file, by a map of their own.

    The pages of one map of the whole file would stay resident beside the normalized rows: twice the memory.
    """
    if not isinstance(matrix, np.memmap) or matrix.filename is None or not matrix.flags.c_contiguous:
        return matrix[start:stop]
    offset = matrix.offset + start * matrix.shape[1] * matrix.itemsize
    shape = (stop - start, matrix.shape[1])
    return np.memmap(matrix.filename, dtype=matrix.dtype, mode="r", offset=offset, shape=shape)


def _merged_rows(
    matrix: NDArray[Any], unit: NDArray[np.float32], valid: NDArray[np.bool_], *, bfloat16_bits: bool
) -> int:
    """Count the rows that rounding made equal to an earlier one from which they differ; see `Embeddings.merged`."""
    rows = np.flatnonzero(valid)
    weight = np.arange(1, unit.shape[1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    key = np.empty(len(rows), dtype=np.uint64)
    for start in range(0, len(rows), _BLOCK):
        part = unit[rows[start : start + _BLOCK]] + np.float32(0)  # -0.0 becomes 0.0
        key[start : start + _BLOCK] = part.view(np.uint32).astype(np.uint64) @ weight
    order = np.argsort(key, kind="stable")
    alike = np.concatenate([[False], key[order][1:] == key[order][:-1]])
    if not alike.any():
        return 0
    first = rows[order[np.maximum.accumulate(np.where(alike, 0, np.arange(len(order))))]]
    pairs = np.stack([first[alike], rows[order[alike]]])
    merged = 0
    for start in range(0, pairs.shape[1], _BLOCK):
        one, other = pairs[:, start : start + _BLOCK]
        equal = (unit[one] == unit[other]).all(axis=1)  # the keys may have met by chance
        left, right = (_directions(matrix[side], bfloat16_bits=bfloat16_bits) for side in (one, other))
        step = 2.0**-7 if bfloat16_bits or matrix.dtype.name == "bfloat16" else float(np.finfo(matrix.dtype).eps)
        noise = (2 * step + 1e-13) * np.maximum(np.abs(left), np.abs(right))
        merged += int((equal & (np.abs(left - right) > noise).any(axis=1)).sum())
    return merged


def _directions(rows: NDArray[Any], *, bfloat16_bits: bool) -> NDArray[np.float64]:
    wide = np.asarray(_from_bfloat16(rows) if bfloat16_bits else rows, dtype=np.float64)
    wide = wide / np.abs(wide).max(axis=1, keepdims=True)
    return np.asarray(wide / np.sqrt(np.square(wide).sum(axis=1, keepdims=True)))


def _from_bfloat16(bits: NDArray[Any]) -> NDArray[np.float32]:
    """The numbers that bfloat16 bits stand for: the upper half of a float32, so the conversion is exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _fingerprint(unit: NDArray[np.float32], valid: NDArray[np.bool_]) -> str:
    digest = hashlib.sha256(f"sdo-embeddings-1 {unit.shape[0]} {unit.shape[1]} ".encode())
    for start in range(0, len(unit), _BLOCK):
        # Adding zero turns -0.0 into 0.0: equal numbers, equal bytes.
        digest.update((unit[start : start + _BLOCK] + np.float32(0)).astype("<f4").tobytes())
    digest.update(valid.tobytes())
    return digest.hexdigest()
