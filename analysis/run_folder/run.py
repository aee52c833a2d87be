"""Run folders, read: what a training run recorded, as arrays and tables.

The layout is written by ``diagnostics`` and described in the README; this module needs nothing of a trainer.
"""

from __future__ import annotations

import heapq
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

from analysis.run_folder.gradient_rows import GradientRows, concatenate, merge_ranks, rank_of, rows_of, sketches_of
from analysis.run_folder.mapped import let_go, zeros
from sdo.checks import whole_number
from sdo.errors import InputError, suggest
from sdo.run_format import (
    EVALUATIONS,
    EXPOSURE,
    FORMAT_VERSION,
    GRADIENT_KINDS,
    GRADIENTS,
    STEPS,
    Stream,
    check_parts,
    check_rows,
    gaps_are_faults,
    read_run_json,
    streams_of,
)
from sdo.run_schema import schema_of

_GRADIENT_COLUMNS = [name for name in GRADIENTS.names if name != "sketch"]
# Rows decoded at once: 512 sketches of 8192 entries are 16 MiB, whatever the size of the part.
_READ_ROWS = 512


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
            beside = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
            meant = suggest(folder.name, beside, folder=folder.parent)
            raise InputError(f"{folder} is not a folder; {meant}expected a run folder as GradientRecorder writes it")
        file = folder / "run.json"
        if not file.is_file():
            raise InputError(f"{folder} is not a run folder: it has no run.json")
        info = read_run_json(file)
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
        return self.table(STEPS)

    def exposure(self) -> pa.Table:
        """Return how often each sample was planned and trained, by organizer epoch."""
        return self.table(EXPOSURE)

    def evaluations(self) -> pa.Table:
        """Return the logged evaluations: step, name, sample id, score."""
        return self.table(EVALUATIONS)

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
        light = [rows_of(_read(file, _GRADIENT_COLUMNS, kind), signal, kind, file, 0) for file in files]
        steps = np.concatenate([rows.step for rows in light])
        order = np.argsort(steps, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        sketch = zeros((len(steps), k))
        start = 0
        for file in files:
            for batch in _batches(file, ["kind", "sketch"], kind):
                values = sketches_of(batch.column("sketch"), k, file)
                sketch[place[start : start + len(values)]] = values
                start += len(values)
            let_go(sketch)
        whole = concatenate(light).take(order)
        rows = replace(whole, sketch=sketch)
        return merge_ranks(rows, self.path) if kind == "step" else rows

    def iter_steps(self, signal: str, kind: str) -> Iterator[GradientRows]:
        """Yield the rows of one step after the other, from all ranks, one part a rank in memory.

        Parameters and errors as in `gradients`; rows of several ranks are kept apart.
        """
        k = self._stored(signal)
        ranks: dict[int, list[Path]] = {}
        for file in self._gradient_files(signal, kind):
            ranks.setdefault(rank_of(file), []).append(file)

        def one_rank(files: list[Path]) -> Iterator[GradientRows]:
            for file in files:
                rows = rows_of(_read(file, [*_GRADIENT_COLUMNS, "sketch"], kind), signal, kind, file, k)
                yield from rows.take(np.argsort(rows.step, kind="stable")).by_step()

        merged = heapq.merge(*map(one_rank, ranks.values()), key=lambda rows: int(rows.step[0]))
        for _, group in groupby(merged, key=lambda rows: int(rows.step[0])):
            yield concatenate(list(group))

    def check(self) -> None:
        """Open every part of the folder, read its footer, and hold the folder against its contract.

        Raises
        ------
        InputError
            A part is cut off or not Parquet (the file is named), a signal has no stated width, steps are missing or
            there twice, or a table has other rows than run.json counts; see :mod:`sdo.run_format`.
        """
        for signal in self.signals:
            self._stored(signal)
        rows: dict[str, int] = {}
        for file in sorted(self.path.rglob("part-*.parquet")):
            stream = file.parent.relative_to(self.path).as_posix()
            count = _open(file).metadata.num_rows
            if not stream.startswith("gradients/") or file.name.startswith("part-r0-"):
                rows[stream] = rows.get(stream, 0) + count
        first = self.info.get("first_step")
        for stream in (name for name, one in streams_of(self.signals).items() if one.by_step):
            folder = self.path / stream
            names = sorted(file.name for file in folder.glob("part-*.parquet"))
            gaps = gaps_are_faults(self.info, stream)
            check_parts(folder, names, first=first if isinstance(first, int) and gaps else None, gaps=gaps)
        recorded = any(count for stream, count in rows.items() if stream.startswith("gradients/"))
        # Gradients go to disk first: a run that died early may hold them alone.
        if recorded and not rows.get("steps") and isinstance(first, int) and self.info.get("status") == "finished":
            raise InputError(f"{self.path} holds gradients and no steps: steps/ is missing; fix: put it back")
        check_rows(self.path, self.info, rows)

    def table(self, stream: Stream) -> pa.Table:
        """Return the rows of a stream other than gradients, sorted by its keys.

        Parameters
        ----------
        stream
            One of :data:`sdo.run_format.STREAMS`. A column that an earlier version did not write is null.

        Raises
        ------
        InputError
            If a part cannot be read, lacks a column, or holds other types or nulls than the contract says.
        """
        schema, tables = schema_of(stream), []
        later = {column.name for column in stream.columns if column.later}
        for file in sorted((self.path / stream.path).glob("part-*.parquet")):
            known = later & set(_open(file).schema_arrow.names) | set(schema.names) - later
            table = _read(file, [name for name in schema.names if name in known])
            for name in later - known:
                table = table.append_column(name, pa.nulls(len(table), schema.field(name).type))
            try:
                tables.append(table.select(schema.names).cast(schema))
            except (pa.ArrowException, ValueError) as error:
                raise InputError(
                    f"{file}: {error}; expected the columns of {stream.path}/ as they are written"
                ) from error
        if not tables:
            return schema.empty_table()
        return pa.concat_tables(tables).sort_by([(key, "ascending") for key in stream.keys])

    def _stored(self, signal: str) -> int:
        where = f"{self.path / 'run.json'}: signals.{signal}.stored"
        return whole_number(where, self.info["signals"][signal].get("stored"), 1)

    def _gradient_files(self, signal: str, kind: str = "step") -> list[Path]:
        if kind not in GRADIENT_KINDS:
            raise InputError(f"unknown kind {kind!r}; expected one of {', '.join(GRADIENT_KINDS)}")
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
