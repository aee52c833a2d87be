"""What the difference of two groups of numbers is worth, one by one or as wholes: t-tests, effect sizes, resampling."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from sdo.checks import number_array
from sdo.errors import counted

LEVEL = 0.05
FEW_PAIRS = 6  # below, no sign-flip p can reach LEVEL
_EXACT_PAIRS = 16  # up to here all 2^n flips are counted
_EXACT_LABELS = 20_000  # up to here all ways to deal the labels are counted
_FLIPS = 9_999


@dataclass(frozen=True)
class PairedComparison:
    """n paired differences, `against` minus `baseline`.

    Parameters
    ----------
    n
        Pairs.
    mean
        Of the differences.
    low, high
        95 % interval of the mean, by Student's t.
    t, p
        Paired t-test, two-sided, n - 1 degrees of freedom.
    cohens_d_paired
        Mean over standard deviation (ddof 1) of the differences: d_z, not the d of two independent groups.
    sign_flip_p, smallest_sign_flip_p
        Two-sided sign-flip test of the mean, and the smallest p that n pairs can reach.
    reason
        Why numbers are None: all differences are equal.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    t: float | None
    p: float | None
    cohens_d_paired: float | None
    sign_flip_p: float
    smallest_sign_flip_p: float
    reason: str | None = None

    @property
    def cohens_d(self) -> float | None:
        """The effect size that fits the pairing."""
        return self.cohens_d_paired

    @property
    def resampling_p(self) -> float:
        """The p that rests on no distribution."""
        return self.sign_flip_p

    @property
    def smallest_resampling_p(self) -> float:
        """The smallest that it can be."""
        return self.smallest_sign_flip_p

    @property
    def sizes(self) -> str:
        """How much data there is, in words."""
        return f"{self.n} pairs"


@dataclass(frozen=True)
class UnpairedComparison:
    """The difference of two means, `against` minus `baseline`, of runs that no seed pairs.

    Parameters
    ----------
    n_baseline, n_against
        Runs of each side.
    mean
        Difference of the means.
    low, high
        95 % interval of it, by Welch's t.
    t, degrees_of_freedom, p
        Welch's test, two-sided: the two spreads may differ.
    cohens_d
        The difference over the pooled standard deviation: d_s, that of two independent groups.
    permutation_p, smallest_permutation_p
        Two-sided test of the difference when every run could as well be of the other side, and the smallest p that so
        many runs can reach.
    reason
        Why numbers are None: no run of a side differs from another.
    """

    n_baseline: int
    n_against: int
    mean: float
    low: float | None
    high: float | None
    t: float | None
    degrees_of_freedom: float | None
    p: float | None
    cohens_d: float | None
    permutation_p: float
    smallest_permutation_p: float
    reason: str | None = None

    @property
    def resampling_p(self) -> float:
        """The p that rests on no distribution."""
        return self.permutation_p

    @property
    def smallest_resampling_p(self) -> float:
        """The smallest that it can be."""
        return self.smallest_permutation_p

    @property
    def sizes(self) -> str:
        """How much data there is, in words."""
        return f"{self.n_baseline} and {self.n_against} runs"


def compare_unpaired(baseline: ArrayLike, against: ArrayLike) -> UnpairedComparison:
    """Compare two groups of values that nothing pairs; the order of the values has no say.

    Parameters
    ----------
    baseline, against
        (n,) and (m,) finite values.

    Raises
    ------
    ValueError
        A side has fewer than two values, or one is not finite.

    Notes
    -----
    Welch, Biometrika 34 (1947). d_s: Cohen, Statistical Power Analysis, 1988, 2.2. Permutation of labels: Pitman, 1937;
    exact up to 20,000 ways, else 9,999 random ones of seed 0 and the observed one. Wrong at 5 %, of 4,000 simulations
    each (``python -m benchmarks.seed_levels``: normal values, 4 to 10 runs a side, spreads of 1 to 3): Welch 4.2 to
    6.0 %; labels 2.8 % at four runs of each side, where p takes few values, to 5.2 %, and 8.2 % where five runs have
    three times the spread of nine others: there Welch's test is the one to trust.

    Examples
    --------
    >>> one = compare_unpaired([1.0, 2.0, 3.0], [5.0, 6.0, 7.0])
    >>> one.mean, one.cohens_d, one.permutation_p
    (4.0, 4.0, 0.1)
    """
    first, second = number_array(baseline, "baseline's values"), number_array(against, "the other runs' values")
    for values in (first, second):
        if values.ndim != 1 or len(values) < 2:
            raise ValueError(f"{values.size} values on a side; one seed gives no verdict, two are the least")
        if not np.isfinite(values).all():
            raise ValueError("a value is not finite")
    first, second = np.sort(first), np.sort(second)
    n, m = len(first), len(second)
    mean = float(second.mean() - first.mean())
    shares = np.array([first.var(ddof=1) / n, second.var(ddof=1) / m])
    error = float(np.sqrt(shares.sum()))
    dealt, least = label_p(first, second), smallest_label_p(n, m)
    if error <= 1e-12 * float(np.abs(first).max() + np.abs(second).max()):
        reason = "the runs of each side are all equal"
        return UnpairedComparison(n, m, mean, None, None, None, None, None, None, dealt, least, reason)
    freedom = float(shares.sum() ** 2 / (shares**2 / np.array([n - 1, m - 1])).sum())
    reach = float(stats.t.ppf(0.975, freedom)) * error
    t = mean / error
    pooled = np.sqrt(((n - 1) * first.var(ddof=1) + (m - 1) * second.var(ddof=1)) / (n + m - 2))
    p = float(2 * stats.t.sf(abs(t), freedom))
    return UnpairedComparison(
        n, m, mean, mean - reach, mean + reach, float(t), freedom, p, mean / float(pooled), dealt, least
    )


def label_p(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the two-sided p of Welch's t of (n,) and (m,) values when each could as well be of the other side.

    Of t and not of the difference alone: that test is wrong in 16 % of cases where the larger spread belongs to the
    smaller side (Janssen, Statistics & Probability Letters 36, 1997).
    """
    n, values = len(first), np.concatenate([first, second])
    values = values - values.mean()
    observed = _welch(values[:n][None], values[n:][None])[0]
    if comb(len(values), n) <= _EXACT_LABELS:
        chosen = np.array(list(combinations(range(len(values)), n)))
    else:
        keys = np.random.default_rng(0).random((_FLIPS, len(values)))
        chosen = np.argpartition(keys, n - 1, axis=1)[:, :n]
    inside = np.zeros((len(chosen), len(values)), dtype=np.bool_)
    np.put_along_axis(inside, chosen, True, axis=1)
    every = np.broadcast_to(values, inside.shape)
    dealt = _welch(every[inside].reshape(len(chosen), n), every[~inside].reshape(len(chosen), -1))
    far = int((dealt >= observed * (1 - 1e-9)).sum())  # sums of other orders of addition differ by rounding
    if comb(len(values), n) <= _EXACT_LABELS:
        return far / len(chosen)
    return (1 + far) / (_FLIPS + 1)


def _welch(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return |t| of each row; infinite where a difference has no spread beside it."""
    n, m = first.shape[1], second.shape[1]
    error = np.sqrt(first.var(axis=1, ddof=1) / n + second.var(axis=1, ddof=1) / m)
    difference = np.abs(second.mean(axis=1) - first.mean(axis=1))
    scale = 1e-12 * (np.abs(first).max(axis=1) + np.abs(second).max(axis=1))
    t = np.where(difference > scale, np.inf, 0.0)
    np.divide(difference, error, out=t, where=error > scale)
    return t


def smallest_label_p(n: int, m: int) -> float:
    """Return the smallest two-sided p that n and m values can reach: the two ends of all ways to deal the labels.

    Of unequal numbers only one end may be as far.
    """
    ways = comb(n + m, n)
    if ways > _EXACT_LABELS:
        return 1.0 / (_FLIPS + 1)
    return (2.0 if n == m else 1.0) / ways


def compare_paired(baseline: ArrayLike, against: ArrayLike) -> PairedComparison:
    """Compare n paired values.

    Parameters
    ----------
    baseline, against
        (n,) finite values, the i-th of each a pair.

    Raises
    ------
    ValueError
        n is below 2, the lengths differ, or a value is not finite.

    Notes
    -----
    Paired t-test: Student, Biometrika 6 (1908). d_z: Cohen, Statistical Power Analysis, 1988, 2.3.5. Sign flips:
    Fisher, The Design of Experiments, 1935, 21; exact up to 16 pairs, else 9,999 random flips of seed 0 and the
    observed one.

    Examples
    --------
    >>> one = compare_paired([1.0, 2.0, 3.0], [1.5, 2.25, 3.75])
    >>> one.mean, one.cohens_d_paired, one.sign_flip_p
    (0.5, 2.0, 0.25)
    """
    first, second = number_array(baseline, "baseline's values"), number_array(against, "the other run's values")
    if first.shape != second.shape:
        raise ValueError(f"shapes {first.shape} and {second.shape}; expected n values each")
    if len(first) < 2:
        raise ValueError(f"{counted(len(first), 'pair')}; one seed gives no verdict, two are the least")
    difference = second - first
    if not np.isfinite(difference).all():
        raise ValueError("a value is not finite")
    n = len(difference)
    mean, deviation = float(difference.mean()), float(difference.std(ddof=1))
    flips, least = sign_flip_p(difference), smallest_sign_flip_p(n)
    # Equal differences leave rounding behind.
    if deviation <= 1e-12 * float(np.abs(first).max() + np.abs(second).max()):
        reason = "all differences are equal"
        return PairedComparison(n, mean, None, None, None, None, None, flips, least, reason)
    error = deviation / np.sqrt(n)
    reach = float(stats.t.ppf(0.975, n - 1)) * error
    t = mean / error
    p = float(2 * stats.t.sf(abs(t), n - 1))
    return PairedComparison(n, mean, mean - reach, mean + reach, float(t), p, mean / deviation, flips, least)


def sign_flip_p(difference: ArrayLike) -> float:
    """Return the two-sided p of the mean of (n,) differences when each sign could as well be the other."""
    d = np.asarray(difference, dtype=np.float64)
    n = len(d)
    # Sums of other orders of addition differ by rounding: as far counts as farther.
    limit = abs(d.sum()) - 1e-9 * np.abs(d).sum()
    if n <= _EXACT_PAIRS:
        signs = np.array(list(product((1.0, -1.0), repeat=n - 1)))
        # The mirror image of a flip is as far: half of them will do.
        sums = np.abs(d[0] + (signs @ d[1:] if n > 1 else np.zeros(1)))
        return float((sums >= limit).mean())
    rng = np.random.default_rng(0)
    signs = rng.integers(0, 2, (_FLIPS, n), dtype=np.int8) * 2.0 - 1.0
    return (1 + int((np.abs(signs @ d) >= limit).sum())) / (_FLIPS + 1)


def smallest_sign_flip_p(n: int) -> float:
    """Return the smallest two-sided p that n pairs can reach: 2 / 2^n, or that of the random flips."""
    return 2.0 / 2.0**n if n <= _EXACT_PAIRS else 1.0 / (_FLIPS + 1)
