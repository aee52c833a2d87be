"""Pictures of exposure and of several seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis.drawing import COLORS, MANY_RUNS, figure_of, message, plain_text, runs_legend
from analysis.exposure.ledger import Exposure
from analysis.seeds.compare import SeedComparison
from analysis.seeds.differences import PairedComparison
from sdo.errors import counted

_BARS = 40  # beyond, or of many runs, counts are drawn as a line


def exposure_histogram(
    exposures: Mapping[str, Exposure], *, title: str = "", ax: Axes | None = None
) -> tuple[Figure, Axes]:
    """Plot how many samples were seen 0, 1, 2, … times.

    Parameters
    ----------
    exposures
        Name to exposure; several stand side by side as shares of their samples.
    title
        Drawn as it is.
    ax
        Axes to draw into; a new figure by default.

    Returns
    -------
    figure, axes
    """
    figure, axes = figure_of(ax, (6.4, 4.0))
    axes.set_title(plain_text(title, 100), fontsize="medium")
    if not exposures:
        message(axes, "no exposures to show")
        return figure, axes
    width = 0.8 / len(exposures)
    longest = max(int(one.times.max()) for one in exposures.values())
    handles: list[Any] = []
    details = []
    for position, one in enumerate(exposures.values()):
        share = np.bincount(one.times, minlength=longest + 1) / len(one.times)
        index = one.gini()
        told = "undefined" if index.value is None else f"{index.value:.3f}"
        details.append(f": mean {one.times.mean():.2f}, Gini {told}")
        color, style = COLORS[position % len(COLORS)], ("-", "--", ":")[position // len(COLORS) % 3]
        if longest < _BARS and len(exposures) <= MANY_RUNS:
            place = np.arange(longest + 1) + (position - (len(exposures) - 1) / 2) * width
            handles.append(axes.bar(place, share, width, color=color))
        else:
            handles += axes.plot(np.arange(longest + 1), share, style, color=color, drawstyle="steps-mid")
    axes.set_xlabel("times a sample was seen")
    axes.set_ylabel("share of samples")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    runs_legend(axes, handles, list(exposures), details, grow=ax is None)
    return figure, axes


def coverage_curves(
    exposures: Mapping[str, Exposure], *, title: str = "", ax: Axes | None = None
) -> tuple[Figure, Axes]:
    """Plot the share of samples seen at least once over the steps; parameters as in `exposure_histogram`."""
    figure, axes = figure_of(ax, (6.4, 4.0))
    axes.set_title(plain_text(title, 100), fontsize="medium")
    if not exposures:
        message(axes, "no exposures to show")
        return figure, axes
    handles, details = [], []
    for position, one in enumerate(exposures.values()):
        style = ("-", "--", ":")[position // len(COLORS) % 3]
        details.append(f": {one.coverage[-1]:.1%} after {counted(len(one.step), 'step')}")
        handles += axes.plot(one.step + 1, one.coverage, style, color=COLORS[position % len(COLORS)], linewidth=1.8)
    axes.set_ylim(0.0, 1.02)
    axes.set_xlim(left=0)
    axes.set_xlabel("steps done")
    axes.set_ylabel("samples seen at least once")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    runs_legend(axes, handles, list(exposures), details, grow=ax is None, loc="lower right")
    return figure, axes


def seed_differences(comparison: SeedComparison, *, title: str = "", ax: Axes | None = None) -> tuple[Figure, Axes]:
    """Plot the differences over the checkpoints: their mean with its 95 % t interval, and a dot a pair.

    Where no seeds pair the runs, the dots are those of `against`, each less the mean of the baseline.

    Parameters
    ----------
    comparison
        One measure.
    title
        Drawn as it is.
    ax
        Axes to draw into; a new figure by default.

    Returns
    -------
    figure, axes
    """
    figure, axes = figure_of(ax, (6.4, 4.0))
    axes.set_title(plain_text(title, 100), fontsize="medium")
    paired = isinstance(comparison.comparisons[0], PairedComparison)
    baseline = comparison.baseline if paired else comparison.baseline.mean(axis=1, keepdims=True)
    difference = comparison.against - baseline
    steps = np.array(comparison.steps)
    for pair in difference.T:
        axes.plot(steps, pair, ".", color="#444444", markersize=7, markeredgewidth=0, zorder=3)
    mean = np.array([one.mean for one in comparison.comparisons])
    known = np.array([one.low is not None for one in comparison.comparisons])
    reach = np.array([0.0 if one.high is None else one.high - one.mean for one in comparison.comparisons])
    axes.plot(steps, mean, color=COLORS[1], linewidth=1.6)
    axes.errorbar(
        steps[known], mean[known], reach[known], fmt="o", color=COLORS[1], capsize=3, markersize=4,
        label=f"mean of {comparison.comparisons[0].sizes}, 95 % t interval",
    )  # fmt: skip
    axes.axhline(0.0, color="#555555", linewidth=0.8, zorder=0)
    axes.set_xlabel("steps done")
    axes.set_ylabel(f"{plain_text(comparison.measure)}:\nagainst minus baseline")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    return figure, axes
