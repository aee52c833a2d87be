"""Hashed linear sketches of gradients.

A gradient of 10⁷ to 10⁹ entries cannot be kept for every step; a count-sketch of 8,192 numbers can. Entry n
of the gradient is added with sign s(n) to bucket h(n), so inner products, and with the exact norms cosines,
are preserved without bias. The sketch is linear: micro-batches, ranks and row shards add up. The tables h and
s come from integer arithmetic alone, so every device, thread count and library version hashes alike.

Sources: Charikar, Chen & Farach-Colton 2002 (count-sketch); Weinberger et al. 2009, arXiv:0902.2206 (the
inner product is unbiased, with variance of at most (|a|²|b|² + <a, b>²) / k); Steele, Lea & Flood 2014
(the splitmix64 finaliser).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diagnostics.sketches import chunks as pieces
from diagnostics.sketches.gpu import ParallelTables
from sdo.checks import whole_number
from sdo.errors import InputError

SKETCH_VERSION = 2
"""Grows whenever the same gradient would get another sketch; sketches of two versions must not be mixed."""
ROW_SKETCH_VERSION = 3
"""The same for sketches that hash rows first, which have changed since; always above the other."""

ROW_BUCKETS = 4096
COLUMN_BUCKETS = 8192
COLUMN_GROUPS = (4, 2, 1)  # where rows are hashed, each group of columns hashes them apart: the first that divides them
TABLE_ENTRIES = ROW_BUCKETS * COLUMN_BUCKETS  # the largest flat table: 2^25 int32, 128 MiB
PRODUCT_ENTRIES = 1 << 22  # a gradient that comes as factors is formed up to here; beyond, its rows are hashed first
FOLD_ENTRIES = 1 << 24  # float32 accumulators of one block of columns in the first stage: 64 MiB

_GOLDEN = 0x9E3779B97F4A7C15
_STAGE_ROWS, _STAGE_COLUMNS, _STAGE_FLAT = 1, 2, 3


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the splitmix64 finaliser of every entry (arrays of uint64 wrap silently, as wanted here)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_table(seed: int, stage: int, count: int, buckets: int) -> NDArray[np.int32]:
    """Return ``2 * bucket + (sign is negative)`` of the entries 0 … count − 1.

    Parameters
    ----------
    seed, stage
        Select the hash function: entry n gets the n-th output of splitmix64 started at
        mix(mix(seed mod 2⁶⁴) + stage).
    count
        Number of entries.
    buckets
        Number of buckets, below 2³⁰. The bucket is (x >> 32) · buckets >> 32, the sign bit is x & 1.

    Returns
    -------
    numpy.ndarray
        (count,) int32.
    """
    key = int(_mix(np.array([seed % (1 << 64)], dtype=np.uint64))[0])
    key = int(_mix(np.array([(key + stage) % (1 << 64)], dtype=np.uint64))[0])
    table = np.empty(count, dtype=np.int32)
    for start in range(0, count, pieces.PIECE_ENTRIES):  # in pieces: the uint64 temporaries stay small
        n = np.arange(start + 1, min(start + pieces.PIECE_ENTRIES, count) + 1, dtype=np.uint64)
        x = _mix(n * np.uint64(_GOLDEN) + np.array([key], dtype=np.uint64))
        bucket = ((x >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32)
        table[start : start + len(n)] = (bucket << np.uint64(1)) | (x & np.uint64(1))
    return table


def _fold_rows(block: torch.Tensor, index: torch.Tensor, buckets: int) -> torch.Tensor:
    """Add the rows of a block of columns into their signed buckets: (rows, width) to (buckets, width).

    For 49,152 × 576 float32 on one thread this takes 16 ms. Others: scatter_add_ with an expanded index the
    same, embedding_bag on sorted rows 0.7 and a sparse CSR product 0.65 of it, but both need the signs as
    floats and a whole float32 copy of a bfloat16 gradient (48 ms); segment_reduce 10 times it.
    """
    signed = torch.zeros(2 * buckets, block.shape[1], dtype=torch.float32, device=block.device)
    for row, _, piece in pieces.pieces_of(block):  # a block is narrower than a piece: pieces are whole rows
        signed.index_add_(0, index[row : row + piece.shape[0]], piece.float())
    return signed[0::2] - signed[1::2]


class GradientSketch:
    """The sketch of the gradients of one parameter.

    A gradient is seen as a matrix (rows, cols) = (shape[0], all the rest); a vector is one row. The rule:

    1. at most k entries: ``identity``, the entries themselves in row-major order;
    2. at most 2²⁵ entries: ``count``, one count-sketch of the row-major index;
    3. more: the rows, where there are more than 4,096, are first hashed to 4,096 (they are added, with a sign),
       in each of four groups of columns (two or one, where four do not divide them) by a hash function of its own;
       the columns, where the matrix would still hold more than 2²⁵ entries and has more than 8,192 of them, are
       hashed to 8,192; then ``count`` on what is left. This is ``count_two_stage``, if something was hashed
       first, else ``count``.

    Two stages err more where few rows carry the gradient and point alike, as those of a language-model head do: where
    two of them meet in a bucket. Each group of columns has a hash of its own so that hardly ever two rows meet
    with all of their entries. On six head gradients of SmolLM2-135M (49,152 × 576, cosines of 0.2 to 0.5; eight hash
    functions) the rmse of the cosine was 0.0092 in one stage, 0.0103 in two with four groups and 0.021 with one, at 46,
    72 and 38 ms. A run compares the sketches of its first steps with the gradients, and says how far they were off.

    The tables take 4 bytes an entry of the last stage (at most 128 MiB) plus 16 (rows) or 8 (columns) bytes a
    row or column, on other devices 20 and 5; they are made once and copied to each device at first use.

    Parameters
    ----------
    shape
        Shape of the parameter.
    k
        Number of buckets. The cosine of two unrelated gradients is estimated with a standard error of about
        1/√k, that of nearly parallel ones with less.
    seed
        Selects the hash function. Only sketches of equal ``describe()`` may be compared.
    factored
        For gradients that come as factors, to :meth:`sketch_product`: rows are hashed first already beyond 2²² entries,
        since the product would cost more than its sketch.

    Attributes
    ----------
    stored : int
        Length of a sketch: k, or the number of entries where that is at most k.
    kind : str
        ``"identity"``, ``"count"`` or ``"count_two_stage"``.

    Raises
    ------
    InputError
        If the shape has no entries or k is not between 1 and 2³⁰ − 1.

    Examples
    --------
    >>> import torch
    >>> sketcher = GradientSketch((3, 2), k=8192)
    >>> sketcher.sketch(torch.ones(3, 2)).shape
    torch.Size([6])
    """

    def __init__(self, shape: Sequence[int], k: int = 8192, seed: int = 0, *, factored: bool = False) -> None:
        self.shape = tuple(int(size) for size in shape)
        self.k = whole_number("sketch size k", k, 1, (1 << 30) - 1)
        self.seed = int(seed)
        entries = math.prod(self.shape)
        if entries < 1:
            raise InputError(f"cannot sketch a parameter of shape {self.shape}: it has no entries")
        self._rows, self._cols = pieces.matrix_shape(self.shape)
        self.row_buckets: int | None = None
        self.column_groups: int | None = None
        self.column_buckets: int | None = None
        if entries > max(self.k, PRODUCT_ENTRIES if factored else TABLE_ENTRIES):
            if self._rows > ROW_BUCKETS:
                self.row_buckets = ROW_BUCKETS
                self.column_groups = next(groups for groups in COLUMN_GROUPS if self._cols % groups == 0)
            if (self.row_buckets or self._rows) * self._cols > TABLE_ENTRIES and self._cols > COLUMN_BUCKETS:
                self.column_buckets = COLUMN_BUCKETS
        self.stored = min(entries, self.k)
        if entries <= self.k:
            self.kind = "identity"
        else:
            self.kind = "count_two_stage" if self.row_buckets or self.column_buckets else "count"
        self._tables: dict[str, torch.Tensor] = {}
        self._parallel: dict[tuple[torch.device, tuple[int, int], tuple[int, int]], ParallelTables] = {}

    def describe(self) -> dict[str, Any]:
        """Return what run.json keeps: everything that decides which numbers a sketch holds."""
        return {
            "kind": self.kind,
            "version": ROW_SKETCH_VERSION if self.row_buckets else SKETCH_VERSION,
            "shape": list(self.shape),
            "k": self.k,
            "seed": self.seed,
            "stored": self.stored,
            "row_buckets": self.row_buckets,
            "column_groups": self.column_groups,
            "column_buckets": self.column_buckets,
        }

    @property
    def table_bytes(self) -> int:
        """Bytes of the hash tables made so far, on all devices; an identity needs none."""
        tensors = [*self._tables.values(), *(one for tables in self._parallel.values() for one in tables.tensors)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def sketch(self, grad: torch.Tensor) -> torch.Tensor:
        """Sketch one gradient.

        Parameters
        ----------
        grad
            Gradient of the parameter's shape: float32, bfloat16, float16 or float64, any strides. It is
            neither changed nor kept.

        Returns
        -------
        torch.Tensor
            (stored,) float32 on the gradient's device. Sums are float32; on a CPU they do not depend on the
            number of threads, on other devices their order may vary. Beyond the tables at most 112 MiB are in use
            for a moment on a CPU: 64 MiB of accumulators, 32 MiB of their differences and pieces of 2²⁰ entries;
            elsewhere what is left after hashing rows, twice, or columns in float32 (of a 151,936 × 1,024 gradient
            2 × 16 MiB, of its transpose 32 MiB, of a 2,560 × 151,936 one 80 MiB) and 64 MiB. (A non-contiguous gradient
            of three or more dimensions is copied whole, and on other devices one whose rows are hashed.)

        Raises
        ------
        InputError
            If the shape is another one, or the gradient is sparse or not of a floating type.
        """
        if tuple(grad.shape) != self.shape:
            raise InputError(f"gradient has shape {tuple(grad.shape)}; the sketch was made for {self.shape}")
        return self.sketch_shard(grad, 0)

    def sketch_shard(self, shard: torch.Tensor, offset: int) -> torch.Tensor:
        """Sketch a part of a gradient, all else being zero: the parts' sketches add up to the whole gradient's.

        Parameters
        ----------
        shard
            Consecutive slices along the gradient's first dimension, as FSDP2 cuts it; it may be empty.
        offset
            Index of the first of them.

        Returns
        -------
        torch.Tensor
            (stored,) float32, as from `sketch`.

        Raises
        ------
        InputError
            If the part does not lie inside the gradient, or it is sparse or not of a floating type.
        """
        count = shard.shape[0] if shard.ndim else 1
        length = self.shape[0] if self.shape else 1
        if tuple(shard.shape[1:]) != self.shape[1:] or not 0 <= offset <= length - count:
            raise InputError(
                f"a part of shape {tuple(shard.shape)} at {offset} does not lie inside a gradient of shape {self.shape}"
            )
        if shard.layout != torch.strided or not shard.is_floating_point():
            raise InputError(f"gradient is {shard.layout}, {shard.dtype}; expected a dense floating tensor")
        if not shard.numel():
            return torch.zeros(self.stored, dtype=torch.float32, device=shard.device)
        if len(self.shape) > 1:
            return self._sketch_block(pieces.matrix_of(shard, (count, self._cols)), offset, 0)
        return self._sketch_block(pieces.matrix_of(shard, (1, count)), 0, offset)

    def sketch_product(self, left: Iterable[tuple[int, torch.Tensor]], right: torch.Tensor) -> torch.Tensor:
        """Sketch ``sum over t of g_t (x) h_t`` from its factors.

        The matrix is formed only as far as its rows are hashed: in a ``factored`` sketch at most 4,096 of them, unless
        it has fewer than 2²² entries. Hashing the left factor takes 128 KiB for each of the T columns on a CPU, since
        each of four groups of columns hashes its rows apart (T = 1,000, of 49,152 × 576: 0.3 s on one thread, where
        the whole product takes 0.7 s), and two times 64 KiB elsewhere.

        Parameters
        ----------
        left
            The g_t as the columns of a matrix (rows, T), in blocks of whole rows: the first row of each, and the block,
            of a floating type. Rows that no block brings are zero.
        right
            (T, cols) float32, the h_t.

        Returns
        -------
        torch.Tensor
            (stored,) float32, what :meth:`sketch` gives for the matrix, up to rounding.
        """
        if self.row_buckets is None:
            matrix = torch.zeros(self._rows, self._cols, dtype=torch.float32, device=right.device)
            for first, block in left:
                matrix[first : first + block.shape[0]] = block.float() @ right
            return self._sketch_block(matrix, 0, 0)
        if right.device.type != "cpu":
            factor = torch.zeros(self._rows, right.shape[0], dtype=torch.float32, device=right.device)
            for first, block in left:
                factor[first : first + block.shape[0]] = block
            return self._parallel_tables(right.device, (0, 0), (self._rows, self._cols)).sketch_product(factor, right)
        tables = self._tables_on_cpu()
        rows = tables["rows"]
        folded = torch.zeros(len(rows), 2 * self.row_buckets, right.shape[0], dtype=torch.float32)
        for first, block in left:
            values = block.float()
            for group, index in enumerate(rows):
                folded[group].index_add_(0, index[first : first + len(values)], values)
        signed = torch.zeros(2 * self.k, dtype=torch.float32)
        factors = folded[:, 0::2].sub_(folded[:, 1::2])
        for group, columns in self._column_blocks():
            self._add_flat(signed, factors[group] @ right[:, columns], tables, 0, columns.start)
        return signed[0::2] - signed[1::2]

    def _column_blocks(self) -> Iterator[tuple[int, slice]]:
        """Yield blocks of columns whose accumulators take at most FOLD_ENTRIES, and the group that each lies in."""
        assert self.row_buckets is not None  # noqa: S101
        assert self.column_groups is not None  # noqa: S101 - where rows are hashed there are groups
        group_width = self._cols // self.column_groups
        width = min(group_width, FOLD_ENTRIES // (2 * self.row_buckets))
        for group in range(self.column_groups):
            stop = (group + 1) * group_width
            for start in range(group * group_width, stop, width):
                yield group, slice(start, min(start + width, stop))

    def _sketch_block(self, matrix: torch.Tensor, row_offset: int, col_offset: int) -> torch.Tensor:
        """Sketch whole rows from row_offset on, or a piece of the only row there is."""
        if self.kind == "identity":
            out = torch.zeros(self.stored, dtype=torch.float32, device=matrix.device)
            start = row_offset * self._cols + col_offset
            out[start : start + matrix.numel()] = matrix.reshape(-1)
            return out
        if matrix.device.type != "cpu":
            offset, shape = (row_offset, col_offset), (matrix.shape[0], matrix.shape[1])
            return self._parallel_tables(matrix.device, offset, shape).sketch(matrix)
        tables = self._tables_on_cpu()
        # Buckets 2h and 2h + 1 collect the positive and the negative entries: no pass that multiplies by
        # signs, and no copy of a float32 gradient (multiplying first took 1.4 times as long).
        signed = torch.zeros(2 * self.k, dtype=torch.float32, device=matrix.device)
        if self.row_buckets is None:
            self._add_flat(signed, matrix, tables, row_offset, col_offset)
        else:
            rows = tables["rows"][:, row_offset : row_offset + matrix.shape[0]]
            for group, columns in self._column_blocks():
                folded = _fold_rows(matrix[:, columns], rows[group], self.row_buckets)
                self._add_flat(signed, folded, tables, 0, columns.start)
        return signed[0::2] - signed[1::2]

    def _add_flat(
        self, signed: torch.Tensor, block: torch.Tensor, tables: dict[str, torch.Tensor], row: int, col: int
    ) -> None:
        """Add a block whose first entry stands at (row, col) of the last stage's matrix.

        For 576 × 1,536 float32 on one thread this takes 1.1 ms; int64 tables took the same at twice the
        memory. Others: scatter_add_ 0.6 of it (0.85 for 4,096 × 576) but int64 only before torch 2.10;
        bincount 1.1, numpy's 1.4, a sparse CSR product 0.8 to 1.3, embedding_bag 1.7, index_put_ 2.4,
        a sort and segment_reduce 5 times it.
        """
        flat = tables["flat"]
        for r, c, piece in pieces.pieces_of(block):
            rows = slice(row + r, row + r + piece.shape[0])
            cols = slice(col + c, col + c + piece.shape[1])
            if self.column_buckets is None:
                index = flat[rows, cols]
            else:
                # Two signs multiply where their bits are xor-ed; the bit of a bucket index is its sign.
                index = flat[rows].index_select(1, tables["columns"][cols]) ^ tables["column_signs"][cols]
            signed.index_add_(0, index.reshape(-1), piece.float().reshape(-1))

    def _parallel_tables(self, device: torch.device, offset: tuple[int, int], shape: tuple[int, int]) -> ParallelTables:
        """Return the tables of a block as `_sketch_block` takes it, arranged for a device with many threads.

        They are made at first use.
        """
        key = (device, offset, shape)
        if key not in self._parallel:
            made = self._tables_on_cpu()
            rows, cols = (slice(start, start + count) for start, count in zip(offset, shape, strict=True))
            columns = (made["columns"] << 1 | made["column_signs"])[cols] if "columns" in made else None
            rows_table = made["rows"][:, rows] if "rows" in made else None
            flat = made["flat"] if "rows" in made else made["flat"][rows]
            flat = flat if "columns" in made else flat[:, cols]
            self._parallel[key] = ParallelTables.of(flat, rows_table, columns, self.k, device)
        return self._parallel[key]

    def _tables_on_cpu(self) -> dict[str, torch.Tensor]:
        """Return the hash tables, made in NumPy once."""
        if not self._tables:
            height = self.row_buckets or self._rows
            width = self.column_buckets or self._cols
            flat = hash_table(self.seed, _STAGE_FLAT, height * width, self.k)
            made = {"flat": torch.from_numpy(flat).view(height, width)}
            if self.row_buckets is not None:
                # Entry r G + g is row r in group g; each group's table is kept in one piece.
                groups = self.column_groups or 1
                rows = hash_table(self.seed, _STAGE_ROWS, self._rows * groups, self.row_buckets)
                made["rows"] = torch.from_numpy(rows).view(self._rows, groups).T.contiguous()
            if self.column_buckets is not None:
                columns = hash_table(self.seed, _STAGE_COLUMNS, self._cols, self.column_buckets)
                made["columns"] = torch.from_numpy(columns >> 1)
                made["column_signs"] = torch.from_numpy(columns & 1)
            self._tables = made
        return self._tables
