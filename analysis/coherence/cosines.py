"""Gradient coherence: between steps, and within a batch.

*Step coherence* compares the gradients of two steps, *batch coherence* those of the samples (or
micro-batches) of one step. Cosines are taken between sketches, normalized by the sketch's own length: they
stay within [-1, 1] and a gradient has cosine 1 with itself. Of a signal that is stored as it is, they are
exact. Sums are in float64. A gradient that is zero, not finite or marked undefined has no direction: it is
left out, never counted as 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from analysis.coherence.unit_rows import UnitRows, as_matrix, unit_rows
from analysis.estimates import Estimate, Spread, describe
from analysis.run_folder.gradient_rows import GradientRows
from sdo.checks import whole_number
from sdo.errors import counted

_BLOCK = 2048  # steps in float64 at once: 128 MiB at k = 8192
_SHARING_PAIRS = 2**25  # pairs of steps that a sparse matrix may hold: 400 MiB


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
class CoherenceBlocks:
    """Step coherence, averaged over square blocks of steps.

    Parameters
    ----------
    cells
        (n, n) float64, the mean over the defined pairs of steps of each block, a step with itself among them; NaN where
        there is none.
    block
        Steps a side of a block; the last may be smaller.
    rows
        T, the steps.
    """

    cells: NDArray[np.float64]
    block: int
    rows: int


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
        W, from 1: replace each unit gradient by the mean of the unit gradients of the last W rows (itself
        included, undefined ones left out) before the cosine. The window is trailing: it holds nothing from the future.
        Rows fewer than W apart then share gradients, so that a bright band along the diagonal means nothing; from
        W = T on that is all of them.

    Returns
    -------
    (T, T) float32
        Within [-1, 1], exactly symmetric, 1 on the diagonal. Rows and columns of undefined steps are NaN.
        Beside this matrix, 4 T^2 bytes, two blocks of 2,048 rows in float64 are in memory, and their products.
        For very long runs see :func:`step_coherence_blocks`.

    Raises
    ------
    InputError
        If `sketch` or `defined` is none of that, entries are masked, or `smooth` is out of range.

    Notes
    -----
    Source: pairwise cosine, common; the closest published meaning of coherence across steps, which is neither
    symmetric nor a cosine, is Dai et al., ICLR 2019, arXiv:1810.03264.

    Examples
    --------
    >>> step_coherence([[1.0, 0.0], [2.0, 0.0], [0.0, -1.0]])[0]
    array([1., 1., 0.], dtype=float32)
    """
    units, window = _units(sketch, defined, smooth)
    T = len(units.rows)
    result = np.empty((T, T), dtype=np.float32)
    for i, j, tile, left_ok, right_ok in _tiles(units, window):
        np.clip(tile, -1.0, 1.0, out=tile)
        if i == j:
            tile = np.triu(tile, 1)
            tile = tile + tile.T + np.eye(len(tile))
        tile[~left_ok] = np.nan
        tile[:, ~right_ok] = np.nan
        result[i : i + len(tile), j : j + tile.shape[1]] = tile
        if i != j:
            result[j : j + tile.shape[1], i : i + len(tile)] = tile.T
    return result


def step_coherence_blocks(
    sketch: ArrayLike, defined: NDArray[np.bool_] | None = None, *, smooth: int | None = None, size: int = 256
) -> CoherenceBlocks:
    """Return C_ts averaged over square blocks of steps, without the T x T matrix.

    Parameters
    ----------
    sketch, defined, smooth
        As in :func:`step_coherence`.
    size
        Most cells a side.

    Returns
    -------
    CoherenceBlocks
        What averaging :func:`step_coherence` over its defined pairs would give, up to rounding.

    Notes
    -----
    The mean of <u_t, u_s> over t in A and s in B is <sum of A, sum of B> / (|A| |B|): time grows with T k, not T^2 k.
    """
    units, window = _units(sketch, defined, smooth)
    T, k = units.rows.shape
    block = max(1, -(-T // whole_number("size", size, 1)))
    edges = np.arange(0, T, block)
    sums, count = np.zeros((len(edges), k)), np.zeros(len(edges))
    whole = max(1, _BLOCK // block) * block
    for start in range(0, T, whole):
        unit, ok = _smooth_units(units, start, min(start + whole, T), window)
        inside = np.arange(0, len(unit), block)
        here = slice(start // block, start // block + len(inside))
        sums[here] = np.add.reduceat(unit, inside, axis=0)
        count[here] = np.add.reduceat(ok.astype(np.float64), inside)
    with np.errstate(invalid="ignore", divide="ignore"):
        cells = np.clip(sums @ sums.T / np.outer(count, count), -1.0, 1.0)
    return CoherenceBlocks(cells=cells, block=block, rows=T)


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
    units = UnitRows.of(*as_matrix(rows.sketch, rows.defined))
    keep = np.flatnonzero(units.ok)
    n = len(keep)
    nameless = sum(len(rows.sample_ids[i]) == 0 for i in keep)
    total, lag, successive = _along_steps(units, rows.step)
    shared, sharing_pairs = (0.0, 0) if nameless else _over_sharing_pairs(units, [rows.sample_ids[i] for i in keep])
    total = (total - n) / 2
    everything = n * (n - 1) // 2
    few = f"{n} of {len(rows)} steps have a gradient with a direction; two are needed"
    if nameless:
        unknown = Estimate.undefined(f"{counted(nameless, 'step')} without sample ids")
        sharing, disjoint = unknown, unknown
    else:
        none = few if n < 2 else "no two steps have a sample in common"
        every = few if n < 2 else "every two steps have a sample in common"
        sharing = _mean_cosine(shared, sharing_pairs, none)
        disjoint = _mean_cosine(total - shared, everything - sharing_pairs, every)
    apart = few if n < 2 else "no two successive steps are both defined"
    return StepSummary(
        rows=len(rows),
        defined=n,
        mean=_mean_cosine(total, everything, few),
        lag_one=_mean_cosine(lag, successive, apart),
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


def _units(sketch: ArrayLike, defined: NDArray[np.bool_] | None, smooth: int | None) -> tuple[UnitRows, int]:
    window = 1 if smooth is None else whole_number("smooth", smooth, 1)
    return UnitRows.of(*as_matrix(sketch, defined)), window


def _tiles(
    units: UnitRows, window: int
) -> Iterator[tuple[int, int, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]]:
    """Yield (first row, first column, products, defined rows, defined columns) of the tiles from the diagonal on."""
    T = len(units.rows)
    for i in range(0, T, _BLOCK):
        left, left_ok = _smooth_units(units, i, min(i + _BLOCK, T), window)
        yield i, i, left @ left.T, left_ok, left_ok
        for j in range(i + _BLOCK, T, _BLOCK):
            right, right_ok = _smooth_units(units, j, min(j + _BLOCK, T), window)
            yield i, j, left @ right.T, left_ok, right_ok


def _smooth_units(units: UnitRows, start: int, stop: int, window: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return unit rows and mask of rows ``start`` to ``stop - 1``, after the trailing mean over ``window`` rows."""
    first = max(0, start - window + 1)
    unit, ok = units.block(first, stop), units.ok[start:stop]
    if window == 1:
        return unit, ok
    sums = np.concatenate([np.zeros((1, unit.shape[1])), np.cumsum(unit, axis=0)])
    ends = np.arange(start - first, len(unit)) + 1
    smooth = sums[ends] - sums[np.maximum(ends - window, 0)]
    # Unit gradients that cancel leave rounding behind, which has no direction.
    whole = np.sqrt(np.einsum("ij,ij->i", smooth, smooth)) > 1e-9
    return unit_rows(smooth, ok & whole)


def _along_steps(units: UnitRows, step: NDArray[np.int64]) -> tuple[float, float, int]:
    """Return |sum u|^2, the sum of <u_t, u_t+1> over successive defined steps, and the number of these."""
    total = np.zeros(units.rows.shape[1])
    lag, successive = 0.0, 0
    last, last_step = np.zeros((0, len(total))), np.zeros(0, dtype=np.int64)
    for start in range(0, len(units.rows), _BLOCK):
        ok = units.ok[start : start + _BLOCK]
        unit = np.concatenate([last, units.block(start, start + _BLOCK)[ok]])
        steps = np.concatenate([last_step, step[start : start + _BLOCK][ok]])
        total += unit[len(last) :].sum(axis=0)
        follows = np.diff(steps) == 1
        lag += float(np.einsum("ij,ij->i", unit[:-1], unit[1:])[follows].sum())
        successive += int(follows.sum())
        last, last_step = unit[-1:].copy(), steps[-1:]
    return float(total @ total), lag, successive


def _over_sharing_pairs(units: UnitRows, sample_ids: list[NDArray[np.int64]]) -> tuple[float, int]:
    """Return the sum of <u_t, u_s> over the pairs of defined steps that have a sample in common, and their number."""
    n = len(sample_ids)
    flat = np.concatenate(sample_ids) if n else np.zeros(0, dtype=np.int64)
    names, column = np.unique(flat, return_inverse=True)
    row = np.repeat(np.flatnonzero(units.ok), [len(ids) for ids in sample_ids])
    incidence = sp.csr_array((np.ones(len(flat)), (row, column)), shape=(len(units.rows), len(names)))
    often = np.bincount(column, minlength=len(names)).astype(np.float64)
    total, number = 0.0, 0
    if np.sum(often * (often - 1) / 2) > _SHARING_PAIRS:
        # Nearly all pairs share something: their products are what a dense product gives fastest.
        for i, j, tile, _, _ in _tiles(units, 1):
            common = incidence[i : i + len(tile)] @ incidence[j : j + tile.shape[1]].T
            pairs = sp.coo_array(sp.triu(common, 1) if i == j else common)
            total += float(tile[pairs.row, pairs.col].sum())
            number += len(pairs.row)
        return total, number
    pairs = _sharing_pairs(incidence)
    if pairs.nnz:
        total = sum(float(np.sum(unit * (pairs @ unit))) for unit in units.columns())
    return total, pairs.nnz


def _sharing_pairs(incidence: sp.csr_array) -> sp.csr_array:
    """Return the (T, T) strictly upper triangular 0/1 matrix of the pairs of rows that have a column in common."""
    parts = [sp.csr_array((0, incidence.shape[0]))]
    for start in range(0, incidence.shape[0], _BLOCK):
        common = sp.coo_array(incidence[start : start + _BLOCK] @ incidence.T)
        above = common.col > common.row + start
        ones, where = np.ones(int(above.sum())), (common.row[above], common.col[above])
        parts.append(sp.csr_array((ones, where), shape=common.shape))
    return sp.csr_array(sp.vstack(parts, format="csr"))
