"""The run folder's contract, as far as it is about names and numbers of rows: writer and readers check the same.

A part of ``steps/`` and ``gradients/<signal>/`` is named by the first and last step it holds; run.json counts under
``rows`` what was written. What a folder lacks, or holds twice, is found here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sdo.errors import InputError

FORMAT = "sdo-run"
FORMAT_VERSION = 1
STREAMS = ("steps", "exposure", "evaluations")  # and gradients/<signal>, of process 0
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

    Runs of earlier versions count none, so that their parts' names alone can tell what is missing.
    """
    return stream == "steps" or not info.get("rows")


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
