"""Losses per sample, read off a forward pass that happened anyway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from diagnostics.batch_ids import IGNORED


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
