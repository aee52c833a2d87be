"""What a model's loss is the mean of: each kind that is known, recomputed sample by sample from the model's outputs.

None is taken for granted: ``losses.LossReader`` compares it with the loss that the model itself
returned for the same batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sdo.trainers.ids import IGNORED
from sdo.trainers.trainer_types import PLAIN


@dataclass(frozen=True, eq=False)
class Paired:
    """A micro-batch's outputs beside what they are compared with.

    Attributes
    ----------
    counts
        Shape ``(b,)``, int64, how many targets each sample has.
    sums
        Returns the loss of each sample summed over its targets, shape ``(b,)``, float64.
    costly
        Whether that is a pass over the logits of a vocabulary.
    mean
        Returns the mean that the model takes, shape ``()``; None where it is all sums over all counts.
    """

    counts: torch.Tensor
    sums: Callable[[], torch.Tensor]
    costly: bool = False
    mean: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True)
class Objective:
    """A kind of loss.

    Attributes
    ----------
    pair
        Given a model's output and the arguments of its call, what is compared; None where their shapes do not fit.
    loss, tokens, score
        What these numbers of a run mean, in words, as in :class:`sdo.trainers.trainer_types.TrainerKind`.
    """

    pair: Callable[[Any, Mapping[str, Any]], Paired | None]
    loss: str
    tokens: str
    score: str | None


def part(output: Any, name: str) -> Any:
    """Return a part of a model's output, an object or a mapping; None where it has none of that name."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model's class says that position t is compared with label t + 1, as causal language models do.

    Classes that are not of transformers, or say nothing, count as causal language models.
    """
    unwrap: Any = getattr(model, "get_base_model", None)
    unwrapped: Any = model if unwrap is None else unwrap()
    if getattr(getattr(unwrapped, "config", None), "is_encoder_decoder", False):
        return False  # the decoder's inputs are the labels, shifted already
    kind, known = loss_kind(unwrapped), _transformers_losses()
    return kind is None or known.get(kind) is known.get("ForCausalLM")


def loss_kind(model: nn.Module) -> str | None:
    """Return transformers' name of a model's kind of loss, such as ``"ForMaskedLM"``; None where its class has none.

    transformers goes by the class's own name, which a user's descendant of one need not have.
    """
    found: str | None = getattr(model, "loss_type", None)
    names = (cls.__name__ for cls in type(model).__mro__)
    return found or next((kind for name in names for kind in _transformers_losses() if kind in name), None)


def _transformers_losses() -> Mapping[str, Any]:
    """The losses of transformers by their kind; none where it is not loaded, so that no model is of it."""
    if "transformers" not in sys.modules:
        return {}
    from transformers.loss.loss_utils import LOSS_MAPPING

    return dict(LOSS_MAPPING)


def objectives(*, shifted: bool) -> Iterator[Objective]:
    """Yield the kinds, the more likely first where shapes alone do not tell.

    Parameters
    ----------
    shifted
        As :func:`shifts_labels` says of the model.
    """
    yield SHIFTED_BEFORE
    yield from (NEXT_TOKEN, SAME_POSITION) if shifted else (SAME_POSITION, NEXT_TOKEN)
    yield from (ONE_LABEL, SQUARED_ERROR, MANY_LABELS, ANSWER_SPAN)


# ---------------------------------------------------------------------- a label for each position


def _tokens(logits: torch.Tensor, target: torch.Tensor) -> Paired:
    """Pair logits (b, t, V) with the labels of the same positions, (b, t)."""

    def sums() -> torch.Tensor:
        # One sample at a time: a float32 copy of all logits would be the largest tensor of an evaluation.
        each = [
            functional.cross_entropy(row.float(), aim, ignore_index=IGNORED, reduction="none").double().sum()
            for row, aim in zip(logits.detach(), target.to(logits.device), strict=True)
        ]
        return torch.stack(each)

    return Paired((target != IGNORED).sum(dim=1), sums, costly=True)


def _positions(output: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Logits of all positions and their labels; vectors that prompt learning puts in front of a text have none."""
    logits = part(output, "logits")
    if not isinstance(labels, torch.Tensor) or not isinstance(logits, torch.Tensor):
        return None
    if logits.ndim != 3 or labels.ndim != 2 or len(logits) != len(labels) or labels.is_floating_point():
        return None
    gap = logits.shape[1] - labels.shape[1]
    return None if gap < 0 else (logits, functional.pad(labels, (gap, 0), value=IGNORED))


def _shifted_before(output: Any, inputs: Mapping[str, Any]) -> Paired | None:
    found = _positions(output, inputs.get("shift_labels"))
    return None if found is None else _tokens(*found)


def _next_token(output: Any, inputs: Mapping[str, Any]) -> Paired | None:
    found = _positions(output, inputs.get("labels"))
    return None if found is None else _tokens(found[0][:, :-1], found[1][:, 1:])


def _same_position(output: Any, inputs: Mapping[str, Any]) -> Paired | None:
    found = _positions(output, inputs.get("labels"))
    return None if found is None else _tokens(*found)


# ---------------------------------------------------------------------- labels of a whole sample


def _one_label(output: Any, inputs: Mapping[str, Any]) -> Paired | None:
    logits, labels = part(output, "logits"), inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or not isinstance(logits, torch.Tensor) or labels.is_floating_point():
        return None
    if logits.ndim != 2 or logits.shape[1] < 2 or labels.numel() != len(logits) or labels.ndim > 2:
        return None
    target = labels.reshape(-1).to(logits.device)

    def sums() -> torch.Tensor:
        scores = logits.detach().float()
        return functional.cross_entropy(scores, target, ignore_index=IGNORED, reduction="none").double()

    return Paired((target != IGNORED).long(), sums)


def _of_values(output: Any, inputs: Mapping[str, Any], each: Callable[..., torch.Tensor]) -> Paired | None:
    """Pair each of a sample's outputs, (b,) or (b, C), with a value of its own."""
    logits, labels = part(output, "logits"), inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or not isinstance(logits, torch.Tensor):
        return None
    if logits.ndim not in (1, 2) or labels.ndim not in (1, 2) or labels.shape[0] != len(logits):
        return None
    if labels.numel() != logits.numel():
        return None
    outputs = logits.detach().float().reshape(len(logits), -1)
    values = labels.to(logits.device).float().reshape(len(logits), -1)
    counts = torch.full((len(logits),), outputs.shape[1], dtype=torch.int64, device=logits.device)
    return Paired(counts, lambda: each(outputs, values, reduction="none").double().sum(dim=1))


def _squared_error(output: Any, inputs: Mapping[str, Any]) -> Paired | None:
    return _of_values(output, inputs, functional.mse_loss)


def _many_labels(output: Any, inputs: Mapping[str, Any]) -> Paired | None:
    return _of_values(output, inputs, functional.binary_cross_entropy_with_logits)


def _answer_span(output: Any, inputs: Mapping[str, Any]) -> Paired | None:
    ends = [(part(output, f"{end}_logits"), inputs.get(f"{end}_positions")) for end in ("start", "end")]
    losses, valid = [], []
    for logits, at in ends:
        if not isinstance(logits, torch.Tensor) or not isinstance(at, torch.Tensor) or logits.ndim != 2:
            return None
        beyond = logits.shape[1]  # an answer outside the text is left out
        target = at.reshape(-1).clamp(0, beyond).to(logits.device)
        if len(target) != len(logits):
            return None
        scores = logits.detach().float()
        losses.append(functional.cross_entropy(scores, target, ignore_index=beyond, reduction="none").double())
        valid.append((target != beyond).long())
    return Paired(
        valid[0] + valid[1],
        lambda: losses[0] + losses[1],
        mean=lambda: (losses[0].sum() / valid[0].sum() + losses[1].sum() / valid[1].sum()) / 2,
    )


NEXT_TOKEN = Objective(_next_token, loss=PLAIN.loss, tokens=PLAIN.tokens, score=PLAIN.score)
SHIFTED_BEFORE = Objective(_shifted_before, loss=PLAIN.loss, tokens=PLAIN.tokens, score=PLAIN.score)
SAME_POSITION = Objective(
    _same_position,
    loss="mean negative log-likelihood per labeled position (labels are not shifted), nats",
    tokens="positions with a label, the first one too",
    score="mean negative log-likelihood per labeled position (labels are not shifted), nats",
)
ONE_LABEL = Objective(
    _one_label,
    loss="mean negative log-likelihood of a sample's label, nats",
    tokens="samples with a label, each counts 1",
    score="negative log-likelihood of the sample's label, nats",
)
SQUARED_ERROR = Objective(
    _squared_error,
    loss="mean squared error per value",
    tokens="values to be predicted",
    score="mean squared error over the sample's values",
)
MANY_LABELS = Objective(
    _many_labels,
    loss="mean binary cross-entropy per label, nats",
    tokens="labels, each yes or no",
    score="mean binary cross-entropy over the sample's labels, nats",
)
ANSWER_SPAN = Objective(
    _answer_span,
    loss="mean negative log-likelihood per end of an answer, nats",
    tokens="ends of answers inside the text, a start and an end each",
    score="mean negative log-likelihood over the answer's start and end, nats",
)
