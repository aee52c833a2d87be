"""Whether embeddings and data belong together, as far as the record that ``sdo embed`` leaves beside a matrix tells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sdo.embeddings.sources import TextDigest

Match = Literal["by id", "by position", "no"]


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the record beside a matrix; None where there is none, or it is of something else."""
    try:
        record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        _ = record["column"], record["texts_sha256"], record["rows"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def match_texts(
    record: dict[str, Any], dataset: Any, ids: Sequence[Any] | None, column: str | None = None
) -> Match | None:
    """Compare the texts of a dataset with those that were embedded.

    Parameters
    ----------
    record
        From :func:`read_record`.
    dataset
        Rows with the column that was embedded.
    ids
        The id of each row, which names its embedding row; None where the position does.
    column
        The column, where it has another name by now.

    Returns
    -------
    "by id", "by position", "no" or None
        Whether each row's id names the embedding of its text; or its position does, and not its id; or neither. None
        where nobody can tell: other texts were made of the column, not all rows are there, or the matrix has ids.
    """
    column = record["column"] if column is None else column
    if record.get("ids") is not None or record.get("strip_think") or column not in (dataset.column_names or ()):
        return None
    texts = list(dataset[column])
    if len(texts) != record["rows"] or not all(isinstance(text, str) for text in texts):
        return None
    by_position = _digest(texts) == record["texts_sha256"]
    if ids is None:
        return "by position" if by_position else "no"
    order = np.argsort(np.asarray(ids), kind="stable")
    if np.array_equal(np.asarray(ids)[order], np.arange(len(texts))):
        if _digest([texts[i] for i in order]) == record["texts_sha256"]:
            return "by id"
        return "by position" if by_position else "no"
    return "by position" if by_position else None


def _digest(texts: Sequence[str]) -> str:
    digest = TextDigest()
    for text in texts:
        digest.add(text)
    return digest.hexdigest()


def misplaced(path: Path, column: str, id_column: str) -> str:
    """Say that ids name other rows than those that were embedded, and what to do."""
    return (
        f"embeddings {path} were made from the rows of column {column!r} in their order, without ids, but the data's "
        f"own column {id_column!r} names another order, so that rows would find other rows' embeddings; expected ids "
        f"that belong to the embeddings; fix: sdo embed --id-column {id_column}, or rename that column (id_column "
        "names another)"
    )


def other_texts(path: Path, column: str) -> str:
    """Say that the embeddings are those of other texts."""
    return (
        f"{path} was made from other texts than column {column!r} of the data, or from the same in another order, so "
        "rows and embeddings do not belong together; fix: sdo embed the data that is trained on"
    )
