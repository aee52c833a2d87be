"""The run folder's contract: its streams, their columns and types, the names of files, and what is checked.

The writer (``diagnostics.run_folder``) and the reader (``analysis.run_folder``) build their Parquet schemas from
`STREAMS` (see :mod:`sdo.run_schema`). A new stream, or a new column of one, is one entry here.

A part of a stream is a file named by the first and last step that it holds; run.json counts under ``rows`` what was
written. What a folder lacks, or holds twice, is found here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdo.errors import InputError

FORMAT = "sdo-run"
FORMAT_VERSION = 1
GRADIENT_KINDS = ("step", "micro_batch", "sample")  # what a row of gradients/<signal> is the gradient of


@dataclass(frozen=True)
class Column:
    """One column of a stream.

    Parameters
    ----------
    name
        Its name.
    type
        ``int32``, ``int64``, ``float64``, ``bool``, ``string``, ``ids`` (a list of int64) or ``sketch`` (as many
        float32 as run.json says under the signal's ``stored``).
    meaning
        What a value is, with its unit.
    nullable
        Whether a value may be null.
    later
        Whether runs of earlier versions lack the column: it is read as null there.
    """

    name: str
    type: str
    meaning: str
    nullable: bool = False
    later: bool = False


@dataclass(frozen=True)
class Stream:
    """One table of a run folder: a folder of Parquet files.

    Parameters
    ----------
    path
        The folder; ``<signal>`` stands for the name of each signal.
    row
        What one row is.
    columns
        Its columns, in their order.
    keys
        The columns by which it is read sorted.
    by_step
        Whether each step's rows lie in one file. Such files are checked for steps that are missing or there twice.
    after
        Resuming at step s keeps the rows of steps below ``s + after``.
    """

    path: str
    row: str
    columns: tuple[Column, ...]
    keys: tuple[str, ...]
    by_step: bool = True
    after: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(column.name for column in self.columns)


_STEP = Column("step", "int64", "global_step before the update, from 0")
STEPS = Stream(
    "steps",
    "one optimizer step",
    (
        _STEP,
        Column("organizer_epoch", "int64", "epoch of the plan; null without an organizer", nullable=True),
        Column("trainer_epoch", "float64", "epochs, as the trainer counts", nullable=True),
        Column("loss", "float64", "the step's loss, as run.json says under its meaning", nullable=True),
        Column("learning_rate", "float64", "of this update", nullable=True),
        Column("grad_norm", "float64", "2-norm over all parameters before clipping, by the trainer", nullable=True),
        Column("clipped", "bool", "whether the gradient was clipped", nullable=True),
        Column("loss_scale", "float64", "factor on the loss under float16; 1 otherwise", nullable=True),
        Column("skipped", "bool", "no update: a gradient overflowed under loss scaling", nullable=True, later=True),
        Column("tokens", "int64", "trained tokens, over all processes"),
        Column("seconds", "float64", "wall time without recorder_seconds", nullable=True),
        Column("recorder_seconds", "float64", "host time of the recorder", nullable=True),
        Column("sample_ids", "ids", "the samples that were trained"),
    ),
    keys=("step",),
)
GRADIENTS = Stream(
    "gradients/<signal>",
    "the gradient of a step, a micro-batch or a sample",
    (
        _STEP,
        Column("kind", "string", "step, micro_batch or sample"),
        Column("micro_batch", "int32", "its number within the step; null for a step", nullable=True),
        Column("sample_ids", "ids", "the samples whose gradient it is"),
        Column("tokens", "int64", "trained tokens of these samples"),
        Column("norm", "float64", "exact 2-norm; null with a reason", nullable=True),
        Column("norm_state", "string", "raw or clipped, scaled or not, in words"),
        Column("reason", "string", "why the sketch is zeros; null for a usable gradient", nullable=True),
        Column("sketch", "sketch", "the gradient itself, or its count-sketch"),
    ),
    keys=("step",),
)
EXPOSURE = Stream(
    "exposure",
    "one sample after one organizer epoch; counts since the beginning",
    (
        Column("organizer_epoch", "int64", "epoch of the plan"),
        Column("sample_id", "int64", "the sample"),
        Column("planned", "int64", "times in planned batches"),
        Column("trained", "int64", "times in updates that happened"),
        Column("in_pool", "bool", "whether it was in the epoch's pool"),
    ),
    keys=("organizer_epoch", "sample_id"),
    by_step=False,
)
EVALUATIONS = Stream(
    "evaluations",
    "one score of one sample at one evaluation",
    (
        Column("step", "int64", "global_step at the evaluation: updates so far"),
        Column("name", "string", "what was measured"),
        Column("sample_id", "int64", "position in the evaluation set, or for reward the training prompt's id"),
        Column("score", "float64", "the score; null where it is not finite", nullable=True),
    ),
    keys=("step", "name", "sample_id"),
    by_step=False,
    after=1,  # evaluation comes before saving
)
SELECTION = Stream(
    "selection",
    "one sample that a step was offered, where a selector decides what is trained",
    (
        _STEP,
        Column("sample_id", "int64", "the sample"),
        Column("micro_batch", "int32", "its number within the step, over all processes"),
        Column("kept", "bool", "whether it was trained"),
        Column("score", "float64", "the selector's; the larger, the sooner kept"),
    ),
    keys=("step", "micro_batch"),
    by_step=False,
)
STREAMS = (STEPS, GRADIENTS, EXPOSURE, EVALUATIONS, SELECTION)


def streams_of(signals: Iterable[str]) -> dict[str, Stream]:
    """Return the streams of a run with these signals, by their folders.

    Examples
    --------
    >>> list(streams_of(["hidden", "weight"]))
    ['steps', 'gradients/hidden', 'gradients/weight', 'exposure', 'evaluations', 'selection']
    """
    signals = list(signals)
    found: dict[str, Stream] = {}
    for stream in STREAMS:
        names = signals if "<signal>" in stream.path else [""]
        found |= {stream.path.replace("<signal>", name): stream for name in names}
    return found


_PART = re.compile(r"part-(?:r(\d+)-)?(\d{8,})-(\d{8,})\.parquet")


def part_range(name: str) -> tuple[int, int, int] | None:
    """Return rank (0 where the name has none), first and last step of a part, or None for another name.

    Examples
    --------
    >>> part_range("part-r1-00000000-00000049.parquet"), part_range("part-00000.parquet")
    ((1, 0, 49), None)
    """
    match = _PART.fullmatch(name)
    return None if match is None else (int(match[1] or 0), int(match[2]), int(match[3]))


def read_run_json(path: Path) -> dict[str, Any]:
    """Return the content of run.json; what is NaN in it is read as null.

    Raises
    ------
    InputError
        If it cannot be read, or does not describe a run of this format.
    """
    try:
        info = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except RecursionError:
        raise InputError(f"{path} is nested too deeply for JSON of ours; expected the run.json of a run") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}; expected the run.json of a run") from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise InputError(f'{path} does not describe a run: expected "format": "{FORMAT}"')
    return info


def gaps_are_faults(info: Mapping[str, Any], stream: str) -> bool:
    """Whether parts of a stream must follow each other: a signal may be silent at a step, and its rows are counted.

    Runs of earlier versions count none, nor does a run before its first flush is whole, so that the parts' names alone
    can tell what is missing. Of a signal without rows of steps they tell nothing: it has rows at some steps alone.
    """
    signal = (info.get("signals") or {}).get(stream.removeprefix("gradients/")) or {}
    return stream == "steps" or (not info.get("rows") and "step" in signal.get("kinds", ("step",)))


def check_parts(
    folder: Path, names: Iterable[str], *, first: int | None = None, last: int | None = None, gaps: bool = True
) -> None:
    """Refuse parts that leave out steps or hold steps twice.

    Parameters
    ----------
    folder
        Named in errors.
    names
        Of its parts, those of all processes.
    first
        The first step that each process must have; None where nobody knows.
    last
        Steps after it are of no account.
    gaps
        Whether to look for steps that are left out, and not only for those that are there twice.

    Raises
    ------
    InputError
        Naming the steps, and what to do.
    """
    ranges: dict[int, list[tuple[int, int]]] = {}
    for name in names:
        found = part_range(name)
        if found is None:
            raise InputError(
                f"{folder / name} is no part that a recorder writes; expected part-FIRST-LAST.parquet alone; fix: "
                "take it out of the run folder"
            )
        if last is None or found[1] <= last:
            ranges.setdefault(found[0], []).append(found[1:])
    for parts in ranges.values():
        before = None if first is None else first - 1
        for start, stop in sorted(parts):
            if gaps and before is not None and start > before + 1:
                raise InputError(
                    f"{folder} lacks the steps {before + 1} to {start - 1}: a part is missing; expected all steps of "
                    "the run; fix: put it back, or use another run"
                )
            if before is not None and start <= before:
                raise InputError(
                    f"{folder} holds step {start} in two parts; expected each step once; fix: take the copy out"
                )
            before = stop


def check_rows(path: Path, info: Mapping[str, Any], found: Mapping[str, int]) -> None:
    """Refuse a folder that holds fewer rows than run.json counts, or, once the run is closed, more.

    Parameters
    ----------
    path
        The run folder.
    info
        Its run.json. Runs of earlier versions count nothing, and pass.
    found
        Rows on disk by stream, ``gradients/<signal>`` of process 0 among them.

    Raises
    ------
    InputError
        Naming the stream and both numbers.
    """
    closed = info.get("status") in ("finished", "failed")
    counts = info.get("rows")
    for stream, count in (counts if isinstance(counts, dict) else {}).items():
        rows = found.get(stream, 0)
        if not isinstance(count, int) or rows == count or (rows > count and not closed):
            continue
        what = "a part is missing or was cut" if rows < count else "a part was copied in"
        raise InputError(
            f"{path / stream} holds {rows:,} rows, run.json counts {count:,}: {what}; expected what was written; fix: "
            "put the folder back as it was, or use another run"
        )
