"""Locality: gradients that agree more where embeddings do, tested against re-draws of the run's own plan.

*Series*: l_t, the mean pairwise embedding cosine of batch t, with c_t, its batch coherence. *Matrix*: E_ts, the cosine
of the batches' mean embeddings, with C_ts, the step coherence. Steps of a training run are neither independent nor
alike: gradients drift, and steps that hold the same sample resemble each other whatever embeddings mean. Both tests
therefore keep the gradients and draw the plan anew, remove or leave out what is known to mislead, and widen the
re-draws where the gradients of samples seen twice say that they are too narrow. How often they are wrong is measured by
``python -m benchmarks locality-levels``; what failed there is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import qr

from analysis.coherence.unit_rows import TILE, as_matrix, unit_rows
from analysis.locality.redraw import PlanDraw
from analysis.locality.redraw_tests import Association, outcome

_TREND_FROM = 20  # steps of an organizer epoch from which it gets a slope of its own
_QUADRATIC_ROWS = 256  # fewer save arithmetic, more are multiplied faster
_FEW = 3  # degrees of freedom, or pairs, that a correlation needs


class SeriesDesign:
    """l_t of one draw without what drifts, and the pairs of steps that share a sample.

    Parameters
    ----------
    draw
        T steps. Where a cosine is undefined, all results are.

    Notes
    -----
    Removed by least squares: for each organizer epoch an intercept and, from 20 steps on, a slope; Legendre polynomials
    1 to 4 over the run; the batch's mean exposure so far, its square, and the mean of log(1 + exposure).
    """

    def __init__(self, draw: PlanDraw) -> None:
        self.basis = drift_basis(draw)
        self.residual = draw.cosine - self.basis @ (self.basis.T @ draw.cosine)
        self.freedom = len(draw) - self.basis.shape[1] - 1
        rows, columns = draw.sharing
        T = len(draw)
        self._shared = sp.csr_array((np.ones(len(rows)), (rows, columns)), shape=(T, T))
        # What is left of a series that the basis explains is rounding.
        scale = np.linalg.norm(draw.cosine)
        self.varies = bool(np.linalg.norm(self.residual) > 1e-9 * scale)

    def correlate(self, coherence: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return r (S,) and Z (S,) for (T, S) series; NaN where a series is explained by the basis.

        Z^2 = (sum_t s_t^2 + 2 sum s_t s_t' over pairs that share a sample) / (|x|^2 |y|^2), with s_t the centered
        products of the residuals x and y: the variance of r that samples seen twice imply.
        """
        rest = coherence - self.basis @ (self.basis.T @ coherence)
        length = np.linalg.norm(rest, axis=0)
        known = (length > 1e-9 * np.linalg.norm(coherence, axis=0)) & self.varies & (self.freedom >= _FEW)
        scale = np.where(known, length * np.linalg.norm(self.residual), np.nan)
        product = self.residual[:, None] * rest
        r = product.sum(axis=0) / scale
        product -= product.mean(axis=0)
        linked = np.square(product).sum(axis=0) + 2 * np.einsum("ij,ij->j", product, self._shared @ product)
        return r, np.sqrt(np.maximum(linked, 0.0)) / scale


class SeriesTest:
    """Association of l_t with batch coherence c_t.

    Parameters
    ----------
    steps
        (T,) ascending steps.
    coherence
        (T,) float64, c_t, all defined.

    Notes
    -----
    The correlation of residuals (`SeriesDesign`) against re-draws, each with its own l_t and its own basis; the run's
    distance from their mean is divided by lambda = max(1, Z / mean Z of the re-draws).
    """

    def __init__(self, steps: NDArray[np.int64], coherence: ArrayLike) -> None:
        self.steps = steps
        self.coherence = np.asarray(coherence, dtype=np.float64)

    design: Callable[[PlanDraw], SeriesDesign] = SeriesDesign

    def of(self, design: SeriesDesign, number: int) -> tuple[float, float]:
        """Return r and Z."""
        r, z = design.correlate(self.coherence[:, None])
        return float(r[0]), float(z[0])

    def result(self, observed: tuple[float, float], redrawn: Sequence[tuple[float, float]]) -> Association:
        """Return the outcome."""
        r, z = observed
        if np.isnan(r):
            reason = "too few steps beside drift and exposure, or a series does not vary beyond these"
            return Association(None, None, reason, len(self.steps))
        others = np.array(redrawn, dtype=np.float64).reshape(-1, 2)
        return outcome(r, others[:, 0], series_inflation(z, others[:, 1]), len(self.steps))


def series_inflation(z: float, redrawn: NDArray[np.float64]) -> float:
    """Return lambda = max(1, Z / mean of the re-draws' Z)."""
    mean = float(redrawn.mean()) if len(redrawn) else 0.0
    return max(1.0, z / mean) if mean > 0 else 1.0


def drift_basis(draw: PlanDraw) -> NDArray[np.float64]:
    """Return (T, m) orthonormal columns that span drift and exposure, see `SeriesDesign`."""
    place = np.linspace(-1.0, 1.0, len(draw)) if len(draw) > 1 else np.zeros(len(draw))
    columns = []
    for epoch in np.unique(draw.organizer_epoch):
        inside = (draw.organizer_epoch == epoch).astype(np.float64)
        columns.append(inside)
        if inside.sum() >= _TREND_FROM:
            columns.append(inside * (place - place[inside > 0].mean()))
    columns += [np.polynomial.legendre.legval(place, np.eye(5)[degree]) for degree in range(1, 5)]
    mean, log = draw.exposure.T
    columns += [mean, np.square(mean), log]
    matrix = np.stack(columns, axis=1)
    length = np.linalg.norm(matrix, axis=0)
    matrix = matrix[:, length > 0] / length[length > 0]
    orthonormal, triangle, _ = qr(matrix, mode="economic", pivoting=True)
    rank = int((np.abs(np.diag(triangle)) > 1e-8 * abs(triangle[0, 0])).sum())
    return np.ascontiguousarray(orthonormal[:, :rank])


class StepGradients:
    """Unit gradients of T steps, centered: what the matrix test keeps fixed.

    Parameters
    ----------
    sketch
        (T, k), one defined gradient a row.

    Attributes
    ----------
    cosine
        (T, T) float32, C_ts of the unit gradients minus their mean over steps.
    factor
        (T, k) float32 whose products it holds, or None where the matrix itself is the smaller.
    """

    def __init__(self, sketch: ArrayLike) -> None:
        rows, given = as_matrix(sketch, None)
        T, k = rows.shape
        mean = np.zeros(k)
        for start in range(0, T, TILE):
            mean += unit_rows(rows[start : start + TILE], given[start : start + TILE])[0].sum(axis=0) / T
        self.cosine = np.empty((T, T), dtype=np.float32)
        for i in range(0, T, TILE):
            left = unit_rows(rows[i : i + TILE], given[i : i + TILE])[0] - mean
            for j in range(i, T, TILE):
                right = left if i == j else unit_rows(rows[j : j + TILE], given[j : j + TILE])[0] - mean
                tile = left @ right.T
                self.cosine[i : i + len(left), j : j + len(right)] = tile
                self.cosine[j : j + len(right), i : i + len(left)] = tile.T
        self.factor: NDArray[np.float32] | None = None
        if 2 * k <= T:
            self.factor = (unit_rows(rows, given)[0] - mean).astype(np.float32)
        self.square = self.cosine.diagonal().astype(np.float64)
        self.total, self.deviation = _pairs_of(self.square, float(np.sum(np.square(self.cosine, dtype=np.float64))))


class MatrixDesign:
    """Unit centroids of one draw, centered, with the pairs of steps that share a sample.

    Parameters
    ----------
    draw
        T steps.
    """

    def __init__(self, draw: PlanDraw) -> None:
        centered = draw.centroid - draw.centroid.mean(axis=0, dtype=np.float64)
        self.centroid = centered.astype(np.float32)
        self.square = np.einsum("ij,ij->i", centered, centered)
        self.total = _sum_over_pairs(self.square)
        self.rows, self.columns = draw.sharing
        T = len(draw)
        self.apart = T * (T - 1) // 2 - len(self.rows)

    # Pictures of few steps need none of these.
    @cached_property
    def shared(self) -> NDArray[np.float64]:
        """(P,), E of the pairs that share a sample."""
        return _pair_dots(self.centroid, self.rows, self.columns)

    @cached_property
    def deviation(self) -> float:
        """Standard deviation of E over all pairs."""
        inner = self.centroid.T @ self.centroid
        return _pairs_of(self.square, float(np.sum(np.square(inner, dtype=np.float64))))[1]

    def statistic(self, gradients: StepGradients) -> float:
        """Return the covariance of E and C over pairs without a common sample, over the deviations of all pairs.

        NaN where too few pairs are apart or nothing varies.
        """
        if self.apart < _FEW or not self.deviation > 0 or not gradients.deviation > 0:
            return float("nan")
        if gradients.factor is not None:
            inner = self.centroid.T @ gradients.factor
            whole = float(np.sum(np.square(inner, dtype=np.float64)))
        else:
            whole = _quadratic(gradients.cosine, self.centroid)
        both = gradients.cosine[self.rows, self.columns].astype(np.float64)
        product = (whole - float(self.square @ gradients.square)) / 2 - float(self.shared @ both)
        left, right = self._means(gradients)
        covariance = product / self.apart - left * right
        return covariance / (self.deviation * gradients.deviation)

    def linked_variance(self, gradients: StepGradients) -> float:
        """Return V, the variance of the statistic that steps linked by common samples imply.

        With S the centered products, zero where a pair shares a sample, and Q the adjacency of sharing steps plus the
        identity: V = 2 <S, Q S Q> / norm^2, norm the number of ordered pairs times both deviations.
        """
        T = len(self.centroid)
        left, right = self._means(gradients)
        products = self.centroid @ self.centroid.T
        products -= np.float32(left)
        products *= gradients.cosine - np.float32(right)
        kept = np.ones((T, T), dtype=bool)
        kept[self.rows, self.columns] = kept[self.columns, self.rows] = False
        np.fill_diagonal(kept, val=False)
        products *= kept
        mean = products.sum(dtype=np.float64) / (2 * self.apart)
        products -= kept * np.float32(mean)
        ones = np.ones(len(self.rows), dtype=np.float32)
        upper = sp.csr_array((ones, (self.rows, self.columns)), shape=(T, T))
        link = sp.csr_array(upper + upper.T + sp.eye_array(T, dtype=np.float32))
        # Q and S are symmetric, so that <S, Q S Q> = <Q S, (Q S)'>.
        linked = link @ products
        norm = 2 * self.apart * self.deviation * gradients.deviation
        return float(2 * np.sum(linked * linked.T, dtype=np.float64) / norm**2)

    def _means(self, gradients: StepGradients) -> tuple[float, float]:
        """Return the means of E and of C over pairs apart."""
        both = gradients.cosine[self.rows, self.columns].sum(dtype=np.float64)
        return (self.total - float(self.shared.sum())) / self.apart, (gradients.total - float(both)) / self.apart


class MatrixTest:
    """Association of E_ts, the cosine of batch centroids, with C_ts, the step coherence.

    Parameters
    ----------
    steps
        (T,) ascending steps.
    sketch
        (T, k), their gradients, all with a direction.

    Notes
    -----
    Unit gradients and unit centroids, each minus its mean over steps. Pairs of steps that share a sample have both
    close centroids and close gradients, whatever embeddings mean, and are left out. The run's distance from the mean
    of the re-draws is divided by lambda = sqrt(1 + max(0, V - V') / s^2): s^2 is the variance of the re-draws, V
    `MatrixDesign.linked_variance` of the run and V' that of the first re-draw.
    """

    def __init__(self, steps: NDArray[np.int64], sketch: ArrayLike) -> None:
        self.steps = steps
        self.gradients = StepGradients(sketch)

    design: Callable[[PlanDraw], MatrixDesign] = MatrixDesign

    def of(self, design: MatrixDesign, number: int) -> tuple[float, float]:
        """Return the statistic and, of the run and the first re-draw, V."""
        value = design.statistic(self.gradients)
        variance = design.linked_variance(self.gradients) if number < 1 and not np.isnan(value) else np.nan
        return value, variance

    def result(self, observed: tuple[float, float], redrawn: Sequence[tuple[float, float]]) -> Association:
        """Return the outcome."""
        value, variance = observed
        if np.isnan(value):
            return Association(
                None, None, "no pairs of steps without a common sample, or nothing varies", len(self.steps)
            )
        others = np.array([one[0] for one in redrawn], dtype=np.float64)
        inflation = matrix_inflation(variance, redrawn[0][1], others) if redrawn else 1.0
        return outcome(value, others, inflation, len(self.steps))


def matrix_inflation(variance: float, redrawn_variance: float, redrawn: NDArray[np.float64]) -> float:
    """Return lambda = sqrt(1 + max(0, V - V') / s^2), s^2 the variance of the re-drawn statistics."""
    spread = float(redrawn.var(ddof=1)) if len(redrawn) > 1 else 0.0
    excess = max(0.0, variance - redrawn_variance)
    return float(np.sqrt(1.0 + excess / spread)) if spread > 0 and np.isfinite(excess) else 1.0


def _sum_over_pairs(square: NDArray[np.float64]) -> float:
    """Return the sum over pairs t < s of products of centered rows, whose squared lengths `square` holds."""
    return -float(square.sum()) / 2  # the rows sum to zero


def _pairs_of(square: NDArray[np.float64], whole: float) -> tuple[float, float]:
    """Return sum and standard deviation over pairs t < s of products of centered rows.

    `square` holds their squared lengths, `whole` is the sum of all T x T squared products.
    """
    T = len(square)
    pairs = T * (T - 1) / 2
    total = _sum_over_pairs(square)
    if not pairs:
        return total, 0.0
    variance = (whole - float(square @ square)) / 2 / pairs - (total / pairs) ** 2
    return total, float(np.sqrt(max(variance, 0.0)))


def _pair_dots(rows: NDArray[np.float32], left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the products of (P,) pairs of rows, in blocks that stay in cache."""
    result = np.empty(len(left))
    for start in range(0, len(left), TILE):
        part = slice(start, start + TILE)
        result[part] = np.einsum("ij,ij->i", rows[left[part]], rows[right[part]])
    return result


def _quadratic(symmetric: NDArray[np.float32], rows: NDArray[np.float32]) -> float:
    """Return the trace of rows' x symmetric x rows, from little more than half of the matrix."""
    total = 0.0
    for start in range(0, len(rows), _QUADRATIC_ROWS):
        own = rows[start : start + _QUADRATIC_ROWS]
        stop = start + len(own)
        part = symmetric[start:stop, start:stop] @ own
        if stop < len(rows):
            part += 2 * (symmetric[start:stop, stop:] @ rows[stop:])
        total += float(np.sum(np.multiply(part, own, dtype=np.float64)))
    return total
