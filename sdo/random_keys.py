"""Random keys that are the same on every machine: raw Philox integers and arithmetic that IEEE 754 fixes.

Generator methods may change between numpy releases and ``log`` between C libraries; the raw stream of a bit
generator and the four basic operations may not. Everything random in a plan comes from here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# One number per use, so that no two draws of a plan share a stream.
ORDER = 1  # order of the anchors, and of a uniform permutation
RANDOM_NEIGHBORS = 2  # the control that replaces neighbors by random members
HOT_DRAW = 3  # inverse-exposure draw from the hot samples
CENTROIDS = 4  # rows that k-means starts from and trains on, when neighbors are approximate
REDRAW = 5  # seeds of the plans that a recorded one is compared with
SELECT = 7  # which candidates of a step are kept; the epoch stands for the step
PROBE = 6  # batches of a plan, and members of a batch, that a probe looks at; the epoch stands for the plan

MAX_SEED = 2**64 - 1


def raw_keys(seed: int, purpose: int, epoch: int, count: int) -> NDArray[np.uint64]:
    """Return the first ``count`` outputs of Philox4x64-10 for one use in one epoch.

    Parameters
    ----------
    seed
        The plan's seed, 0 to 2**64 - 1.
    purpose
        One of the constants of this module.
    epoch
        Organizer epoch, from 0.
    count
        How many keys.

    Returns
    -------
    NDArray[np.uint64]
        Shape ``(count,)``; entry ``i`` is the key of sample ``i``.

    Notes
    -----
    Philox: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    counter = np.array([0, 0, purpose, epoch], dtype=np.uint64)
    key = np.array([seed, 0], dtype=np.uint64)
    return np.random.Philox(counter=counter, key=key).random_raw(count)


def key_of(seed: int, purpose: int, epoch: int, index: int) -> int:
    """Return the first key of one index in a stream of its own, without those of the others.

    Parameters
    ----------
    seed, purpose, epoch
        As for :func:`raw_keys`.
    index
        From 0 to 2**64 - 1.
    """
    counter = np.array([0, index, purpose, epoch], dtype=np.uint64)
    return int(np.random.Philox(counter=counter, key=np.array([seed, 0], dtype=np.uint64)).random_raw())


def order_by_keys(keys: NDArray[np.uint64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``ids`` sorted by their keys, ties to the lower id.

    Parameters
    ----------
    keys
        Shape ``(n,)``, the key of each id.
    ids
        Shape ``(n,)``, ascending.
    """
    return ids[np.argsort(keys, kind="stable")]


def exponentials(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Turn raw keys into standard exponential variates, bit-identical everywhere.

    Parameters
    ----------
    keys
        Shape ``(n,)``, uniform 64-bit integers.

    Returns
    -------
    NDArray[np.float64]
        Shape ``(n,)``, ``-ln U`` with ``U`` the middle of one of 2**52 equal intervals of (0, 1).
    """
    uniform = ((keys >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -_log(uniform)


def _log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of positive numbers from basic operations alone, so that no C library decides a bit.

    With x = m 2**e, m in [sqrt(1/2), sqrt(2)): ln m = 2 artanh s, s = (m - 1)/(m + 1), |s| < 0.172; thirteen
    terms of the series leave a remainder below 1e-20.
    """
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa = np.where(low, 2.0 * mantissa, mantissa)
    exponent = exponent - low
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.zeros_like(s)
    for power in range(25, 0, -2):
        series = series * square + 1.0 / power
    return exponent * 0.6931471805599453 + 2.0 * s * series


def distinct_positions(keys: NDArray[np.uint64], own: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Draw for each row ``k`` distinct positions of ``range(n)``, none of them the row's own.

    Parameters
    ----------
    keys
        Shape ``(m, k)``, uniform 64-bit integers, ``k < n``.
    own
        Shape ``(m,)``, the position that each row must not draw.
    n
        Number of positions.

    Returns
    -------
    NDArray[np.int64]
        Shape ``(m, k)``. Draw ``t`` is uniform over what is left; the bias of the remainder is below n / 2**64.
    """
    m, k = keys.shape
    # Taken positions, kept sorted: the r-th free position is r plus the number of taken ones at or below it.
    taken = own[:, None].astype(np.int64)
    drawn = np.empty((m, k), dtype=np.int64)
    for t in range(k):
        position = (keys[:, t] % np.uint64(n - 1 - t)).astype(np.int64)
        for column in range(taken.shape[1]):
            position += position >= taken[:, column]
        drawn[:, t] = position
        taken = np.sort(np.concatenate([taken, position[:, None]], axis=1), axis=1)
    return drawn
