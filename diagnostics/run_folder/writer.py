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
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from diagnostics.run_folder.cut_back import check_signals, check_whole, count_rows, cut_back, read_info
from diagnostics.run_folder.parquet import (
    EXPOSURE_KEY,
    append_part,
    check_steps,
    drop_evaluation,
    list_parts,
    read_part,
    write_durably,
    write_table,
)
from diagnostics.run_folder.rows import GradientRow, StepRow, gradient_table, step_table, with_reason
from sdo.checks import whole_number
from sdo.errors import InputError
from sdo.run_format import (
    EVALUATIONS,
    EXPOSURE,
    FORMAT,
    FORMAT_VERSION,
    GRADIENT_KINDS,
    read_run_json,
    streams_of,
)
from sdo.run_schema import schema_of

FLUSH_STEPS, FLUSH_SECONDS = 50, 60.0
_OWN_KEYS = ("format", "format_version", "created", "status")
_SIGNAL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


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
            What run.json keeps, JSON-serializable without NaN. ``info["signals"][name]["stored"]`` is the
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
        log = cls(folder, read_info(folder), rank, clock)
        if info is not None:
            check_signals(folder, log.info["signals"], info.get("signals", {}))
        if rank != 0:
            return log
        first = int(log.info.get("first_step", 0))
        log._epoch_ends = check_steps(folder, first, step)
        check_whole(folder, log.info, log._streams, log._epoch_ends, step)
        if "rows" in log.info:
            log.update_info(rows={})  # until the parts are cut: a crash in between must not look like a loss
        cut_back(folder, log._streams, log._epoch_ends, step)
        log._resumed_at = step
        log.update_info(
            status="running",
            first_step=min(first, step),
            resumed_at=[*log.info.get("resumed_at", []), step],
            rows={stream: count_rows(folder / stream) for stream in log._streams},
        )
        return log

    def add_step(self, row: StepRow) -> None:
        """Buffer one step's row. Numbers that are not finite become null."""
        if self._rank != 0:
            return
        self._steps.append(row)
        self._buffered_steps.add(row.step)
        self._epoch_ends[row.organizer_epoch] = row.step + 1

    def add_gradient(self, signal: str, row: GradientRow, sketch: NDArray[np.float32]) -> None:
        """Buffer one gradient's row and a copy of its sketch.

        What gives no direction gets a reason and a sketch of zeros: see `rows.with_reason`.

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
        self._gradients.setdefault(signal, []).append(with_reason(row, sketch.copy()))
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
            table = gradient_table(self._gradients[signal], self._stored[signal])
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
            table = step_table(self._steps)
            append_part(self.path / "steps", "part-", table)
            rows["steps"] = rows.get("steps", 0) + table.num_rows
            self._steps.clear()
        if written and self._rank == 0:
            # Few parts: counted anew, since they may replace rows. Of the others there are many.
            rows |= {stream: count_rows(self.path / stream) for stream in ("exposure", "evaluations")}
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
