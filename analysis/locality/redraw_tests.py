"""Tests by re-draws: the gradients of a run stay, its plan is drawn anew, the statistic is computed again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.locality.redraw import PlanDraw, Redraws
from sdo.errors import counted

# What was simulated, and so what p-values are offered for: no fewer steps, and of more an even selection.
MIN_STEPS = 100
MAX_STEPS = 3000
_MOST_WORKERS = 4  # more would wait for each other in what a re-draw does outside of numpy


@dataclass(frozen=True)
class Association:
    """A correlation over the steps of one run, and how it stands among re-draws of the run's plan.

    Parameters
    ----------
    value
        r, or None where `reason` says why.
    p
        Two-sided, of the hypothesis that gradients do not follow embeddings; at least 1 / (re-draws + 1). None where
        no valid test exists.
    reason
        Why there is no value, or no p; None where there are both.
    steps
        Steps compared.
    redraws
        Plans drawn anew.
    center, spread
        Mean and standard deviation of r over the re-draws.
    inflation
        Lambda >= 1, by which the distance from the center was divided.
    """

    value: float | None
    p: float | None
    reason: str | None
    steps: int
    redraws: int = 0
    center: float | None = None
    spread: float | None = None
    inflation: float | None = None


class RedrawTest(Protocol):
    """A statistic of a draw and fixed gradients, and what many draws say of it."""

    steps: NDArray[np.int64]

    @property
    def design(self) -> Callable[[PlanDraw], Any]:
        """Makes of a draw what `of` takes; tests with equal steps and designs share it."""

    def of(self, design: Any, number: int) -> Any:
        """Return what the test keeps of one draw's design; `number` is -1 for the run's own, then from 0."""

    def result(self, observed: Any, redrawn: Sequence[Any]) -> Any:
        """Return the outcome, an `Association` for a test."""


def thin(steps: NDArray[np.int64], most: int = MAX_STEPS) -> NDArray[np.int64]:
    """Return positions of every m-th of (T,) steps, m the smallest number that leaves at most `most`."""
    every = max(1, -(-len(steps) // most))
    return np.arange(0, len(steps), every)


def worker_count() -> int:
    """Return how many threads draw plans anew where nothing else is said."""
    return min(_MOST_WORKERS, os.cpu_count() or 1)


def run_tests(
    redraws: Redraws,
    tests: Sequence[RedrawTest],
    count: int = 999,
    *,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> list[Any]:
    """Draw the plan anew and run several tests on the same draws.

    Parameters
    ----------
    redraws
        The run's plan.
    tests
        Tests on steps of that run.
    count
        Re-draws R; no p is below 1 / (R + 1).
    workers
        Threads. They change no result.
    progress
        Called with the number of re-draws done.

    Returns
    -------
    list
        What `RedrawTest.result` returns, in the order of `tests`.
    """

    def values(number: int) -> list[Any]:
        drawn = redraws.draws(number, [test.steps for test in tests])
        designs: dict[tuple[int, Any], Any] = {}
        kept = []
        for test, draw in zip(tests, drawn, strict=True):
            key = (id(draw), test.design)
            if key not in designs:
                designs[key] = test.design(draw)
            kept.append(test.of(designs[key], number))
        return kept

    observed = values(-1)  # first and alone: it builds what all plans share
    redrawn: list[list[Any]] = []
    for kept in ordered_map(values, count, workers):
        redrawn.append(kept)
        if progress is not None:
            progress(len(redrawn))
    return [
        test.result(own, [kept[position] for kept in redrawn])
        for position, (test, own) in enumerate(zip(tests, observed, strict=True))
    ]


def ordered_map(function: Callable[[int], Any], count: int, workers: int) -> Iterator[Any]:
    """Yield function(0), …, function(count - 1) in this order, computed by some threads a little ahead."""
    if workers < 2:
        yield from map(function, range(count))
        return
    from concurrent.futures import ThreadPoolExecutor

    from threadpoolctl import threadpool_limits

    # BLAS threads under every worker would wait for each other: half the speed, and twice the CPU time.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        ahead = [pool.submit(function, number) for number in range(min(2 * workers, count))]
        for number in range(count):
            done = ahead.pop(0).result()
            if number + 2 * workers < count:
                ahead.append(pool.submit(function, number + 2 * workers))
            yield done


def redraw_p(value: float, redrawn: ArrayLike, inflation: float = 1.0) -> float:
    """Return the two-sided p of a statistic among its re-draws.

    Parameters
    ----------
    value
        Of the run.
    redrawn
        (R,).
    inflation
        Lambda >= 1: the value's distance from the re-draws' mean is divided by it.

    Returns
    -------
    float
        (1 + number of re-draws at least as far from their mean) / (R + 1).

    Notes
    -----
    The run's own draw counts as one (Davison and Hinkley, Bootstrap Methods and their Application, 1997, 4.2).

    Examples
    --------
    >>> redraw_p(9.0, [0.0, 1.0, 2.0])
    0.25
    """
    others = np.asarray(redrawn, dtype=np.float64)
    center = others.mean()
    far = np.abs(others - center) >= abs(value - center) / inflation
    return float((1 + far.sum()) / (len(others) + 1))


def outcome(value: float, redrawn: NDArray[np.float64], inflation: float, steps: int) -> Association:
    """Return how a statistic stands among (R,) re-draws, with no p where none is valid."""
    undefined = int(np.isnan(redrawn).sum())
    if len(redrawn) == 0:
        return Association(value, None, "the plan was not drawn anew", steps)
    if undefined:
        return Association(value, None, f"the statistic is undefined in {undefined} of {len(redrawn)} re-draws", steps)
    spread = float(redrawn.std(ddof=1)) if len(redrawn) > 1 else None
    p: float | None = redraw_p(value, redrawn, inflation)
    reason = None
    if spread is None or spread <= 1e-12:
        p, reason = None, "re-drawn plans all give the same statistic"
    elif steps < MIN_STEPS:
        p, reason = None, f"{counted(steps, 'step')}; the test was found valid from {MIN_STEPS} steps on"
    return Association(value, p, reason, steps, len(redrawn), float(redrawn.mean()), spread, inflation)
