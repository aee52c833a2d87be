"""The run folder: append-only, crash-safe, readable by anything that reads Parquet.

::

    run.json
    steps/part-<first>-<last>.parquet
    gradients/<signal>/part-r<rank>-<first>-<last>.parquet
    exposure/part-<organizer epoch>.parquet
    evaluations/part-<first>-<last>.parquet

Steps are written with 8 digits, epochs with 5. A part is written under a temporary name, synced and renamed:
it is there whole or not at all. No file holds NaN or an infinity: a value that is not finite is null, and a
gradient row then says so in ``reason``.

An exposure part holds one organizer epoch; writing that epoch again replaces it. Its Parquet metadata carry
``sdo.step``: the number of steps up to which its counts are true, by which `RunLog.resume` judges it.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from diagnostics.run_folder.parquet import (
    EXPOSURE_KEY,
    append_part,
    check_steps,
    drop_evaluation,
    drop_exposure,
    list_parts,
    own_parts,
    read_part,
    read_rows,
    truncate,
    write_durably,
    write_table,
)
from sdo.checks import whole_number
from sdo.errors import InputError
from sdo.run_format import (
    EVALUATIONS,
    EXPOSURE,
    FORMAT,
    FORMAT_VERSION,
    GRADIENT_KINDS,
    GRADIENTS,
    STEPS,
    check_parts,
    check_rows,
    gaps_are_faults,
    read_run_json,
    streams_of,
)
from sdo.run_schema import schema_of

FLUSH_STEPS, FLUSH_SECONDS = 50, 60.0
_OWN_KEYS = ("format", "format_version", "created", "status")
_SIGNAL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class StepRow:
    """One optimizer step; None where a value is not known, ``seconds`` without ``recorder_seconds``."""

    step: int  # global_step before the update, from 0
    organizer_epoch: int | None
    trainer_epoch: float
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None  # as the trainer reports it: over all parameters, before clipping
    clipped: bool | None
    loss_scale: float
    skipped: bool  # no update: a gradient overflowed under loss scaling
    tokens: int
    seconds: float
    recorder_seconds: float
    sample_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class GradientRow:
    """One gradient of a signal; its sketch is given beside it."""

    step: int
    kind: str  # "step", "micro_batch" or "sample"
    micro_batch: int | None
    sample_ids: Sequence[int]
    tokens: int
    norm: float | None  # exact 2-norm; None with a reason
    norm_state: str  # raw or clipped, scaled or not, in words
    reason: str | None = None  # why the sketch is zeros; None for a usable gradient


def check_free(path: str | os.PathLike[str]) -> None:
    """Refuse a path at which a new run must not be written. Nothing is changed.

    Raises
    ------
    InputError
        If the path is a file, holds another run, or is a folder with other files in it.
    """
    folder = Path(path)
    if "\0" in str(folder):
        raise InputError(f"{folder} holds a NUL character; expected the name of a new folder for the run")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; expected the name of a new folder for the run")
    if (folder / "run.json").exists():
        try:
            created = read_run_json(folder / "run.json")["created"]
            steps = sum(read_part(part, ["step"]).num_rows for _, _, part in list_parts(folder / "steps"))
            found = f"{steps} steps, created {created}"
        except (ValueError, KeyError, TypeError):
            found = "damaged"
        raise InputError(f"{folder} holds another run ({found}); choose another folder or resume from its checkpoint")
    # A run that died before its first run.json leaves only our temporary file, which is overwritten.
    others = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    others = [name for name in others if name != ".run.json.tmp"]
    if others:
        raise InputError(f"{folder} holds other files ({others[0]} …); expected a new or an empty folder")


def steps_recorded(path: str | os.PathLike[str]) -> int:
    """Return one more than the last step that a run folder holds, 0 where there is none."""
    return max((last + 1 for _, last, _ in list_parts(Path(path) / "steps")), default=0)


class RunLog:
    """Writes one run folder. Make one with `create` or `resume`.

    Rows are buffered; `maybe_flush`, called between steps, writes them after 50 steps or 60 s, so that the
    rows of one step never lie in two parts. A crash loses at most what was not flushed: flush before a
    checkpoint is saved. Rank 0 alone writes run.json, steps, exposure and evaluations (on other ranks these
    calls do nothing); every rank writes its own gradients, all into one shared folder.

    Attributes
    ----------
    path : pathlib.Path
        The folder.
    info : dict
        What run.json holds.
    """

    def __init__(self, path: Path, info: dict[str, Any], rank: int, clock: Callable[[], float]) -> None:
        self.path = path
        self.info = info
        self._rank = rank
        self._clock = clock
        self._flushed_at = clock()
        self._stored: dict[str, int] = {name: int(s["stored"]) for name, s in info["signals"].items()}
        self._steps: list[StepRow] = []
        self._gradients: dict[str, list[tuple[GradientRow, NDArray[np.float32]]]] = {}
        self._exposure: dict[int, pa.Table] = {}
        self._streams = streams_of(self._stored)
        self._tables: dict[str, list[pa.Table]] = {}  # of streams that need no more than to be appended to
        self._resumed_at = -1
        self._replaced: set[str] = set()  # evaluations at that step that this session has written
        self._buffered_steps: set[int] = set()
        self._epoch_ends: dict[int | None, int] = {}  # organizer epoch -> its last step so far + 1

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        info: Mapping[str, Any],
        *,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> RunLog:
        """Begin a run in a new or empty folder.

        Parameters
        ----------
        path
            The folder; made if missing. On ranks above 0 it is not checked: rank 0 may have begun already.
        info
            What run.json keeps, JSON-serialisable without NaN. ``info["signals"][name]["stored"]`` is the
            length of that signal's sketches; ``info["first_step"]`` (0 if missing) the first step recorded.
        rank
            This process's rank.
        clock
            Seconds, for the flush interval.

        Raises
        ------
        InputError
            If the folder is not free (see `check_free`) or a signal's name or length is unusable.
        """
        folder = Path(path)
        for name, signal in info.get("signals", {}).items():
            if not _SIGNAL_NAME.fullmatch(name):
                raise InputError(
                    f"signal name {name!r} cannot name a folder; expected letters, digits, '_', '-' and '.'"
                )
            whole_number(f"stored of signal {name!r}", signal.get("stored"), 1)
        if rank == 0:
            check_free(folder)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        own = {"format": FORMAT, "format_version": FORMAT_VERSION, "created": created, "status": "running"}
        log = cls(folder, {"signals": {}, **info, **own, "rows": {}}, rank, clock)
        log._write_info(log.info)
        return log

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        step: int,
        info: Mapping[str, Any] | None = None,
        *,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> RunLog:
        """Continue a run from the checkpoint that holds the steps 0 … step − 1.

        Kept are steps and gradients before ``step``, evaluations up to and including it (evaluation comes
        before saving), and the exposure of an epoch if it counts all that epoch's steps before ``step`` and
        none after. Later parts are dropped, the straddling one is rewritten. Steps go first and every stream
        from its end, so that a crash in between leaves a shorter run and never one with a hole, and the same
        call completes it. Rank 0 does this for all ranks: the others call it afterwards, behind a barrier.

        Parameters
        ----------
        path
            The run's folder.
        step
            ``global_step`` of the checkpoint.
        info
            What `create` would be given now: its signals must be those of the run. Otherwise run.json stays
            as it is, but for the status and ``resumed_at``, the list of all these steps.
        rank, clock
            As for `create`.

        Raises
        ------
        InputError
            If the folder holds no run of this format, its signals are other ones, or steps before ``step``
            are not stored.
        """
        folder = Path(path)
        log = cls(folder, _read_info(folder), rank, clock)
        if info is not None:
            _check_signals(folder, log.info["signals"], info.get("signals", {}))
        if rank != 0:
            return log
        first = int(log.info.get("first_step", 0))
        log._epoch_ends = check_steps(folder, first, step)
        log._check_whole(first, step)
        if "rows" in log.info:
            log.update_info(rows={})  # until the parts are cut: a crash in between must not look like a loss
        for pattern in (".run.json.tmp", "*/.part-*.parquet.tmp", "gradients/*/.part-*.parquet.tmp"):
            for temporary in folder.glob(pattern):
                temporary.unlink()
        for name, stream in log._streams.items():
            truncate(folder / name, step + stream.after)
        log._resumed_at = step
        drop_exposure(folder / "exposure", step, log._epoch_ends)
        log.update_info(
            status="running",
            first_step=min(first, step),
            resumed_at=[*log.info.get("resumed_at", []), step],
            rows=log._count_rows(),
        )
        return log

    def _check_whole(self, first: int, step: int) -> None:
        """Refuse to continue a folder that has lost or doubled something of the steps before ``step``."""
        for stream in (name for name, one in self._streams.items() if one.by_step):
            folder = self.path / stream
            names = [part.name for _, _, part in list_parts(folder)]
            gaps = gaps_are_faults(self.info, stream)
            check_parts(folder, names, first=min(first, step) if gaps else None, last=step - 1, gaps=gaps)
            if step > first and not names and gaps:
                raise InputError(
                    f"{folder} lacks the steps {first} to {step - 1}: it holds no part; expected all steps before the "
                    "checkpoint; fix: put it back, or choose another folder"
                )
        check_rows(self.path, {**self.info, "status": "running"}, self._count_rows())
        for epoch, end in self._epoch_ends.items():
            later = [other for other in self._epoch_ends if epoch is not None and other is not None and other > epoch]
            if later and end <= step and not (self.path / "exposure" / f"part-{epoch:05d}.parquet").is_file():
                raise InputError(
                    f"{self.path / 'exposure'} lacks organizer epoch {epoch}; expected every epoch that ended before "
                    "the checkpoint; fix: put it back, or choose another folder"
                )

    def _count_rows(self) -> dict[str, int]:
        """Rows on disk by stream; of gradients those of process 0."""
        return {stream: self._rows_of(stream) for stream in self._streams}

    def _rows_of(self, stream: str) -> int:
        return sum(read_rows(part) for part in own_parts(self.path / stream, rank=0))

    def add_step(self, row: StepRow) -> None:
        """Buffer one step's row. Numbers that are not finite become null."""
        if self._rank != 0:
            return
        self._steps.append(row)
        self._buffered_steps.add(row.step)
        self._epoch_ends[row.organizer_epoch] = row.step + 1

    def add_gradient(self, signal: str, row: GradientRow, sketch: NDArray[np.float32]) -> None:
        """Buffer one gradient's row and a copy of its sketch.

        A row with a reason has a sketch of zeros. Where none is given, a norm of 0 gets "zero gradient", a
        norm that is not finite null and "non-finite gradient", and a sketch that is not "non-finite sketch".

        Parameters
        ----------
        signal
            One of ``info["signals"]``.
        row
            The row.
        sketch
            (stored,) float32.

        Raises
        ------
        ValueError
            If the signal is unknown, the sketch has another shape or dtype, or the row contradicts itself.
        """
        stored = self._stored.get(signal)
        if stored is None:
            raise ValueError(f"unknown signal {signal!r}; run.json has {sorted(self._stored)}")
        if sketch.shape != (stored,) or sketch.dtype != np.float32:
            raise ValueError(f"{signal}: sketch is {sketch.dtype} {sketch.shape}; expected float32 ({stored},)")
        if row.kind not in GRADIENT_KINDS:
            raise ValueError(f"{signal}: kind is {row.kind!r}; expected one of {GRADIENT_KINDS}")
        if row.norm is None and row.reason is None:
            raise ValueError(f"{signal}: step {row.step} has no norm and no reason")
        norm, reason = row.norm, row.reason
        sketch = sketch.copy()
        if norm is not None and not math.isfinite(norm):
            norm, reason = None, reason or "non-finite gradient"
        elif norm == 0.0:
            reason = reason or "zero gradient"
        elif not np.isfinite(sketch).all():
            reason = reason or "non-finite sketch"
        if reason is not None:
            sketch[:] = 0.0
        self._gradients.setdefault(signal, []).append((replace(row, norm=norm, reason=reason), sketch))
        self._buffered_steps.add(row.step)

    def add_exposure(
        self,
        organizer_epoch: int,
        sample_ids: ArrayLike,
        planned: ArrayLike,
        trained: ArrayLike,
        in_pool: ArrayLike,
    ) -> None:
        """Buffer the ledgers of one organizer epoch, replacing what was written for it before.

        Call it after `add_step` of the last step it counts.

        Parameters
        ----------
        organizer_epoch
            The epoch.
        sample_ids, planned, trained, in_pool
            (M,) int64 ids and counts, and whether the sample was in the epoch's pool.
        """
        if self._rank != 0:
            return
        columns = {"sample_id": sample_ids, "planned": planned, "trained": trained, "in_pool": in_pool}
        arrays = {name: np.asarray(column) for name, column in columns.items()}
        epochs = np.full(len(arrays["sample_id"]), organizer_epoch)
        counted = self._epoch_ends.get(organizer_epoch, max(self._epoch_ends.values(), default=0))
        schema = schema_of(EXPOSURE).with_metadata({EXPOSURE_KEY: str(counted).encode()})
        self._exposure[organizer_epoch] = pa.table({"organizer_epoch": epochs, **arrays}, schema=schema)

    def add_evaluation(self, step: int, name: str, sample_ids: ArrayLike, scores: ArrayLike) -> None:
        """Buffer one evaluation of the model after ``step`` updates.

        Parameters
        ----------
        step
            ``global_step`` at the evaluation.
        name
            What was measured, as "held-out loss".
        sample_ids, scores
            (M,) int64 and (M,) float64; a score that is not finite becomes null.
        """
        ids, values = np.asarray(sample_ids, np.int64), np.asarray(scores, np.float64)
        score = pa.array(values, mask=~np.isfinite(values))
        named = {"step": np.full(len(ids), step), "name": [name] * len(ids)}
        self.add_rows(EVALUATIONS.path, {**named, "sample_id": ids, "score": score})

    def add_rows(self, stream: str, columns: Mapping[str, Any]) -> None:
        """Buffer rows of a stream that is a table and no more, as evaluations are; call it between steps.

        Parameters
        ----------
        stream
            Its folder, as `sdo.run_format` names it.
        columns
            Column name to (M,) values; ``step`` is among them.
        """
        if self._rank == 0:
            self._tables.setdefault(stream, []).append(pa.table(dict(columns), schema=schema_of(self._streams[stream])))

    def update_info(self, **changes: Any) -> None:
        """Set keys of run.json and rewrite it atomically; nothing changes if a value cannot be written."""
        refused = [key for key in changes if key in _OWN_KEYS[:3]]
        if refused:
            raise ValueError(f"run.json's {refused[0]!r} is fixed")
        info = {**self.info, **changes}
        self._write_info(info)
        self.info = info

    def maybe_flush(self) -> None:
        """Flush if 50 steps are buffered or 60 s have passed. Call it between steps."""
        if len(self._buffered_steps) >= FLUSH_STEPS or self._clock() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write all that is buffered. Steps go last: a stored step has its gradients stored; then run.json counts."""
        written = self._buffered
        rows = dict(self.info.get("rows") or {})
        for signal in list(self._gradients):
            table = _gradient_table(self._gradients[signal], self._stored[signal])
            rows[f"gradients/{signal}"] = rows.get(f"gradients/{signal}", 0) + table.num_rows
            append_part(self.path / "gradients" / signal, f"part-r{self._rank}-", table)
            del self._gradients[signal]
        for epoch in list(self._exposure):
            folder = self.path / "exposure"
            folder.mkdir(parents=True, exist_ok=True)
            write_table(folder / f"part-{epoch:05d}.parquet", self._exposure[epoch])
            del self._exposure[epoch]
        for stream in list(self._tables):
            table = pa.concat_tables(self._tables[stream])
            if stream == EVALUATIONS.path:
                self._drop_replaced(table, rows)
            append_part(self.path / stream, "part-", table)
            rows[stream] = rows.get(stream, 0) + table.num_rows
            del self._tables[stream]
        if self._steps:
            table = pa.Table.from_pylist([_finite(asdict(row)) for row in self._steps], schema=schema_of(STEPS))
            append_part(self.path / "steps", "part-", table)
            rows["steps"] = rows.get("steps", 0) + table.num_rows
            self._steps.clear()
        if written and self._rank == 0:
            # Few parts: counted anew, since they may replace rows. Of the others there are many.
            rows |= {stream: self._rows_of(stream) for stream in ("exposure", "evaluations")}
            self.update_info(rows={stream: rows.get(stream, 0) for stream in self._streams})
        self._buffered_steps.clear()
        self._flushed_at = self._clock()

    def _drop_replaced(self, table: pa.Table, rows: Mapping[str, int]) -> None:
        """Make room for evaluations at the step of the checkpoint: a resumed run makes them again, and these count."""
        again = set(table.filter(pc.equal(table["step"], self._resumed_at))["name"].to_pylist()) - self._replaced
        if again and rows.get(EVALUATIONS.path):
            self.update_info(rows={**rows, EVALUATIONS.path: 0})  # a kill in between must not look like a loss
        for name in again:
            drop_evaluation(self.path / EVALUATIONS.path, self._resumed_at, name)
        self._replaced |= again

    def close(self, status: str = "finished") -> None:
        """Flush and set the status: "finished" or "failed". The log can still be used afterwards."""
        if status not in ("finished", "failed"):
            raise ValueError(f"status is {status!r}; expected 'finished' or 'failed'")
        self.flush()
        self.update_info(status=status)

    @property
    def is_empty(self) -> bool:
        """Whether no row was given to it, and none of before is on disk."""
        return not self._buffered and next(self.path.rglob("part-*.parquet"), None) is None

    @property
    def _buffered(self) -> bool:
        return bool(self._steps or self._gradients or self._exposure or self._tables)

    def withdraw(self) -> None:
        """Give up a folder in which nothing was recorded, so that another run can begin there."""
        if self._rank == 0 and self.is_empty:
            (self.path / "run.json").unlink(missing_ok=True)

    def _write_info(self, info: dict[str, Any]) -> None:
        text = json.dumps(info, allow_nan=False, indent=1) + "\n"
        if self._rank == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            write_durably(self.path / "run.json", lambda file: file.write(text.encode()))


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    bad = {k for k, v in row.items() if isinstance(v, float | np.floating) and not math.isfinite(v)}
    return {k: None if k in bad else v for k, v in row.items()}


def _gradient_table(rows: list[tuple[GradientRow, NDArray[np.float32]]], stored: int) -> pa.Table:
    small = pa.Table.from_pylist([asdict(row) for row, _ in rows], schema=schema_of(GRADIENTS))
    values = pa.array(np.concatenate([sketch for _, sketch in rows]))
    field = schema_of(GRADIENTS, stored).field("sketch")
    return small.append_column(field, pa.FixedSizeListArray.from_arrays(values, stored))


def _read_info(folder: Path) -> dict[str, Any]:
    """Return run.json of a run that this version can continue."""
    path = folder / "run.json"
    if not path.is_file():
        raise InputError(f"{folder} holds no run: run.json is missing; expected the folder of the run to resume")
    info = read_run_json(path)
    found = (info.get("format"), info.get("format_version"))
    if found != (FORMAT, FORMAT_VERSION):
        raise InputError(
            f"{path} has format {found[0]!r}, version {found[1]!r}; expected {FORMAT!r}, version "
            f"{FORMAT_VERSION}: resume with the version that wrote it, or choose another folder"
        )
    return dict(info)


def _check_signals(folder: Path, recorded: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse signals or sketches other than the run's: their rows could not be compared."""
    now = json.loads(json.dumps(given))
    for name in {**recorded, **now}:
        found = _first_difference(recorded.get(name), now.get(name), name)
        if found is not None:
            where, before, after = found
            raise InputError(
                f"{folder} was recorded with {where} = {before}, which is now {after}; expected the same signals and "
                "sketches; fix: resume with the recorder's first options and version, or choose another folder"
            )


def _first_difference(before: Any, after: Any, where: str) -> tuple[str, Any, Any] | None:
    """Return the place of the first value that differs between two descriptions, and both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        parts = (_first_difference(before.get(key), after.get(key), f"{where}.{key}") for key in {**before, **after})
        return next((part for part in parts if part is not None), None)
    return None if before == after else (where, before, after)
