"""What a selector is asked, and how many samples it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from sdo.checks import number
from sdo.errors import InputError

Scope = Literal["micro_batch", "step"]


@dataclass(frozen=True, eq=False)
class Candidates:
    """The samples that a process is offered in a step.

    Attributes
    ----------
    step
        The optimizer step, from 0.
    sample_ids
        Shape ``(b,)``, int64, in the order of the batch.
    micro_batch
        Shape ``(b,)``, int64, the micro-batch of this process that each stands in.
    tokens
        Shape ``(b,)``, int64, how many tokens each has, padding left out.
    """

    step: int
    sample_ids: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    tokens: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Scores:
    """What a selector thinks of the candidates: the larger, the sooner kept.

    Attributes
    ----------
    total
        Shape ``(b,)``, float64, finite.
    parts
        What it is made of, by name, of the same shape.
    """

    total: NDArray[np.float64]
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


class Selector(Protocol):
    """Keeps some of the samples of each step; :class:`~sdo.selectors.RandomSelect` is one.

    Attributes
    ----------
    name
        As run.json and checkpoints call it.
    options
        Constructor keywords as plain JSON.
    needs
        What it looks at beside ids and lengths: some of "hidden", "log_probs". None of them is there yet.
    keep
        Share of the candidates that is kept, above 0, at most 1.
    scope
        Among whom they are compared: ``"micro_batch"``, or all of the process's in the ``"step"``.
    """

    name: str
    options: Mapping[str, Any]
    needs: frozenset[str]
    keep: float
    scope: Scope

    def score(self, candidates: Candidates) -> Scores:
        """Score the candidates. Global random states stay as they are."""

    def chosen(self, candidates: Candidates, kept: NDArray[np.bool_]) -> None:
        """Learn which were kept, shape ``(b,)``, once they are."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep, plain JSON."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's :meth:`state`."""


def check_keep(keep: float) -> float:
    """Return the share that is kept, or refuse it."""
    return number("keep", keep, 0.0, 1.0, open_low=True)


def check_scope(scope: str) -> Scope:
    """Return where candidates are compared, or refuse it."""
    if scope not in get_args(Scope):
        raise InputError(f"scope is {scope!r}; expected {' or '.join(map(repr, get_args(Scope)))}")
    return scope  # type: ignore[return-value]  # one of them


def kept_count(keep: float, candidates: int) -> int:
    """Return how many of so many candidates are kept: ``max(1, floor(keep * candidates + 1/2))``.

    Examples
    --------
    >>> [kept_count(0.25, n) for n in (1, 2, 8, 10)]
    [1, 1, 2, 3]
    """
    return max(1, int(keep * candidates + 0.5))


def choose(selector: Selector, candidates: Candidates) -> tuple[NDArray[np.bool_], Scores]:
    """Return which candidates are kept, shape ``(b,)``, and their scores. Equal scores go by their place in the batch.

    With the scope ``"step"`` at least as many are kept as there are micro-batches, each of which needs a sample.

    Raises
    ------
    InputError
        If the scores are not a finite number a candidate.
    """
    count = len(candidates.sample_ids)
    scores = selector.score(candidates)
    total = np.asarray(scores.total, dtype=np.float64)
    if total.shape != (count,) or not np.isfinite(total).all():
        raise InputError(
            f"selector {selector.name!r} gave scores of shape {total.shape}, {int((~np.isfinite(total)).sum())} of "
            f"them not finite; expected a finite one for each of {count} candidates"
        )
    kept = np.zeros(count, dtype=np.bool_)
    micro_batches = np.unique(candidates.micro_batch)
    if selector.scope == "step":
        wanted = max(kept_count(selector.keep, count), len(micro_batches))
        kept[np.argsort(-total, kind="stable")[:wanted]] = True
    else:
        for number_ in micro_batches:
            places = np.flatnonzero(candidates.micro_batch == number_)
            order = places[np.argsort(-total[places], kind="stable")]
            kept[order[: kept_count(selector.keep, len(places))]] = True
    return kept, scores
