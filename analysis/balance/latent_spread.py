"""How far the clusters' underlying accuracies lie apart: the latent spread, its interval and what follows from it.

A cluster's accuracy is its underlying accuracy plus the noise of few questions. The raw standard deviation over
clusters counts both: with 164 clusters of 8 equally hard questions at accuracy 0.83 it is 0.13. Here the noise is
taken off (one-way analysis of variance with random effects), and the underlying accuracies are described by the beta
distribution with the mean and standard deviation that are left.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.balance.questions import QuestionUnits, Sums, chunks

_LARGEST_SHARE = 0.98  # of the largest variance that accuracies with a given mean can have, mean·(1 - mean)
_NODES = 1000  # quantiles that stand for the underlying accuracies of more clusters than that

Array = NDArray[np.float64]


def accuracies(units: QuestionUnits, sums: Sums) -> Array:
    """Shape ``(R, C)``: the mean score of each cluster."""
    return np.asarray(sums.weighted / units.size)


def within_variance(units: QuestionUnits, sums: Sums) -> Array:
    """Shape ``(R,)``: variance of a unit's score within its cluster, pooled (mean square within).

    NaN where every cluster holds one unit.
    """
    spare = len(units) - units.clusters
    if spare == 0:
        return np.full(len(sums.squares), np.nan)
    inside = sums.squares - (np.square(sums.plain) / units.count).sum(axis=1)
    return np.asarray(np.maximum(inside, 0.0) / spare)


def random_effect_variance(units: QuestionUnits, values: Array, within: Array) -> Array:
    """Variance of the clusters' underlying values, negative where the noise alone explains more than there is.

    Parameters
    ----------
    units
        Give the effective sizes m.
    values
        Shape ``(R, C)``, the clusters' means.
    within
        Shape ``(R,)``, variance s² of one unit within its cluster.

    Returns
    -------
    ndarray
        Shape ``(R,)``: ``(Q - (C - 1) s²) / (M - Σ m²/M)`` with ``Q = Σ m_c (a_c - ā)²``, ā the mean weighted by m and
        M = Σ m, the ANOVA estimator of a random effect in unequal groups (Searle, Casella and McCulloch, *Variance
        Components*, 1992, ch. 3.6). NaN with fewer than two clusters.
    """
    m = units.effective
    if units.clusters < 2:
        return np.full(len(values), np.nan)
    scale = m.sum() - np.square(m).sum() / m.sum()
    return np.asarray((between_squares(units, values) - (units.clusters - 1) * within) / scale)


def between_squares(units: QuestionUnits, values: Array) -> Array:
    """Shape ``(R,)``: ``Q = Σ m_c (a_c - ā)²``, ā the mean of the (R, C) values weighted by the effective sizes m."""
    m = units.effective
    center = (values @ m) / m.sum()
    return np.asarray(np.square(values - center[:, None]) @ m)


def latent_spread(units: QuestionUnits, sums: Sums) -> Array:
    """Shape ``(R,)``: standard deviation of the underlying accuracies, 0 where the estimated variance is negative.

    NaN with fewer than two clusters or where every cluster holds one unit.
    """
    variance = random_effect_variance(units, accuracies(units, sums), within_variance(units, sums))
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def spread_interval(units: QuestionUnits, level: float = 0.95) -> tuple[float, float]:
    """Q-profile interval of the latent spread.

    The spreads τ at which ``Σ w_c (a_c - ā_w)²``, ``w_c = 1/(τ² + s²/m_c)``, lies between the quantiles of χ² with
    C - 1 degrees of freedom (Viechtbauer, *Statistics in Medicine* 26, 2007, 37-52). s² is pooled: a cluster of eight
    questions says too little about its own.

    Returns
    -------
    tuple of float
        Both ends are 0 where even τ = 0 explains more spread than there is.

    Raises
    ------
    ValueError
        With fewer than two clusters, no cluster of two units, or no variance within clusters.
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2

    sums = units.sums()
    variance = float(within_variance(units, sums)[0]) if units.clusters > 1 else np.nan
    if not variance > 0:
        raise ValueError("the interval needs two clusters and a positive variance within clusters")
    a = accuracies(units, sums)[0]
    noise = variance / units.effective

    def excess(tau: float, quantile: float) -> float:
        w = 1.0 / (tau * tau + noise)
        return float((w * np.square(a - (w @ a) / w.sum())).sum() - quantile)

    ends = []
    for share in ((1 + level) / 2, (1 - level) / 2):
        quantile = float(chi2.ppf(share, units.clusters - 1))
        if excess(0.0, quantile) <= 0:
            ends.append(0.0)
        elif excess(0.5, quantile) >= 0:  # accuracies in [0, 1] have no larger standard deviation
            ends.append(0.5)
        else:
            ends.append(float(brentq(excess, 0.0, 0.5, args=(quantile,), xtol=1e-10)))
    return ends[0], ends[1]


def beta_shape(mean: ArrayLike, spread: ArrayLike) -> tuple[Array, Array]:
    """Return the beta distribution's two shapes for means and standard deviations, elementwise.

    Infinite where the spread or the variance ``mean (1 - mean)`` is 0: all accuracies are the mean. NaN where the
    spread is. The variance is cut at 98 % of ``mean (1 - mean)``, beyond which there is no beta distribution.
    """
    mu = np.asarray(mean, dtype=np.float64)
    most = mu * (1 - mu)
    variance = np.minimum(np.square(np.asarray(spread, dtype=np.float64)), _LARGEST_SHARE * most)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.where(variance == 0, np.inf, most / variance - 1)
        none = np.where(np.isnan(variance), np.nan, 0.0)
        return np.where(mu > 0, mu * total, none), np.where(mu < 1, (1 - mu) * total, none)


def underlying(mean: ArrayLike, spread: ArrayLike, clusters: int) -> Array:
    """Return the accuracies that stand for the clusters' underlying ones: quantiles of the fitted beta distribution.

    Parameters
    ----------
    mean, spread
        Shape ``(R,)``.
    clusters
        Number of clusters C.

    Returns
    -------
    ndarray
        Shape ``(R, min(C, 1000))``, ascending: the quantiles at ``(i - 0.375)/(C + 0.25)``, which are close to the mean
        of the i-th of C values (Blom 1958). NaN where the spread is.
    """
    from scipy.special import betaincinv

    mu = np.atleast_1d(np.asarray(mean, dtype=np.float64))
    sd = np.broadcast_to(np.asarray(spread, dtype=np.float64), mu.shape)
    if clusters <= _NODES:
        place = (np.arange(1, clusters + 1) - 0.375) / (clusters + 0.25)
    else:
        place = (np.arange(_NODES) + 0.5) / _NODES
        place[[0, -1]] = np.array([0.625, clusters - 0.375]) / (clusters + 0.25)
    a, b = beta_shape(mu, sd)
    values = np.repeat(np.where(np.isnan(sd), np.nan, mu)[:, None], len(place), axis=1)
    spreads = np.isfinite(a) & np.isfinite(b) & (a > 0) & (b > 0)
    values[spreads] = betaincinv(a[spreads, None], b[spreads, None], place)
    return values


def logit_spread(mean: ArrayLike, spread: ArrayLike) -> Array:
    """Return the standard deviation of ``log(p/(1 - p))`` under the fitted beta distribution, elementwise.

    ``√(ψ₁(a) + ψ₁(b))``, ψ₁ the trigamma function. NaN at mean 0 or 1, and where the spread is NaN.
    """
    from scipy.special import polygamma

    a, b = beta_shape(mean, spread)
    with np.errstate(invalid="ignore"):
        value = np.sqrt(polygamma(1, a) + polygamma(1, b))
    mu = np.broadcast_to(np.asarray(mean, dtype=np.float64), value.shape)
    return np.asarray(np.where((mu > 0) & (mu < 1), np.where(np.isinf(a), 0.0, value), np.nan))


def refitted(
    units: QuestionUnits, mean: float, spread: float, within: float, draws: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Parametric bootstrap: draw underlying accuracies and scores from the fit, and fit again.

    Parameters
    ----------
    units
        Give the sizes, and whether scores are 0 or 1.
    mean, spread
        The fitted beta distribution.
    within
        Variance of a unit's score within its cluster.
    draws
        How many.
    rng
        Source of randomness.

    Returns
    -------
    tuple of ndarray
        Shape ``(draws,)`` each: mean and latent spread of the draws. Scores of 0 or 1 without duplicates are drawn
        binomially. Others are averages with less noise than that: the mean of a cluster is drawn from the beta
        distribution with mean p and variance ``φ p (1 - p) / m``, φ the share of the binomial variance that is there.
    """
    a, b = (float(shape) for shape in beta_shape(mean, spread))
    clusters, m = units.clusters, units.effective
    means, spreads = [], []
    for rows in chunks(draws, clusters):
        p = rng.beta(a, b, (rows, clusters)) if 0 < a < np.inf and 0 < b < np.inf else np.full((rows, clusters), mean)
        if units.binary and (units.weight == 1).all():
            total = rng.binomial(units.count, p).astype(np.float64)
            drawn = Sums(total, total, total.sum(axis=1))
            values, inside = accuracies(units, drawn), within_variance(units, drawn)
        else:
            share = min(1.0, within / max(mean * (1 - mean) - spread * spread, within))
            size = np.maximum(m / share - 1, 1e-3)
            p = np.clip(p, 1e-9, 1 - 1e-9)
            values = rng.beta(p * size, (1 - p) * size)
            inside = share * (p * (1 - p)) @ units.count / len(units)
        means.append(values.mean(axis=1))
        spreads.append(np.sqrt(np.maximum(random_effect_variance(units, values, inside), 0.0)))
    return np.concatenate(means), np.concatenate(spreads)
