"""The line through all pairs of n samples, with every fit that leaves one sample out.

So that what is read off the line has an interval too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.jackknife import IntervalEstimate, jackknife_interval
from analysis.locality.sample_pairs import SamplePairs, pair_slope


@dataclass(frozen=True, eq=False)
class PairLine:
    """y = level + slope (x - center), by least squares over pairs.

    Parameters
    ----------
    samples
        (n,) int64, ascending ids.
    slope, level, center
        Of all pairs; the center is their mean x.
    slopes, levels
        (n,) float64, without one sample, in the order of `samples`; levels at the same center.
    """

    samples: NDArray[np.int64]
    slope: float
    level: float
    center: float
    slopes: NDArray[np.float64]
    levels: NDArray[np.float64]

    def at(self, x: float) -> tuple[float, NDArray[np.float64]]:
        """Return y at x, and the (n,) values of y that leave one sample out."""
        return self.level + self.slope * (x - self.center), self.levels + self.slopes * (x - self.center)

    def predict(self, x: float) -> IntervalEstimate:
        """Return y at x with an interval jackknifed over samples."""
        return jackknife_interval(*self.at(x))

    def change(self, x: float, since: float) -> IntervalEstimate:
        """Return y at x less y at `since`, with an interval jackknifed over samples."""
        return jackknife_interval(self.slope * (x - since), self.slopes * (x - since))


def fit_line(pairs: SamplePairs) -> tuple[PairLine | None, str | None]:
    """Fit the line to pairs of one step, or say why there is none.

    Parameters
    ----------
    pairs
        As :func:`analysis.all_pairs` gives them, or with another quantity in the place of the gradients'
        cosine.

    Returns
    -------
    line, reason
        One of them is None. There is a line where :func:`analysis.locality.sample_pairs.pair_slope` has an interval.
    """
    slope = pair_slope(pairs)
    if slope.value is None or slope.low is None:
        return None, slope.reason
    samples, ends = np.unique(np.concatenate([pairs.first, pairs.second]), return_inverse=True)
    center, middle = float(pairs.embedding.mean()), float(pairs.gradient.mean())
    x, y = pairs.embedding - center, pairs.gradient - middle
    columns = (np.ones(len(pairs)), x, y, x * x, x * y)
    left = [column.sum() - np.bincount(ends, np.tile(column, 2), len(samples)) for column in columns]
    count, mean_x, mean_y = left[0], left[1] / left[0], left[2] / left[0]
    slopes = (left[4] / count - mean_x * mean_y) / (left[3] / count - mean_x**2)
    return PairLine(samples, slope.value, middle, center, slopes, middle + mean_y - slopes * mean_x), None
