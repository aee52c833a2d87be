"""What a probe found, as plain values for JSON and as sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.jackknife import IntervalEstimate
from analysis.locality.sample_pairs import BinnedMean
from analysis.probe.batches import ArmProbe
from analysis.probe.design import ProbeDesign
from analysis.probe.study import SMALLEST_CHANGE, SignalProbe

_NOTED_EQUAL = 0.005  # share of a plan's pairs with equal embeddings that is worth a note
_ESTIMATES = (
    *("predicted", "predicted_size", "within", "between", "difference"),
    *("predicted_difference", "departure", "size"),
)


def rule(smallest_change: float = SMALLEST_CHANGE) -> str:
    """Return the rule of :func:`analysis.probe.study.decide` in words."""
    return (
        "from the 95 % interval of SDO's within minus between. unlikely: it lies within the smallest change that "
        "counts, to either side; else likely: it excludes zero; else cannot tell. The smallest change is the one that "
        f"moves 1 + (B - 1) coherence by {smallest_change:.0%}. Where nothing changes, likely comes in at most 5 % of "
        "probes; where the smallest change or more is there, unlikely in at most 2.5 %"
    )


def signal_entry(found: SignalProbe) -> dict[str, Any]:
    """Return one signal's numbers for JSON; what is None has a reason beside it."""
    slope, mantel = asdict(found.slope), asdict(found.mantel)
    return {
        "samples": found.samples,
        "undefined": found.undefined,
        "curve_samples": found.curve_samples,
        "curve": _bins(found.curve),
        "curve_in_sdo_batches": _bins(found.neighbors),
        "slope": {name: slope[name] for name in ("value", "low", "high", "pairs", "samples", "reason")},
        "mantel": mantel,
        "predicted_change": asdict(found.predicted_change),
        "pairs_beyond_curve": found.beyond,
        "arms": {name: _arm_entry(arm) for name, arm in found.arms.items()},
        "outcome": found.verdict.outcome,
        "smallest_change": found.verdict.smallest,
        "outcome_reason": found.verdict.reason,
    }


def design_entry(design: ProbeDesign) -> dict[str, Any]:
    """Return what was looked at, for JSON."""
    return {
        "batch_size": design.batch_size,
        "members": design.members,
        "steps": design.steps,
        "asked": design.asked,
        "samples": len(design.sample_ids),
        "curve_samples": len(design.curve_ids),
        "arms": {
            name: {
                "batches": len(arm.batches),
                "within_batch_cosine": arm.cosine,
                "pair_cosine_quantiles": _quantiles(arm.pairs),
                "equal_embeddings": arm.equal if len(arm.pairs) else None,
                "reason": None if arm.cosine is not None else "no two embeddings of a batch have a direction",
            }
            for name, arm in design.arms.items()
        },
    }


def advice(signal: str, found: SignalProbe, design: ProbeDesign, seconds_per_sample: float) -> str:
    """Return the one sentence.

    Parameters
    ----------
    signal
        Its name.
    found, design
        What was found, on what.
    seconds_per_sample
        Measured.
    """
    verdict, difference, B = found.verdict, found.arms["sdo"].difference, design.batch_size
    if difference.value is None or difference.low is None or difference.high is None or verdict.smallest is None:
        return f"cannot tell: {verdict.reason}; more samples are needed (--samples)"
    way = "more" if difference.value >= 0 else "less"
    measured = (
        f"gradients of {signal} agree by {abs(difference.value):.3f} {way} inside SDO's batches than between them "
        f"(95 % interval {difference.low:+.3f} to {difference.high:+.3f})"
    )
    if verdict.outcome == "likely":
        return (
            f"likely: {measured}, so neighbor batches of {B} change what a step sees; whether that helps the model "
            "only training can tell, best against locality random"
        )
    if verdict.outcome == "unlikely":
        return (
            f"unlikely to change them much: {measured}; a change of {verdict.smallest:.3f}, the smallest that counts "
            f"at batch size {B}, is excluded"
        )
    text = f"cannot tell: {measured}; neither no change nor one of {verdict.smallest:.3f} is excluded"
    if verdict.times_more is None or not np.isfinite(verdict.times_more):
        return text
    samples = _rounded(design.asked * max(verdict.times_more, 1.1))
    return f"{text}; if the estimate stays, about {samples:,} samples ({duration(samples * seconds_per_sample)}) decide"


def more_samples(found: SignalProbe, design: ProbeDesign, seconds_per_sample: float) -> dict[str, Any]:
    """Return what twice as many samples would cost and bring.

    Errors shrink as one over the root of the samples: half the interval's width falls by a factor of 0.71.
    """
    half = found.arms["sdo"].difference.half_width
    return {
        "seconds_per_sample": seconds_per_sample,
        "samples": 2 * design.asked,
        "more_seconds": seconds_per_sample * len(design.sample_ids),
        "half_width": half,
        "half_width_then": None if half is None else half / math.sqrt(2),
        "reason": None if half is not None else found.arms["sdo"].difference.reason,
    }


def notes(
    found: Mapping[str, SignalProbe], reasons: Mapping[str, Sequence[str | None]], design: ProbeDesign
) -> list[str]:
    """Return what a reader must know beside the numbers.

    Parameters
    ----------
    found
        Signal to what was found.
    reasons
        Signal to why each gradient has no direction; None where it has.
    design
        What was looked at.
    """
    said = []
    n = len(design.sample_ids)
    if n < 0.9 * design.asked:
        said.append(f"asked for {design.asked} samples; the batches drawn hold {n} different ones")
    for name, arm in design.arms.items():
        if arm.equal > _NOTED_EQUAL:
            said.append(
                f"{arm.equal:.1%} of the pairs inside {name} batches have equal embeddings: repeated texts agree "
                "whatever their neighborhood"
            )
    for signal, one in found.items():
        missing = Counter(reason for reason in reasons[signal] if reason is not None)
        if missing:
            why = "; ".join(f"{reason}: {count}" for reason, count in missing.most_common())
            said.append(
                f"{signal}: {one.undefined} of {one.samples} gradients have no direction and are left out ({why})"
            )
        said += _signal_notes(signal, one)
    return said


def _signal_notes(signal: str, one: SignalProbe) -> list[str]:
    said = []
    if one.line is None:
        said.append(f"{signal}: nothing is predicted: {one.slope.reason}")
    elif one.beyond is not None and one.beyond > 0.01:
        said.append(
            f"{signal}: {one.beyond:.0%} of the pairs inside SDO's batches have an embedding cosine above 99 % of the "
            "curve's; for them the line is extended"
        )
    departure = one.arms["sdo"].departure
    if departure.low is not None and departure.high is not None and departure.low * departure.high > 0:
        way = "more" if departure.low > 0 else "less"
        said.append(
            f"{signal}: SDO's batches agree {way} than the line says ({departure.value:+.3f}, 95 % interval "
            f"{departure.low:+.3f} to {departure.high:+.3f}); believe what was observed"
        )
    return said


def duration(seconds: float) -> str:
    """Return a time in words.

    Examples
    --------
    >>> duration(42.4), duration(400)
    ('42 s', '7 min')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _rounded(count: float) -> int:
    """Round up to two digits."""
    unit: int = 10 ** max(0, math.floor(math.log10(count)) - 1)
    return math.ceil(count / unit) * unit


def _arm_entry(arm: ArmProbe) -> dict[str, Any]:
    estimates: dict[str, IntervalEstimate] = {name: getattr(arm, name) for name in _ESTIMATES}
    return {
        "batches": arm.batches,
        "embedding_cosine_within": arm.cosine_within,
        "embedding_cosine_between": arm.cosine_between,
        **{name: asdict(estimate) for name, estimate in estimates.items()},
    }


def _bins(binned: BinnedMean) -> list[dict[str, Any]]:
    def known(value: float) -> float | None:
        return float(value) if np.isfinite(value) else None

    columns = zip(binned.x, binned.y, binned.low, binned.high, binned.count, strict=True)
    return [
        {
            "embedding_cosine": known(x),
            "gradient_cosine": known(y),
            "low": known(low),
            "high": known(high),
            "pairs": int(count),
            "reason": None if np.isfinite(low) else "too few samples or batches for an interval",
        }
        for x, y, low, high, count in columns
    ]


def _quantiles(values: NDArray[np.float64]) -> dict[str, float] | None:
    if not len(values):
        return None
    shares = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
    return {str(share): float(q) for share, q in zip(shares, np.quantile(values, shares), strict=True)}
