"""What run.json says about a run: organizer, signals, model, data, seeds and versions."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

from diagnostics.signals.base import Capture
from sdo.trainers.adapter import TrainerAdapter
from sdo.trainers.checkpoints import dataset_digest
from sdo.trainers.session import TrainingSession

_PACKAGES = (
    "sdo-toolkit",
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "datasets",
    "numpy",
    "faiss-cpu",
    "pyarrow",
)


def describe_run(training: TrainerAdapter, session: TrainingSession, captures: Mapping[str, Capture]) -> dict[str, Any]:
    """Collect the provenance of a run.

    Parameters
    ----------
    training
        What is about to begin.
    session
        Where sample ids come from, and the plan if there is one.
    captures
        Of the signals, by name.

    Returns
    -------
    dict
        Plain values, ready for JSON.
    """
    plan = session.plan
    embeddings = None if plan is None else plan.organizer.embeddings
    selection = None if session.schedule is None else session.schedule.selection
    model, dataset, settings = training.model, training.dataset, training.settings
    parameters = list(model.parameters())
    extra = dict(settings.extra)
    data_seed = extra.pop("data_seed", None)
    return {
        "first_step": training.first_step,
        "organizer": None if plan is None else {**plan.describe(), "fingerprint": plan.fingerprint},
        "selector": None if selection is None else selection.describe(),
        "embeddings": None
        if embeddings is None
        else {
            "path": None if embeddings.path is None else os.path.abspath(embeddings.path),
            "fingerprint": embeddings.fingerprint,
            "rows": len(embeddings),
            "dim": embeddings.dim,
            "ids": None if embeddings.ids is None else "strings" if embeddings.ids.dtype.kind == "U" else "integers",
        },
        "signals": {name: capture.describe() for name, capture in captures.items()},
        "model": {
            "class": type(model).__name__,
            "name": getattr(model, "name_or_path", None) or None,
            "parameters": sum(p.numel() for p in parameters),
            "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "dtype": str(parameters[0].dtype).removeprefix("torch."),
        },
        "dataset": {
            "rows": None if dataset is None else len(dataset),
            "fingerprint": None if dataset is None else dataset_digest(dataset, session.ids.ids_of(len(dataset))),
            "sample_id": session.ids.source,
            # Of the rows that were embedded: left out on purpose, or dropped by TRL.
            "missing": None if plan is None else plan.organizer.n_samples - len(plan.ids),
        },
        "evaluations": _describe_evaluations(session),
        "meaning": training.kind.describe(),
        "trainer": {
            "processes": settings.processes,
            "steps_per_batch": session.steps_per_batch,
            "train_batch_size": settings.micro_batch,
            "gradient_accumulation_steps": settings.accumulation,
            "max_steps": settings.max_steps,
            "learning_rate": settings.learning_rate,
            "max_grad_norm": _finite(settings.max_grad_norm),
            "bf16": settings.precision == "bf16",
            "fp16": settings.precision == "fp16",
            **extra,
        },
        "seeds": {"seed": settings.seed, "data_seed": data_seed},
        "versions": versions(),
    }


def _describe_evaluations(session: TrainingSession) -> dict[str, str]:
    """What ``sample_id`` is in evaluations/."""
    if session.follower is None:
        return {"sample_id": "position in the evaluation dataset"}
    return {"sample_id": "of the training prompt; rewards have a row for each completion, so several at one step"}


def _finite(value: float | None) -> float | str | None:
    """JSON has no infinity; "no limit" is written as a word."""
    return value if value is None or math.isfinite(value) else str(value)


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and the packages that a run depends on."""
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
