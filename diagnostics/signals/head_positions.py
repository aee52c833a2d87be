"""Positions that a language-model head scored, and the gradient of the loss with respect to their logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sdo.errors import InputError

BLOCK_ENTRIES = 1 << 24  # logits in float32 at a time: 64 MiB
KEPT_ENTRIES = 1 << 25  # up to here the logits are kept between the two passes over the vocabulary: 128 MiB
# Mean difference of log-probabilities, in nats, that rounding explains; another form of the logits makes more.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}
_ROUNDING_OF_HALF = 0.05


@dataclass(frozen=True)
class LogitForm:
    """How logits follow from the head's product: ``softcap tanh(scale z / softcap) / temperature``.

    Attributes
    ----------
    scale, softcap
        As the model's configuration has them.
    temperature
        As the trainer divides the logits by it.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, config: Any, temperature: float = 1.0) -> LogitForm:
        """Read it off a model's configuration; the names are those of the families of transformers."""
        text = config.get_text_config()
        factors = ("logit_scale", "output_multiplier", "lm_head_multiplier")
        scale = next((getattr(text, name) for name in factors if getattr(text, name, None) is not None), None)
        if scale is None and getattr(text, "logits_scaling", None) is not None:
            scale = text.logits_scaling if text.model_type == "hyperclovax" else 1 / text.logits_scaling
        softcap = getattr(text, "final_logit_softcapping", None)
        return cls(scale=1.0 if scale is None else float(scale), softcap=softcap, temperature=temperature)

    def apply(self, product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return the logits and their slope with respect to the product, entry by entry."""
        scaled, slope = product * self.scale, self.scale / self.temperature
        if self.softcap is None:
            return scaled / self.temperature, slope
        bent = torch.tanh(scaled / self.softcap)
        return self.softcap * bent / self.temperature, (1 - bent.square()) * slope


class FusedPositions:
    """Positions that TRL's fused loss scored: their logits are computed anew, a block of the vocabulary at a time.

    Parameters
    ----------
    head
        The language-model head.
    form
        How logits follow from its product.
    dtype
        That of the product.
    states
        (T, H), what entered the head.
    targets
        (T,) int64, the labels.
    by_log_prob
        (T,) float32, dL / d log p of the label.
    by_entropy
        (T,) float32, dL / d entropy of the position; None where the loss has none.

    Attributes
    ----------
    log_probs
        (T,) float32, log p of the labels, for comparison with the trainer's own.
    """

    def __init__(
        self,
        head: Any,
        form: LogitForm,
        dtype: torch.dtype,
        states: torch.Tensor,
        targets: torch.Tensor,
        by_log_prob: torch.Tensor,
        by_entropy: torch.Tensor | None,
    ) -> None:
        self.states, self._targets = states.float(), targets
        self._head, self._form, self._dtype = head, form, dtype
        self._input = states.to(dtype)
        self._by_log_prob, self._by_entropy = by_log_prob, by_entropy
        self._kept: list[_Block] | None = None
        if len(head.weight) * len(targets) <= KEPT_ENTRIES:
            self._kept = list(self._compute())
        parts, score = [], torch.zeros_like(by_log_prob)
        for first, logits, _ in self._blocks():
            parts.append(torch.logsumexp(logits, dim=0))
            row, column = self._own(first, len(logits))
            score[column] = logits[row, column]
        self._log_z = torch.logsumexp(torch.stack(parts), dim=0)
        self.log_probs = score - self._log_z
        if by_entropy is not None:
            means = [((logits - self._log_z).exp() * logits).sum(dim=0) for _, logits, _ in self._blocks()]
            self._entropy = self._log_z - torch.stack(means).sum(dim=0)

    def gradients(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield dL / d product in blocks of the vocabulary: the first row, and (rows, T) float32."""
        for first, logits, slope in self._blocks():
            log_p = logits - self._log_z
            p = log_p.exp()
            by_logit = p * -self._by_log_prob
            row, column = self._own(first, len(logits))
            by_logit[row, column] += self._by_log_prob[column]
            if self._by_entropy is not None:
                by_logit -= self._by_entropy * p * (log_p + self._entropy)
            yield first, by_logit * slope

    def _own(self, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and columns of a block at which labels stand."""
        column = ((self._targets >= first) & (self._targets < first + rows)).nonzero()[:, 0]
        return self._targets[column] - first, column

    def _blocks(self) -> Iterator[_Block]:
        return self._compute() if self._kept is None else iter(self._kept)

    def _compute(self) -> Iterator[_Block]:
        weight, bias = self._head.weight.detach(), self._head.bias
        for rows in _row_blocks(len(weight), len(self._targets)):
            product = weight[rows].to(self._dtype) @ self._input.T
            if bias is not None:
                product += bias.detach()[rows, None].to(self._dtype)
            yield rows.start, *self._form.apply(product.float())


class CalledPositions:
    """Positions of a head that was called: the gradient of its output is there.

    Parameters
    ----------
    states
        (T, H), what entered the head.
    by_product
        (T, V), the gradient of what it returned.
    """

    def __init__(self, states: torch.Tensor, by_product: torch.Tensor) -> None:
        self.states, self._by_product = states.float(), by_product

    def gradients(self) -> Iterator[tuple[int, torch.Tensor]]:
        """As :meth:`FusedPositions.gradients`."""
        for rows in _row_blocks(self._by_product.shape[1], len(self._by_product)):
            yield rows.start, self._by_product[:, rows].T.float()


_Block = tuple[int, torch.Tensor, torch.Tensor | float]  # first row, logits, their slope
Positions = FusedPositions | CalledPositions


def _row_blocks(rows: int, positions: int) -> Iterator[slice]:
    height = max(1, BLOCK_ENTRIES // max(1, positions))
    return (slice(first, min(first + height, rows)) for first in range(0, rows, height))


def require_same(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse a head whose logits are made in another way than is known here."""
    known = torch.isfinite(expected)  # a loss that is no number says nothing of the head
    difference = float((found - expected)[known].abs().mean()) if bool(known.any()) else 0.0
    if not difference <= _ROUNDING.get(dtype, _ROUNDING_OF_HALF):
        raise InputError(
            f"'head_only' cannot be rebuilt: log-probabilities made from the head's weight differ by {difference:.2g} "
            "nats from the trainer's; expected the same up to rounding, so this model makes its logits in a way that "
            "is not known here; fix: leave head_only out of signals"
        )
