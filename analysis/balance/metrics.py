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
    center = (p + z * z / (2 * count)) / shrink
    half = z * np.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / shrink
    # At the ends the formula gives 0 and 1 but for rounding.
    low, high = np.where(p <= 0, 0.0, center - half), np.where(p >= 1, 1.0, center + half)
    return np.stack([np.clip(low, 0, 1), np.clip(high, 0, 1)], axis=-1)


def largest_difference(name: str, clusters: int) -> float:
    """Return by how much a metric of two runs over the same C clusters can differ at most; infinite for others.

    An accuracy lies in [0, 1], ``cv`` in [0, √(C - 1)] and ``gini`` in [0, 1 - 1/C] (one cluster holds all that is
    right), ``spread`` in [0, 0.5].
    """
    largest = {"mean": 1.0, "b20": 1.0, "gap": 1.0, "spread": 0.5}
    largest |= {"cv": float(np.sqrt(clusters - 1)), "gini": 1 - 1 / clusters}
    return largest.get(name, np.inf)


def score_interval(difference: float, half: float) -> tuple[float, float]:
    """Widen a difference of two accuracies to an interval that cannot leave [-1, 1].

    Parameters
    ----------
    difference
        In [-1, 1].
    half
        Half the width that the interval has where the true difference is 0, positive.

    Returns
    -------
    tuple of float
        The δ with ``|difference - δ| ≤ half √(1 - δ²)``: a mean of numbers in [-1, 1] varies the less, the nearer to an
        end it is, as in Wilson's interval of a proportion (*JASA* 22, 1927, 209-212). It holds 0 exactly where
        ``|difference| ≤ half``.

    Examples
    --------
    >>> [round(end, 3) for end in score_interval(1.0, 0.2)]
    [0.923, 1.0]
    """
    scale = 1 + half * half
    away = half * float(np.sqrt(max(0.0, scale - difference * difference)))
    low, high = (difference - away) / scale, (difference + away) / scale
    return max(low, -1.0), min(high, 1.0)


def paired_interval(baseline: ArrayLike, run: ArrayLike, weight: ArrayLike) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two accuracies on the same questions.

    Parameters
    ----------
    baseline, run
        Shape ``(n,)``, scores in [0, 1] of the same questions, n at least 1.
    weight
        Shape ``(n,)``, positive: how often each question counts.

    Returns
    -------
    tuple of float
        Of ``run`` minus ``baseline``, within [-1, 1]: Newcombe's hybrid of Wilson's two intervals and the correlation
        of the scores, with his correction of a positive correlation (*Statistics in Medicine* 17, 1998, 2635-2650,
        method 10), for weighted questions with Kish's effective number of them. Its width is positive where the runs
        agree on everything, too.

    Examples
    --------
    >>> [round(end, 3) for end in paired_interval([0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1])]
    [0.307, 1.0]
    """
    w = number_array(weight, "weights")
    scores = np.stack([number_array(baseline, "scores"), number_array(run, "scores")])
    share = w / w.sum()
    n = 1 / float(np.square(share).sum())
    mean = scores @ share
    (low_a, high_a), (low_b, high_b) = wilson(np.clip(mean, 0, 1), np.full(2, n))
    centered = scores - mean[:, None]
    both = float((centered[0] * centered[1]) @ share)
    if both > 0:
        both = max(0.0, both - 1 / (2 * n))
    deviation = float(np.sqrt(np.prod(np.square(centered) @ share)))
    correlation = min(1.0, max(-1.0, both / deviation)) if deviation > 0 else 0.0

    def away(one: float, other: float) -> float:
        return float(np.sqrt(max(0.0, one * one + other * other - 2 * correlation * one * other)))

    difference = float(mean[1] - mean[0])
    low = difference - away(mean[1] - low_b, high_a - mean[0])
    high = difference + away(high_b - mean[1], mean[0] - low_a)
    return max(-1.0, low), min(1.0, high)
