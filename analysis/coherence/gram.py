"""The Gram matrix of one step's gradients, and the measures of the literature that are functions of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.coherence.unit_rows import as_matrix, lengths, unit_rows
from analysis.estimates import Estimate
from sdo.checks import number_array
from sdo.errors import InputError


def gram_matrix(
    sketch: ArrayLike, norm: ArrayLike | None = None, defined: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Return the Gram matrix K_ij = <g_i, g_j> of the gradients of one step.

    K_ij = |g_i| |g_j| cos_ij with the cosine of the sketches. Given exact norms, the diagonal is exact, and K
    is positive semi-definite in any case, so that |sum g|^2 = sum K is never negative.

    Parameters
    ----------
    sketch
        (m, k).
    norm
        (m,) norms of the full gradients; those of the sketches by default.
    defined
        (m,) bool, optional. Undefined rows are left out.

    Returns
    -------
    (n, n) float64
        For the n defined rows. Infinite where squared norms exceed float64; the measures then say so.
    """
    rows, given = as_matrix(sketch, defined)
    unit, ok = unit_rows(rows, given)
    if norm is None:
        peak, length, _ = lengths(rows, given)
        norms = (peak * length)[ok]
    else:
        exact = number_array(norm, "norms")
        if len(exact) != len(rows):
            raise InputError(f"there are {len(exact)} norms; expected one for each of {len(rows)} gradients")
        ok = ok & np.isfinite(exact) & (exact > 0)
        norms = exact[ok]
    cosine = np.clip(unit[ok] @ unit[ok].T, -1.0, 1.0)
    cosine = np.triu(cosine, 1)
    cosine = cosine + cosine.T + np.eye(len(norms))
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.outer(norms, norms) * cosine, dtype=np.float64)


def m_coherence(K: ArrayLike) -> Estimate:
    """Return |sum g|^2 / sum |g|^2: 1 for orthogonal gradients, m for m equal ones, 0 if they cancel.

    `K` is the (m, m) Gram matrix of one step. Source: Chatterjee & Zielinski, arXiv:2008.01217.
    """
    matrix, reason = _checked(K, 1)
    return Estimate.undefined(reason) if reason else Estimate.of(matrix.sum() / np.trace(matrix), len(matrix))


def gradient_diversity(K: ArrayLike) -> Estimate:
    """Return sum |g|^2 / |sum g|^2: 1/m for m equal gradients, 1 for orthogonal, undefined if they cancel.

    `K` is the (m, m) Gram matrix of one step. Source: Yin et al., AISTATS 2018, arXiv:1706.05699.
    """
    matrix, reason = _checked(K, 1)
    if reason:
        return Estimate.undefined(reason)
    total = matrix.sum()
    # What is left of a sum that cancels is rounding, of this size at most.
    if total <= 8 * np.finfo(np.float64).eps * np.abs(matrix).sum():
        return Estimate.undefined("the gradients cancel", len(matrix))
    return Estimate.of(np.trace(matrix) / total, len(matrix))


def noise_scale(K: ArrayLike) -> Estimate:
    """Return the simple gradient noise scale tr(Sigma) / |G|^2, in samples.

    From m single-sample gradients, with mean g: tr(Sigma) = sum |g_i - g|^2 / (m - 1) (Bessel) and
    |G|^2 = |g|^2 - tr(Sigma) / m, both unbiased; |G|^2 is the mean off the diagonal of K. One step's ratio is
    noisy. Undefined where the estimate of |G|^2 is not positive.

    `K` is the (m, m) Gram matrix of one step. Source: McCandlish et al., arXiv:1812.06162, appendix A.1.
    """
    matrix, reason = _checked(K, 2)
    if reason:
        return Estimate.undefined(reason)
    m = len(matrix)
    signal = (matrix.sum() - np.trace(matrix)) / (m * (m - 1))
    scatter = np.trace(matrix) / m - signal
    if signal <= 8 * np.finfo(np.float64).eps * np.abs(matrix).mean():
        return Estimate.undefined("the estimate of the squared mean gradient is not positive", m)
    return Estimate.of(max(scatter, 0.0) / signal, m)


def conflict_share(K: ArrayLike) -> Estimate:
    """Return the share of pairs with a negative inner product, in [0, 1]; `count` is the number of pairs.

    `K` is the (m, m) Gram matrix of one step. Source: the negative fraction, common beside mean cosines.
    """
    matrix, reason = _checked(K, 2)
    if reason:
        return Estimate.undefined(reason)
    pairs = matrix[np.triu_indices(len(matrix), 1)]
    return Estimate.of(float(np.mean(pairs < 0)), len(pairs))


def gradient_confusion(K: ArrayLike) -> Estimate:
    """Return eta = max(0, -min over i != j of <g_i, g_j>), in squared gradient units: not a cosine.

    `K` is the (m, m) Gram matrix of one step; `count` is the number of pairs. Source: Sankararaman et al.,
    ICML 2020, arXiv:1904.06963.
    """
    matrix, reason = _checked(K, 2)
    if reason:
        return Estimate.undefined(reason)
    pairs = matrix[np.triu_indices(len(matrix), 1)]
    scale = float(np.max(np.diag(_array(K)), initial=0.0))
    return Estimate.of(max(0.0, -float(pairs.min())) * scale, len(pairs))


def gram_measures(K: ArrayLike) -> dict[str, Estimate]:
    """Return all measures of one step's (m, m) Gram matrix by name."""
    measures = (m_coherence, gradient_diversity, noise_scale, conflict_share, gradient_confusion)
    return {measure.__name__: measure(K) for measure in measures}


def _array(values: ArrayLike) -> NDArray[np.float64]:
    if np.shape(values) == (0,):
        return np.zeros((0, 0))
    matrix = number_array(values, "entries of the Gram matrix", ndim=2)
    if matrix.shape[0] != matrix.shape[1]:
        raise InputError(f"the Gram matrix has shape {matrix.shape}; expected as many rows as columns")
    return matrix


def _checked(K: ArrayLike, least: int) -> tuple[NDArray[np.float64], str]:
    """Return K divided by its largest diagonal entry, so that sums cannot overflow, or the reason why not."""
    matrix = _array(K)
    m = len(matrix)
    if m < least:
        return matrix, f"{m} gradients have a direction; {least} are needed"
    if not np.isfinite(matrix).all():
        return matrix, "squared norms are too large for float64"
    scale = float(np.diag(matrix).max())
    if scale <= 0:
        return matrix, "all gradients are zero"
    return matrix / scale, ""
