"""What users write as ``module:name``: a reward, a section of the report."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from sdo.errors import InputError, error_line


def imported(place: str, what: str, *, expected: str = "module:name") -> Any:
    """Return what stands at ``module:name``; the module is imported, from the current folder too.

    Parameters
    ----------
    place
        ``module:name``.
    what
        What it is to be, for messages, such as "reward".
    expected
        What else would have been right, for messages.

    Raises
    ------
    InputError
        If it is not written so, the module cannot be imported or lacks the name; file and line are named where they are
        known.
    """
    module, _, name = place.partition(":")
    named = all(module.split(".")) and len(module.split()) == 1  # a file's name need not be an identifier
    if not named or not name.isidentifier():
        raise InputError(f"{what} is {place!r}; expected {expected}")
    if os.getcwd() not in sys.path:  # a command's own folder comes first there, and not the user's
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:  # the module's own code runs, and may raise anything
        raise InputError(f"{what} {place}: {_why_not_imported(module, error)}") from error
    if not hasattr(found, name):
        raise InputError(f"{what} {place}: module {module} has no {name}")
    return getattr(found, name)


def _why_not_imported(module: str, error: Exception) -> str:
    """What is wrong with a module, where, and how to fix it; one that is missing itself is told from one it lacks."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module}.".startswith(f"{missing}."):
        return (
            f"there is no module {missing!r}; expected one that can be imported from here; "
            f"fix: start in the folder that holds {missing.replace('.', '/')}.py, or install its package"
        )
    place = f"module {module}"
    ours = (__file__, importlib.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in ours]
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    if frames:  # else nothing of the module ran
        place = f"{frames[-1].filename}, line {frames[-1].lineno}"
    if missing is not None:
        return f"{place}: there is no module {missing!r}, which {module} needs; fix: install it, or correct its name"
    if isinstance(error, SyntaxError):
        place = place if error.filename is None else f"{error.filename}, line {error.lineno}"
        return f"{place}: {error.msg}; expected Python; fix: correct it there"
    line = error_line(error, named=True)
    return f"{place}: {line}; expected a module that is imported without an error; fix: correct it there"
