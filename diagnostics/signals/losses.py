"""Losses per sample, read off a forward pass that happened anyway."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diagnostics.signals.objectives import NEXT_TOKEN, Objective, Paired, objectives, part, shifts_labels
from sdo.trainers.trainer_types import TrainerKind

# A loss recomputed from the same logits differs by rounding alone: relative, by whether it was made in float32.
_ROUNDING, _ROUNDING_OF_HALF = 1e-4, 2e-2
# Micro-batches that are compared until it is known what the model divides its loss by.
_COMPARED = 8
_LABELS = ("labels", "shift_labels", "start_positions")


@dataclass(frozen=True, eq=False)
class SampleLosses:
    """Losses of each sample of a micro-batch; negative log-likelihoods in nats unless the model has another loss.

    Attributes
    ----------
    nll
        Shape ``(b,)``, float64, summed over the sample's trained tokens; None where the forward pass does not tell
        samples apart.
    tokens
        Shape ``(b,)``, int64, the tokens that the sum runs over, or what the loss is a mean of instead.
    total
        Shape ``()``, float64, the sum over the micro-batch; None where the forward pass does not tell.
    """

    nll: torch.Tensor | None
    tokens: torch.Tensor
    total: torch.Tensor | None


class LossReader:
    """Reads per-sample losses off a model's outputs, once its own loss has shown what it is the mean of.

    The first forward passes are recomputed from their outputs in each way whose shapes fit (see
    ``objectives``) and compared with the loss that the model returned; where none of them gives that
    loss, none is recorded.

    Parameters
    ----------
    model
        The model, whose class says which way is tried first.
    kind
        The trainer's kind.

    Attributes
    ----------
    shifts
        Whether position t is compared with label t + 1: what the model's class says.
    objective
        What was found; None before the first labels, and where nothing agrees.
    disagrees
        Whether none of the known kinds gives the model's own loss.
    reason
        Why no loss could be read off the latest forward pass that should have had one; None where one was.
    """

    def __init__(self, model: nn.Module, kind: TrainerKind) -> None:
        # Where the trainer makes the loss itself, the model is a causal language model that it takes from TRL.
        self.shifts = kind.loss_from != "forward" or shifts_labels(model)
        self.objective: Objective | None = None
        self.reason: str | None = None
        self._coefficient = float(getattr(getattr(model, "config", None), "router_aux_loss_coef", 0.0) or 0.0)
        self.disagrees = False
        self._balances = False  # whether the model adds the loss of its router
        self._by_items: bool | None = None  # whether it divides by num_items_in_batch where it is given; None: unknown
        self._to_compare = _COMPARED

    def read(self, output: Any, inputs: Mapping[str, Any], *, exact: bool) -> SampleLosses | None:
        """Read the losses of one forward pass.

        Parameters
        ----------
        output
            What the model returned: TRL's fused output with ``log_probs`` and ``label_mask``, or an output with a loss
            and what it was made from.
        inputs
            The keyword arguments of the call.
        exact
            Whether to spend a pass over the logits of a vocabulary where the output carries no log-probabilities.
            Without it the total comes from the model's own mean loss and single samples stay unknown.

        Returns
        -------
        SampleLosses or None
            None, and a ``reason``, where it is not known what the loss is made of.
        """
        log_probs, mask = part(output, "log_probs"), part(output, "label_mask")
        if log_probs is not None and mask is not None:
            self.objective, self.reason = NEXT_TOKEN, None
            nll = -(log_probs.detach().double() * mask).sum(dim=1)
            return SampleLosses(nll=nll, tokens=mask.sum(dim=1), total=nll.sum())
        if all(inputs.get(name) is None for name in _LABELS):
            if self.objective is None:  # else one forward pass of several had them
                self.reason = (
                    "the model's call has no labels: the trainer keeps them for a loss of its own "
                    "(label_smoothing_factor, compute_loss_func or a compute_loss of yours), or the data have none by "
                    "that name"
                )
            return None
        loss = part(output, "loss")
        if not self.disagrees and (self.objective is None or self._undecided(inputs)):
            self._compare(output, inputs, loss)
        if self.disagrees:
            return None
        paired = self._pair(output, inputs)
        if paired is None:
            return None
        if not isinstance(loss, torch.Tensor):
            self.reason = "the model returned no loss, with which losses read off its outputs could be compared"
            return SampleLosses(nll=None, tokens=paired.counts, total=None)
        self.reason = None
        if exact or not paired.costly:
            nll = paired.sums()
            return SampleLosses(nll=nll, tokens=paired.counts, total=nll.sum())
        count, items = paired.counts.sum(), inputs.get("num_items_in_batch")
        divisor = count if items is None or self._by_items is False else items
        own = (loss.detach().double() - self._extra(output)) * divisor
        # A mean over no token is 0 / 0, and adds nothing.
        return SampleLosses(nll=None, tokens=paired.counts, total=torch.where(count.to(own.device) > 0, own, 0.0))

    def meaning(self) -> dict[str, str | None]:
        """Return what loss, tokens and score mean, in words, as far as it is known; None with a reason where it is not.

        Returns
        -------
        dict
            Some of ``loss``, ``tokens`` and ``score``; ``loss_reason`` and ``score_reason`` where these are None.
        """
        found = self.objective
        if found is not None and not self.disagrees:
            return {"loss": found.loss, "tokens": found.tokens, "score": found.score}
        if self.reason is not None:
            tokens = "tokens with a label, but for the first of each row" if self.shifts else "positions with a label"
            unknown = {"loss": None, "loss_reason": self.reason, "score": None, "score_reason": self.reason}
            return {**unknown, "tokens": tokens}
        return {}

    def _undecided(self, inputs: Mapping[str, Any]) -> bool:
        return self._by_items is None and self._to_compare > 0 and inputs.get("num_items_in_batch") is not None

    def _pair(self, output: Any, inputs: Mapping[str, Any]) -> Paired | None:
        """Pair outputs and labels in the way that was found, or before in the likeliest one that fits."""
        known = objectives(shifted=self.shifts) if self.objective is None else [self.objective]
        paired = next((found for one in known if (found := one.pair(output, inputs)) is not None), None)
        if paired is None:
            self.reason = (
                f"the outputs of {type(output).__name__} and the labels are of no kind that is known here (a label for "
                "each position, one or several for a sample, a value, or an answer's start and end)"
            )
        return paired

    def _extra(self, output: Any) -> torch.Tensor | float:
        """What a model adds to the loss of its outputs: that of a mixture of experts' router."""
        extra = part(output, "aux_loss")
        return extra.detach().double() * self._coefficient if self._balances and extra is not None else 0.0

    def _compare(self, output: Any, inputs: Mapping[str, Any], loss: Any) -> None:
        """Find which kind of loss gives the model's own."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not math.isfinite(own := float(loss.detach())):
            return
        rounding = _ROUNDING if loss.dtype in (torch.float32, torch.float64) else _ROUNDING_OF_HALF
        items, aux = inputs.get("num_items_in_batch"), part(output, "aux_loss")
        extra = 0.0 if not isinstance(aux, torch.Tensor) else float(aux.detach()) * self._coefficient
        tried = []
        known = objectives(shifted=self.shifts) if self.objective is None else [self.objective]
        for objective in known:
            paired = objective.pair(output, inputs)
            if paired is None:
                continue
            count = int(paired.counts.sum())
            if not count and own == 0.0:
                return  # nothing is trained here; the next batch tells
            if not count:
                continue
            total = float(paired.sums().sum())
            mean = total / count if paired.mean is None else float(paired.mean())
            by_items = mean if items is None else total / float(items)
            for added in (0.0, extra) if extra else (0.0,):
                limit = rounding * max(abs(own), abs(added)) + 1e-6
                agree = abs(own - added - mean) <= limit, abs(own - added - by_items) <= limit
                if any(agree):
                    self._found(objective, balances=bool(added), agree=agree, items=items, count=count)
                    return
            tried.append(f"{mean:.6g} as {objective.loss}")
        if tried:
            self.disagrees = True
            self.reason = (
                f"the model's own loss is {own:.6g}, and its outputs give {', or '.join(tried)}: it has a loss of "
                "another kind, or more in it"
            )

    def _found(self, objective: Objective, *, balances: bool, agree: tuple[bool, bool], items: Any, count: int) -> None:
        self.objective, self._balances = objective, balances
        self._to_compare -= 1
        if items is not None and agree[0] != agree[1]:
            self._by_items = agree[1]


def held_out_scores(
    output: Any, inputs: Mapping[str, Any], kind: TrainerKind, reader: LossReader
) -> list[float | None] | None:
    """Score each sample of an evaluation's forward pass, in the way that suits the trainer.

    Parameters
    ----------
    output, inputs
        As for :meth:`LossReader.read`.
    kind
        ``score_from`` ``"loss"``: the mean loss per token, or of what the reader found; ``"log_probs"``: the
        log-likelihood of a sample's first sequence less that of its second, from TRL's fused output; ``"logits"``: the
        same of a reward model's outputs, shape ``(2b, 1)``.
    reader
        Of the evaluation's losses.

    Returns
    -------
    list or None
        One score a sample, None for one that has no token; no list where the output does not tell.
    """
    if kind.score_from == "loss":
        losses = reader.read(output, inputs, exact=True)
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
