"""The report's section on several seeds: what the difference between two kinds of run is worth."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from analysis.exposure.plots import seed_differences
from analysis.report.content import Absent, Cell, Finding, Picture, Section, Table, number, signed, some
from analysis.report.material import ReportMaterial
from analysis.report.settings import arms_of
from analysis.seeds.compare import Pairing, SeedComparison, compare_seeds, pair_runs
from analysis.seeds.differences import FEW_PAIRS, LEVEL, PairedComparison, UnpairedComparison
from sdo.errors import InputError, counted

# What the name of a measure says of its direction; of others no better or worse is said.
_LOWER, _HIGHER = ("loss",), ("correct", "accuracy", "reward", "margin")


def seeds_section(material: ReportMaterial) -> Section | Absent:
    """Comparisons of each kind of run with the first kind, at each checkpoint."""
    arms = arms_of(material.runs)
    several = {arm: runs for arm, runs in arms.items() if len(runs) > 1}
    if len(several) < 2:
        return Absent("Two kinds of run with at least two seeds each are compared here; one seed gives no verdict.")
    (baseline, first), *others = several.items()
    tables: list[Table] = []
    pictures: list[Picture] = []
    findings: list[Finding] = []
    words: list[str] = []
    data: dict[str, Any] = {"baseline": baseline, "against": {}}
    for kind, runs in others:
        try:
            pairing = pair_runs([material.runs[name] for name in first], [material.runs[name] for name in runs])
            found = compare_seeds(pairing)
        except InputError as error:
            words.append(f"{kind} against {baseline} is not compared: {error}.")
            data["against"][kind] = {"measures": None, "reason": str(error)}
            continue
        left_out = [name for name in (*first, *runs) if any(material.runs[name] is one for one in pairing.left_out)]
        words.append(_paired(kind, baseline, pairing, left_out))
        for one in found:
            meaning = material.score_meaning(one.measure)
            measure = f"{one.measure}, {meaning}" if meaning else one.measure
            tables.append(_table(one, f"{measure}: {kind} minus {baseline}"))
            figure, _ = seed_differences(one)
            dots = "a dot a pair" if pairing.by else f"a dot a run less the mean of {baseline}"
            caption = f"{measure}: {kind} minus {baseline}, {dots}."
            pictures.append(Picture.of(figure, alt=caption, caption=caption))
            findings.append(_finding(one, kind, baseline))
            words += [f"{note}." for note in one.notes]
        data["against"][kind] = {
            "pairs": len(pairing.baseline) if pairing.by else None,
            "paired_by": pairing.by,
            "paired_by_reason": pairing.reason,
            "left_out": left_out,
            "measures": {one.measure: _entries(one) for one in found},
        }
    return Section(tuple(words), tuple(tables), tuple(pictures), more=_WORDS, findings=tuple(findings), data=data)


def _paired(kind: str, baseline: str, pairing: Pairing, left_out: list[str]) -> str:
    if pairing.by is None:
        return (
            f"{kind} against {baseline}: {len(pairing.against)} and {len(pairing.baseline)} runs, as two groups, since "
            f"seeds do not pair them: {pairing.reason}."
        )
    told = f"{kind} against {baseline}: {len(pairing.baseline)} pairs of runs, paired by {pairing.by}."
    if left_out:
        told += f" Left out, since the other kind has no run of their seed: {some(left_out)}."
    return told


def _entries(one: SeedComparison) -> list[dict[str, Any]]:
    return [{"step": step, **asdict(found)} for step, found in zip(one.steps, one.comparisons, strict=True)]


def _table(one: SeedComparison, caption: str) -> Table:
    rows = []
    for step, found in zip(one.steps, one.comparisons, strict=True):
        interval = number(None, reason=found.reason)
        if found.low is not None and found.high is not None:
            interval = Cell(f"{signed(found.low, '{:+.4g}')} to {signed(found.high, '{:+.4g}')}")
        rows.append(
            (
                Cell(str(step)),
                number(found.mean, "{:+.4g}"),
                interval,
                number(found.p, "{:.3f}", found.reason),
                number(found.cohens_d, "{:+.2f}", found.reason),
                number(found.resampling_p, "{:.3f}"),
                number(found.smallest_resampling_p, "{:.3f}"),
            )
        )
    paired = isinstance(one.comparisons[0], PairedComparison)
    tests = ("Cohen's d, paired", "p (sign flips)") if paired else ("Cohen's d, pooled", "p (labels)")
    head = ("step", "mean difference", "95 % interval (t)", "p (t)", *tests, "least p")
    return Table(head, tuple(rows), f"{caption}, {one.comparisons[0].sizes}")


def _finding(one: SeedComparison, kind: str, baseline: str) -> Finding:
    last = one.comparisons[-1]
    after = counted(one.steps[-1], "step")
    told = f"{one.measure} after {after}: {kind} minus {baseline} is {signed(last.mean, '{:+.4g}')}"
    paired = isinstance(last, PairedComparison)
    told += f" over {last.sizes}" + (" of seeds" if paired else "")
    told += f" ({'sign-flip' if paired else 'permuted labels,'} p = {last.resampling_p:.3f})."
    if last.smallest_resampling_p >= LEVEL:
        told += f" So few {'pairs' if paired else 'runs'} cannot reach {LEVEL}."
        told += f" {FEW_PAIRS} pairs can." if paired else " 4 of each kind can."
    return Finding(_tone(one.measure, last), told)


def _tone(measure: str, found: PairedComparison | UnpairedComparison) -> str:
    if found.resampling_p >= LEVEL:
        return "undetermined"
    lower = any(word in measure for word in _LOWER)
    if lower == any(word in measure for word in _HIGHER):
        return "plain"
    return "better" if (found.mean < 0) == lower else "worse"


_WORDS = (
    "Where seeds pair the runs, differences are between runs of one seed each. Paired t-test with its interval; "
    "Cohen's d is the mean difference over its standard deviation (d_z). The sign-flip test asks how often the mean "
    "would be as large if each sign could as well be the other; with n pairs its p is at least 2 / 2^n.",
    "Where seeds do not, the kinds are two groups: Welch's t-test with its interval; Cohen's d over the pooled "
    "standard deviation (d_s); and how often the difference would be as large if the runs' labels were dealt anew.",
)
