"""The balance metrics of cluster accuracies, each for many sets of accuracies at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.estimates import gini_of_ascending
from sdo.checks import number, number_array
from sdo.errors import InputError

Array = NDArray[np.float64]

_ROUNDING = 1e-9

RAW = ("mean", "b20", "cv", "gini", "gap")
METRICS = (*RAW, "spread")
# Of these a lower value is better.
LOWER = ("cv", "gini", "gap", "spread")
# They move when the mean does, at equal balance: their difference is no verdict on balance.
MOVES_WITH_MEAN = ("b20", "cv", "gini", "gap")


def raw_metrics(accuracies: Array) -> dict[str, Array]:
    """Compute the raw metrics over C cluster accuracies.

    Parameters
    ----------
    accuracies
        Shape ``(R, C)``: R sets of accuracies in [0, 1], C at least 1.

    Returns
    -------
    dict of ndarray
        Shape ``(R,)`` each: ``mean``; ``b20``, the mean of the ⌈0.2·C⌉ lowest, at least one; ``cv``, standard deviation
        (ddof 0) over mean; ``gini``, ``Σ|a_i - a_j| / (2 C² mean)``; ``gap``, largest minus smallest. ``cv`` and
        ``gini`` are NaN where the mean is 0: there nothing is balanced, nor unbalanced.
    """
    a = np.sort(accuracies, axis=1)
    mean = a.mean(axis=1)
    lowest = -(-a.shape[1] // 5)
    with np.errstate(divide="ignore", invalid="ignore"):
        cv = np.where(mean > 0, a.std(axis=1) / mean, np.nan)
    b20, gap = a[:, :lowest].mean(axis=1), a[:, -1] - a[:, 0]
    return {"mean": mean, "b20": b20, "cv": cv, "gini": gini_of_ascending(a), "gap": gap}


def lorenz_curves(ascending: NDArray[np.floating]) -> Array:
    """Return Lorenz curves of cluster accuracies.

    Parameters
    ----------
    ascending
        Shape ``(R, C)``, sorted along the last axis.

    Returns
    -------
    ndarray
        Shape ``(R, C + 1)``: what share of all accuracy the i lowest clusters hold, 0 to 1; NaN where all
        accuracies are 0.
    """
    total = np.cumsum(ascending, axis=1, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        share = total / total[:, -1:]
    return np.concatenate([np.where(np.isnan(share[:, :1]), np.nan, 0.0), share], axis=1)


def wilson(mean: ArrayLike, n: ArrayLike, level: float = 0.95) -> Array:
    """Wilson's score interval of proportions.

    Parameters
    ----------
    mean
        Shape ``(C,)``, in [0, 1]; averages of several answers have less noise than this interval assumes.
    n
        Shape ``(C,)``, positive; need not be whole.
    level
        Coverage, between 0 and 1.

    Raises
    ------
    InputError
        For means, sizes or a level outside of that, and masked entries.

    Returns
    -------
    ndarray
        Shape ``(C, 2)``. Its width is positive at 0 and 1 too (Wilson, *JASA* 22, 1927, 209-212).

    Examples
    --------
    >>> wilson([1.0], [1]).round(3).tolist()
    [[0.207, 1.0]]
    """
    from scipy.special import ndtri

    p, count = number_array(mean, "means", ndim=np.ndim(mean)), number_array(n, "sizes", ndim=np.ndim(n))
    if not ((p > -_ROUNDING) & (p < 1 + _ROUNDING)).all() or not (count > 0).all():
        raise InputError("means must lie in [0, 1], and sizes above 0")
    if not 0 < number("level", level, 0, 1) < 1:
        raise InputError(f"level is {level}; expected a number between 0 and 1")
    z = float(ndtri((1 + level) / 2))
    shrink = 1 + z * z / count
    centre = (p + z * z / (2 * count)) / shrink
    half = z * np.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / shrink
    # At the ends the formula gives 0 and 1 but for rounding.
    low, high = np.where(p <= 0, 0.0, centre - half), np.where(p >= 1, 1.0, centre + half)
    return np.stack([np.clip(low, 0, 1), np.clip(high, 0, 1)], axis=-1)
