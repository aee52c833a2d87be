"""Run folders, read: what a training run recorded, as arrays and tables.

The layout is written by ``diagnostics`` and described in the README; this module needs nothing of a trainer.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from analysis.mapped import let_go, zeros
from sdo.errors import InputError

FORMAT = "sdo-run"
FORMAT_VERSION = 1
KINDS = ("step", "micro_batch", "sample")

_STEPS = pa.schema(
    [
        ("step", pa.int64()),
        ("organizer_epoch", pa.int64()),
        ("trainer_epoch", pa.float64()),
        ("loss", pa.float64()),
        ("learning_rate", pa.float64()),
        ("grad_norm", pa.float64()),
        ("clipped", pa.bool_()),
        ("loss_scale", pa.float64()),
        ("skipped", pa.bool_()),
        ("tokens", pa.int64()),
        ("seconds", pa.float64()),
        ("recorder_seconds", pa.float64()),
        ("sample_ids", pa.list_(pa.int64())),
    ]
)
_LATER = ("skipped",)  # columns that earlier versions did not write: null
_EXPOSURE = pa.schema(
    [
        ("organizer_epoch", pa.int64()),
        ("sample_id", pa.int64()),
        ("planned", pa.int64()),
        ("trained", pa.int64()),
        ("in_pool", pa.bool_()),
    ]
)
_EVALUATIONS = pa.schema(
    [("step", pa.int64()), ("name", pa.string()), ("sample_id", pa.int64()), ("score", pa.float64())]
)
_GRADIENT_COLUMNS = ["step", "kind", "micro_batch", "sample_ids", "tokens", "norm", "norm_state", "reason"]
_PART_NAME = re.compile(r"part-r(\d+)-(\d+)-(\d+)\.parquet")
# Rows decoded at once: 512 sketches of 8192 entries are 16 MiB, whatever the size of the part.
_READ_ROWS = 512


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


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder.

    Parameters
    ----------
    path
        The folder.
    info
        The content of its ``run.json``.

    Examples
    --------
    >>> run = Run.open("runs/sdo")  # doctest: +SKIP
    >>> run.gradients("hidden", "step").sketch.shape  # doctest: +SKIP
    (1901, 576)
    """

    path: Path
    info: dict[str, Any]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """Open a run folder.

        Raises
        ------
        InputError
            The folder is missing or no run folder, or its ``run.json`` is broken or of an unknown version.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder; expected a run folder as GradientRecorder writes it")
        file = folder / "run.json"
        if not file.is_file():
            raise InputError(f"{folder} is not a run folder: it has no run.json")
        try:
            # A NaN that found its way into the file is no JSON; it is read as null rather than passed on.
            info = json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda _: None)
        except (OSError, ValueError) as error:
            raise InputError(f"{file} cannot be read as JSON: {error}") from error
        if not isinstance(info, dict) or info.get("format") != FORMAT:
            raise InputError(f'{file} does not describe a run: expected "format": "{FORMAT}"')
        if info.get("format_version") != FORMAT_VERSION:
            found = info.get("format_version")
            raise InputError(f"{file} has format version {found!r}; this version reads {FORMAT_VERSION}")
        signals = info.get("signals", {})
        if not isinstance(signals, dict) or not all(isinstance(one, dict) for one in signals.values()):
            raise InputError(f'{file}: "signals" must map names to descriptions')
        for name in signals:
            # Names become parts of paths, here and in results.
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise InputError(f"{file}: {name!r} is no name of a signal; expected letters, digits, . _ -")
        return cls(folder, info)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of the recorded signals."""
        return tuple(self.info.get("signals", {}))

    def holds(self, signal: str) -> bool:
        """Return whether gradients of a signal are stored; a run that ended in its first steps may have none."""
        return any((self.path / "gradients" / signal).glob("part-*.parquet"))

    def steps(self) -> pa.Table:
        """Return one row a step: loss, learning rate, norms, tokens, seconds and sample ids."""
        return self._table("steps", _STEPS, ("step",))

    def exposure(self) -> pa.Table:
        """Return how often each sample was planned and trained, by organizer epoch."""
        return self._table("exposure", _EXPOSURE, ("organizer_epoch", "sample_id"))

    def evaluations(self) -> pa.Table:
        """Return the logged evaluations: step, name, sample id, score."""
        return self._table("evaluations", _EVALUATIONS, ("step", "name", "sample_id"))

    def kinds(self, signal: str) -> dict[str, int]:
        """Return how many rows of each kind a signal has; kinds without rows are left out."""
        counts: dict[str, int] = {}
        for file in self._gradient_files(signal):
            for entry in pc.value_counts(_read(file, ["kind"]).column("kind")).to_pylist():
                counts[entry["values"]] = counts.get(entry["values"], 0) + entry["counts"]
        return counts

    def gradients(self, signal: str, kind: str = "step") -> GradientRows:
        """Return all rows of one signal and kind, sorted by step.

        Apart from the (T, k) float32 matrix of the sketches, one part is in memory at a time; above 512 MiB
        that matrix is mapped from an unnamed temporary file. Rows of kind ``"step"`` are unique by step: where
        several ranks wrote one, their mean is returned, which has the right direction whether the ranks
        recorded their own share or the reduced gradient.

        Parameters
        ----------
        signal
            One of `signals`.
        kind
            ``"step"``, ``"micro_batch"`` or ``"sample"``.

        Raises
        ------
        InputError
            Unknown signal or kind, no gradients in the folder, a part that cannot be read, or a step that one
            rank recorded twice.
        """
        files = self._gradient_files(signal, kind)
        k = self._stored(signal)
        light = [_rows(_read(file, _GRADIENT_COLUMNS, kind), signal, kind, file, 0) for file in files]
        steps = np.concatenate([rows.step for rows in light])
        order = np.argsort(steps, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        sketch = zeros((len(steps), k))
        start = 0
        for file in files:
            for batch in _batches(file, ["kind", "sketch"], kind):
                values = _sketches(batch.column("sketch"), k, file)
                sketch[place[start : start + len(values)]] = values
                start += len(values)
            let_go(sketch)
        whole = _concatenate(light).take(order)
        rows = replace(whole, sketch=sketch)
        return _merge_ranks(rows, self.path) if kind == "step" else rows

    def iter_steps(self, signal: str, kind: str) -> Iterator[GradientRows]:
        """Yield the rows of one step after the other, from all ranks, one part a rank in memory.

        Parameters and errors as in `gradients`; rows of several ranks are kept apart.
        """
        k = self._stored(signal)
        ranks: dict[int, list[Path]] = {}
        for file in self._gradient_files(signal, kind):
            ranks.setdefault(_rank(file), []).append(file)

        def one_rank(files: list[Path]) -> Iterator[GradientRows]:
            for file in files:
                rows = _rows(_read(file, [*_GRADIENT_COLUMNS, "sketch"], kind), signal, kind, file, k)
                yield from rows.take(np.argsort(rows.step, kind="stable")).by_step()

        merged = heapq.merge(*map(one_rank, ranks.values()), key=lambda rows: int(rows.step[0]))
        for _, group in groupby(merged, key=lambda rows: int(rows.step[0])):
            yield _concatenate(list(group))

    def check(self) -> None:
        """Open every part of the folder and read its footer.

        Raises
        ------
        InputError
            A part is cut off or not Parquet (the file is named), or a signal has no stated width.
        """
        for signal in self.signals:
            self._stored(signal)
        for file in sorted(self.path.rglob("part-*.parquet")):
            _open(file)

    def _table(self, folder: str, schema: pa.Schema, keys: tuple[str, ...]) -> pa.Table:
        tables = []
        for file in sorted((self.path / folder).glob("part-*.parquet")):
            known = [name for name in schema.names if name not in _LATER or name in _open(file).schema_arrow.names]
            table = _read(file, known)
            for name in schema.names:
                if name not in known:
                    table = table.append_column(schema.field(name), pa.nulls(len(table), schema.field(name).type))
            try:
                tables.append(table.select(schema.names).cast(schema))
            except pa.ArrowException as error:
                raise InputError(f"{file}: {error}") from error
        if not tables:
            return schema.empty_table()
        return pa.concat_tables(tables).sort_by([(key, "ascending") for key in keys])

    def _stored(self, signal: str) -> int:
        stored = self.info["signals"][signal].get("stored")
        if not isinstance(stored, int) or stored < 1:
            raise InputError(f"{self.path / 'run.json'}: signal {signal!r} has no positive 'stored' width")
        return stored

    def _gradient_files(self, signal: str, kind: str = "step") -> list[Path]:
        if kind not in KINDS:
            raise InputError(f"unknown kind {kind!r}; expected one of {', '.join(KINDS)}")
        folder = self.path / "gradients"
        files = {name: sorted((folder / name).glob("part-*.parquet")) for name in self.signals}
        if not any(files.values()):
            raise InputError(f"{self.path}: the run recorded no gradients; was GradientRecorder added to the trainer?")
        if signal not in files:
            known = ", ".join(self.signals)
            raise InputError(f"{self.path} has no signal {signal!r}; it has {known}")
        if not files[signal]:
            raise InputError(f"{self.path}: the run recorded no gradients of signal {signal!r}")
        return files[signal]


def _rank(file: Path) -> int:
    match = _PART_NAME.fullmatch(file.name)
    if match is None:
        raise InputError(f"{file}: expected a name like part-r0-00000000-00000049.parquet")
    return int(match[1])


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file} cannot be read as Parquet (cut off in writing?): {error}") from error


def _batches(file: Path, columns: list[str], kind: str | None) -> Iterator[pa.RecordBatch]:
    parquet = _open(file)
    missing = [name for name in columns if name not in parquet.schema_arrow.names]
    if missing:
        raise InputError(f"{file} lacks the column {missing[0]!r}")
    try:
        for batch in parquet.iter_batches(batch_size=_READ_ROWS, columns=columns):
            yield batch if kind is None else batch.filter(pc.equal(batch.column("kind"), kind))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file} cannot be read as Parquet: {error}") from error


def _read(file: Path, columns: list[str], kind: str | None = None) -> pa.Table:
    schema = _open(file).schema_arrow
    batches = list(_batches(file, columns, kind))
    if not batches:
        return pa.schema([schema.field(name) for name in columns]).empty_table()
    return pa.Table.from_batches(batches)


def _sketches(column: Any, k: int, file: Path) -> NDArray[np.float32]:
    values = np.asarray(column.flatten(), dtype=np.float32)
    if column.null_count or len(values) != len(column) * k:
        raise InputError(f"{file}: every sketch must have {k} entries, as run.json says")
    return values.reshape(len(column), k)


def _rows(table: pa.Table, signal: str, kind: str, file: Path, k: int) -> GradientRows:
    """Turn a table into rows; with k = 0 the sketches are left out (width 0)."""
    table = table.combine_chunks()

    def numbers(name: str, null: float, dtype: type) -> Any:
        return np.array(pc.fill_null(table.column(name), null).to_numpy(), dtype=dtype)

    sketch = np.zeros((len(table), 0), dtype=np.float32)
    if k and len(table):
        sketch = _sketches(table.column("sketch").chunk(0), k, file)
    elif k:
        sketch = np.zeros((0, k), dtype=np.float32)
    return GradientRows(
        signal=signal,
        kind=kind,
        step=numbers("step", -1, np.int64),
        rank=np.full(len(table), _rank(file), dtype=np.int64),
        micro_batch=numbers("micro_batch", -1, np.int64),
        sample_ids=tuple(np.array(x or [], dtype=np.int64) for x in table.column("sample_ids").to_pylist()),
        tokens=numbers("tokens", 0, np.int64),
        norm=numbers("norm", np.nan, np.float64),
        norm_state=tuple(state or "" for state in table.column("norm_state").to_pylist()),
        reason=tuple(table.column("reason").to_pylist()),
        sketch=sketch,
    )


def _concatenate(parts: list[GradientRows]) -> GradientRows:
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


def _merge_ranks(rows: GradientRows, path: Path) -> GradientRows:
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
    return replace(_concatenate(merged), sketch=sketch[: len(merged)])
