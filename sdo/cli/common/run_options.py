"""What commands on run folders share: their options, opening and checking the runs, and names that tell runs apart."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdo.errors import InputError, printable

if TYPE_CHECKING:
    from analysis import Run


def add_options(parser: argparse.ArgumentParser, *, signals: str = "all") -> None:
    """Add run folders, output folder and signal; `signals` says which are taken by default."""
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="folder of a recorded run")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    add("--signal", metavar="weight|hidden|head_only", help=f"one signal only (default: {signals})")
    add("--overwrite", action="store_true", help="write into a folder that holds files")


def open_runs(paths: list[Path]) -> dict[str, Run]:
    """Open run folders.

    Returns
    -------
    dict
        By the names that :func:`unique_names` gives, in the order of `paths`.

    Raises
    ------
    InputError
        A folder came twice or is no run folder.
    """
    from analysis import Run

    return dict(zip(unique_names(paths), [Run.open(path) for path in paths], strict=True))


def check_gradients(run: Run, signals: Iterable[str]) -> None:
    """Open every part of a run folder, and refuse a signal of which it holds no gradients.

    Raises
    ------
    InputError
        In one line.
    """
    run.check()
    for signal in signals:
        run.kinds(signal)


def unique_names(paths: list[Path]) -> list[str]:
    """Return the shortest path suffix that tells each run from the others.

    Raises
    ------
    InputError
        The same folder came twice.
    """
    for path in paths:
        if os.fsencode(path) != str(path).encode(errors="replace"):
            raise InputError(f"{path}: the name is no UTF-8; expected one that Parquet readers take; fix: rename it")
    parts = [real(path).parts for path in paths]
    for i, one in enumerate(parts):
        if one in parts[:i]:
            raise InputError(f"{paths[i]} came twice; expected different run folders")
    return [shortest_suffix(one, [*parts[:i], *parts[i + 1 :]]) for i, one in enumerate(parts)]


def real(path: Path) -> Path:
    """Return a path without links and dots; where links lead in a circle, what is known of it."""
    return Path(os.path.realpath(path))


def shortest_suffix(parts: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    """Return the end of a path, given by its parts, with as few of them as tell it from the other paths."""
    depth = next(n for n in range(1, len(parts) + 1) if all(other[-n:] != parts[-n:] for other in others))
    return run_name("/".join(part.strip("/") for part in parts[-depth:]))


def run_name(text: str) -> str:
    r"""Return a name on one line for tables, pictures and reports; different texts give different names.

    Examples
    --------
    >>> print(run_name("a\nb"), run_name("a\\nb"))
    a\nb a\\nb
    """
    return printable(text.replace("\\", "\\\\"))
