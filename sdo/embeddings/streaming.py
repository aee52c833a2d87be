"""A matrix that is written to disk chunk by chunk, and continued after the process was killed."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from sdo.atomic import write_atomically
from sdo.embeddings.sources import Survey, TextDigest
from sdo.errors import InputError

Encode = Callable[[Sequence[str]], NDArray[np.float32]]


def encode_to_disk(
    texts: Iterable[str],
    expected: Survey,
    encode: Encode,
    matrix: ResumableMatrix,
    *,
    chunk: int,
    report: Callable[[int], object] = lambda rows: None,
) -> Path:
    """Encode texts in chunks and write the rows as they come; never more than a chunk is in memory.

    Parameters
    ----------
    texts
        All of them, from the first; those that are done are read, for the digest, and not encoded again.
    expected
        What an earlier pass over the same texts found.
    encode
        Maps n texts to rows of shape ``(n, d)``.
    matrix
        Where the rows go.
    chunk
        Texts per call of `encode`.
    report
        Called with the number of rows just written.

    Returns
    -------
    Path
        The finished ``.npy`` file, still under its temporary name.

    Raises
    ------
    InputError
        If the texts are no longer those of the earlier pass.
    """
    digest, waiting, seen, done = TextDigest(), [], 0, matrix.done
    for text in texts:
        digest.add(text)
        seen += 1
        if seen > expected.rows:
            break
        if seen <= done:
            continue
        waiting.append(text)
        if len(waiting) == chunk or seen == expected.rows:
            matrix.append(encode(waiting))
            report(len(waiting))
            waiting = []
    path = matrix.close()
    if seen != expected.rows or digest.hexdigest() != expected.texts_sha256:
        raise InputError("the source changed while it was being embedded; expected it to stay; fix: run again")
    return path


class ResumableMatrix:
    """A float32 ``.npy`` file under a temporary name, with a record of the rows that are done.

    Parameters
    ----------
    target
        What the file will be called; the temporaries stand beside it, hidden.
    key
        What the rows are a function of. An unfinished file of another key is written anew.
    rows
        N.
    dim
        d.

    Attributes
    ----------
    done
        Rows that are written; the next chunk begins there.
    discarded
        Whether an unfinished file of another key was there.

    Notes
    -----
    A chunk counts once its bytes were flushed and the record was renamed into place, in this order. Chunks have to
    begin where they would without an interruption, and then the finished file has the same bytes.
    """

    def __init__(self, target: Path, key: str, rows: int, dim: int) -> None:
        self.path, self._record = work_files(target)
        self._state: dict[str, object] = {"key": key, "rows": rows, "dim": dim}
        found = _read(self._record)
        same = all(found.get(name) == value for name, value in self._state.items())
        done = found.get("done")
        self.discarded = bool(found) and not same
        self.done = done if same and isinstance(done, int) and 0 <= done <= rows and self._fits(rows, dim) else 0
        if self.done:
            self._matrix = open_memmap(self.path, mode="r+")
        else:
            self._record.unlink(missing_ok=True)  # before the matrix it speaks of is replaced
            self._matrix = open_memmap(self.path, mode="w+", dtype="<f4", shape=(rows, dim))

    def _fits(self, rows: int, dim: int) -> bool:
        try:
            there = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return False
        return bool(there.shape == (rows, dim) and there.dtype == np.dtype("<f4"))

    def append(self, chunk: NDArray[np.float32]) -> None:
        """Write the next rows, shape ``(n, d)``, so that they outlive the process."""
        stop = self.done + len(chunk)
        self._matrix[self.done : stop] = chunk
        self._matrix.flush()
        state = json.dumps({**self._state, "done": stop})
        write_atomically({self._record: lambda path: path.write_text(state, encoding="utf-8")})
        self.done = stop

    def close(self) -> Path:
        """Let go of the file, which is complete once :attr:`done` is N, and return its path."""
        self._matrix.flush()
        del self._matrix
        return self.path


def work_files(target: Path) -> tuple[Path, Path]:
    """The temporary matrix of a target, and its record."""
    return target.with_name(f".{target.name}.partial.npy"), target.with_name(f".{target.name}.partial.json")


def remove_work_files(target: Path) -> None:
    """Remove what a finished or given-up run left beside its target."""
    matrix, record = work_files(target)
    for path in (matrix, record, *record.parent.glob(f".{glob.escape(record.name)}.*.tmp")):
        path.unlink(missing_ok=True)


def _read(record: Path) -> dict[str, object]:
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
