"""Pairs of samples: how the cosine of two samples' gradients follows that of their embeddings.

Pairs share samples, so that their number says little about how much is known: intervals come from leaving out one
sample at a time, with all its pairs. In a recorded run pairs are taken within a step, where both gradients belong to
the same parameters, and compared with the other pairs of that step: what drifts between steps then plays no part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.coherence.unit_rows import as_matrix, unit_rows
from analysis.jackknife import jackknife_error, reach
from analysis.locality.redraw_tests import redraw_p
from analysis.run_folder.gradient_rows import GradientRows
from sdo.checks import integer_array, whole_number
from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError, counted

_FEW_SAMPLES = 10  # a jackknife over fewer says nothing


@dataclass(frozen=True, eq=False)
class SamplePairs:
    """P pairs of different samples.

    Parameters
    ----------
    first, second
        (P,) int64, sample ids.
    step
        (P,) int64, the step at which both gradients were recorded.
    embedding, gradient
        (P,) float64, cosine of the embeddings and of the gradients.
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    step: NDArray[np.int64]
    embedding: NDArray[np.float64]
    gradient: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.first)

    def within_steps(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return both cosines with each step's mean replaced by the mean over all pairs; as they are for one step."""
        _, place = np.unique(self.step, return_inverse=True)
        count = np.bincount(place)

        def centered(values: NDArray[np.float64]) -> NDArray[np.float64]:
            means = np.bincount(place, values) / count
            return np.asarray(values - means[place] + values.mean())

        if len(count) < 2:
            return self.embedding, self.gradient
        return centered(self.embedding), centered(self.gradient)


@dataclass(frozen=True)
class Slope:
    """Change of the gradients' cosine per unit of the embeddings' cosine, between pairs of the same step.

    Parameters
    ----------
    value
        Least squares with a level for each step; None where `reason` says why.
    low, high
        95 % interval, jackknifed over samples; None with too few of them.
    pairs, samples, steps
        What it rests on.
    reason
        Why something is missing.
    """

    value: float | None
    low: float | None
    high: float | None
    pairs: int
    samples: int
    steps: int
    reason: str | None = None


@dataclass(frozen=True, eq=False)
class BinnedMean:
    """Mean of y in bins of x.

    Parameters
    ----------
    edges
        (n + 1,) float64, ascending.
    x, y
        (n,) float64, means in the bin; NaN in an empty one.
    low, high
        (n,) float64, interval of y; NaN where there is none.
    count
        (n,) int64.
    """

    edges: NDArray[np.float64]
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    count: NDArray[np.int64]


def all_pairs(unit: ArrayLike, sketch: ArrayLike, sample_ids: NDArray[np.int64] | None = None) -> SamplePairs:
    """Return all pairs of n samples whose gradients belong to the same parameters.

    Parameters
    ----------
    unit
        (n, d) embeddings.
    sketch
        (n, k) gradients. A row that has no direction, here or there, is left out.
    sample_ids
        (n,); 0 … n - 1 by default. Pairs of a sample with itself are left out.
    """
    left, gives = unit_rows(*as_matrix(unit, None))
    right, has = unit_rows(*as_matrix(sketch, None))
    ids = np.arange(len(left)) if sample_ids is None else integer_array(sample_ids, "sample ids")
    if not len(left) == len(right) == len(ids):
        raise InputError(
            f"there are {len(left)} embeddings, {len(right)} gradients and {len(ids)} sample ids; expected one of each "
            "a sample"
        )
    keep = np.flatnonzero(gives & has)
    i, j = np.triu_indices(len(keep), 1)
    i, j = keep[i], keep[j]
    apart = ids[i] != ids[j]
    i, j = i[apart], j[apart]
    embedding, gradient = (np.clip(rows @ rows.T, -1.0, 1.0)[i, j] for rows in (left, right))
    return SamplePairs(ids[i], ids[j], np.zeros(len(i), dtype=np.int64), embedding, gradient)


def pairs_within_steps(groups: Iterable[GradientRows], embeddings: Embeddings) -> SamplePairs:
    """Return the pairs of samples of each step.

    Parameters
    ----------
    groups
        Rows of kind ``"sample"``, one step each (`Run.iter_steps`).
    embeddings
        The run's; a row's sample id is a row number.
    """
    parts = []
    for rows in groups:
        named = np.flatnonzero([len(ids) == 1 for ids in rows.sample_ids] & rows.defined)
        ids = np.array([rows.sample_ids[i][0] for i in named], dtype=np.int64)
        pairs = all_pairs(embeddings.unit[ids], rows.sketch[named], ids)
        step = np.full(len(pairs), rows.step[0])
        parts.append((pairs.first, pairs.second, step, pairs.embedding, pairs.gradient))
    if not parts:
        nobody = np.zeros(0, dtype=np.int64)
        return SamplePairs(nobody, nobody, nobody, np.zeros(0), np.zeros(0))
    first, second, step, embedding, gradient = (np.concatenate(column) for column in zip(*parts, strict=True))
    return SamplePairs(first, second, step, embedding, gradient)


def pair_slope(pairs: SamplePairs) -> Slope:
    """Return the slope of gradient cosine over embedding cosine, with an interval jackknifed over samples.

    Notes
    -----
    sum_s (Sxy_s - Sx_s Sy_s / n_s) / sum_s (Sxx_s - Sx_s^2 / n_s) over steps s, which is least squares with a level for
    each step. Jackknife: Efron and Stein, Annals of Statistics 9 (1981); deleting a sample deletes its pairs, as
    Snijders and Borgatti, Connections 22 (1999), do for ties of a network. Student's t with n - 1 degrees of freedom.
    """
    samples, ends = np.unique(np.concatenate([pairs.first, pairs.second]), return_inverse=True)
    steps, place = np.unique(pairs.step, return_inverse=True)
    n, P = len(samples), len(pairs)
    if P < 2:
        return Slope(None, None, None, P, n, len(steps), f"{counted(P, 'pair')} of samples; two are needed")
    x, y = pairs.embedding - pairs.embedding.mean(), pairs.gradient - pairs.gradient.mean()
    columns = np.stack([np.ones(P), x, y, x * x, x * y])
    sums = np.stack([np.bincount(place, column, len(steps)).astype(np.float64) for column in columns])
    top, bottom = _moments(sums)
    if not bottom.sum() > 1e-12 * P:
        return Slope(None, None, None, P, n, len(steps), "the embeddings' cosines do not vary within steps")
    value = float(top.sum() / bottom.sum())
    if n < _FEW_SAMPLES:
        return Slope(value, None, None, P, n, len(steps), f"{counted(n, 'sample')}; an interval takes {_FEW_SAMPLES}")
    # What each sample contributes to each step that it stands in.
    keys, where = np.unique(np.tile(place, 2) * n + ends, return_inverse=True)
    own = np.stack([np.bincount(where, np.tile(column, 2)).astype(np.float64) for column in columns])
    changed = _moments(sums[:, keys // n] - own)
    without = [
        total.sum() + np.bincount(keys % n, after - total[keys // n], n)
        for total, after in zip((top, bottom), changed, strict=True)
    ]
    if not (without[1] > 1e-12 * P).all():
        return Slope(value, None, None, P, n, len(steps), "without one sample there is no slope")
    half = reach(jackknife_error(without[0] / without[1]), n)
    return Slope(value, value - half, value + half, P, n, len(steps))


def binned_pairs(pairs: SamplePairs, bins: int = 10) -> BinnedMean:
    """Return the mean gradient cosine in bins of equally many pairs, with intervals jackknifed over samples.

    Parameters
    ----------
    pairs
        Of one step or of several; of several, cosines are taken within steps (`SamplePairs.within_steps`).
    bins
        Fewer where values repeat.
    """
    whole_number("bins", bins, 1)
    x, y = pairs.within_steps()
    return binned_mean(x, y, np.stack([pairs.first, pairs.second]), bins)


def binned_mean(x: NDArray[np.float64], y: NDArray[np.float64], units: NDArray[np.int64], bins: int = 10) -> BinnedMean:
    """Return the mean of y in bins of equally many x, with intervals that leave out one unit at a time.

    Parameters
    ----------
    x, y
        (P,), of pairs.
    units
        (u, P), the labels of what a pair belongs to: its two samples, or its one batch.
    bins
        Fewer where values repeat.
    """
    edges = np.unique(np.quantile(x, np.linspace(0, 1, bins + 1))) if len(x) else np.zeros(0)
    if len(edges) < 2:
        nothing = np.full(0, np.nan)
        return BinnedMean(edges, nothing, nothing, nothing, nothing, np.zeros(0, dtype=np.int64))
    place = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, len(edges) - 2)
    n_bins = len(edges) - 1
    count = np.bincount(place, minlength=n_bins)
    mean_x, mean_y = (np.bincount(place, values, n_bins) / np.maximum(count, 1) for values in (x, y))
    labels, ends = np.unique(units.ravel(), return_inverse=True)
    low, high = np.full(n_bins, np.nan), np.full(n_bins, np.nan)
    n, each = len(labels), len(units)
    for b in range(n_bins):
        inside = np.tile(place == b, each)
        values = np.tile(y - mean_y[b], each)[inside]
        own_count = np.bincount(ends[inside], minlength=n)
        own_sum = np.bincount(ends[inside], values, n)
        present = own_count > 0
        left = count[b] - own_count[present]
        if present.sum() < _FEW_SAMPLES or (left == 0).any():
            continue
        # Units without a pair in the bin change nothing: they count among the n, with the mean itself.
        without = np.zeros(n)
        without[present] = -own_sum[present] / left
        half = reach(jackknife_error(without), int(present.sum()))
        low[b], high[b] = mean_y[b] - half, mean_y[b] + half
    empty = count == 0
    mean_x[empty] = mean_y[empty] = np.nan
    return BinnedMean(edges, mean_x, mean_y, low, high, count)


@dataclass(frozen=True)
class PermutationTest:
    """A correlation with its permutation p; None with a `reason` where undefined."""

    value: float | None
    p: float | None
    samples: int
    permutations: int
    reason: str | None = None


def mantel_test(unit: ArrayLike, sketch: ArrayLike, *, permutations: int = 999, seed: int = 0) -> PermutationTest:
    """Test whether gradients of n samples at the same parameters are more alike where embeddings are.

    Parameters
    ----------
    unit, sketch
        (n, d) and (n, k), a row a sample, each sample once.
    permutations
        M; no p is below 1 / (M + 1).
    seed
        Of the permutations.

    Notes
    -----
    Correlation over pairs, against permutations of the samples (Mantel, Cancer Research 27 (1967)). Samples must be
    exchangeable: not for rows of several steps, which `analysis.run_locality` compares with re-draws of the plan.
    """
    whole_number("permutations", permutations, 0)
    whole_number("seed", seed, 0)
    left, gives = unit_rows(*as_matrix(unit, None))
    right, has = unit_rows(*as_matrix(sketch, None))
    if len(left) != len(right):
        raise InputError(f"there are {len(left)} embeddings and {len(right)} gradients; expected one of each a sample")
    keep = gives & has
    n = int(keep.sum())
    if n < _FEW_SAMPLES:
        return PermutationTest(None, None, n, 0, f"{counted(n, 'sample')} with a direction; {_FEW_SAMPLES} are needed")
    x, y = (rows[keep] @ rows[keep].T for rows in (left, right))
    for matrix in (x, y):
        np.fill_diagonal(matrix, 0.0)
        matrix -= matrix.sum() / (n * (n - 1))
        np.fill_diagonal(matrix, 0.0)
    scale = np.sqrt(np.square(x).sum() * np.square(y).sum())
    if not scale > 1e-12:
        return PermutationTest(None, None, n, 0, "all cosines are equal")
    rng = np.random.default_rng(seed)

    def correlation(order: NDArray[np.int64]) -> float:
        return float(np.sum(x[order][:, order] * y) / scale)

    value = correlation(np.arange(n))
    others = [correlation(rng.permutation(n)) for _ in range(permutations)]
    if not others:
        return PermutationTest(value, None, n, 0, "no permutations")
    return PermutationTest(value, redraw_p(value, others), n, permutations)


def _moments(sums: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return Sxy - Sx Sy / n and Sxx - Sx^2 / n of each column of sums 1, x, y, xx, xy; 0 without pairs."""
    n, x, y, xx, xy = sums
    some = n > 0.5
    size = np.where(some, n, 1.0)
    return np.where(some, xy - x * y / size, 0.0), np.where(some, xx - x * x / size, 0.0)
