"""What a run trained on and scored, by sample: prompts stand for their completions where the trainer generates."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.run_folder.run import Run
from sdo.checks import whole_number

REWARD = "reward"  # and "reward/<function>" where there are several: of completions, at every step
# How the recorder ends the name of the held-out score of each trainer.
_SCORES = {"Trainer": "loss", "SFTTrainer": "loss", "DPOTrainer": "logp_margin", "RewardTrainer": "reward_margin"}

Recorded = tuple[NDArray[np.int64], list[NDArray[np.int64]], NDArray[np.int64]]


def steps_per_batch(run: Run) -> int:
    """Return how many optimizer steps train from one batch of prompts: 1, or of GRPO and RLOO what run.json says.

    Raises
    ------
    InputError
        run.json holds something else than a whole number from 1.
    """
    trainer = _trainer(run)
    where = f"{run.path / 'run.json'}: trainer.steps_per_batch"
    noted = whole_number(where, trainer.get("steps_per_batch", 1), 1)
    if noted == 1 and not run.info.get("organizer"):
        # The recorder counts batches of a plan; without one the arguments say how long the trainer's own serve.
        names = ("steps_per_generation", "num_iterations", "gradient_accumulation_steps")
        values: list[Any] = [trainer.get(name) for name in names]
        if generates(run) and all(isinstance(value, int) and value > 0 for value in values):
            steps, rest = divmod(values[0] * values[1], values[2])
            return steps if steps and not rest else 1
    return noted


def recorded_batches(run: Run) -> Recorded:
    """Return the recorded steps (S,), the sample ids of each, and the organizer epoch (S,), -1 where there is none.

    A trainer that generates records the prompt of each completion; here each prompt of a step stands once, ascending.
    """
    table = run.steps()
    ids = [np.array(row or [], dtype=np.int64) for row in table.column("sample_ids").to_pylist()]
    if generates(run):
        ids = [np.unique(row) for row in ids]
    epoch = [-1 if value is None else value for value in table.column("organizer_epoch").to_pylist()]
    return (
        np.array(table.column("step").to_pylist(), dtype=np.int64),
        ids,
        np.array(epoch, dtype=np.int64),
    )


def flat_batches(batches: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ids of T batches one after the other, (S,), and where each begins, (T + 1,)."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *batches]), np.cumsum([0, *map(len, batches)])


def exposed_batches(run: Run) -> Recorded:
    """Return `recorded_batches` with each prompt of a generation batch only at the first of its steps that has it.

    So a prompt is exposed once a generation batch, as the ledger in exposure/ counts it.
    """
    steps, batches, epochs = recorded_batches(run)
    each = steps_per_batch(run)
    if each == 1:
        return steps, batches, epochs
    exposed: list[NDArray[np.int64]] = []
    current, held = -1, np.zeros(0, dtype=np.int64)
    for batch, ids in zip((steps // each).tolist(), batches, strict=True):
        if batch != current:
            current, held = batch, np.zeros(0, dtype=np.int64)
        exposed.append(np.setdiff1d(ids, held))
        held = np.union1d(held, ids)
    return steps, exposed, epochs


def sample_scores(run: Run) -> dict[str, dict[int, dict[int, float]]]:
    """Return a run's evaluations: measure -> step -> sample id -> score.

    A sample that was scored several times at a step, as a prompt is by the rewards of its completions, has their mean.
    Scores that are null or not finite are left out; a step without any keeps its place, empty.
    """
    table = run.evaluations()
    found: dict[str, dict[int, dict[int, list[float]]]] = {}
    columns = (table.column(name).to_pylist() for name in ("name", "step", "sample_id", "score"))
    for name, step, sample, score in zip(*columns, strict=True):
        scores = found.setdefault(name, {}).setdefault(step, {})
        if score is not None and math.isfinite(score):
            scores.setdefault(sample, []).append(score)
    return {
        name: {
            step: {sample: math.fsum(values) / len(values) for sample, values in scores.items()}
            for step, scores in steps.items()
        }
        for name, steps in found.items()
    }


def evaluation_scores(run: Run) -> dict[str, dict[int, dict[int, float]]]:
    """Return `sample_scores` without the rewards of completions that were trained on."""
    return {name: steps for name, steps in sample_scores(run).items() if not _is_reward(run, name)}


def training_rewards(run: Run) -> dict[str, dict[int, dict[int, float]]]:
    """Return, of a trainer that generates, the rewards of the completions of each step: name -> step -> prompt -> mean.

    Each step has its own prompts, so that two steps, or two runs, compare as means over many of them alone.
    """
    return {name: steps for name, steps in sample_scores(run).items() if _is_reward(run, name)}


def _is_reward(run: Run, name: str) -> bool:
    return generates(run) and (name == REWARD or name.startswith(f"{REWARD}/"))


def score_meaning(run: Run, measure: str) -> str | None:
    """Return what an evaluation's scores are, and in which unit, in the words of run.json.

    None where it does not say, and for scores that are not the recorder's own.

    Examples
    --------
    >>> score_meaning(Run.open("runs/sdo"), "eval_loss")  # doctest: +SKIP
    'mean negative log-likelihood per token, nats'
    """
    meaning = run.info.get("meaning")
    if not isinstance(meaning, dict):
        return None
    words, own = meaning.get("score"), _SCORES.get(str(meaning.get("trainer")))
    # eval_loss, or with several evaluation datasets eval_NAME_loss.
    known = own is not None and re.fullmatch(rf"eval_(.+_)?{own}", measure) is not None
    return words if known and isinstance(words, str) and words else None


def generates(run: Run) -> bool:
    """Whether the run trained on completions of its prompts, as GRPO and RLOO do."""
    trainer = _trainer(run)
    return trainer.get("num_generations") is not None or trainer.get("steps_per_batch") not in (None, 1)


def _trainer(run: Run) -> dict[str, Any]:
    trainer = run.info.get("trainer")
    return trainer if isinstance(trainer, dict) else {}
