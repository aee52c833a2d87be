"""Writing files so that a reader sees the old ones or the whole new ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path


def write_atomically(writers: Mapping[Path, Callable[[Path], object]]) -> None:
    """Let each writer fill a temporary file beside its target, then rename all of them.

    Parameters
    ----------
    writers
        Target -> function that writes the file at the path it is given. If one of them fails no target has changed.

    Raises
    ------
    OSError
        If a file cannot be written; temporaries are removed.
    """
    staged = {target: target.with_name(f".{target.name}.{os.getpid()}.tmp") for target in writers}
    try:
        for target, write in writers.items():
            write(staged[target])
        for target, temporary in staged.items():
            temporary.replace(target)
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
