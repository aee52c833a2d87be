"""What stands first: the verdict, as far as the numbers carry one, and what a reader must know before believing it."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.report.content import Failed, Finding, Place, Section, join, some
from analysis.report.material import ReportMaterial
from analysis.report.settings import arms_of, setting_alerts
from sdo.errors import InputError

_RMSE = 0.02
_RECORDER_SHARE = 0.05
_CLIPPED = 0.5
_DISTINCT = 0.95


def verdict(material: ReportMaterial, places: Mapping[str, Place]) -> list[Finding]:
    """Return the sentences that stand first.

    Parameters
    ----------
    material
        What the report is made from.
    places
        The sections by key.
    """
    findings: list[Finding] = []
    for place in places.values():
        if isinstance(place.content, Section):
            findings += place.content.findings
    groups = arms_of(material.runs)
    if len(material.runs) > 1 and len(groups) > 1 and min(map(len, groups.values())) < 2:
        alone = join([name for name, runs in groups.items() if len(runs) == 1])
        findings.append(
            Finding(
                "undetermined",
                f"Whether the organizers differ: one run of {alone} cannot tell a difference from chance. Several "
                "seeds of each can: sdo compare.",
            )
        )
    elif len(material.runs) == 1:
        findings.append(Finding("plain", "One run: this page describes it; there is nothing to compare it with."))
    failed = [place.title for place in places.values() if isinstance(place.content, Failed)]
    if failed:
        findings.insert(0, Finding("worse", f"This page is incomplete: {join(failed)} could not be computed."))
    if not findings:
        findings.append(Finding("plain", "The numbers below describe what was given; nothing was compared."))
    return findings


def alerts(material: ReportMaterial, places: Mapping[str, Place]) -> list[str]:
    """Return what a reader must know before believing a number.

    Parameters
    ----------
    material
        What the report is made from.
    places
        The sections by key.
    """
    found = [*_contract(material), *_status(material), *setting_alerts(material.runs)]
    found += [*_gradients(material, places), *_steps(material)]
    for place in places.values():
        if isinstance(place.content, Section):
            found += place.content.alerts
    return found


def _contract(material: ReportMaterial) -> list[str]:
    """Say which run folders have lost or doubled something: their numbers are not those of the run."""
    found = []
    for name, run in material.runs.items():
        try:
            run.check()
        except InputError as error:
            found.append(f"{name}: {error}.")
    return found


def _status(material: ReportMaterial) -> list[str]:
    found = []
    for name, run in material.runs.items():
        status = run.info.get("status")
        if status != "finished":
            last = material.training(name).step
            until = f"it holds steps up to {last[-1]}" if len(last) else "it holds no complete step"
            found.append(f"{name} is {status!r}, not finished: {until}.")
    return found


def _gradients(material: ReportMaterial, places: Mapping[str, Place]) -> list[str]:
    content = places["coherence"].content if "coherence" in places else None
    if not isinstance(content, Section):
        return []
    found = []
    for signal, runs in content.data["signals"].items():
        for name, entry in runs.items():
            undefined = entry["step_coherence"]["undefined"]
            if undefined:
                steps = entry["step_coherence"]["steps"]
                found.append(f"{name}: {undefined} of {steps} gradients of {signal} have no direction: left out.")
            rmse = (entry["sketch_check"] or {}).get("rmse")
            if rmse is not None and rmse > _RMSE:
                found.append(f"{name}: sketched cosines of {signal} are off by {rmse:.3f} (rmse).")
    return found


def _steps(material: ReportMaterial) -> list[str]:
    slow: dict[str, list[str]] = {}
    clipping: dict[str, list[str]] = {}
    distinct: dict[int, list[str]] = {}
    for name, run in material.runs.items():
        share = material.overview(name)["recorder_share"]
        if share is not None and share > _RECORDER_SHARE:
            slow.setdefault(f"the recorder took {share:.0%} of the time", []).append(name)
        clipped = [value for value in run.steps().column("clipped").to_pylist() if value is not None]
        if clipped and sum(clipped) / len(clipped) > _CLIPPED:
            clipping.setdefault(f"{sum(clipped)} of {len(clipped)} updates were clipped", []).append(name)
        seen = material.training(name).distinct
        if len(seen):
            distinct.setdefault(int(seen[-1]), []).append(name)
    found = [f"{some(names)}: {words}." for one in (slow, clipping) for words, names in one.items()]
    if distinct and min(distinct) < _DISTINCT * max(distinct):
        named = join([f"{count} in {some(names)}" for count, names in distinct.items()])
        found.append(f"The runs saw different numbers of different samples: {named}.")
    return found
