"""The rows that a training command trains on: loaded, numbered, and shaped as TRL's trainer expects them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdo.embeddings.sources import load_whole, locate, split_names
from sdo.errors import InputError, suggest


@dataclass
class SFTColumns:
    """Top-level keys of ``sdo sft`` beside TRL's: how rows become training samples.

    Parameters
    ----------
    prompt_column, completion_column
        Columns to use as prompt and completion; the loss is on the completion.
    chat
        Whether to wrap them in the tokenizer's chat template; None does so where there is one.
    """

    prompt_column: str | None = None
    completion_column: str | None = None
    chat: bool | None = None


@dataclass
class DPOColumns:
    """Top-level keys of ``sdo dpo`` beside TRL's: how rows become pairs.

    Parameters
    ----------
    prompt_column, chosen_column, rejected_column
        Columns to use as the prompt and its two answers; None stands for TRL's own names. Without a prompt the answers
        are whole conversations or texts that begin alike.
    chat
        Whether to wrap plain prompts and answers in the tokenizer's chat template; None does so where there is one.
        Has an effect only where a column is named.
    """

    prompt_column: str | None = None
    chosen_column: str | None = None
    rejected_column: str | None = None
    chat: bool | None = None


# What TRL 1.16 reads beside prompt and answers: what it renders into the prompt, and the reference's own scores.
READ_BY_TRL = ("tools", "chat_template_kwargs", "image", "images", "ref_chosen_logps", "ref_rejected_logps")


@dataclass
class Rows:
    """One split of a dataset, or slices of it.

    Attributes
    ----------
    dataset
        The rows, with a column of sample ids: that of the data, or each row's position in the whole split.
    whole
        How many rows the whole split has; None where the data brought their own ids.
    source
        Where they come from, in words.
    """

    dataset: Any
    whole: int | None
    source: str = ""


def load_rows(name: str | None, config: str | None, split: str, *, id_column: str, what: str) -> Rows:
    """Load one split of a dataset: a file, a folder, or a hub id.

    Parameters
    ----------
    name
        ``dataset_name``. An existing file or folder comes before a hub id of the same name.
    config
        ``dataset_config``.
    split
        A split, with an optional slice such as ``train[:6796]``, ``train[50%:]`` or ``train[-16:]``; of a sum of
        several the whole is all rows of the splits that it names, one split after the other.
    id_column
        Column of sample ids; made where the data have none.
    what
        Named in errors.

    Raises
    ------
    InputError
        If the source is missing, offline, malformed or empty.
    """
    if not name:
        raise InputError(f"{what} is missing; expected a .jsonl, .csv or .parquet file, a folder or a hub id")
    try:
        place = locate(name)
        if place.kind == "file" and split_names(split) != ["train"]:
            raise InputError(
                f"{name} is one file and has one split, train; got {split}; fix: a slice such as "
                "dataset_test_split: train[1000:], or a folder with train.jsonl and test.jsonl"
            )
        rows, positions = load_whole(place, config, split, progress=sys.stderr.isatty())
    except InputError as error:
        raise InputError(f"{what} {error}") from error
    own_ids = id_column in rows.column_names
    if not own_ids:
        rows = rows.add_column(id_column, list(range(len(rows))))
    if not positions:
        raise InputError(f"{what} {name}, split {split}, has no rows; expected at least one")
    return Rows(
        dataset=rows if positions == list(range(len(rows))) else rows.select(positions),
        whole=None if own_ids else len(rows),
        source=f"{place.title(split)}, {len(positions)} rows",
    )


def as_completions(dataset: Any, options: SFTColumns, tokenizer: Any, *, id_column: str, what: str) -> Any:
    """Name the prompt and completion columns as TRL expects them, in chat form where asked for.

    Parameters
    ----------
    dataset
        Rows as loaded.
    options
        Columns and form.
    tokenizer
        Tells whether there is a chat template.
    id_column
        Column of sample ids, which stays.
    what
        Named in errors.
    """
    wanted = {"prompt": options.prompt_column, "completion": options.completion_column}
    require_named_columns(dataset, wanted, id_column, what)
    if (wanted["prompt"] is None) != (wanted["completion"] is None):
        raise InputError("prompt_column and completion_column go together; expected both or neither")
    if wanted["prompt"] is None:
        known = ("text", "messages", "prompt", "completion", "input_ids")
        if not set(known) & set(dataset.column_names):
            raise InputError(
                f"{what} has the columns {', '.join(dataset.column_names)}; expected one that TRL knows "
                f"({', '.join(known)}); fix: name yours with prompt_column and completion_column"
            )
        return dataset
    return _renamed(dataset, wanted, options.chat, tokenizer, id_column)


def as_pairs(dataset: Any, options: DPOColumns, tokenizer: Any, *, id_column: str, what: str) -> Any:
    """Name the columns of prompt, chosen and rejected answer as TRL expects them, in chat form where asked for.

    Parameters
    ----------
    dataset, options, tokenizer, id_column, what
        As for :func:`as_completions`.
    """
    named = {"prompt": options.prompt_column, "chosen": options.chosen_column, "rejected": options.rejected_column}
    require_named_columns(dataset, named, id_column, what)
    wanted = {name: column or name for name, column in named.items()}
    if not {wanted["chosen"], wanted["rejected"]} <= set(dataset.column_names):
        raise InputError(
            f"{what} has the columns {', '.join(c for c in dataset.column_names if c != id_column)}; expected chosen "
            "and rejected, and prompt unless both begin with it; fix: name yours with prompt_column, chosen_column "
            "and rejected_column"
        )
    if not any(named.values()):
        return dataset
    present = {name: column for name, column in wanted.items() if column in dataset.column_names}
    return _renamed(dataset, present, options.chat if "prompt" in present else False, tokenizer, id_column)


def require_named_columns(dataset: Any, wanted: Mapping[str, str | None], id_column: str, what: str) -> None:
    """Refuse columns that the data do not have, with the nearest names.

    Parameters
    ----------
    dataset, id_column, what
        As for :func:`as_completions`.
    wanted
        The columns, by what they are wanted for; None for none.
    """
    for column in wanted.values():
        if column is not None and column not in dataset.column_names:
            others = [c for c in dataset.column_names if c != id_column]
            raise InputError(
                f"{what} has no column {column!r}; {suggest(column, others)}its columns are {', '.join(others)}"
            )


def _renamed(dataset: Any, wanted: Mapping[str, Any], chat: bool | None, tokenizer: Any, id_column: str) -> Any:
    """Rows with the wanted columns, their ids and what TRL reads; texts become messages where a chat is wanted."""
    as_chat = bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat

    def cell(name: str, value: Any) -> Any:
        if not as_chat or not isinstance(value, str):
            return value
        return [{"role": "user" if name == "prompt" else "assistant", "content": value}]

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        return {name: cell(name, row[column]) for name, column in wanted.items()}

    kept = {id_column, *READ_BY_TRL} - set(wanted.values())
    return dataset.map(convert, remove_columns=[c for c in dataset.column_names if c not in kept])
