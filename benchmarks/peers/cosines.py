"""How far the cosines of stored gradients are off those of the gradients themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pair_cosines(vectors: ArrayLike) -> NDArray[np.float64]:
    """Return the cosines of all pairs of rows.

    Parameters
    ----------
    vectors
        Shape ``(n, D)``; products are summed in float64. A row of zeros has no direction and gives NaN.

    Returns
    -------
    ndarray
        The ``n (n - 1) / 2`` cosines, in the order of ``numpy.triu_indices(n, 1)``.
    """
    rows = np.asarray(vectors, np.float64)
    return gram_cosines(rows @ rows.T)


def gram_cosines(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosines of all pairs, in the order of :func:`pair_cosines`, from an ``(n, n)`` matrix of products."""
    norms = np.sqrt(np.diag(gram))
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines: NDArray[np.float64] = gram / np.outer(norms, norms)
    return cosines[np.triu_indices(len(gram), 1)]


def cosine_errors(stored: NDArray[np.float64], exact: NDArray[np.float64]) -> dict[str, Any]:
    """Compare cosines.

    Parameters
    ----------
    stored, exact
        Cosines of the same pairs.

    Returns
    -------
    dict
        ``pairs`` that have both, ``undefined`` (pairs of which the store has no direction), and over those that have
        both ``rmse``, ``worst`` (largest absolute error) and ``correlation``; ``None`` where no pair is left.
    """
    known = np.isfinite(stored)
    errors = (stored - exact)[known]
    found: dict[str, Any] = {"pairs": int(known.sum()), "undefined": int((~known).sum())}
    if not len(errors):
        return {**found, "rmse": None, "worst": None, "correlation": None}
    varied = len(errors) > 1 and np.ptp(stored[known]) > 0 and np.ptp(exact[known]) > 0
    correlation = float(np.corrcoef(stored[known], exact[known])[0, 1]) if varied else None
    return {
        **found,
        "rmse": float(np.sqrt(np.mean(errors**2))),
        "worst": float(np.abs(errors).max()),
        "correlation": correlation,
    }
