"""Errors that users meet: the one exception for wrong input, and which package is missing."""

from __future__ import annotations


class InputError(ValueError):
    """Wrong input: one line that says what came, what was expected and how to mend it.

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
