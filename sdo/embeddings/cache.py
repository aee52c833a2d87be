"""Embeddings made before, found by what they were made from.

The key is the SHA-256 of the texts' own SHA-256, the model, its revision and every option; lengths and file names play
no part. An entry is a ``.npy`` matrix and a JSON record with the matrix's SHA-256; it exists once the record does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdo.atomic import write_atomically

# Raised when the same description would give other rows.
CACHE_VERSION = 1
_BLOCK = 1 << 22


def cache_folder() -> Path:
    """``$SDO_CACHE``, or ``~/.cache/sdo-toolkit/embeddings``."""
    named = os.environ.get("SDO_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "sdo-toolkit" / "embeddings"


def cache_key(description: Mapping[str, Any]) -> str:
    """The SHA-256 of what a matrix is a function of.

    Parameters
    ----------
    description
        Plain values: digest and number of the texts, encoder, model, revision, options.
    """
    text = json.dumps({"cache_version": CACHE_VERSION, **description}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class EmbeddingCache:
    """A folder of embedding matrices.

    Parameters
    ----------
    folder
        Made when the first entry is stored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fetch(self, key: str, target: Path) -> dict[str, Any] | None:
        """Copy an entry's matrix and return its record; None where there is none, or it is damaged.

        Parameters
        ----------
        key
            From :func:`cache_key`.
        target
            Written with the matrix; after None it may hold anything.
        """
        try:
            record: dict[str, Any] = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            digest = _copy(self.folder / f"{key}.npy", target)
        except (OSError, ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) and record.get("matrix_sha256") == digest else None

    def store(self, key: str, matrix: Path, record: Mapping[str, Any]) -> None:
        """Keep a copy of a matrix.

        Parameters
        ----------
        key
            From :func:`cache_key`.
        matrix
            A ``.npy`` file.
        record
            Plain values that :meth:`fetch` returns.

        Raises
        ------
        OSError
            If the folder cannot be written; no half entry is left.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        entry = dict(record)
        try:
            write_atomically(
                {
                    self.folder / f"{key}.npy": lambda path: entry.update(matrix_sha256=_copy(matrix, path)),
                    self.folder / f"{key}.json": lambda path: path.write_text(json.dumps(entry), encoding="utf-8"),
                }
            )
        except BaseException:
            with contextlib.suppress(OSError):
                (self.folder / f"{key}.json").unlink(missing_ok=True)
            raise


def _copy(source: Path, target: Path) -> str:
    """Copy a file and return its SHA-256."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb") as writer:
        while block := reader.read(_BLOCK):
            digest.update(block)
            writer.write(block)
    return digest.hexdigest()
