"""Whether SDO's neighbor batches would change the gradients, asked before training.

From gradients of single samples at the same parameters: how their cosine follows that of the embeddings, the batch
coherence and effective batch size to expect of a plan, and the same observed on batches of that plan. Which interval
stands where is settled by simulation (``benchmarks/probe_levels.py``): over pairs it leaves out one sample at a time,
and the check compares the inside of batches with what lies between batches of the same draw, leaving out one batch at a
time; the difference of two sets of batches would tell mostly which samples were drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.jackknife import IntervalEstimate
from analysis.locality.pair_line import PairLine, fit_line
from analysis.locality.sample_pairs import (
    BinnedMean,
    PermutationTest,
    Slope,
    all_pairs,
    binned_pairs,
    mantel_test,
    pair_slope,
)
from analysis.probe.batches import BINS, CANCEL, ArmProbe, ObservedBatches, ProbeGram, ProbeRows, SizeLine
from analysis.probe.design import ProbeDesign

SMALLEST_CHANGE = 0.05

Outcome = Literal["likely", "unlikely", "cannot tell"]


@dataclass(frozen=True)
class Verdict:
    """Whether neighbor batches change the gradients, by the rule of :func:`decide`.

    Parameters
    ----------
    outcome
        One of the three.
    smallest
        Difference in coherence below which a change counts as small; None where it is undefined.
    times_more
        Of how many times the batches a decision could be expected, if the estimate stays; None where there is one, or
        nothing can be expected.
    reason
        Why there can be no decision.
    """

    outcome: Outcome
    smallest: float | None
    times_more: float | None = None
    reason: str | None = None


@dataclass(frozen=True, eq=False)
class SignalProbe:
    """What a probe found of one signal.

    Parameters
    ----------
    samples, undefined
        Gradients taken, and those of them without a direction.
    curve_samples
        Samples behind curve, slope, Mantel test and predictions.
    curve
        Gradient cosine in bins of embedding cosine, over all their pairs.
    neighbors
        The same over pairs inside SDO's batches, jackknifed over batches.
    slope, mantel
        Over all pairs of `curve_samples`.
    line
        Which predictions were read off; None where `slope.reason` says why.
    arms
        By name.
    predicted_change
        Coherence predicted for SDO less that for uniform batches.
    beyond
        Share of the pairs inside SDO's batches whose embedding cosine is above 99 % of the curve's pairs: there the
        line is extended. None where undefined.
    verdict
        On SDO's batches.
    """

    samples: int
    undefined: int
    curve_samples: int
    curve: BinnedMean
    neighbors: BinnedMean
    slope: Slope
    mantel: PermutationTest
    line: PairLine | None
    arms: dict[str, ArmProbe]
    predicted_change: IntervalEstimate
    beyond: float | None
    verdict: Verdict


def probe_signal(
    design: ProbeDesign,
    rows: ProbeRows,
    *,
    smallest_change: float = SMALLEST_CHANGE,
    permutations: int = 999,
    seed: int = 0,
) -> SignalProbe:
    """Analyze one signal.

    Parameters
    ----------
    design
        Which samples stand in which batches.
    rows
        Their gradients; `design.sample_ids` at least.
    smallest_change
        See :func:`decide`.
    permutations, seed
        Of the Mantel test.

    Notes
    -----
    Curve, slope, Mantel test and predictions rest on samples that were drawn without a look at the embeddings. The
    predicted coherence of a plan is the least-squares line at the plan's mean within-batch cosine. The effective batch
    size is B times the gradient diversity sum |g|^2 / |sum g|^2 of a batch (Yin et al., AISTATS 2018, arXiv:1706.05699,
    call m times the diversity of m gradients their bound on the batch size), in expectation B / (1 + (B - 1) rho) with
    rho = E<g_i, g_j> / E|g|^2: B for orthogonal gradients, 1 for equal ones.
    """
    defined = rows.defined & np.isfinite(rows.norm) & (rows.norm > 0)
    used = defined & (np.abs(rows.unit).max(axis=1) > 0)
    gram = ProbeGram.of(rows, used)
    curve_rows = np.isin(rows.sample_ids, design.curve_ids) & used
    at = np.flatnonzero(curve_rows)
    pairs = all_pairs(rows.unit[at], rows.sketch[at], rows.sample_ids[at])
    slope, (line, reason) = pair_slope(pairs), fit_line(pairs)
    sizes = None if line is None else SizeLine.of(pairs, line, rows.sample_ids, gram)
    arms = {
        name: ObservedBatches(arm, design.batch_size, rows.sample_ids, used, gram).probe(line, sizes, reason)
        for name, arm in design.arms.items()
    }
    sdo, uniform = design.arms["sdo"], design.arms["uniform"]
    change = IntervalEstimate.undefined(reason or "the embeddings' cosines are undefined", slope.samples)
    if line is not None and sdo.cosine is not None and uniform.cosine is not None:
        change = line.change(sdo.cosine, uniform.cosine)
    beyond = None
    if len(pairs) and len(sdo.pairs):
        beyond = float(np.mean(sdo.pairs > np.quantile(pairs.embedding, 0.99)))
    mantel = mantel_test(rows.unit[at], rows.sketch[at], permutations=permutations, seed=seed)
    checked = arms["sdo"]
    return SignalProbe(
        samples=len(rows.sample_ids),
        undefined=int((~defined).sum()),
        curve_samples=len(at),
        curve=binned_pairs(pairs, BINS),
        neighbors=ObservedBatches(sdo, design.batch_size, rows.sample_ids, used, gram).curve(),
        slope=slope,
        mantel=mantel,
        line=line,
        arms=arms,
        predicted_change=change,
        beyond=beyond,
        verdict=decide(checked.difference, checked.between, design.batch_size, smallest_change),
    )


def decide(
    difference: IntervalEstimate,
    between: IntervalEstimate,
    batch_size: int,
    smallest_change: float = SMALLEST_CHANGE,
) -> Verdict:
    """Say whether neighbor batches change the gradients.

    Parameters
    ----------
    difference
        Observed coherence within minus between SDO's batches.
    between
        What lies between them.
    batch_size
        B.
    smallest_change
        Share by which 1 + (B - 1) coherence, which divides B in the effective size of a batch of gradients of equal
        length, must change to count.

    Returns
    -------
    Verdict
        ``"unlikely"``: the 95 % interval lies within the smallest change, to either side; else ``"likely"``: it
        excludes zero; else ``"cannot tell"``. So where nothing changes ``"likely"`` comes in at most 5 % of the cases,
        and where the smallest change or more is there ``"unlikely"`` in at most 2.5 %.
    """
    smallest = None
    if between.value is not None and 1 + (batch_size - 1) * between.value > 0:
        smallest = smallest_change * (1 + (batch_size - 1) * between.value) / (batch_size - 1)
    if difference.value is None or difference.low is None or difference.high is None or smallest is None:
        return Verdict("cannot tell", smallest, reason=difference.reason or between.reason or CANCEL)
    if -smallest < difference.low and difference.high < smallest:
        return Verdict("unlikely", smallest)
    if difference.low > 0 or difference.high < 0:
        return Verdict("likely", smallest)
    half = (difference.high - difference.low) / 2
    distance = max(abs(difference.value), smallest - abs(difference.value))
    return Verdict("cannot tell", smallest, times_more=float((half / distance) ** 2))
