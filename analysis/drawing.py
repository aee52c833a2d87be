"""What every picture needs: figures without a display, text drawn as it is, small palette PNGs.

matplotlib's object-oriented figures are used throughout: no global settings, no list of open figures.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from numpy.typing import NDArray

from sdo.atomic import write_atomically
from sdo.errors import printable

# Okabe and Ito's palette: told apart by color-blind readers and in print.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_LONGEST_NAME = 48
MANY_RUNS = 8  # beyond, names stand below the axes and alone
_NARROW_NAME = 24
_ROW, _CHARACTER, _HANDLE = 0.17, 0.075, 0.45  # inches of a small legend


def plain_text(text: str, longest: int = _LONGEST_NAME) -> str:
    """Return `text` so that matplotlib draws it as it is: one line, cut, no mathematics, no missing glyphs.

    Characters that the default font lacks appear by their code point, so that two names stay apart.
    """
    line = printable(" ".join(text.split()))
    if len(line) > longest:
        line = line[: longest - 1] + "…"
    known = get_font(findfont(FontProperties())).get_charmap()
    shown = "".join(c if ord(c) in known else c.encode("ascii", "backslashreplace").decode() for c in line)
    return shown.replace("$", r"\$")


def save(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 130) -> Path:
    """Write a figure as a PNG of at most 256 colors, complete or not at all.

    Parameters
    ----------
    figure
        Any figure.
    path
        File to write, in an existing folder; replaced if it exists.
    dpi
        Pixels an inch.

    Returns
    -------
    Path
        `path`.
    """
    target = Path(path)

    def write(file: Path) -> None:
        with file.open("wb") as stream:
            write_png(figure, stream, dpi=dpi)

    write_atomically({target: write})
    return target


def write_png(figure: Figure, stream: IO[bytes], *, dpi: int) -> None:
    """Write a figure as a PNG of at most 256 colors into an open file."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", bbox_inches="tight", pad_inches=0.1)
    buffer.seek(0)
    with Image.open(buffer) as image:
        pixels = np.array(image.convert("RGB"))
    # Smooth letters alone would use up the colors: 32 grays do for them.
    gray = np.ptp(pixels, axis=2) == 0
    pixels[gray] = np.round(np.round(pixels[gray] / 255 * 31) * (255 / 31)).astype(np.uint8)
    small = Image.fromarray(pixels).quantize(256, dither=Image.Dither.NONE)
    small.save(stream, format="PNG", optimize=True)


def root_figure(axes: Axes) -> Figure:
    """Return the figure that holds some axes."""
    holder = axes.get_figure()
    if holder is None:
        raise ValueError("the axes belong to no figure")
    return holder.figure  # a subfigure's is the whole; matplotlib 3.9 cannot say get_figure(root=True)


def figure_of(ax: Axes | None, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Return the given axes and their figure, or a new figure of `size` inches."""
    if ax is not None:
        return root_figure(ax), ax
    figure = Figure(figsize=size, layout="compressed")
    return figure, figure.subplots()


def message(axes: Axes, text: str) -> None:
    """Say in an empty picture why it is empty."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="#444444")


def named_legend(axes: Axes, handles: Sequence[Any], names: Sequence[str], **place: Any) -> None:
    """Add a legend whose names are drawn as they are; `place` goes to matplotlib."""
    legend = axes.legend(
        list(handles), [str(number) for number in range(len(handles))], frameon=False, fontsize="small", **place
    )
    # Set afterwards: a legend refuses labels that begin with an underscore.
    for text, shown in zip(legend.get_texts(), names, strict=True):
        text.set_text(shown)


def runs_legend(
    axes: Axes, handles: Sequence[Any], names: Sequence[str], details: Sequence[str], *, grow: bool, **place: Any
) -> None:
    """Add a legend of runs: names with details where they are few, else names alone, in columns below the axes.

    Parameters
    ----------
    axes
        What the handles are drawn in.
    handles, names, details
        One a run; details follow the name.
    grow
        Make the figure higher by what many names take: right for a figure of one's own alone.
    place
        Where few names stand, for matplotlib.
    """
    if len(names) <= MANY_RUNS:
        shown = [f"{plain_text(name)}{more}" for name, more in zip(names, details, strict=True)]
        named_legend(axes, handles, shown, **place)
        return
    shown = [plain_text(name) for name in short_names(names)]
    figure = root_figure(axes)
    width = _HANDLE + _CHARACTER * max(map(len, shown))
    columns = max(1, int(figure.get_figwidth() / width))
    if grow:
        figure.set_figheight(figure.get_figheight() + _ROW * -(-len(names) // columns))
    below: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, 0.0), "borderaxespad": 4.4}
    named_legend(axes, handles, shown, ncols=columns, columnspacing=1.2, **below)


def short_names(names: Sequence[str], longest: int = _NARROW_NAME) -> list[str]:
    """Return names of which none is longer than `longest`, where that leaves them apart.

    What long names begin with in common goes first, then the middle of each.

    Examples
    --------
    >>> short_names(["ablations-of-the-spring-k2-101", "ablations-of-the-spring-k4-101"])
    ['…k2-101', '…k4-101']
    """
    if max(map(len, names), default=0) <= longest:
        return list(names)
    columns = zip(*names, strict=False)
    shared = next((i for i, letters in enumerate(columns) if len(set(letters)) > 1), 0)
    while shared and names[0][shared - 1].isalnum():  # words stay whole
        shared -= 1
    ends = [f"…{name[shared:]}" if shared > 1 else name for name in names]
    half = (longest - 1) // 2
    cut = [end if len(end) <= longest else f"{end[:half]}…{end[-half:]}" for end in ends]
    return cut if len(set(cut)) == len(set(names)) else ends


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Return the centered mean over `window` values, over those there are at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    n = len(values)
    first = np.maximum(np.arange(n) - (window - 1) // 2, 0)
    last = np.minimum(np.arange(n) + window // 2 + 1, n)
    return np.asarray((sums[last] - sums[first]) / (last - first), dtype=np.float64)
