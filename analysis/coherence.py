"""Gradient coherence: between steps, and within a batch.

*Step coherence* compares the gradients of two steps, *batch coherence* those of the samples (or
micro-batches) of one step. Cosines are taken between sketches, normalised by the sketch's own length: they
stay within [-1, 1] and a gradient has cosine 1 with itself. Of a signal that is stored as it is, they are
exact. Sums are in float64. A gradient that is zero, not finite or marked undefined has no direction: it is
left out, never counted as 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from analysis.estimates import Estimate, Spread, describe
from analysis.runs import GradientRows
from analysis.units import TILE, as_matrix, lengths, unit_rows


@dataclass(frozen=True)
class StepSummary:
    """Step coherence of a run in a few numbers; every count is a number of pairs of steps.

    Parameters
    ----------
    rows, defined
        Recorded steps, and those whose gradient has a direction.
    mean
        Over all pairs of two steps.
    lag_one
        Over pairs of successive steps.
    sharing, disjoint
        Over pairs of steps that have a sample in common, and that have none.
    """

    rows: int
    defined: int
    mean: Estimate
    lag_one: Estimate
    sharing: Estimate
    disjoint: Estimate


@dataclass(frozen=True, eq=False)
class BatchCoherence:
    """Batch coherence of S steps.

    Parameters
    ----------
    step
        (S,) int64.
    value
        (S,) float64, c_t; NaN where undefined, and only there.
    rows, used
        (S,) int64, gradients recorded in the step, and those of them that have a direction.
    reason
        S texts, None where defined.
    """

    step: NDArray[np.int64]
    value: NDArray[np.float64]
    rows: NDArray[np.int64]
    used: NDArray[np.int64]
    reason: tuple[str | None, ...]

    @property
    def defined(self) -> NDArray[np.bool_]:
        """(S,) bool: steps with a value."""
        return ~np.isnan(self.value)

    def spread(self) -> Spread:
        """Return mean, range and quartiles of c_t over the defined steps."""
        return describe(self.value[self.defined], "no step has two gradients with a direction")


def step_coherence(
    sketch: ArrayLike, defined: NDArray[np.bool_] | None = None, *, smooth: int | None = None
) -> NDArray[np.float32]:
    """Return C_ts = <g_t, g_s> / (|g_t| |g_s|) for all pairs of steps.

    Parameters
    ----------
    sketch
        (T, k), one row a step.
    defined
        (T,) bool; all rows by default. Rows without a finite, positive length are undefined in any case.
    smooth
        W: replace each unit gradient by the mean of the unit gradients of the last W rows (itself included,
        undefined ones left out) before the cosine. The window is trailing: it holds nothing from the future.
        Rows fewer than W apart then share gradients, so that a bright band along the diagonal means nothing.

    Returns
    -------
    (T, T) float32
        Within [-1, 1], exactly symmetric, 1 on the diagonal. Rows and columns of undefined steps are NaN.
        Only this matrix and two tiles of rows are in memory.

    Notes
    -----
    Source: pairwise cosine, common; the closest published meaning of coherence across steps, which is neither
    symmetric nor a cosine, is Dai et al., ICLR 2019, arXiv:1810.03264.

    Examples
    --------
    >>> step_coherence([[1.0, 0.0], [2.0, 0.0], [0.0, -1.0]])[0]
    array([1., 1., 0.], dtype=float32)
    """
    rows, given = as_matrix(sketch, defined)
    window = 1 if smooth is None else int(smooth)
    if window < 1:
        raise ValueError(f"smooth is {smooth}; expected a number of steps of at least 1")
    T = len(rows)
    result = np.empty((T, T), dtype=np.float32)
    for i in range(0, T, TILE):
        left, left_ok = _smooth_units(rows, given, i, window)
        for j in range(i, T, TILE):
            right, right_ok = (left, left_ok) if i == j else _smooth_units(rows, given, j, window)
            tile = np.clip(left @ right.T, -1.0, 1.0)
            if i == j:
                tile = np.triu(tile, 1) + np.triu(tile, 1).T + np.eye(len(tile))
            tile[~left_ok] = np.nan
            tile[:, ~right_ok] = np.nan
            result[i : i + len(left), j : j + len(right)] = tile
            result[j : j + len(right), i : i + len(left)] = tile.T
    return result


def step_summary(rows: GradientRows) -> StepSummary:
    """Return the step coherence of a run in a few means, without the T x T matrix.

    With unit gradients u_1..u_n, the mean over pairs is (|sum u|^2 - n) / (n (n - 1)). The sum over pairs
    that share a sample is sum_t <u_t, (M u)_t>, with M the sparse matrix that marks those pairs.

    Parameters
    ----------
    rows
        T rows of kind ``"step"``.

    Returns
    -------
    StepSummary
        Counts are pairs of steps. Never smoothed.
    """
    sketch, given = as_matrix(rows.sketch, rows.defined)
    peak, length, usable = lengths(sketch, given)
    keep = np.flatnonzero(usable)
    n = len(keep)
    nameless = sum(len(rows.sample_ids[i]) == 0 for i in keep)
    pairs = _sharing_pairs([rows.sample_ids[i] for i in keep])
    successive = np.diff(rows.step[keep]) == 1
    total = lag = shared = 0.0
    for start in range(0, sketch.shape[1], TILE):
        unit = sketch[keep, start : start + TILE].astype(np.float64) / peak[keep, None] / length[keep, None]
        total += float(np.square(unit.sum(axis=0)).sum())
        lag += float(np.sum(unit[:-1][successive] * unit[1:][successive]))
        shared += float(np.sum(unit * (pairs @ unit)))
    total = (total - n) / 2
    everything = n * (n - 1) // 2
    few = f"{n} of {len(rows)} steps have a gradient with a direction; two are needed"
    if nameless:
        unknown = Estimate.undefined(f"{nameless} steps carry no sample ids")
        sharing, disjoint = unknown, unknown
    else:
        none = few if n < 2 else "no two steps have a sample in common"
        every = few if n < 2 else "every two steps have a sample in common"
        sharing = _mean_cosine(shared, pairs.nnz, none)
        disjoint = _mean_cosine(total - shared, everything - pairs.nnz, every)
    apart = few if n < 2 else "no two successive steps are both defined"
    return StepSummary(
        rows=len(rows),
        defined=n,
        mean=_mean_cosine(total, everything, few),
        lag_one=_mean_cosine(lag, int(successive.sum()), apart),
        sharing=sharing,
        disjoint=disjoint,
    )


def mean_pairwise_cosine(vectors: ArrayLike, defined: NDArray[np.bool_] | None = None) -> Estimate:
    """Return the mean cosine over the pairs of n vectors, (|sum u|^2 - n) / (n (n - 1)) with unit vectors u.

    Parameters
    ----------
    vectors
        (m, k); rows that are zero, not finite or not `defined` are left out.
    defined
        (m,) bool, optional.

    Returns
    -------
    Estimate
        In [-1, 1]; `count` is n, the vectors used. Undefined for fewer than two.

    Examples
    --------
    >>> mean_pairwise_cosine([[1.0, 0.0], [3.0, 0.0], [0.0, 0.0]])
    Estimate(value=1.0, reason=None, count=2)
    """
    rows, given = as_matrix(vectors, defined)
    unit, ok = unit_rows(rows, given)
    n = int(ok.sum())
    if n < 2:
        return Estimate.undefined(f"{n} of {len(rows)} vectors have a direction; two are needed", n)
    total = unit.sum(axis=0)
    return Estimate.of(float(np.clip((total @ total - n) / (n * (n - 1)), -1.0, 1.0)), n)


def batch_coherence(groups: Iterable[GradientRows]) -> BatchCoherence:
    """Return c_t, the mean pairwise cosine of the gradients within step t.

    Parameters
    ----------
    groups
        The rows of one step each, of kind ``"sample"`` or ``"micro_batch"``: `Run.iter_steps`, which keeps
        the memory small, or `GradientRows.by_step`. c_t of samples and of micro-batches are different
        quantities: the mean of several samples has less noise than one.

    Returns
    -------
    BatchCoherence
        One entry a step, in the order of `groups`.

    Notes
    -----
    Source: mean off-diagonal cosine (S_cos of Fort et al., arXiv:1901.09491, over the pairs of one batch).
    """
    step, value, total, used, reason = [], [], [], [], []
    for rows in groups:
        estimate = mean_pairwise_cosine(rows.sketch, rows.defined)
        step.append(int(rows.step[0]))
        value.append(np.nan if estimate.value is None else estimate.value)
        total.append(len(rows))
        used.append(estimate.count)
        reason.append(None if estimate.reason is None else estimate.reason.replace("vectors", "gradients"))
    return BatchCoherence(
        step=np.array(step, dtype=np.int64),
        value=np.array(value, dtype=np.float64),
        rows=np.array(total, dtype=np.int64),
        used=np.array(used, dtype=np.int64),
        reason=tuple(reason),
    )


def _mean_cosine(total: float, pairs: int, empty: str) -> Estimate:
    if pairs == 0:
        return Estimate.undefined(empty)
    return Estimate.of(float(np.clip(total / pairs, -1.0, 1.0)), pairs)


def _smooth_units(
    rows: NDArray[Any], given: NDArray[np.bool_], start: int, window: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return unit rows and mask of the tile from `start`, after the trailing mean over `window` rows."""
    first = max(0, start - window + 1)
    unit, ok = unit_rows(rows[first : start + TILE], given[first : start + TILE])
    if window == 1:
        return unit, ok
    sums = np.concatenate([np.zeros((1, unit.shape[1])), np.cumsum(unit, axis=0)])
    ends = np.arange(start - first, len(unit)) + 1
    smooth = sums[ends] - sums[np.maximum(ends - window, 0)]
    # Unit gradients that cancel leave rounding behind, which has no direction.
    whole = np.sqrt(np.einsum("ij,ij->i", smooth, smooth)) > 1e-9
    return unit_rows(smooth, ok[start - first :] & whole)


def _sharing_pairs(sample_ids: list[NDArray[np.int64]]) -> sp.csr_array:
    """Return the (n, n) strictly upper triangular 0/1 matrix of the pairs that have a sample in common."""
    n = len(sample_ids)
    flat = np.concatenate(sample_ids) if n else np.zeros(0, dtype=np.int64)
    names, column = np.unique(flat, return_inverse=True)
    row = np.repeat(np.arange(n), [len(ids) for ids in sample_ids])
    incidence = sp.csr_array((np.ones(len(flat)), (row, column)), shape=(n, len(names)))
    pairs = sp.csr_array(sp.triu(incidence @ incidence.T, 1))
    pairs.data[:] = 1.0
    return pairs
