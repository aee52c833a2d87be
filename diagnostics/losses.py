"""Losses per sample, read off a forward pass that happened anyway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from diagnostics.batch_ids import IGNORED
from diagnostics.kinds import TrainerKind


@dataclass(frozen=True, eq=False)
class SampleLosses:
    """Negative log-likelihood of each sample of a micro-batch.

    Attributes
    ----------
    nll
        Shape ``(b,)``, float64, summed over the sample's trained tokens, in nats; None where the forward pass does not
        tell samples apart.
    tokens
        Shape ``(b,)``, int64, the tokens that the sum runs over.
    total
        Shape ``()``, float64, the sum over the micro-batch; None where the forward pass does not tell.
    """

    nll: torch.Tensor | None
    tokens: torch.Tensor
    total: torch.Tensor | None


def sample_losses(output: Any, inputs: Mapping[str, Any], *, exact: bool) -> SampleLosses | None:
    """Read per-sample losses off a causal language model's output.

    Parameters
    ----------
    output
        What the model returned: TRL's fused output with ``log_probs`` and ``label_mask``, or an output with ``logits``.
    inputs
        The keyword arguments of the call, among them ``labels`` of shape ``(b, t)``.
    exact
        Whether to spend a pass over the logits where the output carries no log-probabilities. Without it the total
        comes from the model's own mean loss and single samples stay unknown.

    Returns
    -------
    SampleLosses or None
        None where the call had no labels of a causal language model.
    """
    log_probs, mask = getattr(output, "log_probs", None), getattr(output, "label_mask", None)
    if log_probs is not None and mask is not None:
        nll = -(log_probs.detach().double() * mask).sum(dim=1)
        return SampleLosses(nll=nll, tokens=mask.sum(dim=1), total=nll.sum())
    labels, logits = inputs.get("labels"), getattr(output, "logits", None)
    if labels is None or logits is None or logits.ndim != 3 or logits.shape[:2] != labels.shape:
        return None
    target = labels[:, 1:]
    tokens = (target != IGNORED).sum(dim=1)
    if exact:
        # One sample at a time: a float32 copy of all logits would be the largest tensor of the evaluation.
        sums = [
            functional.cross_entropy(row[:-1].float(), aim, ignore_index=IGNORED, reduction="none").double().sum()
            for row, aim in zip(logits.detach(), target, strict=True)
        ]
        nll = torch.stack(sums)
        return SampleLosses(nll=nll, tokens=tokens, total=nll.sum())
    loss = getattr(output, "loss", None)
    if loss is None:
        return SampleLosses(nll=None, tokens=tokens, total=None)
    divisor = inputs.get("num_items_in_batch")
    divisor = tokens.sum() if divisor is None else divisor
    return SampleLosses(nll=None, tokens=tokens, total=loss.detach().double() * divisor)


def held_out_scores(output: Any, inputs: Mapping[str, Any], kind: TrainerKind) -> list[float | None] | None:
    """Score each sample of an evaluation's forward pass, in the way that suits the trainer.

    Parameters
    ----------
    output, inputs
        As for :func:`sample_losses`.
    kind
        ``score_from`` ``"loss"``: the mean negative log-likelihood per token; ``"log_probs"``: the log-likelihood of a
        sample's first sequence less that of its second, from TRL's fused output; ``"logits"``: the same of a reward
        model's outputs, shape ``(2b, 1)``.

    Returns
    -------
    list or None
        One score a sample, None for one that has no token; no list where the output does not tell.
    """
    if kind.score_from == "loss":
        losses = sample_losses(output, inputs, exact=True)
        if losses is None or losses.nll is None:
            return None
        pairs = zip(losses.nll.tolist(), losses.tokens.tolist(), strict=True)
        return [nll / tokens if tokens else None for nll, tokens in pairs]
    value = getattr(output, kind.score_from or "", None)
    if not isinstance(value, torch.Tensor) or value.ndim != 2 or len(value) % 2:
        return None
    first, second = value.detach().double().sum(dim=1).chunk(2)
    margins: list[float | None] = (first - second).tolist()
    return margins
