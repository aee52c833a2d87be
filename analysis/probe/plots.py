"""Picture of a probe: gradient cosine over embedding cosine, and the coherence of three kinds of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from analysis.drawing import COLORS, message, named_legend, plain_text
from analysis.jackknife import IntervalEstimate
from analysis.locality.pair_line import PairLine
from analysis.locality.sample_pairs import BinnedMean
from analysis.probe.design import ARMS, ProbeDesign
from analysis.probe.study import SignalProbe

ARM_NAMES = {"uniform": "uniform", "random": "SDO, random locality", "sdo": "SDO"}
_BLIND, _NEAR, _LINE = COLORS[0], COLORS[1], "#555555"
_HISTOGRAM = 0.16  # of the height, for the plans' cosines
_TRIMMED = 0.002  # share of the plans' pairs outside the picture at each side


def probe_figure(
    found: Mapping[str, SignalProbe], design: ProbeDesign, *, title: str = ""
) -> tuple[Figure, NDArray[Any]]:
    """Plot a row for each signal: the curve, and predicted and observed coherence.

    Parameters
    ----------
    found
        Signal to what the probe found.
    design
        What it looked at.
    title
        Above all, drawn as it is.

    Returns
    -------
    figure, axes
        Axes of shape (signals, 2).
    """
    if not found:
        raise ValueError("no signal to draw")
    figure = Figure(figsize=(12.6, 0.5 + 4.7 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), 2, squeeze=False, width_ratios=(1.25, 1))
    figure.suptitle(plain_text(title, 110))
    for row, (signal, one) in zip(axes, found.items(), strict=True):
        probe_curve(one, design, title=signal, ax=row[0])
        probe_arms(one, title=signal, ax=row[1])
    return figure, axes


def probe_curve(found: SignalProbe, design: ProbeDesign, *, title: str, ax: Axes) -> None:
    """Plot gradient cosine over embedding cosine, and where the plans' pairs lie.

    Parameters
    ----------
    found
        One signal.
    design
        Has the cosines of the plans' pairs.
    title
        Drawn as it is.
    ax
        Axes to draw into.
    """
    slope = found.slope
    note = slope.reason or ""
    if slope.value is not None and slope.low is not None:
        note = f"slope {slope.value:+.3f} ({slope.low:+.3f} to {slope.high:+.3f}), {found.curve_samples} samples"
    ax.set_title(f"{plain_text(title, 80)}\n{plain_text(note, 90)}", fontsize="medium")
    if not len(found.curve.count):
        message(ax, plain_text(note or "no pairs", 90))
        return
    plans = {name: design.arms[name].pairs for name in ("uniform", "sdo") if len(design.arms[name].pairs)}
    ends = [np.quantile(pairs, [_TRIMMED, 1 - _TRIMMED]) for pairs in plans.values()]
    low, high = (float(f([f(end) for end in ends] or [f(found.curve.x)])) for f in (np.min, np.max))
    handles, names = [], []
    if found.line is not None:
        handles.append(_draw_line(ax, found.line, low, high))
        names.append("line, with 95 % interval (samples)")
    handles.append(_draw_bins(ax, found.curve, _BLIND, "o"))
    names.append("all pairs of samples drawn without embeddings")
    if len(found.neighbors.count):
        handles.append(_draw_bins(ax, found.neighbors, _NEAR, "D"))
        names.append("pairs inside SDO's batches")
    _draw_plans(ax, plans, low, high)
    ax.set_xlim(low, high)
    ax.set_xlabel("embedding cosine; below: pairs inside uniform (blue) and SDO batches (red)")
    ax.set_ylabel("gradient cosine")
    ax.spines[["top", "right"]].set_visible(False)
    named_legend(ax, handles, names, loc="upper left")


def probe_arms(found: SignalProbe, *, title: str, ax: Axes) -> None:
    """Plot predicted and observed batch coherence of the three kinds of batches, with 95 % intervals.

    Parameters
    ----------
    found
        One signal.
    title
        Drawn as it is.
    ax
        Axes to draw into.
    """
    ax.set_title(f"{plain_text(title, 80)}\nneighbor batches change it: {found.verdict.outcome}", fontsize="medium")
    kinds = {
        "predicted from the curve": ("predicted", 0.22, _LINE, "o", "full"),
        "inside observed batches": ("within", 0.0, _NEAR, "D", "full"),
        "between observed batches": ("between", -0.22, _NEAR, "D", "none"),
    }
    handles, names = [], []
    for label, (field, shift, color, marker, fill) in kinds.items():
        handle = None
        for place, arm in enumerate(ARMS):
            estimate: IntervalEstimate = getattr(found.arms[arm], field)
            if estimate.value is None:
                continue
            handle = _point(ax, estimate, len(ARMS) - 1 - place + shift, color, marker, fill)
        if handle is not None:
            handles.append(handle)
            names.append(label)
    for place, arm in enumerate(ARMS):
        ax.text(
            0.01,
            len(ARMS) - 1 - place - 0.46,
            _difference_note(found.arms[arm].difference),
            transform=ax.get_yaxis_transform(),
            fontsize="small",
            color="#444444",
        )
    ax.set_yticks(range(len(ARMS)), [ARM_NAMES[arm] for arm in reversed(ARMS)])
    ax.set_ylim(-0.6, len(ARMS) - 0.4)
    ax.set_xlabel("mean gradient cosine (coherence)")
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    if handles:
        named_legend(ax, handles, names, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def _difference_note(difference: IntervalEstimate) -> str:
    if difference.value is None:
        return f"inside - between: {difference.reason}"
    if difference.low is None or difference.high is None:
        return f"inside - between {difference.value:+.3f}, no interval"
    return f"inside - between {difference.value:+.3f} ({difference.low:+.3f} to {difference.high:+.3f})"


def _point(ax: Axes, estimate: IntervalEstimate, y: float, color: str, marker: str, fill: Any) -> Any:
    if estimate.low is not None and estimate.high is not None:
        ax.plot([estimate.low, estimate.high], [y, y], color=color, linewidth=1.6)
    value = [] if estimate.value is None else [estimate.value]
    return ax.plot(value, [y] * len(value), marker, color=color, markersize=6, fillstyle=fill)[0]


def _draw_line(ax: Axes, line: PairLine, low: float, high: float) -> Any:
    x = np.linspace(low, high, 60)
    lower, middle, upper = np.array(
        [(band.low, band.value, band.high) for band in (line.predict(float(one)) for one in x)], dtype=np.float64
    ).T
    ax.fill_between(x, lower, upper, color=_LINE, alpha=0.18, linewidth=0)
    return ax.plot(x, middle, color=_LINE, linewidth=1.4)[0]


def _draw_bins(ax: Axes, binned: BinnedMean, color: str, marker: str) -> Any:
    known = np.isfinite(binned.low)
    ax.vlines(binned.x[known], binned.low[known], binned.high[known], color=color, linewidth=1.6)
    return ax.plot(binned.x, binned.y, marker, color=color, markersize=5)[0]


def _draw_plans(ax: Axes, plans: Mapping[str, NDArray[np.float64]], low: float, high: float) -> None:
    """Plot the density of the plans' cosines along the bottom, over no scale of its own."""
    below = ax.twinx()
    edges = np.linspace(low, high, 61)
    top = 0.0
    for color, pairs in zip((_BLIND, _NEAR), plans.values(), strict=False):
        density, _ = np.histogram(pairs, bins=edges, density=True)
        top = max(top, float(density.max(initial=0.0)))
        below.stairs(density, edges, color=color, alpha=0.28, fill=True)
    below.set_ylim(0, max(top, 1e-9) / _HISTOGRAM)
    below.set_yticks([])
    below.spines[["top", "right", "left"]].set_visible(False)
    ax.set_zorder(below.get_zorder() + 1)
    ax.patch.set_visible(False)
    bottom, upper = ax.get_ylim()
    ax.set_ylim(bottom - _HISTOGRAM * (upper - bottom), upper + 0.22 * (upper - bottom))  # room for plans and legend
