"""What runs were made with, side by side: arms, and settings that should be alike and are not."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from analysis.report.content import join, some
from analysis.run_folder.run import Run

_UNKNOWN = "unknown"


def recorded_digest(run: Run) -> str | None:
    """Return the SHA-256 of the content of a run's dataset; None where run.json has none.

    Earlier versions wrote the fingerprint of the datasets library there, 16 digits that differ between two processes
    with the same data: of such a run nothing can be said.
    """
    noted = (run.info.get("dataset") or {}).get("fingerprint")
    return noted if isinstance(noted, str) and re.fullmatch("[0-9a-f]{64}", noted) else None


def arms_of(runs: Mapping[str, Run]) -> dict[str, list[str]]:
    """Group runs that differ in nothing but their seed; an arm is named by organizer, and by more if needed.

    What has to be alike: the organizer's options, batch size, embeddings, model, dataset and the trainer's arguments.
    """
    groups: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for name, run in runs.items():
        organizer = run.info.get("organizer") or {}
        options = {key: value for key, value in (organizer.get("options") or {}).items() if key != "seed"}
        model, dataset = run.info.get("model") or {}, run.info.get("dataset") or {}
        alike = {
            **options,
            "batch_size": organizer.get("batch_size"),
            "embeddings": organizer.get("embeddings"),
            "model": [model.get("class"), model.get("parameters"), model.get("trainable_parameters")],
            "rows": dataset.get("rows"),
            "trainer": run.info.get("trainer"),
        }
        key = json.dumps(alike, sort_keys=True, default=str)
        groups[str(organizer.get("name", "no organizer"))].setdefault(key, []).append(name)
    arms = {}
    for organizer_name, by_setting in groups.items():
        settings = [part for names in by_setting.values() for part in _by_dataset(names, runs)]
        for number_of_setting, names in enumerate(settings, start=1):
            several = f" (setting {number_of_setting}: {names[0]} …)" if len(settings) > 1 else ""
            arms[f"{organizer_name}{several}"] = names
    return arms


def _by_dataset(names: list[str], runs: Mapping[str, Run]) -> list[list[str]]:
    """Split runs by their dataset; those whose dataset is not known stay with the others where these have one alone."""
    digests = {name: recorded_digest(runs[name]) for name in names}
    known = set(digests.values()) - {None}
    if len(known) < 2:
        return [names]
    return [[name for name in names if digests[name] == digest] for digest in dict.fromkeys(digests.values())]


def plotted_runs(names: Sequence[str], runs: Mapping[str, Run], most: int) -> list[str]:
    """Return at most so many names, of each kind of run in turn, in their order: a page holds few large pictures."""
    arms = arms_of({name: runs[name] for name in names}).values()
    turns = [name for turn in zip_longest(*arms) for name in turn if name is not None]
    chosen = set(turns[:most])
    return [name for name in names if name in chosen]


def not_plotted(plotted: Sequence[str], names: Sequence[str], fix: str) -> str:
    """Return a sentence on runs without a picture, to follow a caption; empty where all have one."""
    if len(plotted) == len(names):
        return ""
    return f" Drawn: {len(plotted)} of {len(names)} runs; the others by {fix}."


def setting_alerts(runs: Mapping[str, Run]) -> list[str]:
    """Name what differs between runs beside the organizer, and what cannot be compared."""
    if len(runs) < 2:
        return []
    facts = {name: _facts(run) for name, run in runs.items()}
    found = []
    for key in dict.fromkeys(key for entry in facts.values() for key in entry):
        by_value: dict[str, list[str]] = {}
        for name, entry in facts.items():
            by_value.setdefault(str(entry.get(key)), []).append(name)
        if key == "dataset":
            by_value.pop(_UNKNOWN, None)
        if len(by_value) > 1:
            named = join([f"{value} in {some(names)}" for value, names in by_value.items()])
            found.append(f"The runs differ in more than their batches: {key} is {named}.")
    unknown = [name for name, run in runs.items() if run.info.get("dataset") and recorded_digest(run) is None]
    if unknown:
        none = "no run.json has a" if len(unknown) == len(runs) else f"run.json of {some(unknown)} has no"
        found.append(
            f"Whether the runs trained on the same data is not known: {none} SHA-256 of the dataset's content, which "
            "earlier versions did not write."
        )
    return found


def _facts(run: Run) -> dict[str, Any]:
    model, dataset, trainer, organizer = (
        run.info.get(key) or {} for key in ("model", "dataset", "trainer", "organizer")
    )
    return {
        **{f"trainer {key}": value for key, value in trainer.items()},
        "model class": model.get("class"),
        "parameters": model.get("parameters"),
        "trained parameters": model.get("trainable_parameters"),
        "dataset rows": dataset.get("rows"),
        "dataset": (recorded_digest(run) or _UNKNOWN)[:16],
        "batch size": organizer.get("batch_size"),
    }
