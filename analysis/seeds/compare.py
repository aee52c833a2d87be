"""Several seeds: two kinds of run, compared checkpoint by checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.run_folder.recorded import evaluation_scores, generates, training_rewards
from analysis.run_folder.run import Run
from analysis.seeds.differences import PairedComparison, UnpairedComparison, compare_paired, compare_unpaired
from sdo.errors import InputError

_WINDOWS = 5  # of rewards in training


@dataclass(frozen=True)
class Pairing:
    """Which run is compared with which.

    Parameters
    ----------
    baseline, against
        Runs: the i-th of each a pair, or two groups that nothing pairs.
    by
        ``"seed"``, or None where no seeds pair the runs.
    left_out
        Runs of either side whose seed the other side does not have.
    reason
        Why nothing pairs them.
    """

    baseline: tuple[Run, ...]
    against: tuple[Run, ...]
    by: str | None
    left_out: tuple[Run, ...] = ()
    reason: str | None = None


def pair_runs(baseline: Sequence[Run], against: Sequence[Run]) -> Pairing:
    """Pair runs by the seed in run.json where each side has a seed once, and two seeds or more are common.

    Runs whose seed the other side does not have are then left out. Otherwise all runs of the two sides are compared as
    groups: an order in which they were named pairs nothing.

    Raises
    ------
    InputError
        Fewer than two runs on a side.
    """
    if min(len(baseline), len(against)) < 2:
        raise InputError(
            f"{len(baseline)} and {len(against)} runs are to be compared; expected at least two of each kind, "
            "trained with different seeds: one seed gives no verdict"
        )
    first, second = ([(run.info.get("seeds") or {}).get("seed") for run in side] for side in (baseline, against))
    common = [seed for seed in first if seed in second]
    if None in (*first, *second):
        reason = "a run does not say its seed"
    elif len(set(first)) < len(first) or len(set(second)) < len(second):
        reason = "a side has a seed twice"
    elif len(common) < 2:
        reason = f"the sides have {'one seed' if common else 'no seed'} in common"
    else:
        common = sorted(common, key=str)  # random flips must not depend on the order of the runs
        one, other = (
            tuple(side[seeds.index(seed)] for seed in common) for side, seeds in ((baseline, first), (against, second))
        )
        every = zip([*baseline, *against], [*first, *second], strict=True)
        return Pairing(one, other, "seed", tuple(run for run, seed in every if seed not in common))
    return Pairing(tuple(baseline), tuple(against), None, reason=reason)


Scores = Mapping[str, Mapping[int, Mapping[int, float]]]  # measure -> step -> sample id -> score


def _without_empty(scores: Scores) -> Scores:
    every = {name: {step: one for step, one in steps.items() if one} for name, steps in scores.items()}
    return {name: steps for name, steps in every.items() if steps}


@dataclass(frozen=True, eq=False)
class SeedComparison:
    """Comparisons of one measure by step.

    Parameters
    ----------
    measure
        Name of the evaluation, or of a reward in training.
    steps
        Number of updates the models had had; of a reward in training, at the end of each window of steps.
    baseline, against
        (steps, n) float64, mean scores of the runs, pair by pair where they are paired.
    comparisons
        One a step.
    notes
        What a reader should know: checkpoints that not all runs have, different samples.
    """

    measure: str
    steps: tuple[int, ...]
    baseline: NDArray[np.float64]
    against: NDArray[np.float64]
    comparisons: tuple[PairedComparison | UnpairedComparison, ...]
    notes: tuple[str, ...]


def compare_seeds(pairing: Pairing) -> list[SeedComparison]:
    """Compare the evaluations of two sides at each checkpoint that all of them have, then their rewards in training.

    Evaluations are compared on the samples that were scored in all runs. Rewards are those of the completions that
    each run trained on, other prompts in each: they are compared as means over windows of steps.

    Raises
    ------
    InputError
        The runs have no measure and step in common.
    """
    every = [*pairing.baseline, *pairing.against]
    held_out = [_without_empty(evaluation_scores(run)) for run in every]
    rewards = [_without_empty(training_rewards(run)) for run in every]
    results = [_compare_evaluations(measure, held_out, pairing) for measure in _common(held_out)]
    results += [_compare_rewards(measure, rewards, pairing) for measure in _common(rewards)]
    found = [one for one in results if one is not None]
    if not found:
        one = pairing.baseline[0]
        held = ", ".join([*held_out[0], *rewards[0]]) or "none"
        train = "" if generates(one) else "train with an eval_dataset, or "
        raise InputError(
            f"the runs have no evaluation in common, by name and step ({one.path}: {held}, …); fix: {train}log scores "
            "by recorder.log_evaluation"
        )
    return found


def _common(runs: Sequence[Scores]) -> list[str]:
    return sorted(set.intersection(*(set(one) for one in runs)))


def _compare_evaluations(measure: str, runs: Sequence[Scores], pairing: Pairing) -> SeedComparison | None:
    """Compare the two sides at the steps that all have, on the samples that all have scored."""
    notes = []
    common = sorted(set.intersection(*(set(one[measure]) for one in runs)))
    dropped = sorted(set.union(*(set(one[measure]) for one in runs)) - set(common))
    if dropped:
        notes.append(f"{measure}: steps {', '.join(map(str, dropped))} are not in all runs and are left out")
    steps, values = [], []
    for step in common:
        each = [one[measure][step] for one in runs]
        samples = set.intersection(*map(set, each))
        every = set.union(*map(set, each))
        if len(samples) < len(every):
            notes.append(
                f"{measure}, step {step}: {len(samples)} of {len(every)} samples were scored in all runs; only "
                "these are compared"
            )
        if samples:
            steps.append(step)
            order = sorted(samples)
            values.append([float(np.mean([scores[sample] for sample in order])) for scores in each])
    return _compare_table(measure, steps, values, pairing, notes)


def _compare_rewards(measure: str, runs: Sequence[Scores], pairing: Pairing) -> SeedComparison | None:
    """Compare the two sides by their mean rewards over windows of the steps that all have."""
    common = sorted(set.intersection(*(set(one[measure]) for one in runs)))
    parts = [part for part in np.array_split(np.array(common, dtype=np.int64), _WINDOWS) if len(part)]
    steps, values = [], []
    for part in parts:
        steps.append(int(part[-1]) + 1)  # updates done when the window ends
        values.append([float(np.mean([np.mean(list(one[measure][step].values())) for step in part])) for one in runs])
    name = f"{measure} in training"
    note = (
        f"{name}: means over {len(parts)} windows of the {len(common)} steps that all runs have, each named by the "
        "updates at its end; every run has its own prompts there, so that these are no held-out scores"
    )
    return _compare_table(name, steps, values, pairing, [note])


def _compare_table(
    measure: str, steps: Sequence[int], values: Sequence[Sequence[float]], pairing: Pairing, notes: Sequence[str]
) -> SeedComparison | None:
    """Compare the columns of (steps, runs) values, the baseline's first; None without a step."""
    if not steps:
        return None
    first, second = np.split(np.array(values), [len(pairing.baseline)], axis=1)
    compare = compare_unpaired if pairing.by is None else compare_paired
    compared = tuple(compare(one, other) for one, other in zip(first, second, strict=True))
    return SeedComparison(measure, tuple(steps), first, second, compared, tuple(notes))
