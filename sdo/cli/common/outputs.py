"""What commands that write files share: checks before they begin, writers, names of files, tables for the terminal."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.errors import InputError, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

Sources = Sequence["Path | str | None"]
_NAME_BYTES = 80  # of a run's name in a file's name
_LONGEST_NAME = 220  # bytes of a file's name; file systems take 255, and working names beside it are longer
_WITH_RECORD = (".npy", ".npz", ".safetensors", ".parquet")


def check_outputs(out: Path, suffix: str | tuple[str, ...], *, overwrite: bool, sources: Sources = ()) -> Path:
    """Refuse a name that is wrong, taken or cannot be written, before any work.

    Parameters
    ----------
    out
        The file to be written.
    suffix
        What its name must end in, or several of which it must be one.
    overwrite
        Whether existing files may be replaced.
    sources
        As for :func:`check_place`.

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
    length = len(os.fsencode(out.name))
    if length > _LONGEST_NAME:
        raise InputError(
            f"--out has a name of {length} bytes; expected at most {_LONGEST_NAME}, since working files beside it have "
            "longer ones; fix: a shorter name"
        )
    record = out.with_suffix(".json")
    check_place(out, sources, files=(out, record))
    for path in (out, record):
        if path.is_dir():
            raise InputError(f"{path} is a folder; expected a file's name; fix: choose another --out")
        if os.path.lexists(path) and not overwrite:
            raise InputError(f"{path} exists; expected a new file; fix: choose another --out, or add --overwrite")
    try_folder(out.parent)
    return record


def check_out_folder(out: Path, *, overwrite: bool, sources: Sources = (), files: Sequence[str] = ()) -> None:
    """Refuse a folder for results that is a file, holds files or cannot be written, before any work.

    Parameters
    ----------
    out
        The folder; it need not exist.
    overwrite
        Whether it may hold files.
    sources
        As for :func:`check_place`.
    files
        Names of the files in it that could replace a source.

    Raises
    ------
    InputError
        In one line, with the remedy.
    """
    with _named(out):
        if os.path.lexists(out) and not out.is_dir():
            raise InputError(f"--out {out} is a file; expected a folder")
        check_place(out, sources, files=[out / name for name in files])
        if out.is_dir() and any(out.iterdir()) and not overwrite:
            raise InputError(f"--out {out} holds files; choose another folder or add --overwrite")
    try_folder(out)


def check_place(
    out: Path, sources: Sources = (), *, files: Sequence[Path] = (), option: str = "--out", is_run: bool = False
) -> None:
    """Refuse results in a run folder, in a folder that is read, or in the place of a file that is read.

    Parameters
    ----------
    out
        A file or folder to be written.
    sources
        Files and folders that are read; None and what does not exist are passed over. Beside a matrix or a plan stands
        its JSON record, which belongs to it.
    files
        The files that will be written.
    option
        What named `out`, for the message.
    is_run
        Whether `out` is for a run, and so may be a run folder itself.

    Raises
    ------
    InputError
        In one line. Links are followed, so that another name of the same place is found out.
    """
    fix = f"fix: choose another {option}"
    with _named(out, option):
        place = Path(os.path.realpath(out))
        targets = {os.path.realpath(file): file for file in files}
        for folder in (*([] if is_run else [place]), *place.parents):
            if is_run_folder(folder):
                where = "a run folder" if folder == place else f"in the run folder {folder}"
                raise InputError(
                    f"{option} {out} is {where}, whose tables could no longer be read; expected a place outside; {fix}"
                )
    for source in sources:
        if source is None or not os.path.exists(source):
            continue
        read = Path(os.path.realpath(source))
        if read.is_dir() and read in (place, *place.parents):
            raise InputError(f"{option} {out} is in the folder {source}, which is read; expected another place; {fix}")
        beside = [read.with_suffix(".json")] if read.suffix.lower() in _WITH_RECORD else []
        for path in (read, *beside):
            if str(path) in targets:
                over = f"would write over its own source {targets[str(path)]}"
                raise InputError(f"{option} {out} {over}; expected another name; {fix}")


def is_run_folder(folder: Path) -> bool:
    """Whether a folder holds the ``run.json`` of a recorded run, even a damaged one."""
    try:
        return b'"sdo-run"' in (folder / "run.json").read_bytes()
    except OSError:
        return False


def try_folder(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be made or written; whatever the trial makes is removed again.

    Parameters
    ----------
    folder
        Where files are to be written.
    option
        What named it, for the message.

    Raises
    ------
    InputError
        In one line.
    """
    with _named(folder, option):
        made = missing_folders(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        finally:
            remove_empty(made)


def missing_folders(folder: Path) -> list[Path]:
    """Return the folders that have to be made for `folder`, itself first."""
    whole = Path(os.path.abspath(folder))
    return list(itertools.takewhile(lambda path: not os.path.lexists(path), (whole, *whole.parents)))


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove those of the folders that are empty, innermost first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _named(path: Path, option: str = "--out") -> Iterator[None]:
    """Say in one line why a path cannot be written; ValueError: a NUL character in it."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = "a file stands there" if isinstance(error, FileExistsError) else getattr(error, "strerror", error)
        raise InputError(
            f"{option} {path} cannot be written: {reason}; expected a folder of yours; fix: choose another {option}"
        ) from error


def make_folder(folder: Path) -> None:
    """Make the folder of an output.

    Parameters
    ----------
    folder
        Made with its parents where missing.

    Raises
    ------
    InputError
        If it cannot be made.
    """
    with _named(folder):
        folder.mkdir(parents=True, exist_ok=True)


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


class Outputs:
    """The outputs of a command, made one by one: one that fails is named, and the others go on.

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
        except Exception as error:  # whatever it was, the others are still worth having
            self.failed.append(what)
            print(f"sdo {self._command}: {what} failed: {' '.join(str(error).split())}", file=sys.stderr)
            return None


def json_writer(content: Any) -> Callable[[Path], object]:
    """Return a writer of a JSON file for `write_atomically`; NaN and infinity are refused now."""
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    # A lone surrogate, of a file's name that is no UTF-8, becomes JSON's own escape.
    return lambda file: file.write_text(text, encoding="utf-8", errors="backslashreplace")


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
    lines = [[printable(cell) for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = {*range(texts), *([len(widths) - 1] if last_text else [])}
    cells = [
        [cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    return "\n".join(indent + "  ".join(line).rstrip() for line in cells)
