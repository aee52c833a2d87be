"""Intervals from leaving out one unit at a time: a sample with all its pairs, or a batch.

Source: Efron and Stein, Annals of Statistics 9 (1981); for statistics over pairs, where deleting a unit deletes its
pairs, Snijders and Borgatti, Connections 22 (1999). Student's t with n - 1 degrees of freedom.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class IntervalEstimate:
    """A number with its 95 % interval; what is None has its reason.

    Parameters
    ----------
    value
        A finite number, or None.
    low, high
        The interval's ends, or None.
    count
        Units that were left out one at a time: samples or batches, stated by the function.
    reason
        Why something is missing.
    """

    value: float | None
    low: float | None
    high: float | None
    count: int
    reason: str | None = None

    @classmethod
    def undefined(cls, reason: str, count: int = 0) -> IntervalEstimate:
        """Return an estimate without a value."""
        return cls(None, None, None, count, reason)

    @property
    def half_width(self) -> float | None:
        """Half the length of the interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def jackknife_error(without: NDArray[np.float64]) -> float:
    """Return the standard error from the values that each leave one of n units out."""
    n = len(without)
    return float(np.sqrt((n - 1) / n * np.square(without - without.mean()).sum()))


def reach(error: float, count: int) -> float:
    """Return half the width of the 95 % interval that a standard error over `count` units gives."""
    return float(stats.t.ppf(0.5 + LEVEL / 2, count - 1)) * error


def jackknife_interval(value: float, without: NDArray[np.float64]) -> IntervalEstimate:
    """Return a value with the interval that (n,) values, each with one unit left out, give; all finite."""
    half = reach(jackknife_error(without), len(without))
    return IntervalEstimate(value, value - half, value + half, len(without))
