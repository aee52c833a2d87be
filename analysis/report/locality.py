"""The report's sections on locality and exposure."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from analysis.exposure.ledger import exposure_entry, run_exposure
from analysis.exposure.plots import coverage_curves, exposure_histogram
from analysis.locality.plots import signal_clouds
from analysis.locality.redraw_tests import Association, worker_count
from analysis.locality.sample_pairs import Slope
from analysis.locality.study import RunLocality, locality_entry, run_locality
from analysis.report.content import DASH, Absent, Cell, Picture, Section, Table, number, some
from analysis.report.material import ReportMaterial
from analysis.report.settings import not_plotted, plotted_runs
from sdo.errors import InputError

_CLOUDS = 4  # pictures, a run and signal each; more would not fit a page that can be sent
_POOLS = 6  # epochs whose pool size is shown


def locality_section(material: ReportMaterial) -> Section | Absent:
    """Whether batches, and steps, that are closer in embedding have gradients that agree more."""
    if not material.runs:
        return Absent("No run folder was given.")
    found: dict[str, RunLocality] = {}
    missing: dict[str, str] = {}
    for name, run in material.runs.items():
        signals = [signal for signal in run.signals if run.holds(signal)]
        if not signals:
            missing[name] = "it holds no gradients"
            continue
        try:
            with warnings.catch_warnings():
                # The plan said it when it was made; here it would be said with each re-draw.
                warnings.filterwarnings("ignore", message="k = ")
                found[name] = run_locality(
                    run,
                    embeddings=material.embeddings,
                    signals=signals,
                    redraws=material.redraws,
                    workers=worker_count(),
                )
        except Exception as error:  # one run that cannot be tested leaves the others standing
            missing[name] = str(error) or type(error).__name__
    if not found:
        return Absent("; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    rows = [row for name, one in found.items() for row in _rows(name, one)]
    head = ("run", "signal", "steps: r", "p", "pairs of steps: r", "p", "pairs of samples: slope", "95 % interval")
    table = Table(head, tuple(rows), "Embedding cosine against gradient cosine", texts=2)
    untested: dict[str, list[str]] = {}
    for name, one in found.items():
        if one.reason is not None:
            untested.setdefault(one.reason, []).append(name)
    words = [_sentence(some(names), found[names[0]]) for names in untested.values()]
    words += [_sentence(name, one) for name, one in found.items() if one.reason is None]
    words += [f"{name} is left out: {reason}." for name, reason in missing.items()]
    data: dict[str, Any] = {name: locality_entry(one) for name, one in found.items()}
    data |= {name: {"signals": None, "reason": reason} for name, reason in missing.items()}
    return Section(tuple(words), (table,), tuple(_clouds(found, material)), more=_WORDS, data={"runs": data})


def _clouds(found: dict[str, RunLocality], material: ReportMaterial) -> list[Picture]:
    having = [name for name, one in found.items() if any(of.clouds for of in one.signals.values())]
    signals = {signal for name in having for signal, of in found[name].signals.items() if of.clouds}
    plotted = plotted_runs(having, material.runs, max(1, _CLOUDS // max(1, len(signals))))
    pictures = []
    for name in plotted:
        for signal, of in found[name].signals.items():
            if of.clouds:
                figure, _ = signal_clouds(of, title=f"{signal}, {name}")
                alt = f"Gradient cosine over embedding cosine of steps and pairs of samples: {signal}, {name}."
                pictures.append(Picture.of(figure, alt=alt, caption=f"Locality of {signal}, {name}.", dpi=75))
    if pictures:
        told = not_plotted(plotted, having, "sdo locality RUN --out DIR")
        pictures[-1] = replace(pictures[-1], caption=pictures[-1].caption + told)
    return pictures


def exposure_section(material: ReportMaterial) -> Section | Absent:
    """How often samples were seen."""
    if not material.runs:
        return Absent("No run folder was given.")
    found, missing = {}, []
    for name, run in material.runs.items():
        try:
            found[name] = run_exposure(run)
        except InputError as error:
            missing.append(str(error))
    if not found:
        return Absent("; ".join(missing))
    rows: list[tuple[Cell, ...]] = []
    data: dict[str, Any] = {}
    for name, one in found.items():
        entry = data[name] = exposure_entry(one)
        pools = [str(pool["size"]) for pool in entry["pools"]]
        rows.append(
            (
                Cell(name),
                number(entry["samples"], "{:d}"),
                number(entry["coverage"], "{:.1%}"),
                number(entry["mean"], "{:.2f}"),
                number(entry["max"], "{:d}"),
                number(entry["gini"], "{:.3f}", entry.get("gini_reason")),
                Cell(", ".join([*pools[:_POOLS], *(["…"] if len(pools) > _POOLS else [])]) or DASH),
            )
        )
    head = ("run", "samples", "seen", "mean", "max", "Gini", "pool by organizer epoch")
    tables = (Table(head, tuple(rows), "How often samples were trained on"),)
    histogram, _ = exposure_histogram(found)
    coverage, _ = coverage_curves(found)
    pictures = (
        Picture.of(histogram, alt="Samples by how often they were seen, a color a run.", caption="Times seen."),
        Picture.of(
            coverage, alt="Share of samples seen over the steps, a line a run.", caption="Coverage over the steps."
        ),
    )
    words = tuple(f"{name}: {note}." for name, one in found.items() for note in one.notes)
    return Section(words, tables, pictures, data={"runs": data})


def _rows(name: str, one: RunLocality) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for signal, of in one.signals.items():
        slope = of.slope
        rows.append(
            (
                Cell(name),
                Cell(signal),
                *_association(of.series, of.reasons.get("series")),
                *_association(of.matrix, of.reasons.get("matrix")),
                number(slope.value if slope else None, "{:+.3f}", slope.reason if slope else of.reasons.get("pairs")),
                _slope_interval(slope, of.reasons.get("pairs")),
            )
        )
    return rows


def _association(found: Association | None, missing: str | None) -> tuple[Cell, Cell]:
    if found is None:
        return number(None, reason=missing), number(None, reason=missing)
    return number(found.value, "{:+.3f}", found.reason), number(found.p, "{:.3f}", found.reason)


def _slope_interval(slope: Slope | None, missing: str | None) -> Cell:
    if slope is None or slope.low is None or slope.high is None:
        return number(None, reason=missing if slope is None else slope.reason)
    return Cell(f"{slope.low:+.3f} to {slope.high:+.3f}".replace("-", "−"))


def _sentence(name: str, one: RunLocality) -> str:
    if one.reason is not None:
        return f"{name}: no p-values: {one.reason}."
    told = []
    for signal, of in one.signals.items():
        for words, found in (("of batches", of.series), ("between steps", of.matrix)):
            if found is not None and found.p is not None:
                way = "negatively" if (found.value or 0.0) < 0 else "positively"
                linked = f"{way} associated" if found.p < 0.05 else "not shown to be associated"
                told.append(f"{signal} {words} is {linked} with embeddings ({_sign(found.value)}p = {found.p:.3f})")
    several = f" None of these {len(told)} p-values is adjusted for the others." if len(told) > 1 else ""
    return f"{name}: {'; '.join(told) or 'too few steps for a test'}. A p speaks of this run alone.{several}"


def _sign(value: float | None) -> str:
    return "" if value is None else f"r = {value:+.2f}, ".replace("-", "−")


_WORDS = (
    "Steps: correlation over the steps of the within-batch cosine (of the embeddings) with batch coherence, drift and "
    "exposure removed. Pairs of steps: correlation of the cosine of batch centroids with step coherence, over pairs of "
    "steps without a common sample. Both are compared with re-draws of the plan from other seeds, widened where the "
    "recorded series depends on itself more than the re-draws do; the smallest p is 1/(re-draws + 1).",
    "Pairs of samples: change of the gradients' cosine per unit of the embeddings' cosine between samples of one step, "
    "its interval jackknifed over samples, since pairs share them.",
)
