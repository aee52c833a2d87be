"""Recorded gradients as arrays: rows of one signal and kind, joined over parts and over the processes' files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sdo.checks import integer_array
from sdo.errors import InputError
from sdo.run_format import part_range


@dataclass(frozen=True, eq=False)
class GradientRows:
    """Recorded gradients of one signal and one kind, T rows in the order of their steps.

    Parameters
    ----------
    signal, kind
        What was recorded, for instance ``"weight"``, and a row's scope: ``"step"``, ``"micro_batch"`` or
        ``"sample"``.
    step
        (T,) int64, counted from 0.
    rank
        (T,) int64, the process that wrote the row; -1 for a row put together from several.
    micro_batch
        (T,) int64, -1 where there is none.
    sample_ids
        T arrays of int64.
    tokens
        (T,) int64.
    norm
        (T,) float64, Euclidean norm of the full gradient, not of its sketch.
    norm_state
        T words on the norm (raw or clipped, scaled or not).
    reason
        T texts: why a gradient is undefined; None where it is defined.
    sketch
        (T, k) float32; zeros where undefined.
    """

    signal: str
    kind: str
    step: NDArray[np.int64]
    rank: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    sample_ids: tuple[NDArray[np.int64], ...]
    tokens: NDArray[np.int64]
    norm: NDArray[np.float64]
    norm_state: tuple[str, ...]
    reason: tuple[str | None, ...]
    sketch: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.step)

    @property
    def defined(self) -> NDArray[np.bool_]:
        """(T,) bool: rows without a reason whose norm is positive and finite."""
        stated = np.array([reason is None for reason in self.reason], dtype=bool)
        return stated & np.isfinite(self.norm) & (self.norm > 0)

    def take(self, index: NDArray[np.int64]) -> GradientRows:
        """Return the rows `index`, (n,) positions, in that order."""
        index = integer_array(index, "positions", low=0, high=len(self) - 1)
        return replace(
            self,
            step=self.step[index],
            rank=self.rank[index],
            micro_batch=self.micro_batch[index],
            sample_ids=tuple(self.sample_ids[i] for i in index),
            tokens=self.tokens[index],
            norm=self.norm[index],
            norm_state=tuple(self.norm_state[i] for i in index),
            reason=tuple(self.reason[i] for i in index),
            sketch=self.sketch[index],
        )

    def by_step(self) -> Iterator[GradientRows]:
        """Yield the rows of one step after the other."""
        edges = np.flatnonzero(np.diff(self.step)) + 1
        for positions in np.split(np.arange(len(self)), edges):
            if len(positions):
                yield self.take(positions)


def rank_of(file: Path) -> int:
    """Return the process that wrote a part, from the file's name."""
    found = part_range(file.name)
    if found is None:
        raise InputError(f"{file}: expected a name like part-r0-00000000-00000049.parquet")
    return found[0]


def sketches_of(column: Any, k: int, file: Path) -> NDArray[np.float32]:
    """Return the sketches of a column of n lists, (n, k)."""
    values = np.asarray(column.flatten(), dtype=np.float32)
    if column.null_count or len(values) != len(column) * k:
        raise InputError(f"{file}: every sketch must have {k} entries, as run.json says")
    return values.reshape(len(column), k)


def rows_of(table: pa.Table, signal: str, kind: str, file: Path, k: int) -> GradientRows:
    """Turn a table into rows; with k = 0 the sketches are left out (width 0)."""
    table = table.combine_chunks()

    def numbers(name: str, null: float, dtype: type) -> Any:
        return np.array(pc.fill_null(table.column(name), null).to_numpy(), dtype=dtype)

    sketch = np.zeros((len(table), 0), dtype=np.float32)
    if k and len(table):
        sketch = sketches_of(table.column("sketch").chunk(0), k, file)
    elif k:
        sketch = np.zeros((0, k), dtype=np.float32)
    return GradientRows(
        signal=signal,
        kind=kind,
        step=numbers("step", -1, np.int64),
        rank=np.full(len(table), rank_of(file), dtype=np.int64),
        micro_batch=numbers("micro_batch", -1, np.int64),
        sample_ids=tuple(np.array(x or [], dtype=np.int64) for x in table.column("sample_ids").to_pylist()),
        tokens=numbers("tokens", 0, np.int64),
        norm=numbers("norm", np.nan, np.float64),
        norm_state=tuple(state or "" for state in table.column("norm_state").to_pylist()),
        reason=tuple(table.column("reason").to_pylist()),
        sketch=sketch,
    )


def concatenate(parts: list[GradientRows]) -> GradientRows:
    """Return the rows of all parts, in their order; at least one part."""
    if len(parts) == 1:
        return parts[0]
    return GradientRows(
        signal=parts[0].signal,
        kind=parts[0].kind,
        step=np.concatenate([part.step for part in parts]),
        rank=np.concatenate([part.rank for part in parts]),
        micro_batch=np.concatenate([part.micro_batch for part in parts]),
        sample_ids=tuple(ids for part in parts for ids in part.sample_ids),
        tokens=np.concatenate([part.tokens for part in parts]),
        norm=np.concatenate([part.norm for part in parts]),
        norm_state=tuple(state for part in parts for state in part.norm_state),
        reason=tuple(reason for part in parts for reason in part.reason),
        sketch=np.concatenate([part.sketch for part in parts]),
    )


def merge_ranks(rows: GradientRows, path: Path) -> GradientRows:
    """Reduce the rows of each step to one: the mean over ranks."""
    if len(np.unique(rows.step)) == len(rows):
        return rows
    sketch, start = rows.sketch, 0
    merged: list[GradientRows] = []
    for group in replace(rows, sketch=rows.sketch[:, :0]).by_step():
        if len(np.unique(group.rank)) < len(group):
            raise InputError(f"{path}: a rank recorded step {group.step[0]} of {rows.signal!r} twice")
        parts = sketch[start : start + len(group)]
        start += len(group)
        # In place, from the front: a mean never stands behind the rows it is of.
        mean = sketch[len(merged)]
        mean[:] = parts[0] if len(group) == 1 else parts.mean(axis=0, dtype=np.float64)
        if len(group) == 1:
            merged.append(group)
            continue
        # Equal norms mean that every rank saw the reduced gradient; else only the sketch knows the norm.
        reduced = np.allclose(group.norm, group.norm[0], rtol=1e-6, atol=0)
        alike = all(np.array_equal(ids, group.sample_ids[0]) for ids in group.sample_ids)
        norm = group.norm[0] if reduced else np.linalg.norm(mean.astype(np.float64))
        merged.append(
            replace(
                group.take(np.array([0])),
                rank=np.array([-1]),
                sample_ids=(np.unique(np.concatenate(group.sample_ids)),),
                tokens=group.tokens[:1] if alike else group.tokens.sum(keepdims=True),
                norm=np.array([norm]),
                reason=(next((reason for reason in group.reason if reason is not None), None),),
            )
        )
    return replace(concatenate(merged), sketch=sketch[: len(merged)])
