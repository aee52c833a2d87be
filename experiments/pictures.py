"""Pictures of finished cells: held-out curves by arm, and each arm's difference to the baseline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from analysis.drawing import COLORS, named_legend
from analysis.seeds.differences import PairedComparison
from experiments.figures import Measure, Result, by_seed, difference, level, score
from experiments.settings import Setting
from experiments.tables import MAIN_SCORE, SCORE_BETTER, SCORE_LABEL


def curves(setting: Setting, cells: Sequence[Result], arms: Sequence[str]) -> Figure:
    """Plot the held-out score over the checkpoints, and below it each arm's paired difference to the baseline.

    Bands and bars are 95 % t intervals over seeds; there are none with one seed.
    """
    name, label, better = MAIN_SCORE[setting.method], SCORE_LABEL[setting.method], SCORE_BETTER[setting.method]
    steps = np.array([point["step"] for point in cells[0]["checkpoints"]])
    figure = Figure(figsize=(7.2, 6.0), layout="compressed")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    shown = [arm for arm in arms if by_seed(cells, arm)]
    handles = []
    width = 0.012 * float(np.ptp(steps) or 1)
    for number, arm in enumerate(shown):
        color = COLORS[number % len(COLORS)]
        levels = [level(cells, arm, score(name, at, label, better)) for at in range(len(steps))]
        known = [at for at, one in enumerate(levels) if one is not None]
        mean = np.array([levels[at].mean for at in known])  # type: ignore[union-attr]
        reach = np.array([levels[at].reach or 0.0 for at in known])  # type: ignore[union-attr]
        handles += upper.plot(steps[known], mean, "-o", color=color, markersize=3)
        upper.fill_between(steps[known], mean - reach, mean + reach, color=color, alpha=0.15, linewidth=0)
        if arm == setting.baseline:
            continue
        compared = [difference(cells, setting.baseline, arm, score(name, at, label, better)) for at in known]
        for at, one in zip(known, compared, strict=True):
            if one is not None:
                mean, reach = _middle(one)
                style = {"fmt": "o", "color": color, "markersize": 3, "capsize": 2, "linewidth": 1}
                lower.errorbar([steps[at] + (number - len(shown) / 2) * width], [mean], reach, **style)
    upper.set_ylabel(f"{label} ({better} is better)")
    lower.axhline(0.0, color="#555555", linewidth=0.8)
    lower.set_ylabel(f"difference to {setting.baseline}")
    lower.set_xlabel("optimizer steps")
    seeds = {arm: len(by_seed(cells, arm)) for arm in shown}
    named_legend(upper, handles, [f"{arm} (seeds: {seeds[arm]})" for arm in shown], loc="best")
    return figure


def forest(setting: Setting, cells: Sequence[Result], arms: Sequence[str], measures: Sequence[Measure]) -> Figure:
    """Plot the paired differences of arms to the baseline with their 95 % intervals, a panel a measure."""
    others = [arm for arm in arms if arm != setting.baseline and by_seed(cells, arm)]
    figure = Figure(figsize=(3.1 * len(measures), 0.9 + 0.34 * max(len(others), 1)), layout="compressed")
    panels = np.atleast_1d(figure.subplots(1, len(measures), sharey=True))
    for panel, measure in zip(panels, measures, strict=True):
        for row, arm in enumerate(others):
            one = difference(cells, setting.baseline, arm, measure)
            if one is None:
                continue
            mean, reach = _middle(one)
            panel.errorbar([mean], [row], xerr=reach, fmt="o", color=COLORS[0], markersize=4, capsize=3)
        panel.axvline(0.0, color="#555555", linewidth=0.8)
        panel.set_title(f"{measure.label}\n({measure.better or 'neither'} is better)", fontsize="small")
        panel.set_yticks(range(len(others)), others, fontsize="small")
        panel.tick_params(axis="x", labelsize="x-small")
        panel.margins(y=0.15)
    panels[0].invert_yaxis()
    return figure


def _middle(one: PairedComparison | float) -> tuple[float, float | None]:
    """Return a difference and half the width of its interval, None where it has none: then no bar is drawn."""
    if isinstance(one, float):
        return one, None
    return one.mean, None if one.high is None else one.high - one.mean
