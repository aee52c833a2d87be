"""Several seeds: what a difference between two kinds of run is worth, checkpoint by checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from analysis.recorded import evaluation_scores, generates, training_rewards
from analysis.runs import Run
from sdo.checks import number_array
from sdo.errors import InputError, counted

FEW_PAIRS = 6  # below, no sign-flip p can reach 0.05
_EXACT_PAIRS = 16  # up to here all 2^n flips are counted
_FLIPS = 9_999
_WINDOWS = 5  # of rewards in training


@dataclass(frozen=True)
class PairedComparison:
    """n paired differences, `against` minus `baseline`.

    Parameters
    ----------
    n
        Pairs.
    mean
        Of the differences.
    low, high
        95 % interval of the mean, by Student's t.
    t, p
        Paired t-test, two-sided, n - 1 degrees of freedom.
    cohens_d_paired
        Mean over standard deviation (ddof 1) of the differences: d_z, not the d of two independent groups.
    sign_flip_p, smallest_sign_flip_p
        Two-sided sign-flip test of the mean, and the smallest p that n pairs can reach.
    reason
        Why numbers are None: all differences are equal.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    t: float | None
    p: float | None
    cohens_d_paired: float | None
    sign_flip_p: float
    smallest_sign_flip_p: float
    reason: str | None = None


def compare_paired(baseline: ArrayLike, against: ArrayLike) -> PairedComparison:
    """Compare n paired values.

    Parameters
    ----------
    baseline, against
        (n,) finite values, the i-th of each a pair.

    Raises
    ------
    ValueError
        n is below 2, the lengths differ, or a value is not finite.

    Notes
    -----
    Paired t-test: Student, Biometrika 6 (1908). d_z: Cohen, Statistical Power Analysis, 1988, 2.3.5. Sign flips:
    Fisher, The Design of Experiments, 1935, 21; exact up to 16 pairs, else 9,999 random flips of seed 0 and the
    observed one.

    Examples
    --------
    >>> one = compare_paired([1.0, 2.0, 3.0], [1.5, 2.25, 3.75])
    >>> one.mean, one.cohens_d_paired, one.sign_flip_p
    (0.5, 2.0, 0.25)
    """
    first, second = number_array(baseline, "baseline's values"), number_array(against, "the other run's values")
    if first.shape != second.shape:
        raise ValueError(f"shapes {first.shape} and {second.shape}; expected n values each")
    if len(first) < 2:
        raise ValueError(f"{counted(len(first), 'pair')}; one seed gives no verdict, two are the least")
    difference = second - first
    if not np.isfinite(difference).all():
        raise ValueError("a value is not finite")
    n = len(difference)
    mean, deviation = float(difference.mean()), float(difference.std(ddof=1))
    flips, least = sign_flip_p(difference), smallest_sign_flip_p(n)
    # Equal differences leave rounding behind.
    if deviation <= 1e-12 * float(np.abs(first).max() + np.abs(second).max()):
        reason = "all differences are equal"
        return PairedComparison(n, mean, None, None, None, None, None, flips, least, reason)
    error = deviation / np.sqrt(n)
    reach = float(stats.t.ppf(0.975, n - 1)) * error
    t = mean / error
    p = float(2 * stats.t.sf(abs(t), n - 1))
    return PairedComparison(n, mean, mean - reach, mean + reach, float(t), p, mean / deviation, flips, least)


def sign_flip_p(difference: ArrayLike) -> float:
    """Return the two-sided p of the mean of (n,) differences when each sign could as well be the other."""
    d = np.asarray(difference, dtype=np.float64)
    n = len(d)
    # Sums of other orders of addition differ by rounding: as far counts as farther.
    limit = abs(d.sum()) - 1e-9 * np.abs(d).sum()
    if n <= _EXACT_PAIRS:
        signs = np.array(list(product((1.0, -1.0), repeat=n - 1)))
        # The mirror image of a flip is as far: half of them will do.
        sums = np.abs(d[0] + (signs @ d[1:] if n > 1 else np.zeros(1)))
        return float((sums >= limit).mean())
    rng = np.random.default_rng(0)
    signs = rng.integers(0, 2, (_FLIPS, n), dtype=np.int8) * 2.0 - 1.0
    return (1 + int((np.abs(signs @ d) >= limit).sum())) / (_FLIPS + 1)


def smallest_sign_flip_p(n: int) -> float:
    """Return the smallest two-sided p that n pairs can reach: 2 / 2^n, or that of the random flips."""
    return 2.0 / 2.0**n if n <= _EXACT_PAIRS else 1.0 / (_FLIPS + 1)


@dataclass(frozen=True)
class Pairing:
    """Which run is compared with which.

    Parameters
    ----------
    baseline, against
        Runs, the i-th of each a pair.
    by
        How that was found: ``"seed"`` or ``"order"``.
    left_out
        Runs of either side whose seed the other side does not have.
    """

    baseline: tuple[Run, ...]
    against: tuple[Run, ...]
    by: str
    left_out: tuple[Run, ...] = ()


def pair_runs(baseline: Sequence[Run], against: Sequence[Run]) -> Pairing:
    """Pair runs by the seed in run.json where each side has a seed once, and two seeds or more are common.

    Runs whose seed the other side does not have are then left out. Otherwise runs are paired by their order.

    Raises
    ------
    InputError
        Different numbers of runs that seeds do not pair, or fewer than two pairs.
    """
    first, second = ({(run.info.get("seeds") or {}).get("seed"): run for run in side} for side in (baseline, against))
    known = None not in {*first, *second} and (len(first), len(second)) == (len(baseline), len(against))
    common = [seed for seed in first if seed in second] if known else []
    if len(common) > 1 or (common and len(baseline) != len(against)):
        left_out = [run for side in (first, second) for seed, run in side.items() if seed not in common]
        one, other = (tuple(side[seed] for seed in common) for side in (first, second))
        paired = Pairing(one, other, "seed", tuple(left_out))
    elif len(baseline) != len(against):
        raise InputError(
            f"{len(baseline)} baseline runs and {len(against)} others, which no seeds pair; expected as many of each, "
            "pair by pair, or runs of common seeds"
        )
    else:
        paired = Pairing(tuple(baseline), tuple(against), "order")
    if len(paired.baseline) < 2:
        alone = f"one pair of runs has a common seed ({common[0]})" if paired.left_out else "one run of each kind"
        raise InputError(f"{alone}; expected at least two, trained with different seeds: one seed gives no verdict")
    return paired


Scores = Mapping[str, Mapping[int, Mapping[int, float]]]  # measure -> step -> sample id -> score


def _without_empty(scores: Scores) -> Scores:
    every = {name: {step: one for step, one in steps.items() if one} for name, steps in scores.items()}
    return {name: steps for name, steps in every.items() if steps}


@dataclass(frozen=True, eq=False)
class SeedComparison:
    """Paired comparisons of one measure by step.

    Parameters
    ----------
    measure
        Name of the evaluation, or of a reward in training.
    steps
        Number of updates the models had had; of a reward in training, at the end of each window of steps.
    baseline, against
        (steps, n) float64, mean scores of the runs, pair by pair.
    comparisons
        One a step.
    notes
        What a reader should know: checkpoints that not all runs have, different samples.
    """

    measure: str
    steps: tuple[int, ...]
    baseline: NDArray[np.float64]
    against: NDArray[np.float64]
    comparisons: tuple[PairedComparison, ...]
    notes: tuple[str, ...]


def compare_seeds(pairing: Pairing) -> list[SeedComparison]:
    """Compare the evaluations of paired runs at each checkpoint that all of them have, then their rewards in training.

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
    n = len(pairing.baseline)
    results = [_compare_evaluations(measure, held_out, n) for measure in _common(held_out)]
    results += [_compare_rewards(measure, rewards, n) for measure in _common(rewards)]
    found = [one for one in results if one is not None]
    if not found:
        one = pairing.baseline[0]
        held = ", ".join([*held_out[0], *rewards[0]]) or "none"
        train = "" if generates(one) else "train with an eval_dataset, or "
        raise InputError(
            f"the runs have no evaluation in common, by name and step ({one.path}: {held}, …); mend: {train}log scores "
            "by recorder.log_evaluation"
        )
    return found


def _common(runs: Sequence[Scores]) -> list[str]:
    return sorted(set.intersection(*(set(one) for one in runs)))


def _compare_evaluations(measure: str, runs: Sequence[Scores], n: int) -> SeedComparison | None:
    """Compare the first n runs with the others at the steps that all have, on the samples that all have scored."""
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
    return _compare_table(measure, steps, values, n, notes)


def _compare_rewards(measure: str, runs: Sequence[Scores], n: int) -> SeedComparison | None:
    """Compare the first n runs with the others by their mean rewards over windows of the steps that all have."""
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
    return _compare_table(name, steps, values, n, [note])


def _compare_table(
    measure: str, steps: Sequence[int], values: Sequence[Sequence[float]], n: int, notes: Sequence[str]
) -> SeedComparison | None:
    """Compare the first n columns of (steps, runs) values with the others; None without a step."""
    if not steps:
        return None
    table = np.array(values)
    return SeedComparison(
        measure=measure,
        steps=tuple(steps),
        baseline=table[:, :n],
        against=table[:, n:],
        comparisons=tuple(compare_paired(row[:n], row[n:]) for row in table),
        notes=tuple(notes),
    )
