"""The sketch of a gradient on a device with thousands of threads: the same buckets and signs, summed in another order.

There, adding millions of entries to 16,384 numbers makes the threads wait for each other. So rows and columns that
share a bucket are gathered rank by rank, the first of each bucket, then the second …, which takes no atomic addition;
and the last stage adds to many copies of the buckets, which are summed at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

COPIES = 64  # of the 2 k buckets; 4 MiB at k = 8192, which stays in a GPU's cache
_GATHER_ENTRIES = 1 << 24  # gathered at once: 32 MiB in bfloat16


@dataclass(frozen=True, eq=False)
class Ranks:
    """Lines (rows of a group of columns, or columns) by their rank within a bucket.

    Buckets are put in the order of falling size, so that those with an r-th line come first.

    Attributes
    ----------
    order, place
        Shapes ``(buckets,)``: the bucket at each place, and the place of each bucket.
    lines, signs
        One pair a rank: shapes ``(n_r,)``, int32 and int8; line ``lines[r][p]`` belongs to the bucket at place p, with
        that sign.
    """

    order: torch.Tensor
    place: torch.Tensor
    lines: tuple[torch.Tensor, ...]
    signs: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, table: torch.Tensor, buckets: int) -> Ranks:
        """Sort lines by bucket.

        Parameters
        ----------
        table
            Shape ``(n,)``, ``2 * bucket + (sign is negative)``, as ``count_sketch.hash_table`` gives it.
        buckets
            Their number.
        """
        bucket, sign = table.long() >> 1, 1 - 2 * (table & 1)
        count = torch.bincount(bucket, minlength=buckets)
        order = torch.argsort(count, descending=True, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(buckets, device=order.device)
        by_place = torch.argsort(place[bucket], stable=True)
        size = count[order]
        starts = torch.cumsum(size, 0) - size
        lines, signs = [], []
        for rank in range(int(size[0])):
            members = by_place[starts[: int((size > rank).sum())] + rank]
            lines.append(members.int())
            signs.append(sign[members].to(torch.int8))
        return cls(order, place, tuple(lines), tuple(signs))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it holds."""
        return (self.order, self.place, *self.lines, *self.signs)

    def to(self, device: torch.device) -> Ranks:
        """Return a copy on a device."""
        return Ranks(
            self.order.to(device),
            self.place.to(device),
            tuple(one.to(device) for one in self.lines),
            tuple(one.to(device) for one in self.signs),
        )

    def fold_rows(self, matrix: torch.Tensor, lines_a_row: int = 1) -> torch.Tensor:
        """Add up rows by bucket: (rows, cols) to (buckets, cols), float32.

        Parameters
        ----------
        matrix
            Shape ``(rows, cols)``, any floating type.
        lines_a_row
            How many lines in turn are this one row: 1, or the number of groups where each takes the whole row.
        """
        folded = torch.zeros(len(self.order), matrix.shape[1], dtype=torch.float32, device=matrix.device)
        for lines, signs in zip(self.lines, self.signs, strict=True):
            block = max(1, _GATHER_ENTRIES // max(1, matrix.shape[1]))
            for start in range(0, len(lines), block):
                part = slice(start, start + block)
                piece = matrix.index_select(0, lines[part].div(lines_a_row, rounding_mode="floor"))
                folded[start : start + len(piece)].addcmul_(piece.float(), signs[part, None].float())
        return folded.index_select(0, self.place)

    def fold_columns(self, matrix: torch.Tensor) -> torch.Tensor:
        """Add up columns by bucket: (rows, cols) to (rows, buckets), float32, buckets in the order of ``order``."""
        folded = torch.zeros(matrix.shape[0], len(self.order), dtype=torch.float32, device=matrix.device)
        block = max(1, _GATHER_ENTRIES // len(self.order))
        for start in range(0, matrix.shape[0], block):
            part, total = matrix[start : start + block], folded[start : start + block]
            for lines, signs in zip(self.lines, self.signs, strict=True):
                # A product with plus or minus one is exact in any type.
                total[:, : len(lines)].add_(part.index_select(1, lines).mul_(signs.to(part.dtype)))
        return folded


@dataclass(frozen=True, eq=False)
class ParallelTables:
    """The hash tables of one shape, arranged for :meth:`sketch`.

    Attributes
    ----------
    flat
        Shape ``(height * width,)``, int32: bucket and sign of each entry of the last stage, in one of the copies.
    rows
        How rows are folded before, or None: line r G + g, row r in the g-th of G groups of columns, goes to bucket
        b G + g.
    groups
        G.
    columns
        How columns are folded before, or None.
    k
        Buckets.
    """

    flat: torch.Tensor
    rows: Ranks | None
    groups: int
    columns: Ranks | None
    k: int

    @classmethod
    def of(
        cls, flat: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None, k: int, device: torch.device
    ) -> ParallelTables:
        """Arrange tables.

        Parameters
        ----------
        flat
            Shape ``(height, width)``, on the CPU.
        rows
            Shape ``(groups, n)``: for each group of columns, the rows to be hashed to ``height``; None where they are
            not.
        columns
            Shape ``(n,)``, the columns to be hashed to ``width``, or None where they are not.
        k
            Buckets.
        device
            Where the tables go.
        """
        groups, row_ranks = 1, None
        if rows is not None:
            groups = len(rows)
            bucket = (rows >> 1) * groups + torch.arange(groups, dtype=rows.dtype)[:, None]
            row_ranks = Ranks.of((bucket << 1 | rows & 1).T.reshape(-1), flat.shape[0] * groups)
        column_ranks = None if columns is None else Ranks.of(columns, flat.shape[1])
        flat = flat if column_ranks is None else flat[:, column_ranks.order]
        copy = torch.arange(flat.numel(), dtype=torch.int32).div_(32, rounding_mode="floor").remainder_(COPIES)
        flat = flat.reshape(-1) + copy * (2 * k)
        return cls(
            flat.to(device),
            None if row_ranks is None else row_ranks.to(device),
            groups,
            None if column_ranks is None else column_ranks.to(device),
            k,
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it holds."""
        ranks = (one.tensors for one in (self.rows, self.columns) if one is not None)
        return (self.flat, *(tensor for one in ranks for tensor in one))

    def sketch(self, matrix: torch.Tensor) -> torch.Tensor:
        """Sketch a matrix of the tables' shape, any floating type; shape ``(k,)``, float32."""
        if self.rows is not None:
            lines = matrix.reshape(-1, matrix.shape[1] // self.groups)
            matrix = self.rows.fold_rows(lines).view(-1, matrix.shape[1])
        return self._sketch_folded(matrix)

    def sketch_product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Sketch ``left @ right`` of the tables' shape; the product is formed after its rows are folded."""
        if self.rows is None:
            return self._sketch_folded(left @ right)
        factors = self.rows.fold_rows(left, self.groups).view(-1, self.groups, left.shape[1])
        parts = right.reshape(right.shape[0], self.groups, -1)
        return self._sketch_folded(torch.einsum("bgt,tgc->bgc", factors, parts).reshape(len(factors), -1))

    def _sketch_folded(self, matrix: torch.Tensor) -> torch.Tensor:
        if self.columns is not None:
            matrix = self.columns.fold_columns(matrix)
        signed = torch.zeros(COPIES * 2 * self.k, dtype=torch.float32, device=matrix.device)
        signed.index_add_(0, self.flat, matrix.float().reshape(-1))
        total = signed.view(COPIES, 2 * self.k).sum(dim=0)
        return total[0::2] - total[1::2]
