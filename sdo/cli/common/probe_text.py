"""What ``sdo probe`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sdo.cli.common.outputs import aligned

if TYPE_CHECKING:
    from analysis.jackknife import IntervalEstimate
    from analysis.probe.design import ProbeDesign
    from analysis.probe.study import SignalProbe

WORDS = (
    "cosine: of the embeddings, mean over pairs of a batch, all steps of the plan. coherence: mean cosine between the "
    "gradients of a batch's samples, predicted for the plan from the curve, and observed in batches of the plan.\n"
    "within - between: observed coherence less the mean cosine of samples of different batches of the same draw, and "
    "what the curve predicts of these batches. In brackets 95 % intervals.\n"
    "effective batch: B sum |g|^2 / |sum g|^2, B times the gradient diversity of a batch (Yin et al., "
    "arXiv:1706.05699): B for orthogonal gradients, 1 for equal ones. It is no count of independent samples: what all "
    "gradients have in common lowers it too, under uniform batches as well.\n"
    "random: SDO with random samples in the place of neighbors. It says how gradients differ, not whether training is "
    "better."
)
_HEADINGS = (
    *("signal", "batches", "n", "cosine", "coherence predicted", "observed", "within - between", "predicted"),
    *("effective batch predicted", "observed"),
)


def table(found: Mapping[str, SignalProbe], parameters: Mapping[str, str | None], design: ProbeDesign) -> str:
    """Return the table, and below it a line a signal; a dash stands where nothing is defined (probe.json says why).

    Parameters
    ----------
    found
        Signal to what was found.
    parameters
        Signal to its parameter's name.
    design
        What was looked at.
    """
    lines: list[list[str]] = [list(_HEADINGS)]
    for signal, one in found.items():
        for name, arm in one.arms.items():
            cosine = design.arms[name].cosine
            lines.append(
                [
                    *(signal, name, str(arm.batches), "-" if cosine is None else f"{cosine:.3f}"),
                    *(_shown(e, ".3f") for e in (arm.predicted, arm.within)),
                    *(_shown(e, "+.3f") for e in (arm.difference, arm.predicted_difference)),
                    *(_shown(e, ".2f") for e in (arm.predicted_size, arm.size)),
                ]
            )
    curves = [
        f"{signal}{f' ({parameters[signal]})' if parameters[signal] else ''}: {_curve(one)}"
        for signal, one in found.items()
    ]
    return "\n".join([aligned(lines, texts=2), "", *curves])


def _curve(one: SignalProbe) -> str:
    """Say in one line what the curve is, and the outcome."""
    slope, mantel = one.slope, one.mantel
    text = f"slope not defined, {slope.reason}"
    if slope.value is not None:
        interval = "no interval" if slope.low is None else f"{slope.low:+.3f} to {slope.high:+.3f}"
        text = f"gradient cosine changes by {slope.value:+.3f} ({interval}) per unit of embedding cosine"
    test = "" if mantel.p is None else f", Mantel r {mantel.value:+.3f}, p {mantel.p:.3g}"
    return f"{text}{test}, {one.curve_samples} samples; {one.verdict.outcome}"


def _shown(estimate: IntervalEstimate, pattern: str) -> str:
    if estimate.value is None:
        return "-"
    value = format(estimate.value, pattern)
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{format(estimate.low, pattern)}, {format(estimate.high, pattern)}]"
