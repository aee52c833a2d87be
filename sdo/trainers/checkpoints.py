"""Checkpoints of a trainer: the last one that is whole, and the data that one was trained on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
# Rows that are read for a digest: enough to tell data sets apart, at any size a matter of milliseconds.
_DIGEST_ROWS = 256


def last_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the last whole checkpoint of a trainer's output folder.

    Parameters
    ----------
    folder
        ``output_dir``.

    Returns
    -------
    pathlib.Path or None
        The ``checkpoint-n`` with the largest n that is whole, see :func:`checkpoint_damage`.
    """
    return next((path for _, path in _numbered(Path(folder)) if checkpoint_damage(path) is None), None)


def later_damaged(folder: Path, checkpoint: Path | None) -> list[str]:
    """Return what is wrong with the checkpoints of a folder after one (all where it is None), a line each."""
    match = None if checkpoint is None else _NAME.fullmatch(checkpoint.name)
    later = [path for n, path in _numbered(folder) if match is None or n > int(match[1])]
    return [f"{path}: {damage}" for path in later if (damage := checkpoint_damage(path)) is not None]


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a folder with their steps, the latest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def checkpoint_damage(checkpoint: Path) -> str | None:
    """Say in which respect a checkpoint was not written to its end; None where it is whole.

    Parameters
    ----------
    checkpoint
        The folder.

    Notes
    -----
    transformers writes the state last; a machine that dies may all the same leave files of the right name whose content
    never reached the disk. Nothing is unpickled: of safetensors the header must agree with the file's length, of
    torch's files, which are zip archives, the directory at their end must be there.
    """
    if not checkpoint.is_dir():
        return "there is no such folder"
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{STATE} is missing"
    except (OSError, ValueError, RecursionError):
        return f"{STATE} cannot be read"
    if not isinstance(state, dict) or "global_step" not in state:
        return f"{STATE} has no global_step"
    for file in sorted(checkpoint.iterdir()):
        if file.name.endswith(".safetensors.index.json"):
            missing = _missing_shard(file)
            if missing is not None:
                return missing
        if file.suffix == ".safetensors" and not _whole_safetensors(file):
            return f"{file.name} is cut off"
        if file.suffix in (".pt", ".pth", ".bin") and not _whole_archive(file):
            return f"{file.name} is cut off"
    return None


def global_step(checkpoint: Path) -> int:
    """Return how many updates a whole checkpoint's model has had."""
    return int(json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["global_step"])


def _missing_shard(index: Path) -> str | None:
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{index.name} cannot be read"
    gone = sorted(str(shard) for shard in shards if not (index.parent / str(shard)).is_file())
    return f"{gone[0]} is missing" if gone else None


def _whole_safetensors(file: Path) -> bool:
    """Whether the file is as long as its header says; see the format's description: length, JSON, numbers."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= size - 8:
                return False
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return False
    return 8 + length + max(ends, default=0) == size


def _whole_archive(file: Path) -> bool:
    """Whether a file of torch.save has its end; one of the time before zip archives is taken as it is."""
    try:
        with file.open("rb") as stream:
            begins = stream.read(2)
        if begins != b"PK":
            return len(begins) == 2
        with zipfile.ZipFile(file) as archive:
            return bool(archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def dataset_digest(dataset: Any, ids: NDArray[np.int64]) -> str | None:
    """Return a digest of a training dataset's content by sample id, whatever the order of its rows.

    Parameters
    ----------
    dataset
        As the trainer prepared it.
    ids
        Shape ``(n,)``, the sample id of each position.

    Returns
    -------
    str or None
        SHA-256 of up to 256 rows, evenly spread over the ids; of their ``input_ids`` where there are any, else of all
        columns. None for a dataset that is not of the datasets library, whose rows might be made anew at each call.
    """
    as_stored = getattr(dataset, "with_format", None)
    columns = getattr(dataset, "column_names", None)
    if as_stored is None or not columns:
        return None
    order = np.argsort(ids, kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), _DIGEST_ROWS)).astype(np.int64))]
    table = as_stored("arrow")[chosen.tolist()]
    kept = ["input_ids"] if "input_ids" in columns else sorted(columns)
    digest = hashlib.sha256()
    for name in kept:
        values = [ids[chosen].tolist(), table.column(name).to_pylist()]
        digest.update(json.dumps([name, values], sort_keys=True, default=repr).encode())
    return digest.hexdigest()
