"""What commands that write a file and a JSON record beside it check before they begin."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sdo.errors import InputError


def check_outputs(out: Path, suffix: str | tuple[str, ...], *, overwrite: bool, sources: tuple[Path, ...] = ()) -> Path:
    """Refuse a name that is wrong or taken, before any work.

    Parameters
    ----------
    out
        The file to be written.
    suffix
        What its name must end in, or several of which it must be one.
    overwrite
        Whether existing files may be replaced.
    sources
        Files that are read and must not be written over.

    Returns
    -------
    Path
        The JSON record beside it.

    Raises
    ------
    InputError
        In one line, with the remedy.
    """
    allowed = (suffix,) if isinstance(suffix, str) else suffix
    if out.suffix not in allowed:
        raise InputError(f"--out is {out}; expected a name that ends in {' or '.join(allowed)}")
    record = out.with_suffix(".json")
    for path in (out, record):
        if any(path.resolve() == source.resolve() for source in sources):
            raise InputError(f"--out {out} would write over its own source {path}; expected another name")
        if path.is_dir():
            raise InputError(f"{path} is a folder; expected a file's name; mend: choose another --out")
        if path.exists() and not overwrite:
            raise InputError(f"{path} exists; expected a new file; mend: choose another --out, or add --overwrite")
    return record


def make_folder(folder: Path) -> None:
    """Make the folder of an output and try its permission, before the work takes its time.

    Parameters
    ----------
    folder
        Made with its parents where missing.

    Raises
    ------
    InputError
        If it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}; mend: choose another --out") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write into {folder}; expected a folder of yours; mend: choose another --out")


def check_out_folder(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder for results that is a file or holds files.

    Parameters
    ----------
    out
        The folder; it need not exist.
    overwrite
        Whether it may hold files.

    Raises
    ------
    InputError
        In one line, with the remedy.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; expected a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise InputError(f"--out {out} holds files; choose another folder or add --overwrite")


def aligned(lines: Sequence[Sequence[str]], *, texts: int = 1) -> str:
    """Return a table of equally long lines: the first `texts` columns to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    cells = [
        [cell.ljust(w) if i < texts else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in cells)
