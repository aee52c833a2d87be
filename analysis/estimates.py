"""A number or the reason why there is none, and how numbers are spread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdo.checks import number_array


@dataclass(frozen=True)
class Estimate:
    """A number, or the reason why there is none.

    Parameters
    ----------
    value
        A finite number, or None.
    reason
        Why there is no value; None where there is one.
    count
        How many items (pairs, steps, gradients: stated by the function) it rests on.
    """

    value: float | None
    reason: str | None = None
    count: int = 0

    @classmethod
    def of(cls, value: float, count: int) -> Estimate:
        """Return the estimate `value`, undefined if it is not finite."""
        if not np.isfinite(value):
            return cls(None, "the value is not finite", count)
        return cls(float(value), None, count)

    @classmethod
    def undefined(cls, reason: str, count: int = 0) -> Estimate:
        """Return an estimate without a value."""
        return cls(None, reason, count)


@dataclass(frozen=True)
class Spread:
    """How `count` values are spread: a description. Steps depend on each other, so no error is given.

    Where there are no values all fields are None and `reason` says why.
    """

    count: int
    mean: float | None = None
    minimum: float | None = None
    lower_quartile: float | None = None
    median: float | None = None
    upper_quartile: float | None = None
    maximum: float | None = None
    reason: str | None = None


def describe(values: ArrayLike, empty: str = "there are no values") -> Spread:
    """Return mean, range and quartiles of (n,) finite values; `empty` is the reason when there are none."""
    array = number_array(values, "values")
    if len(array) == 0:
        return Spread(count=0, reason=empty)
    low, lower, middle, upper, high = (float(q) for q in np.quantile(array, [0, 0.25, 0.5, 0.75, 1]))
    return Spread(len(array), float(array.mean()), low, lower, middle, upper, high)


def gini_of_ascending(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Gini index of each of R sets of values.

    Parameters
    ----------
    values
        Shape ``(R, n)``, from 0 on, ascending within each set, n at least 1.

    Returns
    -------
    ndarray
        Shape ``(R,)``; NaN where all values are 0.

    Notes
    -----
    sum_ij |v_i - v_j| / (2 n^2 mean), which with ascending values is sum_i (2 i - n - 1) v_i / (n sum v), i from 1
    (Sen, On Economic Inequality, 1973).
    """
    n = values.shape[1]
    total = values.sum(axis=1)
    # Not below 0: of equal values rounding may be left.
    weighted = np.maximum(values @ (2.0 * np.arange(1, n + 1) - n - 1), 0.0)
    return np.asarray(np.divide(weighted, n * total, out=np.full(len(values), np.nan), where=total > 0))
