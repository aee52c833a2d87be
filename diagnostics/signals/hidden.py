"""The ``hidden`` signal: the loss's gradient with respect to the final norm's output, summed over positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from diagnostics.signals.base import Signal, SignalContext, StepFacts, StepGradient
from diagnostics.signals.micro_batch import MicroBatch
from diagnostics.signals.objectives import loss_kind
from diagnostics.signals.sample_vectors import SampleVectors
from sdo.errors import InputError


def find_decoder(model: nn.Module) -> tuple[nn.Module, int]:
    """Find the module whose output enters the language-model head, and its width H: the decoder, ending in its norm.

    Parameters
    ----------
    model
        A model of transformers, with or without a PEFT wrapper. Of an encoder-decoder it is the decoder, whose states
        enter the head; of a model without either, the encoder.

    Raises
    ------
    InputError
        If the model has no separate decoder, or its configuration does not tell how wide the states are.
    """
    unwrap: Any = getattr(model, "get_base_model", None)
    unwrapped: Any = model if unwrap is None else unwrap()
    decoder = getattr(unwrapped, "base_model", unwrapped)
    config: Any = getattr(unwrapped, "config", None)
    if decoder is unwrapped and getattr(config, "is_encoder_decoder", False):
        decoder = unwrapped.get_decoder()  # encoder and decoder lie beside the head, as in T5
    if not isinstance(decoder, nn.Module) or decoder is unwrapped:
        raise InputError(
            f"{type(unwrapped).__name__} has no decoder apart from its head, so that 'hidden' cannot be caught; "
            "expected a causal language model of transformers; fix: signals=['weight']"
        )
    width = getattr(config.get_text_config(), "hidden_size", None) if hasattr(config, "get_text_config") else None
    if not isinstance(width, int):
        raise InputError(
            f"the configuration of {type(unwrapped).__name__} has no hidden_size, so that 'hidden' cannot be caught; "
            "expected a model whose states are vectors of one width; fix: signals=['weight']"
        )
    return decoder, width


def final_states(output: Any) -> Any:
    """Return the hidden states, shape (sequences, T, H), in a decoder's output or tuple; None where there are none."""
    hidden = getattr(output, "last_hidden_state", None)
    return output[0] if hidden is None and isinstance(output, tuple) else hidden


class Hidden(Signal):
    """The sum over a sample's positions of the loss's gradient at the final norm's output, one row a sample."""

    word: ClassVar[str] = "hidden"
    silent: ClassVar[str] = "the decoder's output was not part of the loss, or gradients were disabled"

    def of(self, context: SignalContext) -> HiddenCapture:
        """Find the decoder, see :func:`find_decoder`."""
        if loss_kind(context.model) == "ForQuestionAnswering":
            raise InputError(
                "signal 'hidden' does not exist for a model of answers' starts and ends: its loss is a softmax over "
                "the positions, so that their gradients sum to zero; fix: signals=['weight']"
            )
        decoder, width = find_decoder(context.model)
        return HiddenCapture(self, context, decoder, width)


class HiddenCapture(SampleVectors):
    """Catches the gradient at the decoder's output, summed over a sample's positions."""

    def __init__(self, signal: Signal, context: SignalContext, decoder: nn.Module, width: int) -> None:
        super().__init__(signal, context, width)
        self.decoder = decoder

    def register(self) -> None:
        """Hook the decoder."""
        self._handles = [self.decoder.register_forward_hook(self._on_forward)]

    def parts(self, micros: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        """Sum of the gradients, shape ``(H,)``; where samples are recorded also that of their unit vectors."""
        step, _ = self.context.current()
        unit, count = self._unit_sum(micros) if self.context.with_samples(step) else (None, 0)
        unit = torch.zeros(self.sketch.shape) if unit is None else unit
        return super().parts(micros) | {"count": torch.tensor(count), "unit": unit}

    def step(
        self, total: Mapping[str, torch.Tensor], micros: Sequence[MicroBatch], facts: StepFacts
    ) -> StepGradient | None:
        """Return the step's gradient; ``batch_coherence`` is the mean pairwise cosine of its samples."""
        found = super().step(total, micros, facts)
        coherence = None if found is None else mean_pairwise_cosine(total["unit"], int(total["count"]))
        return found if found is None or coherence is None else replace(found, figures={"batch_coherence": coherence})

    def needed_parameters(self) -> list[nn.Parameter]:
        """Those of the decoder: a gradient reaches its output where one of them asks for it."""
        own = [p for p in self.decoder.parameters() if p.requires_grad] or list(self.decoder.parameters())
        return own[::-1]

    def _unit_sum(self, micros: Sequence[MicroBatch]) -> tuple[torch.Tensor | None, int]:
        """Sum of the samples' unit gradients, shape (H,), float64, and how many have a direction."""
        caught = [(micro.caught[self.name], micro.tied) for micro in micros if self.name in micro.caught]
        rows = [rows[~torch.tensor(tied)].double() for rows, tied in caught]
        if not rows:
            return None, 0
        norms = torch.linalg.vector_norm(torch.cat(rows), dim=1)
        usable = torch.isfinite(norms) & (norms > 0)
        unit = torch.cat(rows)[usable] / norms[usable, None]
        return unit.sum(dim=0), len(unit)

    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        hidden = final_states(output)
        _, micros = self.context.current()
        if hidden is None or not hidden.requires_grad or not micros:
            return
        micro, sequences = micros[-1], self.context.sequences
        samples = len(micro.sample_ids)
        if hidden.ndim != 3 or hidden.shape[0] != sequences * samples:
            rows = "one row" if sequences == 1 else f"{sequences} rows"
            raise InputError(
                f"the hidden states have shape {tuple(hidden.shape)} for {samples} samples; expected {rows} a sample; "
                "fix: padding_free=False, or signals=['weight']"
            )

        def on_gradient(grad: torch.Tensor) -> None:
            with self.context.clock():
                self.add(micro, grad.detach().sum(dim=1, dtype=torch.float64))

        hidden.register_hook(on_gradient)


def mean_pairwise_cosine(total: torch.Tensor, count: int) -> float | None:
    """Mean pairwise cosine of m unit vectors u: ``(|sum u|**2 - m) / (m (m - 1))``, None with fewer than two.

    `analysis.batch_coherence` says the same of a stored run; source as there.
    """
    if count < 2:
        return None
    return min(1.0, max(-1.0, (float(total.square().sum()) - count) / (count * (count - 1))))
