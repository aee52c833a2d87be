"""Pictures of coherence, drawn with matplotlib's object-oriented figures: no display and no global settings.

Every function returns the figure and its axes and takes axes of yours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from analysis.coherence.cosines import BatchCoherence, CoherenceBlocks
from analysis.drawing import COLORS, figure_of, message, plain_text, root_figure, running_mean, runs_legend
from sdo.checks import integer_array, real_array, whole_number
from sdo.errors import InputError

MAX_CELLS = 256
UNDEFINED_GRAY = "#8c8c8c"
_UNDEFINED_TEXT = "undefined (no gradient direction)"
_LEVELS = 129


def block_means(matrix: ArrayLike, size: int = MAX_CELLS) -> tuple[NDArray[np.float64], int]:
    """Average square blocks of a matrix until it has at most `size` cells a side.

    Parameters
    ----------
    matrix
        (T, T); NaN cells are undefined. May be memory-mapped: one strip of blocks is in memory at a time.
    size
        Most cells a side.

    Returns
    -------
    cells : (n, n) float64
        Means over the defined cells of each block; NaN where a block has none.
    block : int
        Cells of `matrix` a side of a block, ceil(T / size); the last block may be smaller. 1 if nothing is
        averaged.
    """
    array = real_array(matrix, "cells of the matrix")
    T = len(array)
    block = max(1, -(-T // whole_number("size", size, 1)))
    edges = np.arange(0, T, block)
    cells = np.full((len(edges), len(edges)), np.nan)
    for i, start in enumerate(edges):
        strip = np.asarray(array[start : start + block], dtype=np.float64)
        known = np.isfinite(strip)
        total = np.add.reduceat(np.where(known, strip, 0.0).sum(axis=0), edges)
        count = np.add.reduceat(known.sum(axis=0), edges)
        np.divide(total, count, out=cells[i], where=count > 0)
    return cells, block


def _cells(matrix: ArrayLike | CoherenceBlocks, size: int = MAX_CELLS) -> tuple[NDArray[np.float64], int]:
    return (matrix.cells, matrix.block) if isinstance(matrix, CoherenceBlocks) else block_means(matrix, size)


def shared_limit(matrices: Sequence[ArrayLike | CoherenceBlocks], size: int = MAX_CELLS) -> float:
    """Return the color limit v of heat maps to be compared; their scale is -v to v.

    It is the largest, over the matrices, of the 99th percentile of the absolute values off the diagonal,
    after `block_means`: a diagonal of ones does not flatten the picture, nor do a few outliers. 1 if nothing
    is defined or everything is 0.
    """
    limits = []
    for matrix in matrices:
        cells, _ = _cells(matrix, size)
        values = np.abs(cells[~np.eye(len(cells), dtype=bool)])
        values = values[np.isfinite(values)]
        if len(values):
            limits.append(float(np.quantile(values, 0.99)))
    limit = max(limits, default=0.0)
    return limit if limit > 0 else 1.0


def heat_map(
    matrix: ArrayLike | CoherenceBlocks,
    *,
    limit: float,
    title: str = "",
    steps: ArrayLike | None = None,
    color_bar: bool = True,
    label: str = "cosine",
    ax: Axes | None = None,
) -> tuple[Figure, Axes]:
    """Plot a square matrix of cosines on a diverging scale centered at 0.

    Parameters
    ----------
    matrix
        (T, T); NaN cells are drawn gray and named in a legend. Above 256 cells a side, means of blocks are
        drawn and the axis says so. Or blocks of steps, as `step_coherence_blocks` returns them.
    limit
        v > 0: the scale runs from -v to v, whatever the matrix holds; give compared matrices the same.
    title
        Drawn as it is.
    steps
        (T,) step numbers for the axes; 0..T-1 by default.
    color_bar
        Draw a color bar, with an arrow where values are clipped.
    label
        Name of the quantity at the color bar.
    ax
        Axes to draw into; a new figure by default.

    Returns
    -------
    figure, axes

    Raises
    ------
    ValueError
        `matrix` is not square or has masked cells, `limit` is not positive, or `steps` are not T whole numbers.
    """
    shape = matrix.cells.shape if isinstance(matrix, CoherenceBlocks) else np.shape(matrix)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"expected a square matrix, not an array of shape {shape}")
    if not limit > 0:
        raise ValueError(f"limit is {limit}; expected a positive number")
    figure, axes = figure_of(ax, (5.6, 5.2))
    axes.set_title(plain_text(title), fontsize="medium")
    cells, block = _cells(matrix)
    if int(np.isfinite(np.diag(cells)).sum()) < 2:
        message(axes, "fewer than two steps\nwith a defined gradient:\nnothing to compare")
        return figure, axes
    T = matrix.rows if isinstance(matrix, CoherenceBlocks) else shape[0]
    numbers = np.arange(T) if steps is None else integer_array(steps, "steps")
    if len(numbers) != T:
        raise InputError(f"there are {len(numbers)} step numbers; expected one for each of {T} rows")
    # The last block may be smaller; the picture ends where its cells would.
    end = len(cells) * block - 0.5
    axes.imshow(
        np.ma.masked_invalid(cells),
        cmap=_palette(),
        vmin=-limit,
        vmax=limit,
        interpolation="nearest",
        extent=(-0.5, end, end, -0.5),
    )
    _number_axes(axes, numbers, block)
    if not np.isfinite(cells).all():
        axes.legend(
            handles=[Patch(facecolor=UNDEFINED_GRAY, edgecolor="none", label=_UNDEFINED_TEXT)],
            loc="upper left",
            bbox_to_anchor=(0.0, -0.16),
            frameon=False,
            fontsize="small",
            borderaxespad=0.0,
        )
    if color_bar:
        _color_bar(figure, [axes], limit, [cells], label)
    return figure, axes


def coherence_heat_maps(
    matrices: Mapping[str, ArrayLike | CoherenceBlocks],
    *,
    steps: Mapping[str, ArrayLike] | None = None,
    limit: float | None = None,
    title: str = "",
    ax: Sequence[Axes] | None = None,
) -> tuple[Figure, list[Axes]]:
    """Plot the step coherence of several runs side by side, on one scale with one color bar.

    Parameters
    ----------
    matrices
        Run name to (T, T) matrix, as `step_coherence` returns it, or to blocks of steps; T may differ between runs.
    steps
        Run name to (T,) step numbers.
    limit
        The common limit of the scale; `shared_limit` by default.
    title
        Above all of them.
    ax
        One axes for each run; a new figure by default, three runs a row.

    Returns
    -------
    figure, list of axes
    """
    if not matrices:
        raise ValueError("no runs to draw")
    v = shared_limit(list(matrices.values())) if limit is None else limit
    if ax is None:
        columns = min(3, len(matrices))
        lines = -(-len(matrices) // columns)
        figure = Figure(figsize=(1.6 + 3.9 * columns, 0.9 + 4.1 * lines), layout="compressed")
        grid = figure.subplots(lines, columns, squeeze=False).ravel()
        for spare in grid[len(matrices) :]:
            spare.remove()
        axes = list(grid[: len(matrices)])
        if title:
            figure.suptitle(plain_text(title, 120))
    else:
        axes = list(ax)
        figure = root_figure(axes[0])
    for place, (name, matrix) in zip(axes, matrices.items(), strict=True):
        numbers = None if steps is None else steps[name]
        heat_map(matrix, limit=v, title=name, steps=numbers, color_bar=False, ax=place)
    if ax is None:
        for place in (axes[i] for i in range(len(axes)) if i % columns):
            place.set_ylabel("")
    cells = [_cells(matrix)[0] for matrix in matrices.values()]
    _color_bar(figure, axes, v, cells, "step coherence (cosine)")
    return figure, axes


def batch_coherence_series(
    series: Mapping[str, BatchCoherence],
    *,
    of: str = "samples",
    window: int | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> tuple[Figure, Axes]:
    """Plot batch coherence over the steps: a dot a step, and a running mean as a line.

    Parameters
    ----------
    series
        Run name to batch coherence.
    of
        Whose gradients are compared, for the axis label: ``"samples"`` or ``"micro-batches"``.
    window
        Defined steps in the centered running mean, cut at the ends; by default a twentieth of them, 3 at
        least.
    title
        Drawn as it is.
    ax
        Axes to draw into; a new figure by default.

    Returns
    -------
    figure, axes
    """
    if window is not None:
        whole_number("window", window, 1)
    figure, axes = figure_of(ax, (8.0, 4.2))
    axes.set_title(plain_text(title, 100), fontsize="medium")
    handles, names, details = [], [], []
    for position, (name, one) in enumerate(series.items()):
        step, value = one.step[one.defined], one.value[one.defined]
        if len(value) == 0:
            continue
        color = COLORS[position % len(COLORS)]
        style = ("-", "--", ":")[position // len(COLORS) % 3]
        wide = min(len(value), max(3, len(value) // 20) if window is None else window)
        size = 9 if len(value) <= 50 else 5
        axes.plot(step, value, ".", color=color, alpha=0.6, markersize=size, markeredgewidth=0)
        handles += axes.plot(step, running_mean(value, wide), style, color=color, linewidth=1.8)
        names.append(name)
        details.append(f" ({len(value)} steps; line: mean over {wide} of them)")
    if not handles:
        message(axes, "no step with two defined gradients:\nnothing to compare")
        return figure, axes
    axes.axhline(0.0, color="#555555", linewidth=0.8, zorder=0)
    axes.set_xlabel("step")
    axes.set_ylabel(f"batch coherence: mean cosine\nbetween the gradients of {plain_text(of)}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.16), "borderaxespad": 0.0}
    runs_legend(axes, handles, names, details, grow=ax is None, **place)
    return figure, axes


def _palette() -> Colormap:
    # seaborn loads pandas and pyplot: only a drawing pays for it.
    import seaborn

    palette: Colormap = seaborn.color_palette("vlag", as_cmap=True)
    # An odd number keeps a neutral middle; the rest of a PNG's 256 colors is left to smooth letters.
    return palette.resampled(_LEVELS).with_extremes(bad=UNDEFINED_GRAY)


def _number_axes(axes: Axes, numbers: NDArray[Any], block: int) -> None:
    """Let the axes show step numbers; positions are rows of the matrix."""

    def number(position: float, _: int | None = None) -> str:
        row = round(position)
        return str(int(numbers[row])) if 0 <= row < len(numbers) else ""

    name = "step" if block == 1 else f"step (each cell: mean over {block} × {block} steps)"
    axes.set_xlabel(name)
    axes.set_ylabel("step")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axis.set_major_formatter(FuncFormatter(number))


def _color_bar(
    figure: Figure, axes: Sequence[Axes], limit: float, cells: Sequence[NDArray[np.float64]], label: str
) -> None:
    values = np.concatenate([one[np.isfinite(one)] for one in cells])
    above, below = bool(np.any(values > limit)), bool(np.any(values < -limit))
    extend = {(True, True): "both", (True, False): "max", (False, True): "min"}.get((above, below), "neither")
    source = ScalarMappable(Normalize(-limit, limit), _palette())
    bar = figure.colorbar(source, ax=list(axes), extend=extend, shrink=0.8, aspect=25)
    clipped = f"; clipped at ±{limit:.2g}" if above or below else ""
    bar.set_label(f"{label}{clipped}")
