"""TRL's losses on a CPU, at half the price: what a GPU does anyway, and vocabulary tiles that a cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

TILE = 2048  # columns of the vocabulary at once; TRL's 32,768 are meant for a GPU's memory


@contextmanager
def answers_alone(vocabulary: int) -> Iterator[bool]:
    """Let TRL's fused head score the trained positions alone, as it does where Triton runs; yields whether it does.

    Elsewhere TRL scores every position, prompt and padding too, and then takes zero for those: a device that compiles
    would compile anew for every count of positions. Loss and gradients are the same up to rounding.

    Parameters
    ----------
    vocabulary
        Its size; one that fits a tile is left alone.
    """
    from trl.trainer import utils

    names = ("_use_triton", "_CHUNKED_LOGPROB_CHUNK_SIZE")  # private: another TRL trains as it does
    before = {name: getattr(utils, name) for name in names if hasattr(utils, name)}
    known = len(before) == len(names) and vocabulary > TILE
    if known:
        utils._use_triton = lambda device: True
        utils._CHUNKED_LOGPROB_CHUNK_SIZE = TILE
    try:
        yield known
    finally:
        for name, value in before.items():
            setattr(utils, name, value)
