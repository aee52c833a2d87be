"""Rows of JSON Lines, CSV and Parquet files, one after the other, each with the place where it stands, for errors."""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sdo.errors import InputError

Row = dict[str, Any]
_BATCH = 1024


def read_jsonl(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield the objects of a JSON Lines file; `columns` is for the caller to check, row by row."""
    try:
        # Bytes, not text: a decoding error can then name its line.
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, _json_row(line, where)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; expected a JSON Lines file") from error


def _json_row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=partial(_distinct_keys, where))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested thousands deep
        reason = getattr(error, "msg", str(error))
        raise InputError(f"{where}: not JSON ({reason}); expected one JSON object a line") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: a JSON {type(row).__name__}; expected an object, one a line")
    return row


def _distinct_keys(where: str, pairs: list[tuple[str, Any]]) -> Row:
    """A JSON object; Python alone would take the last of two values of one key without a word."""
    row = dict(pairs)
    if len(row) < len(pairs):
        require_distinct([name for name, _ in pairs], where)
    return row


def read_csv(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a CSV file with a header; all cells are strings."""
    csv.field_size_limit(2**31 - 1)  # texts are longer than the module's 128 KiB
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            require_distinct(reader.fieldnames or (), str(path))
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise InputError(
                        f"{where}: another number of fields than the header's {len(reader.fieldnames or ())}"
                    )
                yield where, row
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error
    except csv.Error as error:
        raise InputError(f"{path}: not CSV ({error}); expected commas and a header line") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; expected a CSV file") from error


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield the named columns of a Parquet file, row by row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            require_distinct(file.schema_arrow.names, str(path))
            require_columns(columns, file.schema_arrow.names, str(path))
            for batch in file.iter_batches(batch_size=_BATCH, columns=list(dict.fromkeys(columns))):
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is no readable Parquet file ({str(error).splitlines()[0]:.80})") from error


def require_columns(columns: Sequence[str], there: Sequence[str], where: str) -> None:
    """Refuse a table that lacks one of the columns, naming those that it has."""
    missing = [column for column in columns if column not in there]
    if missing:
        present = ", ".join(map(repr, there)) or "none"
        wanted = f"; expected {', '.join(map(repr, columns))}" if len(columns) > 1 else ""
        raise InputError(f"{where}: no column {missing[0]!r}; columns there: {present}{wanted}")


def require_distinct(names: Sequence[str], where: str) -> None:
    """Refuse a table or an object in which a name stands twice: only one of the two would be read.

    Empty names, as spreadsheets leave them behind the last column, are nobody's.
    """
    twice = next((name for name, count in Counter(names).items() if name and count > 1), None)
    if twice is not None:
        count = names.count(twice)
        raise InputError(f"{where}: {twice!r} stands there {count} times; expected each name once; fix: rename one")


def require_distinct_columns(path: Path) -> None:
    """Refuse a CSV or Parquet file with two columns of one name, of which ``datasets`` would rename one.

    A file whose header cannot be read is left to who reads it.
    """
    names: Sequence[str] = ()
    if path.suffix.lower() == ".csv":
        with contextlib.suppress(OSError, UnicodeDecodeError, csv.Error), path.open(encoding="utf-8-sig") as file:
            names = next(csv.reader(file), ())
    elif path.suffix.lower() == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        with contextlib.suppress(OSError, pa.ArrowException):
            names = pq.read_schema(path).names
    require_distinct(names, str(path))


def whole_numbers(ids: list[str]) -> list[Any]:
    """Ids as integers if each is written as one; 007 is not, since 7 would be another string."""
    if all(re.fullmatch(r"0|-?[1-9]\d{0,17}", key, re.ASCII) for key in ids):
        return [int(key) for key in ids]
    return list(ids)


# What a file's name must end in, and how it is then read.
READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[tuple[str, Row]]]] = {
    ".jsonl": read_jsonl,
    ".json": read_jsonl,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
