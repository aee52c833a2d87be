"""Pictures of balance: ranked clusters, Lorenz curves, two runs side by side, cluster sizes.

Every function returns the figure and its axes and takes axes of yours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from analysis.balance.metrics import lorenz_curves
from analysis.balance.per_cluster import LEVEL
from analysis.balance.results import SMALL, Balance, BalanceComparison
from analysis.drawing import COLORS, figure_of, message, named_legend, plain_text
from sdo.checks import integer_array, whole_number
from sdo.errors import counted

ROWS = 40  # clusters named in one picture
_BAND = "#b5b5b5"
_GRAY = "#8c8c8c"
_LABEL = 48
_WORDS = 3


def ranked_clusters(
    balance: Balance,
    *,
    keywords: Mapping[int, Sequence[str]] | None = None,
    rows: int = ROWS,
    title: str = "",
    ax: Axes | None = None,
) -> tuple[Figure, Axes]:
    """Plot each cluster's accuracy, the weakest at the top, with its Wilson interval, its size and the band of chance.

    Parameters
    ----------
    balance
        One run.
    keywords
        Label to words, named beside the cluster.
    rows
        Clusters drawn at most: three quarters of them the weakest, the others the strongest.
    title
        Drawn as it is.
    ax
        Axes to draw into; a new figure by default.

    Returns
    -------
    figure, axes

    Notes
    -----
    The gray band is for ranks, not for clusters: where 95 % of the i-th lowest accuracies lie if all clusters are
    equally good. Some cluster always is the lowest; it is remarkable only outside the band.
    """
    order = np.lexsort((balance.names, balance.accuracy))
    rank, gap = _shown_ranks(len(order), rows)
    place = np.arange(len(rank)) + (np.arange(len(rank)) >= gap) * (gap < len(rank))
    figure, axes = figure_of(ax, (8.2, 1.7 + 0.19 * (len(rank) + 1)))
    axes.set_title(plain_text(title, 100), fontsize="medium")
    low, high = balance.ranked_band
    several = len(order) > 1  # one cluster has no rank
    for part in (slice(0, gap), slice(gap, None)):
        if len(rank[part]) and several:
            # Half a row above and below, so that a single rank has a band too.
            y = np.repeat(place[part], 2) + np.tile([-0.5, 0.5], len(rank[part]))
            axes.fill_betweenx(
                y, np.repeat(low[rank[part]], 2), np.repeat(high[rank[part]], 2), color=_BAND, alpha=0.5, linewidth=0
            )
    shown = order[rank]
    interval = balance.interval[shown]
    axes.hlines(place, interval[:, 0], interval[:, 1], color=COLORS[0], linewidth=1.1, alpha=0.8)
    small = balance.small[shown]
    for chosen, face in ((~small, COLORS[0]), (small, "white")):
        axes.plot(
            balance.accuracy[shown][chosen],
            place[chosen],
            "o",
            color=COLORS[0],
            markerfacecolor=face,
            markersize=4.5,
            clip_on=False,
        )
    mean = float(balance.accuracy.mean())
    axes.axvline(mean, color="black", linewidth=0.9, linestyle="--", zorder=0)
    labels = [_cluster_label(int(balance.names[i]), int(balance.size[i]), keywords) for i in shown]
    ticks = place.tolist()
    if gap < len(rank):
        ticks.insert(gap, gap)
        labels.insert(gap, f"… {counted(len(order) - len(rank), 'cluster')} between …")
    axes.set_yticks(ticks, labels, fontsize="x-small")
    axes.set_ylim(place[-1] + 0.7, -0.7)
    _accuracy_axis(axes)
    handles: list[Any] = [
        Line2D([], [], color=COLORS[0], marker="o", markersize=4.5),
        *([Patch(color=_BAND, alpha=0.5, linewidth=0)] if several else []),
        Line2D([], [], color="black", linewidth=0.9, linestyle="--"),
    ]
    texts = [
        "accuracy, 95 % Wilson interval",
        *(["where 95 % of each rank lie if all clusters are equally good"] if several else []),
        f"mean over {counted(len(order), 'cluster')}: {mean:.3f}",
    ]
    if small.any():
        handles.insert(
            1, Line2D([], [], color=COLORS[0], marker="o", markersize=4.5, markerfacecolor="white", linestyle="")
        )
        texts.insert(1, f"fewer than {SMALL} questions")
    _legend_below(axes, handles, texts)
    return figure, axes


def lorenz(balances: Mapping[str, Balance], *, title: str = "", ax: Axes | None = None) -> tuple[Figure, Axes]:
    """Plot Lorenz curves: which share of all accuracy the weakest clusters hold, with the band of equal clusters.

    Parameters
    ----------
    balances
        Run name to its balance.
    title
        Drawn as it is.
    ax
        Axes to draw into; a new figure by default.

    Returns
    -------
    figure, axes
    """
    figure, axes = figure_of(ax, (5.6, 5.8))
    axes.set_title(plain_text(title, 80), fontsize="medium")
    handles: list[Any] = [Line2D([], [], color=_GRAY, linewidth=1, linestyle="--")]
    texts = ["equal accuracies"]
    for position, (name, one) in enumerate(balances.items()):
        gini = one.metrics["gini"]
        if gini.value is None:
            continue
        color = COLORS[position % len(COLORS)]
        share = np.linspace(0, 1, len(one.accuracy) + 1)
        (curve,) = axes.plot(share, lorenz_curves(np.sort(one.accuracy)[None])[0], color=color, linewidth=1.6)
        band = one.lorenz_band
        axes.fill_between(share, band[0], band[1], color=color, alpha=0.2, linewidth=0)
        chance = (
            "" if gini.equal_band is None else f"; equal clusters: {gini.equal_band[0]:.3f} to {gini.equal_band[1]:.3f}"
        )
        handles.append(curve)
        texts.append(f"{plain_text(name)}: Gini {gini.value:.3f}{chance}")
    if len(handles) == 1:
        message(axes, "no run has a correct answer in\none of several clusters: nothing to share out")
        return figure, axes
    handles.append(Patch(color=_BAND, alpha=0.5, linewidth=0))
    texts.append("shaded, in each run's color: 95 % band of equally good clusters")
    axes.plot([0, 1], [0, 1], color=_GRAY, linewidth=1, linestyle="--", zorder=0)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.set_xlabel("share of clusters, weakest first")
    axes.set_ylabel("share of the sum of cluster accuracies")
    _plain(axes)
    _legend_below(axes, handles, texts)
    return figure, axes


def dumbbell(
    comparison: BalanceComparison,
    *,
    baseline: str = "baseline",
    run: str = "run",
    keywords: Mapping[int, Sequence[str]] | None = None,
    rows: int = ROWS,
    title: str = "",
    ax: Axes | None = None,
) -> tuple[Figure, Axes]:
    """Plot the accuracy of each cluster in two runs, joined by a line.

    Parameters
    ----------
    comparison
        Two runs on the same questions.
    baseline, run
        Their names.
    keywords, rows, title, ax
        As in `ranked_clusters`.

    Returns
    -------
    figure, axes

    Notes
    -----
    Clusters are ordered by the mean of both runs. Ordered by one of them, those that it got wrong by chance would stand
    together and seem to gain from the other. Lines are colored where a cluster's difference is beyond chance (exact
    sign test, adjusted for the number of clusters); the others are not distinguishable from 0.
    """
    order = np.lexsort((comparison.names, comparison.baseline + comparison.run))
    rank, gap = _shown_ranks(len(order), rows)
    place = np.arange(len(rank)) + (np.arange(len(rank)) >= gap) * (gap < len(rank))
    figure, axes = figure_of(ax, (8.2, 1.8 + 0.19 * (len(rank) + 1)))
    axes.set_title(plain_text(title, 100), fontsize="medium")
    shown = order[rank]
    before, after = comparison.baseline[shown], comparison.run[shown]
    sure = comparison.cluster_p[shown] < LEVEL
    axes.hlines(place[~sure], before[~sure], after[~sure], color="#cccccc", linewidth=1.6)
    axes.hlines(place[sure], before[sure], after[sure], color=COLORS[2], linewidth=2.6)
    axes.plot(before, place, "o", color=COLORS[0], markerfacecolor="white", markersize=5, clip_on=False)
    axes.plot(after, place, "o", color=COLORS[1], markersize=4.5, clip_on=False)
    labels = [_cluster_label(int(comparison.names[i]), int(comparison.size[i]), keywords) for i in shown]
    ticks = place.tolist()
    if gap < len(rank):
        ticks.insert(gap, gap)
        labels.insert(gap, f"… {counted(len(order) - len(rank), 'cluster')} between …")
    axes.set_yticks(ticks, labels, fontsize="x-small")
    axes.set_ylim(place[-1] + 0.7, -0.7)
    _accuracy_axis(axes)
    count = int((comparison.cluster_p < LEVEL).sum())
    handles = [
        Line2D([], [], color=COLORS[0], marker="o", markersize=5, markerfacecolor="white", linestyle=""),
        Line2D([], [], color=COLORS[1], marker="o", markersize=4.5, linestyle=""),
        Line2D([], [], color=COLORS[2], linewidth=2.6),
        Line2D([], [], color="#cccccc", linewidth=1.6),
    ]
    texts = [
        plain_text(baseline),
        plain_text(run),
        f"beyond chance: {count} of {counted(len(order), 'cluster')} (sign test, Holm)",
        "not distinguishable from 0",
    ]
    _legend_below(axes, handles, texts)
    return figure, axes


def cluster_sizes(size: ArrayLike, *, title: str = "", ax: Axes | None = None) -> tuple[Figure, Axes]:
    """Plot how many questions the clusters hold, the largest first.

    Parameters
    ----------
    size
        Shape ``(C,)``.
    title
        Drawn as it is.
    ax
        Axes to draw into; a new figure by default.

    Returns
    -------
    figure, axes
    """
    sizes = np.sort(integer_array(size, "sizes", low=0))[::-1]
    figure, axes = figure_of(ax, (6.4, 3.6))
    axes.set_title(plain_text(title, 80), fontsize="medium")
    if not len(sizes):
        message(axes, "no cluster holds a question")
        return figure, axes
    edges = np.arange(len(sizes) + 1) + 0.5
    axes.stairs(sizes, edges, fill=True, color=COLORS[0], alpha=0.75)
    small = int((sizes < SMALL).sum())
    axes.axhline(SMALL, color=COLORS[1], linewidth=1, linestyle="--")
    if sizes[0] > 20 * max(1, sizes[-1]):
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(0.5, len(sizes) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.set_xlabel(f"cluster, by size ({len(sizes)} of them, median {float(np.median(sizes)):g} questions)")
    axes.set_ylabel("questions")
    _plain(axes)
    _legend_below(
        axes,
        [Line2D([], [], color=COLORS[1], linewidth=1, linestyle="--")],
        [f"{SMALL} questions: fewer in {counted(small, 'cluster')}"],
    )
    return figure, axes


def _shown_ranks(count: int, rows: int) -> tuple[NDArray[np.int64], int]:
    """Return the ranks to draw, and how many of them come before the gap; no gap where all are drawn."""
    if count <= whole_number("rows", rows, 1):
        return np.arange(count), count
    first = max(1, round(0.75 * rows))
    return np.concatenate([np.arange(first), np.arange(count - (rows - first), count)]), first


def _cluster_label(name: int, size: int, keywords: Mapping[int, Sequence[str]] | None) -> str:
    words = ", ".join(list(keywords.get(name, ()))[:_WORDS]) if keywords else ""
    text = f"{name} · n {size}" + (f" · {words}" if words else "")
    return plain_text(text, _LABEL)


def _accuracy_axis(axes: Axes) -> None:
    axes.set_xlim(0, 1)
    axes.set_xlabel("accuracy")
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _plain(axes: Axes) -> None:
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend_below(axes: Axes, handles: Sequence[Any], texts: Sequence[str]) -> None:
    """Put a legend under the axes, at a distance in points, whatever their height."""
    named_legend(axes, handles, texts, loc="upper left", bbox_to_anchor=(0.0, 0.0), borderaxespad=4.4)
