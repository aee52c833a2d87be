"""The one exception for wrong input."""

from __future__ import annotations


class InputError(ValueError):
    """Wrong input: one line that says what came, what was expected and how to mend it.

    The commands print the line and exit with status 2.
    """
