"""How a run went: losses, evaluations, and how much data it had seen by then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from analysis.drawing import COLOURS, figure_of, message, plain_text, running_mean
from analysis.runs import Run


@dataclass(frozen=True, eq=False)
class Training:
    """A run's losses, and what it had seen by each step.

    Parameters
    ----------
    step
        (T,) int64.
    loss
        (T,) float64, nats a trained token; NaN where it is not known.
    distinct, samples, tokens
        (T,) int64, after each step: different samples seen, samples seen with repetition, tokens that carried a loss.
    """

    step: NDArray[np.int64]
    loss: NDArray[np.float64]
    distinct: NDArray[np.int64]
    samples: NDArray[np.int64]
    tokens: NDArray[np.int64]


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
    batches = [np.asarray(ids or [], dtype=np.int64) for ids in table.column("sample_ids").to_pylist()]
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
    )


def evaluations(run: Run) -> dict[str, Evaluation]:
    """Return the mean score of each of a run's evaluations, by the name of the measure.

    Examples
    --------
    >>> evaluations(Run.open("runs/sdo"))["held-out loss"].mean  # doctest: +SKIP
    array([2.31, 1.42, 1.01])
    """
    table = run.evaluations()
    names = np.asarray(table.column("name").to_pylist(), dtype=object)
    steps = np.asarray(table.column("step").to_pylist(), dtype=np.int64)
    scores = np.array([np.nan if s is None else s for s in table.column("score").to_pylist()], dtype=np.float64)
    found = {}
    for name in sorted(set(names.tolist())):
        mine = names == name
        step, place = np.unique(steps[mine], return_inverse=True)
        known = np.isfinite(scores[mine])
        count = np.bincount(place[known], minlength=len(step))
        total = np.bincount(place[known], weights=scores[mine][known], minlength=len(step))
        mean = np.divide(total, count, out=np.full(len(step), np.nan), where=count > 0)
        found[str(name)] = Evaluation(step, mean, count.astype(np.int64))
    return found


def loss_curves(runs: Mapping[str, Training], *, title: str = "", ax: Axes | None = None) -> tuple[Figure, Axes]:
    """Draw the training loss of several runs: a faint dot a step, a running mean over a twentieth of the steps.

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
    axes.set_ylabel("training loss, nats a token")
    return figure, axes


def evaluation_curves(
    runs: Mapping[str, Evaluation], name: str, *, title: str = "", ax: Axes | None = None
) -> tuple[Figure, Axes]:
    """Draw one measure over the evaluations of several runs.

    Parameters
    ----------
    runs
        Run name to evaluation.
    name
        The measure, for the axis.
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
    axes.set_ylabel(f"{plain_text(name)}, mean over samples")
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
        colour, style = COLOURS[position % len(COLOURS)], ("-", "--", ":")[position // len(COLOURS) % 3]
        shown = running_mean(value, min(len(value), max(3, len(value) // 20))) if smooth else value
        axes.plot(step, value, dots, color=colour, alpha=0.25 if smooth else 1.0, markersize=4, markeredgewidth=0)
        handles += axes.plot(step, shown, style, color=colour, linewidth=1.7)
        labels.append(plain_text(name))
    if not handles:
        message(axes, f"{empty}:\nnothing to draw")
        return figure, axes
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    name_lines(axes, handles, labels)
    return figure, axes


def name_lines(axes: Axes, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Put a legend into the axes; set afterwards, since a legend refuses labels that begin with an underscore."""
    numbered = [str(number) for number in range(len(handles))]
    legend = axes.legend(list(handles), numbered, frameon=False, fontsize="small")
    for text, shown in zip(legend.get_texts(), labels, strict=True):
        text.set_text(shown)
