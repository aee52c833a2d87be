"""Pictures of locality: clouds with their binned mean, and the two series over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from analysis.drawing import COLORS, figure_of, message, plain_text, root_figure, running_mean
from analysis.locality.redraw_tests import Association
from analysis.locality.sample_pairs import Slope
from analysis.locality.study import Cloud, SignalLocality
from sdo.checks import whole_number
from sdo.errors import counted

_POINTS = 400  # up to here points are drawn one by one
_TRIMMED = 0.001  # share of the cloud outside the picture at each side


def locality_cloud(
    cloud: Cloud | None,
    *,
    title: str = "",
    x_label: str = "embedding cosine",
    y_label: str = "gradient cosine",
    interval: str = "95 % interval",
    note: str = "",
    ax: Axes | None = None,
) -> tuple[Figure, Axes]:
    """Plot gradient cosine over embedding cosine: hexagons by density, and the mean in bins.

    Parameters
    ----------
    cloud
        Points and binned mean; None draws `note` as the reason.
    title, x_label, y_label
        Drawn as they are.
    interval
        What the interval of the binned mean is, for the legend.
    note
        A second line under the title.
    ax
        Axes to draw into; a new figure by default.

    Returns
    -------
    figure, axes
    """
    figure, axes = figure_of(ax, (5.6, 4.8))
    heading = plain_text(title, 90)
    if cloud is None or len(cloud.x) == 0:
        axes.set_title(heading, fontsize="medium")
        message(axes, _folded(plain_text(note, 300) or "nothing to compare"))
        return figure, axes
    axes.set_title(f"{heading}\n{plain_text(note, 110)}" if note else heading, fontsize="medium")
    x, y, binned = cloud.x, cloud.y, cloud.binned
    if len(x) > _POINTS:
        sides = [tuple(np.quantile(values, [_TRIMMED, 1 - _TRIMMED])) for values in (x, y)]
        inside = (x >= sides[0][0]) & (x <= sides[0][1]) & (y >= sides[1][0]) & (y <= sides[1][1])
        cells = axes.hexbin(x[inside], y[inside], gridsize=38, bins="log", cmap="Blues", linewidths=0, mincnt=1)
        figure.colorbar(cells, ax=axes, label="pairs in the hexagon", shrink=0.8, aspect=25)
    else:
        axes.plot(
            x, y, ".", color=COLORS[0], alpha=0.55, markersize=6, markeredgewidth=0, label=counted(len(x), "point")
        )
    known = np.isfinite(binned.low)
    if known.any():
        axes.fill_between(
            binned.x, binned.low, binned.high, where=known.tolist(), color=COLORS[5], alpha=0.35, linewidth=0,
            label=interval,
        )  # fmt: skip
    axes.plot(binned.x, binned.y, "o-", color=COLORS[1], markersize=4, linewidth=1.6, label="mean in bins")
    axes.set_xlabel(plain_text(x_label, 90))
    axes.set_ylabel(plain_text(y_label, 90))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.14), frameon=False, fontsize="small", ncols=3)
    return figure, axes


def signal_clouds(
    found: SignalLocality, *, title: str = "", ax: Sequence[Axes] | None = None
) -> tuple[Figure, list[Axes]]:
    """Plot the three clouds of one signal beside each other: steps, pairs of steps, pairs of samples.

    Parameters
    ----------
    found
        One of `RunLocality.signals`.
    title
        Above all of them, drawn as it is.
    ax
        Three axes to draw into; a new figure by default.

    Returns
    -------
    figure, list of axes
    """
    if ax is None:
        figure = Figure(figsize=(16.2, 5.2), layout="constrained")
        places = list(figure.subplots(1, 3))
        figure.suptitle(plain_text(title, 100))
    else:
        places = list(ax)
        figure = root_figure(places[0])
    band = "95 % of re-draws, widened by lambda"
    parts: list[tuple[str, str, str, str, str, str]] = [
        ("series", "Steps", "within-batch cosine, drift removed", "batch coherence, drift removed", band,
         _association_note(found.series, found.reasons.get("series"))),
        ("matrix", "Pairs of steps without a common sample", "cosine of batch centroids, centered",
         "step coherence, centered", band, _association_note(found.matrix, found.reasons.get("matrix"))),
        ("pairs", "Pairs of samples of one step", "embedding cosine, within steps", "gradient cosine, within steps",
         "95 % interval, jackknife over samples", _slope_note(found.slope, found.reasons.get("pairs"))),
    ]  # fmt: skip
    for place, (part, heading, x, y, interval, note) in zip(places, parts, strict=True):
        cloud = found.clouds.get(part)
        locality_cloud(cloud, title=heading, x_label=x, y_label=y, interval=interval, note=note, ax=place)
    return figure, places


def locality_series(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    window: int | None = None,
    title: str = "",
    ax: Sequence[Axes] | None = None,
) -> tuple[Figure, list[Axes]]:
    """Plot several quantities over the same steps, one below the other: a dot a step, a running mean as a line.

    Parameters
    ----------
    series
        Axis label to (T,) steps and (T,) values; NaN are left out.
    window
        Values in the centered running mean; by default a twentieth of them, 3 at least.
    title
        Drawn as it is.
    ax
        One axes for each series; a new figure by default.

    Returns
    -------
    figure, list of axes
    """
    if not series:
        raise ValueError("no series to draw")
    if window is not None:
        whole_number("window", window, 1)
    if ax is None:
        figure = Figure(figsize=(8.0, 0.6 + 2.2 * len(series)), layout="compressed")
        axes = list(figure.subplots(len(series), 1, sharex=True, squeeze=False).ravel())
    else:
        axes = list(ax)
        figure = root_figure(axes[0])
    axes[0].set_title(plain_text(title, 100), fontsize="medium")
    for position, (place, (label, (steps, values))) in enumerate(zip(axes, series.items(), strict=True)):
        step, value = np.asarray(steps), np.asarray(values, dtype=np.float64)
        known = np.isfinite(value)
        place.set_ylabel(plain_text(label, 60), fontsize="small")
        if not known.any():
            message(place, "no step with a value")
            continue
        _dots_and_mean(place, step[known], value[known], window, COLORS[position % len(COLORS)])
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    return figure, axes


def _dots_and_mean(axes: Axes, step: NDArray[Any], value: NDArray[np.float64], window: int | None, color: str) -> None:
    wide = min(len(value), max(3, len(value) // 20) if window is None else window)
    size = 9 if len(value) <= 50 else 5
    axes.plot(step, value, ".", color=color, alpha=0.45, markersize=size, markeredgewidth=0)
    axes.plot(step, running_mean(value, wide), color=color, linewidth=1.8, label=f"mean over {wide} of {len(value)}")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False, fontsize="small")


def _folded(text: str, width: int = 44) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def _association_note(found: Association | None, missing: str | None) -> str:
    if found is None:
        return missing or ""
    if found.value is None:
        return found.reason or ""
    if found.p is None:
        return f"r = {found.value:+.3f}; no p: {found.reason}"
    steps = counted(found.steps, "step")
    return f"r = {found.value:+.3f}, p = {found.p:.3g} ({found.redraws} re-draws, {steps})"


def _slope_note(found: Slope | None, missing: str | None) -> str:
    if found is None or found.value is None:
        return missing or (found.reason if found else None) or ""
    interval = "no interval" if found.low is None else f"{found.low:+.2f} to {found.high:+.2f}"
    return (
        f"slope {found.value:+.2f} ({interval}), {counted(found.pairs, 'pair')} of {counted(found.samples, 'sample')}"
    )
