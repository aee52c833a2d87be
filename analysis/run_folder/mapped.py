"""Matrices too large to hold: mapped from an unnamed temporary file, whose pages the system may take back."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdo.errors import InputError

IN_MEMORY_BYTES = 512 * 2**20


def zeros(shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return a float32 matrix of zeros, in memory or, above 512 MiB, mapped from a temporary file.

    Parameters
    ----------
    shape
        (n, k). The file has no name and is gone with the last array that refers to it.

    Raises
    ------
    InputError
        If the temporary folder has no room for it.
    """
    size = 4 * math.prod(shape)
    if size <= IN_MEMORY_BYTES:
        return np.zeros(shape, dtype=np.float32)
    try:
        with tempfile.TemporaryFile(prefix="sdo-") as file:
            if hasattr(os, "posix_fallocate"):
                # Reserved at once: a full disk is an error here and not a signal that kills the process later.
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            mapped = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise InputError(
            f"{size / 2**30:.1f} GiB of sketches do not fit into {tempfile.gettempdir()} ({error.strerror}); expected "
            "room for a temporary file; fix: set TMPDIR to a folder that has it"
        ) from error
    return np.frombuffer(mapped, dtype=np.float32).reshape(shape)


def let_go(array: NDArray[Any]) -> None:
    """Give the pages of a mapped matrix back to the system, which reads them again when they are asked for.

    Parameters
    ----------
    array
        A matrix of :func:`zeros`, a view of one, or an ``np.memmap``; any other array is left as it is.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)
