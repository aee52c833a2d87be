"""What a probe's batches say of one signal: coherence inside and between them, effective size, expectation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.coherence.unit_rows import unit_rows
from analysis.jackknife import IntervalEstimate, jackknife_error, jackknife_interval, reach
from analysis.locality.pair_line import PairLine, fit_line
from analysis.locality.sample_pairs import BinnedMean, SamplePairs, binned_mean
from analysis.probe.design import Arm
from sdo.errors import counted

FEW_BATCHES = 6  # a jackknife over fewer is not simulated
BINS = 8
CANCEL = "the gradients of a batch would cancel"


@dataclass(frozen=True, eq=False)
class ProbeRows:
    """Gradients of n samples at the same parameters, and their embeddings.

    Parameters
    ----------
    sample_ids
        (n,) int64, ascending, each once.
    unit
        (n, d), unit rows; zero where an embedding has no direction.
    sketch
        (n, k).
    norm
        (n,) float64, as samples of one step weigh against each other.
    defined
        (n,) bool, gradients that have a direction.
    """

    sample_ids: NDArray[np.int64]
    unit: NDArray[np.floating]
    sketch: NDArray[np.floating]
    norm: NDArray[np.float64]
    defined: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ArmProbe:
    """One way to form batches, for one signal. Coherence: mean pairwise cosine of the gradients of a batch's samples.

    Parameters
    ----------
    batches
        Batches observed, with at least two gradients that have a direction.
    predicted
        Batch coherence over the steps of the plan, from the curve; jackknifed over samples.
    predicted_size
        Effective batch size, the same.
    within, between
        Observed coherence inside the batches, and mean cosine between samples of different batches; jackknifed over
        batches, as all that follows.
    difference
        Within minus between.
    predicted_difference
        What the curve says of these very batches; jackknifed over samples.
    departure
        Observed difference less the predicted one; both kinds of error together.
    size
        Effective batch size observed.
    cosine_within, cosine_between
        Of the embeddings in these batches.
    """

    batches: int
    predicted: IntervalEstimate
    predicted_size: IntervalEstimate
    within: IntervalEstimate
    between: IntervalEstimate
    difference: IntervalEstimate
    predicted_difference: IntervalEstimate
    departure: IntervalEstimate
    size: IntervalEstimate
    cosine_within: float | None
    cosine_between: float | None


@dataclass(frozen=True, eq=False)
class ProbeGram:
    """All pairs of the n rows: cosines of gradients and embeddings, and inner products in units of the mean |g|^2.

    The diagonals of the cosines are zero. Rows that are not used have zeros.
    """

    cosine: NDArray[np.float64]
    embedding: NDArray[np.float64]
    product: NDArray[np.float64]
    square: NDArray[np.float64]

    @classmethod
    def of(cls, rows: ProbeRows, used: NDArray[np.bool_]) -> ProbeGram:
        """Make it of the rows that are used, shape (n,)."""
        unit, _ = unit_rows(np.asarray(rows.sketch), used)
        embedding, _ = unit_rows(np.asarray(rows.unit), used)
        cosine, alike = (np.clip(one @ one.T, -1.0, 1.0) for one in (unit, embedding))
        for matrix in (cosine, alike):
            np.fill_diagonal(matrix, 0.0)
        norm = np.where(used, rows.norm, 0.0)
        largest = norm.max(initial=0.0)
        norm = norm / largest if largest > 0 else norm
        square = np.square(norm)
        mean = square[used].mean() if used.any() else 1.0
        return cls(cosine, alike, cosine * np.outer(norm, norm) / mean, square / mean)


@dataclass(frozen=True, eq=False)
class SizeLine:
    """The line of inner products over embedding cosine, and the mean |g|^2 of the same samples, one left out too."""

    line: PairLine
    square: float
    squares: NDArray[np.float64]

    @classmethod
    def of(cls, pairs: SamplePairs, line: PairLine, ids: NDArray[np.int64], gram: ProbeGram) -> SizeLine | None:
        """Fit it to the curve's pairs; None where there is no line. `ids` are those of all rows."""
        first, second = np.searchsorted(ids, pairs.first), np.searchsorted(ids, pairs.second)
        products, _ = fit_line(dataclasses.replace(pairs, gradient=gram.product[first, second]))
        if products is None:
            return None
        own = gram.square[np.searchsorted(ids, line.samples)]
        return cls(products, float(own.mean()), (own.sum() - own) / (len(own) - 1))

    def predict(self, cosine: float, batch_size: int) -> IntervalEstimate:
        """Return the effective size of batches whose samples' embeddings have this mean cosine."""
        value, without = self.line.at(cosine)
        return _effective_size(batch_size, value / self.square, without / self.squares)


@dataclass(frozen=True, eq=False)
class _PairSums:
    """Sums and numbers of pairs, inside each of T batches and between each two; of a sample with itself none."""

    within: NDArray[np.float64]
    within_count: NDArray[np.float64]
    between: NDArray[np.float64]
    between_count: NDArray[np.float64]

    @classmethod
    def of(cls, matrix: NDArray[np.float64], inside: NDArray[np.float64]) -> _PairSums:
        """Sum a symmetric (n, n) matrix of zero diagonal over (T, n) batches, 1 where a sample stands in one."""
        sums = inside @ matrix @ inside.T
        size = inside.sum(axis=1)
        count = np.outer(size, size) - inside @ inside.T
        within, within_count = np.diag(sums) / 2, np.diag(count) / 2
        np.fill_diagonal(sums, 0.0)
        np.fill_diagonal(count, 0.0)
        return cls(within, within_count, sums, count)

    def means(self) -> tuple[tuple[float, NDArray[np.float64]], tuple[float, NDArray[np.float64]]]:
        """Return the mean within and between, each with the (T,) values that leave one batch out; NaN if undefined."""
        within, within_count = self.within.sum(), self.within_count.sum()
        between, between_count = self.between.sum() / 2, self.between_count.sum() / 2
        left, left_count = between - self.between.sum(axis=1), between_count - self.between_count.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return (
                (float(np.divide(within, within_count)), (within - self.within) / (within_count - self.within_count)),
                (float(np.divide(between, between_count)), left / left_count),
            )


class ObservedBatches:
    """The batches of one arm, in terms of the rows that have a direction."""

    def __init__(
        self, arm: Arm, batch_size: int, ids: NDArray[np.int64], used: NDArray[np.bool_], gram: ProbeGram
    ) -> None:
        self._arm, self._batch_size, self._gram = arm, batch_size, gram
        place = np.searchsorted(ids, arm.batches)
        inside = np.zeros((len(place), len(ids)))
        np.put_along_axis(inside, place, used[place].astype(np.float64), axis=1)
        self._inside = inside[inside.sum(axis=1) >= 2]
        self._cosine = _PairSums.of(gram.cosine, self._inside)
        self._embedding = _PairSums.of(gram.embedding, self._inside)

    def probe(self, line: PairLine | None, sizes: SizeLine | None, reason: str | None) -> ArmProbe:
        """Put everything together; `reason` says why there is no line."""
        within, between = self._cosine.means()
        alike, apart = (mean for mean, _ in self._embedding.means())
        predicted = predicted_size = expected = departure = IntervalEstimate.undefined(
            reason or "the embeddings' cosines are undefined"
        )
        if line is not None and self._arm.cosine is not None:
            predicted = line.predict(self._arm.cosine)
            if sizes is not None:
                predicted_size = sizes.predict(self._arm.cosine, self._batch_size)
        difference = self._estimate(within[0] - between[0], within[1] - between[1])
        if line is not None and np.isfinite(alike - apart):
            expected = line.change(alike, apart)
            departure = self._departure(line, expected, difference)
        return ArmProbe(
            batches=len(self._inside),
            predicted=predicted,
            predicted_size=predicted_size,
            within=self._estimate(*within),
            between=self._estimate(*between),
            difference=difference,
            predicted_difference=expected,
            departure=departure,
            size=self._size(),
            cosine_within=alike if np.isfinite(alike) else None,
            cosine_between=apart if np.isfinite(apart) else None,
        )

    def curve(self) -> BinnedMean:
        """Return the gradients' cosine in bins of the embeddings', over pairs inside the batches."""
        parts = []
        for number, row in enumerate(self._inside):
            members = np.flatnonzero(row)
            i, j = (members[one] for one in np.triu_indices(len(members), 1))
            parts.append((self._gram.embedding[i, j], self._gram.cosine[i, j], np.full(len(i), number)))
        if not parts:
            return binned_mean(np.zeros(0), np.zeros(0), np.zeros((1, 0), dtype=np.int64), BINS)
        x, y, batch = (np.concatenate(column) for column in zip(*parts, strict=True))
        return binned_mean(x, y, batch[None], BINS)

    def _departure(self, line: PairLine, expected: IntervalEstimate, difference: IntervalEstimate) -> IntervalEstimate:
        """Observed less predicted: batches and the curve's samples err independently, as they were drawn."""
        if difference.value is None or difference.low is None or expected.value is None:
            return IntervalEstimate.undefined(difference.reason or "undefined", difference.count)
        (_, within), (_, between) = self._cosine.means()
        (alike, alike_without), (apart, apart_without) = self._embedding.means()
        rest = within - between - line.slope * (alike_without - apart_without)
        error = np.hypot(jackknife_error(rest), jackknife_error(line.slopes * (alike - apart)))
        half = reach(float(error), len(rest))
        value = difference.value - expected.value
        return IntervalEstimate(value, value - half, value + half, len(rest))

    def _size(self) -> IntervalEstimate:
        """Effective batch size, from the inner products inside the batches."""
        products = _PairSums.of(self._gram.product, self._inside)
        own, count = self._inside @ self._gram.square, self._inside.sum(axis=1)
        (product, products_without), _ = products.means()
        with np.errstate(divide="ignore", invalid="ignore"):
            square = np.divide(own.sum(), count.sum())
            squares = (own.sum() - own) / (count.sum() - count)
            found = _effective_size(self._batch_size, float(product / square), products_without / squares)
        return found if len(own) >= FEW_BATCHES or found.value is None else self._without_interval(found.value)

    def _estimate(self, value: float, without: NDArray[np.float64]) -> IntervalEstimate:
        if not np.isfinite(value):
            return IntervalEstimate.undefined(
                f"{counted(len(without), 'batch')} with two gradients to compare", len(without)
            )
        if len(without) < FEW_BATCHES or not np.isfinite(without).all():
            return self._without_interval(value)
        return jackknife_interval(value, without)

    def _without_interval(self, value: float) -> IntervalEstimate:
        T = len(self._inside)
        return IntervalEstimate(value, None, None, T, f"{counted(T, 'batch')}; an interval takes {FEW_BATCHES}")


def _effective_size(batch_size: int, rho: float, without: NDArray[np.float64]) -> IntervalEstimate:
    """B / (1 + (B - 1) rho); the interval is made on the scale of its logarithm, so that it stays positive."""
    if not np.isfinite(rho):
        return IntervalEstimate.undefined("no two gradients to compare", len(without))
    factor, factors = 1 + (batch_size - 1) * rho, 1 + (batch_size - 1) * without
    if not factor > 0:
        return IntervalEstimate.undefined(CANCEL, len(without))
    size = batch_size / factor
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        return IntervalEstimate(size, None, None, len(without), f"without one unit {CANCEL}")
    logarithm = jackknife_interval(float(np.log(factor)), np.log(factors))
    assert logarithm.low is not None  # noqa: S101 - a jackknife of finite values has an interval
    assert logarithm.high is not None  # noqa: S101
    ends = batch_size / np.exp([logarithm.high, logarithm.low])
    return IntervalEstimate(size, float(ends[0]), float(ends[1]), len(without))
