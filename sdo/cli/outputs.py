"""What commands that write files share: checks before they begin, writers, names of files, tables for the terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAME_BYTES = 80  # of a run's name in a file's name


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


def file_names(names: list[str]) -> dict[str, str]:
    """Return for each run name one that is safe in a file name, and different from the others' in more than case."""
    safe: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        base = re.sub(r"[^\w.-]+", "-", name).strip("-.")
        # File systems limit bytes, 255 for most; the end of a cut character goes too.
        base = base.encode()[:_NAME_BYTES].decode(errors="ignore") or "run"
        candidate, number = base, 1
        while candidate.casefold() in taken:
            number += 1
            candidate = f"{base}-{number}"
        taken.add(candidate.casefold())
        safe[name] = candidate
    return safe


class Parts:
    """An output that is made part by part: a part that fails is named, and the others go on.

    Attributes
    ----------
    failed
        What failed.
    files
        Names of the files that were written.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self.failed: list[str] = []
        self.files: list[str] = []

    def attempt(self, what: str, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns, or None where it fails, after a line on standard error."""
        try:
            return compute()
        except Exception as error:  # whatever it was, the other parts are still worth having
            self.failed.append(what)
            print(f"sdo {self._command}: {what} failed: {' '.join(str(error).split())}", file=sys.stderr)
            return None


def json_writer(content: Any) -> Callable[[Path], object]:
    """Return a writer of a JSON file for `write_atomically`; NaN and infinity are refused now."""
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    return lambda file: file.write_text(text, encoding="utf-8")


def array_writer(array: NDArray[Any]) -> Callable[[Path], object]:
    """Return a writer of an ``.npy`` file for `write_atomically`, whatever the file's name ends in."""

    def save(file: Path) -> None:
        import numpy as np

        with file.open("wb") as stream:
            np.save(stream, array, allow_pickle=False)

    return save


def aligned(lines: Sequence[Sequence[str]], *, texts: int = 1, last_text: bool = False, indent: str = "") -> str:
    """Return a table of equally long lines.

    Parameters
    ----------
    lines
        The cells.
    texts
        How many columns stand to the left; numbers stand to the right.
    last_text
        Whether the last column stands to the left too.
    indent
        Before each line.
    """
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = {*range(texts), *([len(widths) - 1] if last_text else [])}
    cells = [
        [cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    return "\n".join(indent + "  ".join(line).rstrip() for line in cells)
