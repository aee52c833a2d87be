"""Where texts come from: JSON Lines, CSV, Parquet, a local dataset folder or a dataset of the hub.

A source is read as a stream and may be read again: nothing here holds a corpus in memory. What exists on disk comes
before a hub id of the same name, and a folder counts only if it holds data (datasets#5228, #6837).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdo.checks import whole_number
from sdo.embeddings.row_files import READERS, Row, require_columns, require_distinct_columns, whole_numbers
from sdo.errors import InputError, error_line

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")  # what can be one, of a dataset or a model
_DATA = ("*.jsonl", "*.json", "*.csv", "*.parquet", "*.arrow", "state.json", "dataset_info.json")
_SPLIT = "split"
_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Selection:
    """Which part of a row becomes its text.

    Attributes
    ----------
    column
        Holds strings, or chats: lists of ``{"role": ..., "content": ...}``.
    role
        Of a chat, all messages of this role, joined by blank lines in their order; None takes "user", and accepts plain
        strings as well.
    id_column
        Holds each row's id, an integer or a string; None takes none.
    strip_think
        Whether to leave out ``<think>`` blocks: one that is never closed ends with the text, one that was opened by
        the chat template begins with it.
    """

    column: str
    role: str | None = None
    id_column: str | None = None
    strip_think: bool = False


@dataclass(frozen=True)
class Source:
    """Rows that can be read again and again.

    Attributes
    ----------
    name
        In words, with the kind of place: "file train.jsonl", "folder data, split train", "hub dataset openai/gsm8k".
    rows
        Starts reading the named columns; yields where a row stands, for errors, and the row.
    path
        The file or folder, or None.
    """

    name: str
    rows: Callable[[Sequence[str]], Iterator[tuple[str, Row]]]
    path: Path | None = None

    def texts(self, selection: Selection, *, limit: int | None = None) -> Iterator[tuple[Any, str]]:
        """Yield the id (None without an id column) and the text of each row, in order.

        Raises
        ------
        InputError
            Naming the row that lacks the column or holds something else, or saying that there are no rows.
        """
        if limit is not None:
            whole_number("limit", limit, 1)
        columns = [selection.column] if selection.id_column is None else [selection.column, selection.id_column]
        count = 0
        for where, row in self.rows(columns):
            text = _text_of(_cell(row, selection.column, where), selection, where)
            yield None if selection.id_column is None else _id_of(row, selection.id_column, where), text
            count += 1
            if count == limit:
                return
        if not count:
            raise InputError(f"{self.name} holds no rows; expected at least one text")


@dataclass
class Survey:
    """What one pass over the texts finds.

    Attributes
    ----------
    rows, characters
        How many.
    texts_sha256
        SHA-256 of the texts as a JSON array, ASCII only: ``json.dumps(list_of_texts)``.
    ids
        One for each row, or None; CSV knows strings only, so ids that are all written as whole numbers become integers.
    """

    rows: int = 0
    characters: int = 0
    texts_sha256: str = ""
    ids: list[Any] | None = None


@dataclass
class TextDigest:
    """The SHA-256 of texts that come one by one; equals that of ``json.dumps(list_of_texts)``."""

    _hash: Any = field(default_factory=lambda: hashlib.sha256(b"["))
    _empty: bool = True

    def add(self, text: str) -> None:
        """Count in one more text."""
        self._hash.update((b"" if self._empty else b", ") + json.dumps(text).encode("ascii"))
        self._empty = False

    def hexdigest(self) -> str:
        """The digest of the texts so far."""
        whole = self._hash.copy()
        whole.update(b"]")
        return str(whole.hexdigest())


def survey(source: Source, selection: Selection, *, limit: int | None = None) -> Survey:
    """Read all texts once: count them, take their digest and keep their ids.

    Raises
    ------
    InputError
        As :meth:`Source.texts` does.
    """
    found, digest = Survey(ids=None if selection.id_column is None else []), TextDigest()
    for key, text in source.texts(selection, limit=limit):
        digest.add(text)
        found.rows += 1
        found.characters += len(text)
        if found.ids is not None:
            found.ids.append(key)
    found.texts_sha256 = digest.hexdigest()
    if found.ids and source.path is not None and source.path.suffix.lower() == ".csv":
        found.ids = whole_numbers(found.ids)
    return found


@dataclass(frozen=True)
class Place:
    """What a name means.

    Attributes
    ----------
    kind
        ``"file"``, ``"folder"`` or ``"hub dataset"``.
    name
        As the user wrote it.
    path
        The file or folder, or None.
    """

    kind: str
    name: str
    path: Path | None = None

    def title(self, split: str | None) -> str:
        """The place in words: "file train.jsonl", "hub dataset openai/gsm8k, split test"."""
        return f"{self.kind} {self.name}" + ("" if self.kind == "file" else f", split {split or 'train'}")


def locate(name: str) -> Place:
    """Find out what a name means, in this order: a file, a folder that holds data, a hub id.

    Parameters
    ----------
    name
        An existing file (``.jsonl``, ``.json``, ``.csv``, ``.parquet``); an existing folder that holds data, as
        ``load_dataset`` or ``load_from_disk`` reads it; a hub id.

    Raises
    ------
    InputError
        If it is none of these. Whether the hub has such a dataset is not asked here.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() not in _BUILDERS:
            raise InputError(f"{name} ends in {path.suffix or 'nothing'}; expected .jsonl, .csv or .parquet")
        return Place("file", name, path)
    if path.is_dir() and any(next(path.rglob(pattern), None) for pattern in _DATA):
        return Place("folder", name, path)
    if path.suffix.lower() in _BUILDERS or not HUB_ID.fullmatch(name):
        there = "holds no data files" if path.is_dir() else "no such file or folder"
        raise InputError(f"{name}: {there}; expected a .jsonl, .csv or .parquet file, a folder with such, or a hub id")
    return Place("hub dataset", name)


def open_source(name: str, *, split: str | None = None, config: str | None = None) -> Source:
    """Find out what a name means, without reading the rows.

    Parameters
    ----------
    name
        As :func:`locate` takes it.
    split
        Of a folder or a hub dataset, slices such as ``train[:1000]`` included; "train" by default.
    config
        Configuration of a hub dataset.

    Raises
    ------
    InputError
        If there is no such source, or no network to fetch it.
    """
    place = locate(name)
    if place.kind == "file" and place.path is not None:
        if split is not None or config is not None:
            raise InputError(f"{name} is a file and has neither splits nor configurations; fix: leave them out")
        path, reader = place.path, READERS[place.path.suffix.lower()]
        return Source(f"file {name}", lambda columns: reader(path, columns), path)
    dataset = load_split(place, config, split or "train", progress=False)
    title = place.title(split)
    return Source(title, lambda columns: _dataset_rows(dataset, columns, title), place.path)


def split_names(split: str) -> list[str]:
    """Return the splits that a split or its slices name, each once.

    Examples
    --------
    >>> split_names("train[:10%]+test+train[90%:]")
    ['train', 'test']
    """
    return list(dict.fromkeys(name for name, _ in _parts(split)))


def load_split(place: Place, config: str | None, split: str, *, progress: bool) -> Any:
    """Load one split or slices of it with ``datasets``; parameters and errors are those of :func:`load_whole`."""
    whole, positions = load_whole(place, config, split, progress=progress)
    return whole if positions == list(range(len(whole))) else whole.select(positions)


def load_whole(place: Place, config: str | None, split: str, *, progress: bool) -> tuple[Any, list[int]]:
    """Load whole splits with ``datasets``, which maps them into memory, and say which rows a slice means.

    Parameters
    ----------
    place
        Where it is.
    config
        Configuration of a hub dataset.
    split
        A split, or slices as ``datasets`` takes them: ``train[:1000]``, ``train[50%:]``, ``train[-16:]``, and sums such
        as ``train[:10%]+train[90%:]``. A file has one split, train.
    progress
        Whether ``datasets`` may draw progress bars.

    Returns
    -------
    rows, positions
        All rows of the splits that are named, one split after the other; and those meant, by their numbers among them.

    Raises
    ------
    InputError
        If ``datasets`` is missing, or cannot load the split; its many errors become one line.
    """
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{place.name} needs the package datasets, which is not installed; expected it for folders and hub ids; "
            "fix: pip install 'sdo-toolkit[encode]'"
        ) from error
    if not progress:
        datasets.disable_progress_bars()
    if place.path is not None:
        for path in [place.path] if place.path.is_file() else sorted(place.path.rglob("*.csv")):
            require_distinct_columns(path)
    what = f"{place.name} ({'hub id' if place.path is None else place.kind}), split {split}"
    parts = [(name, _instruction(name, slice_, what)) for name, slice_ in _parts(split)]
    try:
        splits = {name: _load_split(place, config, name) for name in split_names(split)}
        whole = next(iter(splits.values())) if len(splits) == 1 else datasets.concatenate_datasets([*splits.values()])
        starts = dict(zip(splits, itertools.accumulate(map(len, splits.values()), initial=0), strict=False))
        positions: list[int] = []
        for name, instruction in parts:
            (rows,) = instruction.to_absolute({_SPLIT: len(splits[name])})
            positions += range(starts[name] + rows.from_, starts[name] + rows.to)
    except Exception as error:  # datasets raises many kinds for missing, offline and malformed sources
        raise InputError(
            f"{what}: {error_line(error):.200}; expected a dataset that datasets can load; "
            "fix: check name, configuration and split; offline, a hub dataset has to be in the local cache"
        ) from error
    return whole, positions


def _parts(split: str) -> list[tuple[str, str]]:
    """The name and the slice, or "", of each part of a sum."""
    found = [re.fullmatch(r"([^\[(]*)(.*)", part, re.DOTALL) for part in re.split(r"\s*\+\s*", split)]
    return [(part[1], part[2]) for part in found if part is not None]


def _instruction(name: str, slice_: str, what: str) -> Any:
    """A slice as ``datasets`` reads it, under a name that it takes; a saved dataset may have others."""
    import datasets

    try:
        return datasets.ReadInstruction.from_spec(f"{_SPLIT}{slice_}")
    except ValueError as error:
        reason = str(error).replace(f"{_SPLIT}{slice_}", f"{name}{slice_}").rstrip(".")
        raise InputError(
            f"{what}: {reason}; expected a split or a slice of one, such as train[:1000], train[50%:], train[-16:] or "
            "train[:10%]+train[90%:]"
        ) from error


def _load_split(place: Place, config: str | None, name: str) -> Any:
    """The whole of one split."""
    import datasets

    path = place.path
    if path is not None and path.is_file():
        return datasets.load_dataset(_BUILDERS[path.suffix.lower()], data_files=str(path), split=name)
    if path is not None and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
        loaded = datasets.load_from_disk(str(path))
        if not isinstance(loaded, datasets.DatasetDict):  # one split, which train means too
            loaded = {"train": loaded, str(loaded.split or "train"): loaded}
        if name not in loaded:
            raise ValueError(f"no such split; splits there: {', '.join(loaded)}")
        return loaded[name]
    return datasets.load_dataset(str(path or place.name), config, split=name)


def _dataset_rows(dataset: Any, columns: Sequence[str], title: str) -> Iterator[tuple[str, Row]]:
    require_columns(columns, dataset.column_names, title)
    for number, row in enumerate(dataset.select_columns(list(dict.fromkeys(columns)))):
        yield f"{title}, row {number}", row


def _cell(row: Row, column: str, where: str) -> Any:
    require_columns([column], list(row), where)
    return row[column]


def _text_of(cell: Any, selection: Selection, where: str) -> str:
    """The text of one cell, or say at `where` what is wrong with it."""
    what = f"{where}: column {selection.column!r}"
    if isinstance(cell, str):
        if selection.role is not None:
            raise InputError(f"{what} holds text; expected a chat, as role is {selection.role!r}; fix: leave role out")
        text = cell
    elif isinstance(cell, list):
        text = _messages(cell, selection.role or "user", what)
    else:
        came = "is null" if cell is None else f"holds {cell!r:.60} ({type(cell).__name__})"
        raise InputError(f"{what} {came}; expected a string or a chat")
    return _without_thoughts(text) if selection.strip_think else text


def _messages(chat: list[Any], role: str, what: str) -> str:
    texts: list[str] = []
    roles: list[str] = []
    for message in chat:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise InputError(f"{what} holds the message {message!r:.60}; expected {{'role': ..., 'content': ...}}")
        roles.append(str(message["role"]))
        if message["role"] != role:
            continue
        content = message["content"]
        if content is None and message.get("tool_calls"):  # a call has no words of its own
            continue
        if isinstance(content, list):  # parts: those that are text
            content = "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and part.get("text"))
        if not isinstance(content, str):
            raise InputError(f"{what} holds the content {content!r:.60}; expected a string")
        texts.append(content)
    if not texts:
        lacking = "text" if role in roles else "message"
        raise InputError(f"{what} holds no {lacking} of role {role!r}; roles there: {', '.join(roles) or 'none'}")
    return "\n\n".join(texts)


def _without_thoughts(text: str) -> str:
    if "<think>" not in text and "</think>" not in text:
        return text
    left = _THINK.sub("", text)
    return left.rpartition("</think>")[2].strip()


def _id_of(row: Row, column: str, where: str) -> Any:
    key = _cell(row, column, where)
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise InputError(f"{where}: id column {column!r} holds {key!r:.60}; expected an integer or a string")
    return key
