"""A run folder's figures: what had been seen at each checkpoint and how it scored, coherence, locality, exposure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis import Run, cluster_balance, run_coherence, run_exposure, run_locality
from analysis.run_folder.curves import training
from analysis.run_folder.overview import mean_within_batch_cosine, recorder_share
from analysis.run_folder.recorded import recorded_batches, sample_scores
from experiments.correctness import NAME as CORRECT
from sdo.errors import InputError

REDRAWS = 199
REWARD = "reward"
_LOGGED = ("eval_loss", "eval_rewards/margins", "eval_rewards/accuracies", "eval_reward")
_RESAMPLES = 499


def measure(
    folder: Path, *, logged: Sequence[Mapping[str, Any]] = (), groups: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the figures of one run.

    Parameters
    ----------
    folder
        The run folder.
    logged
        The trainer's own log of its evaluations.
    groups
        The family of each held-out row, where families are known: then balance is measured over them.
    """
    run = Run.open(folder)
    progress = training(run)
    _, _, epochs = recorded_batches(run)
    times = run_exposure(run)
    cosine = mean_within_batch_cosine(run)
    return {
        "steps": len(progress.step),
        "organizer_epochs": int(epochs[-1]) + 1 if len(epochs) and epochs[-1] >= 0 else None,
        "checkpoints": _checkpoints(run, logged, groups),
        "within_batch_cosine": cosine.value,
        "within_batch_cosine_reason": cosine.reason,
        "signals": {signal: _signal(run, signal) for signal in run.info["signals"]},
        "locality": _locality(run),
        "exposure": {
            "coverage": float(times.coverage[-1]),
            "gini": times.gini().value,
            "mean": float(times.times.mean()),
            "most": int(times.times.max()),
            "pools": {str(epoch): size for epoch, size in times.pools.items()},
        },
        "updates": updates(run),
        "recorder_share": recorder_share(run).value,
    }


def updates(run: Run) -> dict[str, float | None]:
    """Return which share of the updates was clipped, and the mean norm of the gradient before clipping."""
    columns = {name: run.steps().column(name).to_pylist() for name in ("clipped", "grad_norm")}
    known = {name: [float(value) for value in column if value is not None] for name, column in columns.items()}
    return {name: float(np.mean(values)) if values else None for name, values in known.items()}


def _checkpoints(run: Run, logged: Sequence[Mapping[str, Any]], groups: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return, by updates done, what had been seen and the mean score of each measure."""
    progress = training(run)
    scores = sample_scores(run)
    trained = scores.get(REWARD, {})  # of completions that were trained on, at every step
    held_out = {name: steps for name, steps in scores.items() if name.startswith("eval_")}
    _, _, epochs = recorded_batches(run)
    at = {step for steps in held_out.values() for step in steps} | {int(entry["step"]) for entry in logged}
    found: list[dict[str, Any]] = []
    for step in sorted(at):
        done = int(np.searchsorted(progress.step, step)) - 1  # the last step before this evaluation
        seen = (progress.distinct, progress.samples, progress.tokens)
        distinct, samples, tokens = (int(values[done]) if done >= 0 else 0 for values in seen)
        entry: dict[str, Any] = {"step": step, "distinct": distinct, "samples": samples, "tokens": tokens}
        entry["organizer_epoch"] = int(epochs[done]) if done >= 0 else 0
        known = {name: steps[step] for name, steps in held_out.items() if steps.get(step)}
        means = {name: {"mean": float(np.mean(list(one.values()))), "n": len(one)} for name, one in known.items()}
        for line in logged:
            if int(line["step"]) == step:
                means = {name: {"mean": line[name]} for name in _LOGGED if name in line} | means
        entry["scores"] = dict(sorted(means.items()))
        before = found[-1]["step"] if found else 0
        rewards = [value for s in range(before, step) for value in trained.get(s, {}).values()]
        if rewards:
            entry["training_reward"] = {"mean": float(np.mean(rewards)), "n": len(rewards)}
        if groups is not None and CORRECT in known:
            entry["balance"] = _balance(known[CORRECT], groups)
        found.append(entry)
    return found


def _balance(correct: dict[int, float], groups: Sequence[str]) -> dict[str, Any]:
    """Return how many answers of each family are right, and the balance metrics over families."""
    names = sorted(set(groups))
    label = np.array([names.index(groups[sample]) for sample in correct])
    value = np.array(list(correct.values()))
    balance = cluster_balance(value, label, resamples=_RESAMPLES)
    return {
        "right": {name: int(value[label == at].sum()) for at, name in enumerate(names)},
        "n": {name: int((label == at).sum()) for at, name in enumerate(names)},
        "metrics": {name: {"value": one.value, "latent": one.latent} for name, one in balance.metrics.items()},
        "homogeneity_p": balance.homogeneity.p,
    }


def _signal(run: Run, signal: str) -> dict[str, Any]:
    """Return step and batch coherence of one signal."""
    found = run_coherence(run, [signal])[signal]
    summary, coherence = found.between_steps.summary, found.within_steps.series
    names = ("mean", "lag_one", "sharing", "disjoint")
    between = found.within_steps.to_dict()
    kept: dict[str, Any] = {"steps": summary.defined}
    kept["step_coherence"] = {name: getattr(summary, name).value for name in names}
    kept["batch_coherence"] = between.get("mean")
    kept["batch_coherence_steps"] = between["steps"]
    thirds = np.array_split(np.flatnonzero(coherence.defined), 3)
    kept["batch_coherence_by_third"] = [float(coherence.value[part].mean()) if len(part) else None for part in thirds]
    return kept


def _locality(run: Run) -> dict[str, Any]:
    """Return the correlations of embeddings with gradients, by signal."""
    try:
        found = run_locality(run, redraws=REDRAWS)
    except InputError as error:
        return {"reason": str(error)}
    result = {}
    for signal, one in found.signals.items():
        entry: dict[str, Any] = {}
        for name in ("series", "matrix"):
            test = getattr(one, name)
            entry[name] = None
            if test is not None:
                entry[name] = {"value": test.value, "p": test.p, "steps": test.steps, "reason": test.reason}
        entry["slope"] = None if one.slope is None else one.slope.value
        entry |= {f"{name}_reason": reason for name, reason in one.reasons.items()}
        result[signal] = entry
    return result
