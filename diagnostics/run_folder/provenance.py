"""What run.json says about a run: organizer, signals, model, data, seeds and versions."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from diagnostics.signals.base import Capture
from sdo.trainers.checkpoints import dataset_digest
from sdo.trainers.ids import IdChannel
from sdo.trainers.trainer_types import TrainerKind
from sdo.trainers.versions import checkpointing_name

_GENERATION = (
    "num_generations",
    "steps_per_generation",
    "num_iterations",
    "generation_batch_size",
    "max_completion_length",
    "temperature",
    "beta",
    "loss_type",
    "scale_rewards",
)
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


def describe_run(
    args: Any,
    kind: TrainerKind,
    state: Any,
    model: nn.Module,
    loader: Any,
    channel: IdChannel,
    captures: Mapping[str, Capture],
) -> dict[str, Any]:
    """Collect the provenance of a run.

    Parameters
    ----------
    args, state
        The trainer's arguments and state.
    kind
        Its kind.
    model
        The model in training.
    loader
        The training data loader.
    channel
        Where sample ids come from, and the plan if there is one.
    captures
        Of the signals, by name.

    Returns
    -------
    dict
        Plain values, ready for JSON.
    """
    plan = channel.plan
    embeddings = None if plan is None else plan.organizer.embeddings
    parameters = list(model.parameters())
    dataset = getattr(loader.dataset, "inner", loader.dataset)
    return {
        "first_step": state.global_step,
        "organizer": None if plan is None else {**plan.describe(), "fingerprint": plan.fingerprint},
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
            "rows": len(dataset),
            "fingerprint": dataset_digest(dataset, channel.ids_of(len(dataset))),
            "sample_id": channel.source,
            # Of the rows that were embedded: left out on purpose, or dropped by TRL.
            "missing": None if plan is None else plan.organizer.n_samples - len(plan.ids),
        },
        "evaluations": _describe_evaluations(channel),
        "meaning": kind.describe(),
        "trainer": {
            "processes": args.world_size,
            "steps_per_batch": channel.steps_per_batch,
            **{name: getattr(args, name) for name in _GENERATION if kind.generates and hasattr(args, name)},
            "train_batch_size": args.train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "max_steps": state.max_steps,
            "learning_rate": args.learning_rate,
            "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            "max_grad_norm": _finite(args.max_grad_norm),
            "bf16": args.bf16,
            "fp16": args.fp16,
            "gradient_checkpointing": bool(getattr(args, checkpointing_name(args))),
        },
        "seeds": {"seed": args.seed, "data_seed": args.data_seed},
        "versions": versions(),
    }


def _describe_evaluations(channel: IdChannel) -> dict[str, str]:
    """What ``sample_id`` is in evaluations/."""
    if channel.follower is None:
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
