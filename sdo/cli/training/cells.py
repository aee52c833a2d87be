"""The cells of text that a training command trains on: each a string or a chat, or refused by its row and column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sdo.errors import InputError

_ROLES = ("prompt", "completion", "chosen", "rejected")  # columns of TRL's that a key of ours can name
_BATCH = 1000


def text_columns(columns: Any, trainer: Any, names: list[str]) -> list[str]:
    """Return the columns of a dataset that the trainer will read texts or chats from.

    Parameters
    ----------
    columns
        The method's own keys, such as :class:`sdo.cli.training.data.SFTColumns`.
    trainer
        TRL's arguments.
    names
        The dataset's columns.

    Returns
    -------
    list
        Those that are there; none where the rows are tokens already.
    """
    named = {role: getattr(columns, f"{role}_column", None) for role in _ROLES if hasattr(columns, f"{role}_column")}
    if hasattr(columns, "completion_column") and not any(named.values()):  # as SFTTrainer chooses, in this order
        groups = (("input_ids",), ("prompt", "completion"), ("messages",))
        field = str(getattr(trainer, "dataset_text_field", "text"))
        wanted = next((group for group in groups if group[0] in names), (field,))
        return [name for name in wanted if name in names and name != "input_ids"]
    return [column for column in (value or role for role, value in named.items()) if column in names]


def check_cells(rows: Any, columns: list[str], *, what: str, id_column: str, numbered: bool) -> None:
    """Refuse the first cell that is neither a string nor a chat, before a trainer stumbles over it.

    Parameters
    ----------
    rows
        The dataset, or the slice of it that is used.
    columns
        Columns of texts.
    what
        Where the rows come from, in words.
    id_column
        Column of sample ids.
    numbered
        Whether these are the rows' numbers in their source.

    Raises
    ------
    InputError
        Naming row and column, what stands there and what was expected.
    """
    if not columns:
        return
    place = 0
    for batch in rows.select_columns([*dict.fromkeys([*columns, id_column])]).iter(batch_size=_BATCH):
        for column in columns:
            for i, cell in enumerate(batch[column]):
                for fault in _faults(cell):
                    row = batch[id_column][i] if numbered else place + i
                    raise InputError(f"{what}: row {row}, column {column!r} {fault}; expected a string or a chat")
        place += len(batch[id_column])


def _faults(cell: Any) -> Iterator[str]:
    """Yield what is wrong with a cell."""
    if isinstance(cell, str):
        return
    if cell is None:
        yield "is null"
    elif not isinstance(cell, list):
        yield f"holds {cell!r:.60} ({type(cell).__name__})"
    elif not cell:
        yield "is an empty list"
    else:
        for number, message in enumerate(cell):
            yield from (f"holds a chat whose message {number} {fault}" for fault in _faults_of_message(message))


def _faults_of_message(message: Any) -> Iterator[str]:
    if not isinstance(message, dict):
        yield f"is {message!r:.60} ({'null' if message is None else type(message).__name__})"
        return
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        yield "has no role" if role is None else f"has the role {role!r:.60} ({type(role).__name__})"
    # The call of a tool, or a thought, needs no words of its own.
    more = any(value for key, value in message.items() if key not in ("role", "content", "name"))
    if content is None and not more:
        yield "has no content"
    elif content is not None and not isinstance(content, str | list):
        yield f"has the content {content!r:.60} ({type(content).__name__})"
