"""Checkpoints of a trainer: the last one that is whole, and the data that one was trained on."""

from __future__ import annotations

import hashlib
import json
import os
import re
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
        The ``checkpoint-n`` with the largest n whose state can be read. transformers writes the state last, so that a
        process that died while it saved leaves a checkpoint without one.
    """
    numbered = [
        (int(match[1]), path) for path in Path(folder).glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))
    ]
    return next((path for _, path in sorted(numbered, reverse=True) if is_whole(path)), None)


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and "global_step" in state


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
