"""Keep some samples of each step: between the loader, which brings what was planned, and the forward pass.

The place is the trainer's ``get_batch_samples``: all micro-batches of the step are known there, the parameters are
those of the step, and the tokens that divide the loss are counted after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sdo.errors import InputError
from sdo.selectors.selector import Candidates, Selector, choose
from sdo.trainers.ids import BATCH_KEY, IGNORED, BatchIds, ids_of_batch, with_ids
from sdo.trainers.requirements import no_ids_came
from sdo.trainers.trainer_types import kind_of

ALLOWED = ("SFTTrainer", "Trainer")


@dataclass(frozen=True, eq=False)
class StepSelection:
    """What a process was offered in a step, and what it kept.

    Attributes
    ----------
    candidates
        The samples that were offered.
    kept
        Shape ``(b,)``, bool.
    score
        Shape ``(b,)``, float64.
    """

    candidates: Candidates
    kept: NDArray[np.bool_]
    score: NDArray[np.float64]

    @property
    def trained(self) -> NDArray[np.int64]:
        """The samples that are trained."""
        return self.candidates.sample_ids[self.kept]


def selection_refusals(trainer: Any, selector: Any) -> list[str]:
    """Return why a selector cannot work with a trainer, each reason with its remedy."""
    members = ("name", "options", "needs", "keep", "scope", "score", "chosen", "state", "load")
    missing = [name for name in members if not hasattr(selector, name)]
    if missing:
        return [
            f"selector is a {type(selector).__name__} without {', '.join(missing)}; expected a selector, such as "
            "RandomSelect(0.25)"
        ]
    found = []
    kind = kind_of(type(trainer)).trainer
    if kind not in ALLOWED:
        found.append(
            f"selector {selector.name!r} came with a {kind}, whose batches hold more than a row a sample; expected "
            f"{' or '.join(ALLOWED)}; fix: leave the selector out"
        )
    if selector.needs:
        found.append(
            f"selector {selector.name!r} needs {', '.join(sorted(selector.needs))}; expected one that needs ids and "
            "lengths alone: nothing else is handed out yet"
        )
    if getattr(trainer.args, "padding_free", False):
        found.append(f"selector {selector.name!r} cuts batches by rows, and padding_free=True makes one row of them; "
                     "fix: padding_free=False")  # fmt: skip
    if "get_batch_samples" in vars(trainer):
        found.append("get_batch_samples of this trainer is replaced already; expected its own; fix: detach the other")
    return found


class BatchSelection:
    """Stands before one trainer's ``get_batch_samples``.

    Parameters
    ----------
    trainer
        Whose steps are cut.
    selector
        What decides.

    Attributes
    ----------
    latest
        What was kept of the step under way; None before the first.
    """

    def __init__(self, trainer: Any, selector: Selector) -> None:
        self.selector, self._trainer = selector, trainer
        self.latest: StepSelection | None = None
        self._original: Callable[..., Any] = trainer.get_batch_samples
        trainer.get_batch_samples = self._get_batch_samples

    def detach(self) -> None:
        """Leave the trainer as it was."""
        del self._trainer.get_batch_samples

    def of_step(self, step: int) -> StepSelection:
        """Return what was kept of a step.

        Raises
        ------
        RuntimeError
            If the step was not asked for: something else brings the trainer's batches.
        """
        if self.latest is None or self.latest.candidates.step != step:
            raise RuntimeError(
                f"step {step} was trained on batches that the selector has not seen; something else replaced "
                "get_batch_samples of this trainer"
            )
        return self.latest

    def describe(self) -> dict[str, Any]:
        """Return name and options, as run.json and checkpoints keep them."""
        return {"name": self.selector.name, "options": dict(self.selector.options)}

    def _get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, items = self._original(*args, **kwargs)
        if not batches:
            return batches, items
        step: int = self._trainer.state.global_step
        candidates = candidates_of(step, batches)
        kept, scores = choose(self.selector, candidates)
        self.latest = StepSelection(candidates, kept, np.asarray(scores.total, dtype=np.float64))
        self.selector.chosen(candidates, kept)
        if kept.all():
            return batches, items
        cut = cut_batches(batches, kept)
        device = kwargs["device"] if "device" in kwargs else args[2]
        return cut, self._trainer._get_num_items_in_batch(cut, device)


def require_offered(step: int, offered: NDArray[np.int64], planned: NDArray[np.int64]) -> None:
    """Refuse, with a RuntimeError, a step of which this process was offered other samples than planned."""
    if sorted(offered.tolist()) != sorted(planned.tolist()):
        raise RuntimeError(
            f"step {step} offered samples {sorted(offered.tolist())}, but the plan holds {sorted(planned.tolist())}; "
            "something else changed the data loader of this trainer"
        )


def candidates_of(step: int, batches: list[Any]) -> Candidates:
    """Return who is in the micro-batches of a step.

    Raises
    ------
    InputError
        If a batch is no mapping with a row of ``input_ids`` for each of its samples.
    """
    ids: list[int] = []
    numbers: list[int] = []
    tokens: list[int] = []
    for number, batch in enumerate(batches):
        found = ids_of_batch(batch)
        if found is None:
            raise InputError(f"a selector found no sample ids on a batch; {no_ids_came()}")
        rows = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(rows, torch.Tensor) or rows.ndim != 2 or len(rows) != len(found.sample_ids):
            raise InputError(
                f"a batch of {len(found.sample_ids)} samples has no row of input_ids for each; expected one, which a "
                "selector can leave out; fix: padding_free=False, or leave the selector out"
            )
        ids += found.sample_ids
        numbers += [number] * len(found.sample_ids)
        tokens += _lengths(batch).tolist()
    return Candidates(step, np.array(ids, np.int64), np.array(numbers, np.int64), np.array(tokens, np.int64))


def cut_batches(batches: list[dict[str, Any]], kept: NDArray[np.bool_]) -> list[dict[str, Any]]:
    """Cut what is kept of a step into as many micro-batches as it had, by length, each trimmed to its longest row.

    Parameters
    ----------
    batches
        The micro-batches of a process.
    kept
        Shape ``(b,)``, over all of their rows; as many true as there are micro-batches at least.

    Returns
    -------
    list of dict
        Rows of like length stand together. Padding stays on the side where it was. What belongs to no row, such as a
        number, is that of the first batch.
    """
    rows, start = [], 0
    for batch in batches:
        count = len(batch["input_ids"])
        rows += [_row(batch, place) for place in range(count) if kept[start + place]]
        start += count
    left = any(bool((batch["attention_mask"][:, 0] == 0).any()) for batch in batches if "attention_mask" in batch)
    order = np.argsort([row.length for row in rows], kind="stable")
    parts = np.array_split(order, len(batches))
    return [_batch([rows[place] for place in part], batches, left=left) for part in parts]


@dataclass(frozen=True, eq=False)
class _Row:
    """One sample's row: what it has for each token, what it has once, its id and how many tokens carry a loss."""

    per_token: dict[str, torch.Tensor]
    once: dict[str, Any]
    length: int
    sample: int
    tokens: int | None
    labels: int | None


def _lengths(batch: Mapping[str, Any]) -> torch.Tensor:
    mask = batch.get("attention_mask")
    ids = batch["input_ids"]
    return torch.full((len(ids),), ids.shape[1]) if mask is None else mask.sum(dim=1)


def _row(batch: Mapping[str, Any], place: int) -> _Row:
    shape, found = batch["input_ids"].shape, ids_of_batch(batch)
    assert found is not None  # noqa: S101 - candidates_of has seen them
    mask = batch.get("attention_mask")
    inside = torch.ones(shape[1], dtype=torch.bool) if mask is None else mask[place].bool()
    per_token = {
        name: value[place][inside.to(value.device)]
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.shape[:2] == shape
    }
    once = {
        name: value[place]
        for name, value in batch.items()
        if name not in per_token and name != BATCH_KEY and _by_row(value, shape[0])
    }
    told = (found.tokens, found.labels)
    tokens, labels = (None if one is None else one[place] for one in told)
    return _Row(per_token, once, int(inside.sum()), found.sample_ids[place], tokens, labels)


def _by_row(value: Any, rows: int) -> bool:
    return (isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows) or (
        isinstance(value, list | tuple) and len(value) == rows
    )


def _batch(rows: list[_Row], batches: list[dict[str, Any]], *, left: bool) -> dict[str, Any]:
    """Pad some rows to their longest one."""
    first, width = batches[0], max(row.length for row in rows)
    made: dict[str, Any] = {}
    for name, value in first.items():
        if name == BATCH_KEY:
            continue
        if name in rows[0].per_token:
            filler = _filler(name, batches)
            made[name] = torch.stack([_padded(row.per_token[name], width, filler, left=left) for row in rows])
        elif name in rows[0].once:
            each = [row.once[name] for row in rows]
            made[name] = torch.stack(each) if isinstance(value, torch.Tensor) else each
        else:
            made[name] = value
    tokens, labels = [row.tokens for row in rows], [row.labels for row in rows]
    ids = BatchIds(
        tuple(row.sample for row in rows),
        None if None in tokens else tuple(t for t in tokens if t is not None),
        labels=None if None in labels else tuple(n for n in labels if n is not None),
    )
    return with_ids(made, ids)


def _padded(row: torch.Tensor, width: int, filler: Any, *, left: bool) -> torch.Tensor:
    gap = row.new_full((width - len(row), *row.shape[1:]), filler)
    return torch.cat([gap, row] if left else [row, gap])


def _filler(name: str, batches: list[dict[str, Any]]) -> Any:
    """What stands at padding: as the collator filled it where it did, else as such columns are filled."""
    for batch in batches:
        mask = batch.get("attention_mask")
        if mask is not None and name != "attention_mask" and bool((mask == 0).any()):
            found = batch[name][(mask == 0).to(batch[name].device)]
            return found.reshape(len(found), -1)[0, 0].item()
    return IGNORED if "labels" in name else 0
