"""Errors that users meet: the one exception for wrong input, what may have been meant, which package is missing.

And text that came from outside, as a line may show it; counted things.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# What a terminal or a browser would obey: control characters, breaks of a line, overrides of the direction of writing.
# Lone surrogates stand for bytes of a file's name that are no UTF-8; no output takes them.
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class InputError(ValueError):
    """Wrong input: one line that says what came, what was expected and how to fix it.

    The commands print the line and exit with status 2.
    """


def absent_package(error: BaseException | None) -> str:
    """Return the package whose absence lies at the root of an error, ``""`` where there is none.

    transformers wraps the error of a package that it lacks in one of its own, which names none.
    """
    name = ""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            name = error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
    return name


def counted(number: int, noun: str) -> str:
    """Return how many there are of something, in the singular where there is one.

    Examples
    --------
    >>> counted(1, "cluster"), counted(0, "cluster"), counted(12_000, "common question")
    ('1 cluster', '0 clusters', '12000 common questions')
    >>> counted(3, "batch")
    '3 batches'
    """
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def error_line(error: BaseException, *, named: bool = False) -> str:
    r"""Return the first line of what an error says, after its type where `named` or where it says nothing.

    Where that line ends in a colon, the next one belongs to it.

    Examples
    --------
    >>> error_line(ValueError("no such split\nsplits there: train")), error_line(KeyError())
    ('no such split', 'KeyError')
    >>> error_line(ValueError("no such split"), named=True)
    'ValueError: no such split'
    """
    lines = [line.strip() for line in str(error).strip().splitlines()]
    said = [" ".join(lines[: 2 if lines[0].endswith(":") else 1])] if lines else []
    return ": ".join([type(error).__name__, *said] if named or not said else said)


def printable(text: str, *, keep: str = "") -> str:
    r"""Return text in which each character that a terminal or a browser would obey stands as an escape.

    Parameters
    ----------
    text
        Names of files, runs, columns, evaluations; anything that came from outside.
    keep
        Characters that stay as they are.

    Examples
    --------
    >>> print(printable("a\x1b[31m\nb"))
    a\x1b[31m\nb
    """
    return _OBEYED.sub(lambda found: found[0] if found[0] in keep else found[0].encode("unicode_escape").decode(), text)


def suggest(name: str, known: Iterable[Any], *, folder: Path | None = None) -> str:
    """Return a question that begins a remedy, where a known name is close to the one given, else ``""``.

    Parameters
    ----------
    name
        What came.
    known
        What would have been right.
    folder
        Where these are; the name is then shown as a path.

    Examples
    --------
    >>> suggest("delta_tao", ["k", "delta_tau"])
    "did you mean 'delta_tau'? "
    >>> suggest("batch", ["k", "delta_tau"])
    ''
    """
    close = difflib.get_close_matches(name, [str(each) for each in known], n=1)
    if not close:
        return ""
    return f"did you mean {repr(close[0]) if folder is None else folder / close[0]}? "
