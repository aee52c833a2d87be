"""Figures of finished cells, and paired differences between arms: what tables, pictures and the page are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from analysis.seeds.differences import PairedComparison, compare_paired

Result = Mapping[str, Any]
_POWER, _LARGE, _FAR = 0.8, 1000, 6.0
FEW_STEPS = 50  # of a series, of which drift and exposure take up to a dozen degrees of freedom


@dataclass(frozen=True)
class Measure:
    """One number of a cell.

    Parameters
    ----------
    label
        Words for a table's head.
    of
        The number, or None where the cell has none.
    better
        ``"lower"``, ``"higher"`` or None where neither is better.
    digits
        Behind the point.
    """

    label: str
    of: Callable[[Result], float | None]
    better: str | None = None
    digits: int = 3


@dataclass(frozen=True)
class Level:
    """Mean of n seeds with its 95 % t interval; None with one seed."""

    n: int
    mean: float
    reach: float | None


def by_seed(cells: Sequence[Result], arm: str) -> dict[int, Result]:
    """Return an arm's cells by seed."""
    return {cell["seed"]: cell for cell in cells if cell["arm"] == arm}


def values(cells: Sequence[Result], arm: str, measure: Measure) -> dict[int, float]:
    """Return an arm's numbers by seed, without those that are undefined."""
    each = {seed: measure.of(cell) for seed, cell in by_seed(cells, arm).items()}
    return {seed: value for seed, value in each.items() if value is not None}


def level(cells: Sequence[Result], arm: str, measure: Measure) -> Level | None:
    """Return the mean over an arm's seeds, None where there is none."""
    found = np.array(list(values(cells, arm, measure).values()))
    if not len(found):
        return None
    if len(found) == 1:
        return Level(1, float(found[0]), None)
    error = float(found.std(ddof=1)) / math.sqrt(len(found))
    return Level(len(found), float(found.mean()), float(stats.t.ppf(0.975, len(found) - 1)) * error)


def difference(cells: Sequence[Result], baseline: str, arm: str, measure: Measure) -> PairedComparison | float | None:
    """Return an arm minus the baseline, paired by seed: a number with one seed, None with none."""
    first, second = values(cells, baseline, measure), values(cells, arm, measure)
    common = [seed for seed in first if seed in second]
    if not common:
        return None
    if len(common) == 1:
        return second[common[0]] - first[common[0]]
    return compare_paired([first[seed] for seed in common], [second[seed] for seed in common])


def seeds_needed(comparison: PairedComparison, effect: float) -> int | None:
    """Return how many pairs of seeds would tell `effect` from nothing in four of five experiments.

    Two-sided paired t-test at 5 %, power 80 % by the noncentral t, with the standard deviation seen here; Cohen,
    Statistical Power Analysis, 1988, 2.4. None where differences do not vary or the effect is 0.
    """
    if comparison.low is None or comparison.high is None or not effect:
        return None
    # The interval's half width is t times the standard error.
    reach = (comparison.high - comparison.low) / 2
    error = reach / float(stats.t.ppf(0.975, comparison.n - 1))
    size = abs(effect) / (error * math.sqrt(comparison.n))
    few, many = 1, 2
    while _power(many, size) < _POWER:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if _power(middle, size) >= _POWER else (middle, many)
    return many


def _power(n: int, size: float) -> float:
    """Power of a two-sided paired t-test at 5 % with n pairs and an effect of `size` standard deviations."""
    bound, shift = stats.t.ppf(0.975, n - 1), size * math.sqrt(n)
    if n > _LARGE:  # the noncentral t is then the normal distribution, and its sum does not always converge
        return float(stats.norm.sf(bound - shift))
    with np.errstate(divide="ignore", over="ignore"):  # scipy 1.13 warns on its way to the right number
        # The far side has less than 1e-9 there, and scipy says NaN of some of it.
        far = 0.0 if shift > _FAR else float(stats.nct.cdf(-bound, n - 1, shift))
        return float(stats.nct.sf(bound, n - 1, shift)) + far


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for all of them: Holm, Scandinavian Journal of Statistics 6 (1979)."""
    order, adjusted, largest = np.argsort(p_values, kind="stable"), [0.0] * len(p_values), 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = largest
    return adjusted


# ---------------------------------------------------------------------- what is measured


def score(name: str, at: int, label: str, better: str, digits: int = 3) -> Measure:
    """Return the mean score of an evaluation; `at` is the checkpoint's number, -1 the last."""

    def of(cell: Result) -> float | None:
        points = cell["checkpoints"]
        if not -len(points) <= at < len(points):
            return None
        found = points[at]["scores"].get(name)
        return None if found is None else float(found["mean"])

    return Measure(label, of, better, digits)


def mean_score(name: str, label: str, better: str, digits: int = 3, *, first: int = 1) -> Measure:
    """Return the mean of an evaluation over the checkpoints from the `first` on; 0 is before training."""

    def of(cell: Result) -> float | None:
        found = [point["scores"].get(name) for point in cell["checkpoints"][first:]]
        known = [float(one["mean"]) for one in found if one is not None]
        return float(np.mean(known)) if known else None

    return Measure(label, of, better, digits)


def training_reward(label: str = "reward in training") -> Measure:
    """Return the mean reward of all completions that were trained on."""

    def of(cell: Result) -> float | None:
        parts = [point["training_reward"] for point in cell["checkpoints"] if "training_reward" in point]
        total = sum(part["n"] for part in parts)
        return sum(part["mean"] * part["n"] for part in parts) / total if total else None

    return Measure(label, of, "higher")


def balance(metric: str, label: str, better: str) -> Measure:
    """Return a balance metric over the families at the last checkpoint, as it is."""

    def of(cell: Result) -> float | None:
        found = cell["checkpoints"][-1].get("balance")
        return None if found is None else found["metrics"][metric]["value"]

    return Measure(label, of, better)


def inside(*path: str, label: str, better: str | None = None, digits: int = 3) -> Measure:
    """Return the number under some keys of a cell."""

    def of(cell: Result) -> float | None:
        value: Any = cell
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return None if value is None else float(value)

    return Measure(label, of, better, digits)


def series_r(signal: str) -> Measure:
    """Return the correlation of the series of locality; None over few steps, where nearly all is fitted away."""
    whole = inside("locality", signal, "series", "value", label=f"locality, series r, {signal}")
    steps = inside("signals", signal, "batch_coherence_steps", label="")
    return Measure(whole.label, lambda cell: whole.of(cell) if (steps.of(cell) or 0) >= FEW_STEPS else None)


def seen(key: str, label: str) -> Measure:
    """Return what had been seen at the last checkpoint: ``distinct``, ``samples`` or ``tokens``."""
    return Measure(label, lambda cell: float(cell["checkpoints"][-1][key]), None, 0)
