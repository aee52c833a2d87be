"""The folder of ``sdo demo``: what it may write over, and what it removes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from sdo.atomic import write_atomically
from sdo.cli.common.outputs import check_place, try_folder
from sdo.errors import InputError

MANIFEST = "demo.json"
NAMES = ("uniform", "sdo")  # of the runs
_DATA = ("train.jsonl", "held_out.jsonl", "embeddings.npy")
ENTRIES = (*_DATA, *NAMES, "coherence", "report.html", "report.json")


class DemoFolder:
    """The demo's folder. It lists its files in ``demo.json``, and removes those alone.

    Parameters
    ----------
    out
        The folder.
    """

    def __init__(self, out: Path) -> None:
        self.out = out

    def check(self, *, overwrite: bool) -> None:
        """Refuse a folder that is in use; nothing changes.

        Raises
        ------
        InputError
            If the folder holds files and may not be overwritten, or a name that the demo needs is taken by a file that
            it did not write.
        """
        if self.out.exists() and not self.out.is_dir():
            raise InputError(f"--out {self.out} is a file; expected a folder")
        check_place(self.out)
        try:
            in_use = self.out.is_dir() and any(self.out.iterdir())
        except OSError as error:
            raise InputError(f"cannot read {self.out}: {error.strerror}") from error
        if in_use and not overwrite:
            raise InputError(
                f"--out {self.out} holds files; choose another folder, or add --overwrite to replace an earlier demo"
            )
        written = self._written()
        foreign = [path for path in self._files() if path not in written]
        if foreign:
            raise InputError(
                f"{foreign[0]} stands where the demo would write, and no earlier demo lists it as its own; expected "
                f"{', '.join(ENTRIES)} to be free in {self.out}; fix: choose another folder, or move the file"
            )
        try_folder(self.out)

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Remove what an earlier demo wrote, and list what is written now, even if it ends early."""
        try:
            self._remove()
            self.out.mkdir(parents=True, exist_ok=True)
            self._list()
        except OSError as error:
            raise InputError(f"cannot write into {self.out}: {error.strerror}") from error
        try:
            yield
        finally:
            self._list()

    def _files(self) -> list[Path]:
        """Everything that is no folder under the names that the demo uses."""
        found: list[Path] = []
        for entry in (self.out / name for name in ENTRIES):
            if entry.is_symlink() or not entry.is_dir():
                found += [entry] if entry.is_symlink() or entry.exists() else []
            else:
                found += [path for path in sorted(entry.rglob("*")) if path.is_symlink() or not path.is_dir()]
        return found

    def _written(self) -> set[Path]:
        manifest = self.out / MANIFEST
        if not manifest.exists():
            return set()
        try:
            content = json.loads(manifest.read_text(encoding="utf-8"))
            if content["format"] != "sdo-demo":
                raise ValueError
            return {self.out / str(name) for name in content["files"]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{manifest} is not the list of an earlier demo; choose another folder") from error

    def _remove(self) -> None:
        """Remove the listed files under the demo's names, then the empty folders there."""
        written = self._written()
        for path in self._files():
            if path in written:
                path.unlink()
        for entry in (self.out / name for name in ENTRIES):
            if entry.is_dir():
                for folder in sorted((path for path in entry.rglob("*") if path.is_dir()), reverse=True):
                    folder.rmdir()
                entry.rmdir()

    def _list(self) -> None:
        names = [path.relative_to(self.out).as_posix() for path in self._files()]
        content = {"format": "sdo-demo", "format_version": 1, "files": names}
        text = json.dumps(content, indent=1) + "\n"
        write_atomically({self.out / MANIFEST: lambda file: file.write_text(text, encoding="utf-8")})
