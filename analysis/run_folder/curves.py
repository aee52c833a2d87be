"""How a run went: losses, evaluations, and how much data it had seen by then."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from analysis.drawing import COLORS, figure_of, message, plain_text, running_mean, runs_legend
from analysis.run_folder.recorded import evaluation_scores, exposed_batches, training_rewards
from analysis.run_folder.run import Run


@dataclass(frozen=True, eq=False)
class Training:
    """A run's losses, and what it had seen by each step.

    Parameters
    ----------
    step
        (T,) int64.
    loss
        (T,) float64; NaN where it is not known.
    distinct, samples, tokens
        (T,) int64, after each step: different samples seen; samples seen with repetition, a prompt of GRPO or RLOO once
        a generation batch; tokens that carried a loss.
    meaning
        What the loss is, in the words of run.json; None where it does not say.
    """

    step: NDArray[np.int64]
    loss: NDArray[np.float64]
    distinct: NDArray[np.int64]
    samples: NDArray[np.int64]
    tokens: NDArray[np.int64]
    meaning: str | None = None


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One measure over a run's evaluations.

    Parameters
    ----------
    step
        (E,) int64, updates before each evaluation.
    mean
        (E,) float64, over the samples with a score; NaN where there is none.
    count
        (E,) int64, samples with a score.
    """

    step: NDArray[np.int64]
    mean: NDArray[np.float64]
    count: NDArray[np.int64]


def training(run: Run) -> Training:
    """Return a run's losses and what it had seen by each step; T is 0 for a run without steps."""
    table = run.steps()
    _, batches, _ = exposed_batches(run)
    flat = np.concatenate(batches) if batches else np.zeros(0, dtype=np.int64)
    first = np.zeros(len(flat), dtype=np.int64)
    first[np.unique(flat, return_index=True)[1]] = 1
    sizes = np.array([len(ids) for ids in batches], dtype=np.int64)
    ends = np.cumsum(sizes)
    loss = [np.nan if value is None else value for value in table.column("loss").to_pylist()]
    return Training(
        step=np.asarray(table.column("step").to_pylist(), dtype=np.int64),
        loss=np.asarray(loss, dtype=np.float64),
        distinct=np.concatenate([[0], np.cumsum(first)])[ends],
        samples=ends,
        tokens=np.cumsum(np.asarray([n or 0 for n in table.column("tokens").to_pylist()], dtype=np.int64)),
        meaning=_meaning_of_loss(run),
    )


def _meaning_of_loss(run: Run) -> str | None:
    meaning = run.info.get("meaning")
    words = meaning.get("loss") if isinstance(meaning, dict) else None
    return words if isinstance(words, str) and words else None


def loss_label(runs: Iterable[Training]) -> str:
    """Return what the loss of some runs is, in a few words: those of run.json without how it was averaged.

    Examples
    --------
    >>> nothing = np.zeros(0)
    >>> loss_label([Training(nothing, nothing, nothing, nothing, nothing, "DPO's loss, mean over a micro-batch")])
    "training loss: DPO's loss"
    """
    meanings = {one.meaning for one in runs}
    if len(meanings) > 1:
        return "training loss, of different kinds"
    known = next(iter(meanings), None)
    if known is None:
        return "training loss"
    return f"training loss: {re.split(', (?=mean |summed )', known, maxsplit=1)[0]}"


def evaluations(run: Run) -> dict[str, Evaluation]:
    """Return the mean score over held-out samples of each of a run's evaluations, by the name of the measure.

    Examples
    --------
    >>> evaluations(Run.open("runs/sdo"))["held-out loss"].mean  # doctest: +SKIP
    array([2.31, 1.42, 1.01])
    """
    return _means(evaluation_scores(run))


def rewards(run: Run) -> dict[str, Evaluation]:
    """Return the mean reward of each step's completions, over its prompts, by the name of the reward.

    They are trained on: each step has its own prompts, and no step's mean is that of another's.
    """
    return _means(training_rewards(run))


def _means(scores: Mapping[str, Mapping[int, Mapping[int, float]]]) -> dict[str, Evaluation]:
    found = {}
    for name, steps in sorted(scores.items()):
        means = [math.fsum(one.values()) / len(one) if one else np.nan for one in steps.values()]
        counts = [len(one) for one in steps.values()]
        found[name] = Evaluation(
            step=np.array(list(steps), dtype=np.int64),
            mean=np.array(means, dtype=np.float64),
            count=np.array(counts, dtype=np.int64),
        )
    return found


def loss_curves(runs: Mapping[str, Training], *, title: str = "", ax: Axes | None = None) -> tuple[Figure, Axes]:
    """Plot the training loss of several runs: a faint dot a step, a running mean over a twentieth of the steps.

    Parameters
    ----------
    runs
        Run name to training.
    title
        Drawn as it is.
    ax
        Axes to draw into; a new figure by default.

    Returns
    -------
    figure, axes
    """
    lines = {name: (one.step[np.isfinite(one.loss)], one.loss[np.isfinite(one.loss)]) for name, one in runs.items()}
    figure, axes = _curves(lines, dots=".", smooth=True, empty="no step has a loss", title=title, ax=ax)
    shown = (one for one in runs.values() if np.isfinite(one.loss).any())
    axes.set_ylabel(textwrap.fill(plain_text(loss_label(shown), 100), 40, break_on_hyphens=False))
    return figure, axes


def reward_curves(
    runs: Mapping[str, Evaluation], name: str, *, title: str = "", ax: Axes | None = None
) -> tuple[Figure, Axes]:
    """Plot a reward in training of several runs: a faint dot a step, a running mean over a twentieth of the steps.

    Parameters
    ----------
    runs
        Run name to what :func:`rewards` found.
    name
        The reward, for the axis.
    title
        Drawn as it is.
    ax
        Axes to draw into; a new figure by default.

    Returns
    -------
    figure, axes
    """
    lines = {run: (one.step[one.count > 0], one.mean[one.count > 0]) for run, one in runs.items()}
    figure, axes = _curves(lines, dots=".", smooth=True, empty="no step has a reward", title=title, ax=ax)
    axes.set_ylabel(f"{plain_text(name)} in training, mean over prompts")
    return figure, axes


def evaluation_curves(
    runs: Mapping[str, Evaluation],
    name: str,
    *,
    meaning: str | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> tuple[Figure, Axes]:
    """Plot one measure over the evaluations of several runs.

    Parameters
    ----------
    runs
        Run name to evaluation.
    name
        The measure, for the axis.
    meaning
        What its scores are, and in which unit: beside the name.
    title
        Drawn as it is.
    ax
        Axes to draw into; a new figure by default.

    Returns
    -------
    figure, axes
    """
    lines = {run: (one.step[one.count > 0], one.mean[one.count > 0]) for run, one in runs.items()}
    figure, axes = _curves(lines, dots="o", smooth=False, empty="no evaluation has a score", title=title, ax=ax)
    said = f": {plain_text(meaning, 100)};" if meaning else ","
    label = f"{plain_text(name)}{said} mean over samples"
    axes.set_ylabel(textwrap.fill(label, 40, break_on_hyphens=False))
    return figure, axes


def _curves(
    lines: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]],
    *,
    dots: str,
    smooth: bool,
    empty: str,
    title: str,
    ax: Axes | None,
) -> tuple[Figure, Axes]:
    figure, axes = figure_of(ax, (5.6, 3.8))
    axes.set_title(plain_text(title, 100), fontsize="medium")
    handles: list[Artist] = []
    labels = []
    for position, (name, (step, value)) in enumerate(lines.items()):
        if len(step) == 0:
            continue
        color, style = COLORS[position % len(COLORS)], ("-", "--", ":")[position // len(COLORS) % 3]
        shown = running_mean(value, min(len(value), max(3, len(value) // 20))) if smooth else value
        axes.plot(step, value, dots, color=color, alpha=0.25 if smooth else 1.0, markersize=4, markeredgewidth=0)
        handles += axes.plot(step, shown, style, color=color, linewidth=1.7)
        labels.append(name)
    if not handles:
        message(axes, f"{empty}:\nnothing to draw")
        return figure, axes
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    runs_legend(axes, handles, labels, [""] * len(labels), grow=ax is None)
    return figure, axes
