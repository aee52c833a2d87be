"""Puts the sections together. A section that fails is shown as failed, with its reason; the others stand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from analysis.balance.summary import BalanceSummary
from analysis.report.balance import balance_section, weakest_section
from analysis.report.content import Absent, Failed, Finding, Place, Section, SectionSpec
from analysis.report.locality import exposure_section, locality_section
from analysis.report.material import ReportMaterial
from analysis.report.page import render, state
from analysis.report.provenance import provenance_section, reproduce_section
from analysis.report.sections import coherence_section, training_section
from analysis.report.seeds import seeds_section
from analysis.report.verdict import alerts, verdict
from analysis.run_folder.run import Run
from sdo.atomic import write_atomically
from sdo.errors import InputError, counted

FORMAT = "sdo-report"
FORMAT_VERSION = 1
_PAGE_BYTES = 950_000  # pictures share what words and tables leave, and are a third more as base64
_LEAST_SCALE = 0.4  # smaller, nothing could be read
SECTIONS: tuple[SectionSpec, ...] = (
    SectionSpec("balance", "Balance over clusters", balance_section),
    SectionSpec("seeds", "Several seeds", seeds_section),
    SectionSpec("training", "How training went", training_section),
    SectionSpec("coherence", "Coherence", coherence_section),
    SectionSpec("locality", "Locality", locality_section),
    SectionSpec("exposure", "Exposure", exposure_section),
    SectionSpec("weakest", "Weakest clusters", weakest_section),
    SectionSpec("provenance", "Provenance", provenance_section),
    SectionSpec("reproduce", "How to reproduce", reproduce_section),
)


@dataclass(frozen=True, eq=False)
class Report:
    """A finished report.

    Parameters
    ----------
    html
        The page.
    numbers
        The same numbers, for a JSON file.
    failed
        Titles of the sections that could not be computed.
    """

    html: str
    numbers: dict[str, Any]
    failed: tuple[str, ...]

    def write(self, path: Path) -> Path:
        """Write the page and, beside it, its numbers with the suffix ``.json``; both or neither.

        Returns
        -------
        Path
            The JSON file.
        """
        record = path.with_suffix(".json")
        text = json.dumps(self.numbers, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        write_atomically(
            {
                path: lambda file: file.write_text(self.html, encoding="utf-8"),
                record: lambda file: file.write_text(text, encoding="utf-8", errors="backslashreplace"),
            }
        )
        return record


def build_report(
    runs: Mapping[str, Run],
    *,
    balance: BalanceSummary | None = None,
    embeddings: Path | None = None,
    redraws: int = 199,
    title: str = "SDO report",
    command: Sequence[str] = (),
    sections: Sequence[SectionSpec] = SECTIONS,
) -> Report:
    """Make a report of run folders and predictions.

    Parameters
    ----------
    runs
        Name to run folder, in the order in which they are shown; may be empty where there are predictions.
    balance
        Balance of predictions, as :func:`analysis.summarize_balance` returns it.
    embeddings
        Where the runs' embeddings are, if no longer where run.json says.
    redraws
        How often each run's plan is drawn anew for the tests of locality; 0 for no tests.
    title
        The heading.
    command
        The words of the command, for "how to reproduce".
    sections
        What it is made of, in this order: ours, or some of them, and your own.

    Raises
    ------
    InputError
        If two sections have one key, or a key cannot stand in a link.

    Returns
    -------
    Report
        Under a megabyte, as far as its words allow, readable without scripts and without a network.
    """
    material = ReportMaterial(dict(runs), tuple(command), balance, embeddings, redraws)
    _check_keys(sections)
    places = {spec.key: _place(spec, material) for spec in sections}
    findings, warnings = _first(material, places)
    made = datetime.now(UTC).isoformat(timespec="minutes")
    subtitle = f"{counted(len(runs), 'run')}; made {made}"
    words = render(title, subtitle, findings, warnings, [_without_pictures(place) for place in places.values()])
    places, scale = _fitted(places, (_PAGE_BYTES - len(words.encode())) * 3 // 4)
    html = render(title, subtitle, findings, warnings, list(places.values()))
    numbers = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "made": made,
        "title": title,
        "verdict": [asdict(finding) for finding in findings],
        "alerts": list(warnings),
        "picture_scale": scale,
        "sections": {key: _numbers(place) for key, place in places.items()},
    }
    failed = tuple(place.title for place in places.values() if isinstance(place.content, Failed))
    return Report(html, numbers, failed)


def _fitted(places: dict[str, Place], budget: int) -> tuple[dict[str, Place], float]:
    """Shrink the largest pictures until all take `budget` bytes; return the places and the least factor of a side."""
    shown = {key: place.content for key, place in places.items() if isinstance(place.content, Section)}
    whole = [picture for content in shown.values() for picture in content.pictures]
    scales = [1.0] * len(whole)
    sizes = [len(picture.png) for picture in whole]
    most = max(sizes, default=0)
    pictures = list(whole)
    while sum(sizes) > budget and max(scales, default=0.0) > _LEAST_SCALE:
        # Curves are small and have to be read; heat maps and clouds are large and can be seen.
        most = round(0.9 * most)
        for i, size in enumerate(sizes):
            if size > most and scales[i] > _LEAST_SCALE:
                # Bytes shrink a little slower than the area.
                scales[i] = max(_LEAST_SCALE, scales[i] * min(0.95, (most / size) ** 0.5))
                pictures[i] = whole[i].scaled(scales[i])
        sizes = [len(picture.png) for picture in pictures]
    left = iter(pictures)
    fitted = {
        key: replace(places[key], content=replace(content, pictures=tuple(next(left) for _ in content.pictures)))
        for key, content in shown.items()
    }
    return places | fitted, min(scales, default=1.0)


def _without_pictures(place: Place) -> Place:
    return replace(place, content=replace(place.content, pictures=())) if isinstance(place.content, Section) else place


def _check_keys(sections: Sequence[SectionSpec]) -> None:
    seen: set[str] = set()
    for spec in sections:
        if not isinstance(spec, SectionSpec):
            raise InputError(f"a section of the report is {type(spec).__name__}; expected a SectionSpec")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", spec.key):
            raise InputError(f"the key of a section is {spec.key!r}; expected letters, digits, - and _")
        if spec.key in seen:
            raise InputError(f"two sections have the key {spec.key!r}; expected each once")
        seen.add(spec.key)


def _place(spec: SectionSpec, material: ReportMaterial) -> Place:
    try:
        content: object = spec.compute(material)
        if not isinstance(content, Section | Absent):
            raise TypeError(f"it gave {type(content).__name__}; expected a Section, or Absent where there is nothing")
        json.dumps(content.data if isinstance(content, Section) else {}, allow_nan=False)
    except Exception as error:  # whatever it was, the other sections are still worth having
        return Place(spec.key, spec.title, Failed(f"{type(error).__name__}: {_words(error)}"))
    return Place(spec.key, spec.title, content)


def _first(material: ReportMaterial, places: Mapping[str, Place]) -> tuple[list[Finding], list[str]]:
    """Return verdict and alerts; they read the run folders too, so a broken one must not take the page with it."""
    try:
        findings = verdict(material, places)
    except Exception as error:  # as for a section
        findings = [Finding("worse", f"No verdict could be reached: {_words(error)}")]
    try:
        return findings, alerts(material, places)
    except Exception as error:  # as for a section
        return findings, [f"Alerts could not be collected: {_words(error)}"]


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _numbers(place: Place) -> dict[str, Any]:
    entry: dict[str, Any] = {"title": place.title, "state": state(place)}
    if isinstance(place.content, Section):
        return entry | place.content.data
    return entry | {"reason": place.content.reason}
