"""What a report is made of: plain values that `page` turns into HTML and that go into the JSON file beside it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from PIL import Image

from analysis.drawing import write_png
from analysis.estimates import Estimate

if TYPE_CHECKING:
    from analysis.report.material import ReportMaterial

DASH = "–"


@dataclass(frozen=True)
class Cell:
    """A table's cell.

    Parameters
    ----------
    text
        As it is shown.
    reason
        Why there is no number, where there is none.
    """

    text: str
    reason: str | None = None


@dataclass(frozen=True)
class Table:
    """A table; the first `texts` columns are words, the others numbers.

    Parameters
    ----------
    head
        One name a column.
    rows
        One cell a column.
    caption
        What the rows are.
    texts
        Columns from the left that hold words.
    notes
        Sentences below it.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    texts: int = 1
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A PNG with the words for those who cannot see it, and the finding below it."""

    png: bytes
    alt: str
    caption: str

    @classmethod
    def of(cls, figure: Figure, *, alt: str, caption: str, dpi: int = 100) -> Picture:
        """Plot a figure at `dpi` pixels an inch."""
        buffer = io.BytesIO()
        write_png(figure, buffer, dpi=dpi)
        return cls(buffer.getvalue(), alt, caption)

    def scaled(self, factor: float) -> Picture:
        """Return the picture with its sides times `factor`."""
        with Image.open(io.BytesIO(self.png)) as image:
            size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
            small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS).quantize(128, dither=Image.Dither.NONE)
        buffer = io.BytesIO()
        small.save(buffer, format="PNG", optimize=True)
        return replace(self, png=buffer.getvalue())


@dataclass(frozen=True)
class Quotes:
    """Texts of the dataset under a heading; cut and escaped before they are shown."""

    heading: str
    words: str
    quotes: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """A sentence of the verdict; its tone is ``"better"``, ``"worse"``, ``"undetermined"`` or ``"plain"``."""

    tone: str
    words: str


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Parameters
    ----------
    words
        Its paragraphs, the finding first.
    tables, pictures, quotes
        What stands below them.
    more
        Definitions and sources, folded away.
    findings
        What it adds to the verdict.
    alerts
        What a reader must know before believing its numbers.
    data
        The same numbers for the JSON file; None where one is undefined, with its reason beside it.
    """

    words: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    quotes: tuple[Quotes, ...] = ()
    more: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    alerts: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Absent:
    """A section that has nothing to show, and what it would need."""

    reason: str


@dataclass(frozen=True)
class SectionSpec:
    """A section that a report can have.

    Parameters
    ----------
    key
        Its name in the JSON file and in the page's links: letters, digits, ``-`` and ``_``.
    title
        Its heading.
    compute
        Takes the :class:`~analysis.report.ReportMaterial` and returns :class:`Section`, or :class:`Absent` where it has
        nothing to show. What it raises is shown in the section's place.
    """

    key: str
    title: str
    compute: Callable[[ReportMaterial], Section | Absent]


@dataclass(frozen=True)
class Failed:
    """A section that could not be computed."""

    reason: str


@dataclass(frozen=True)
class Place:
    """A section's place in the report, whatever became of it."""

    key: str
    title: str
    content: Section | Absent | Failed


def signed(value: float, pattern: str) -> str:
    """Return a number in words, with a true minus; names around it keep their hyphens."""
    return pattern.format(value).replace("-", "−")


def number(value: float | Estimate | None, pattern: str = "{:.3g}", reason: str | None = None) -> Cell:
    """Return a number's cell, or a dash with the reason.

    Parameters
    ----------
    value
        The number; an estimate brings its own reason.
    pattern
        A format string.
    reason
        Why `value` is None.
    """
    shown, why = (value.value, value.reason) if isinstance(value, Estimate) else (value, reason)
    if shown is None:
        return Cell(DASH, why or "not recorded")
    return Cell(signed(shown, pattern))


def join(names: Sequence[str]) -> str:
    """Return names as a list in words: ``a``, ``a and b``, ``a, b and c``."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def some(names: Sequence[str], most: int = 6) -> str:
    """Return names as `join` does, the last ones counted where there are more than `most`."""
    if len(names) <= most:
        return join(names)
    return join([*names[: most - 1], f"{len(names) - most + 1} more"])
