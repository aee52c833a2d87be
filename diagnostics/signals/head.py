"""The ``head_only`` signal: the gradient of the language-model head alone, as if it were not tied to the embeddings.

With logits ``z_t = f(W h_t)`` at position t it is the sum over t of ``g_t (x) h_t``, where ``g_t`` is the gradient of
the loss with respect to ``W h_t``, and it needs no trainable head. Where the head is called, g_t is the gradient of its
output. TRL's fused loss never calls it: there g_t follows from that of the label's log-probability,
``g_t = a_t (onehot(y_t) - softmax(z_t)) f'`` with ``a_t = dL / d log p_t``, and, where the loss has the entropy H, from
``-e_t p_t (log p_t + H_t) f'``. The matrix of a sample is never formed, see
:meth:`diagnostics.sketches.count_sketch.GradientSketch.sketch_product`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from diagnostics.signals.base import Capture, Measured, Signal, SignalContext, StepFacts, StepGradient, summed
from diagnostics.signals.head_positions import CalledPositions, FusedPositions, LogitForm, Positions, require_same
from diagnostics.signals.hidden import final_states, find_decoder
from diagnostics.signals.micro_batch import MicroBatch
from diagnostics.sketches.accuracy import SketchCheck, device_norm, exact_norm
from diagnostics.sketches.count_sketch import GradientSketch
from sdo.errors import InputError
from sdo.trainers.ids import IGNORED
from sdo.trainers.versions import OLDEST_TRL

CHUNK_POSITIONS = 2048  # positions whose factors are in use at a time
WHOLE_ENTRIES = 1 << 27  # up to here the gradient itself is built up, for its norm: 512 MiB in float32


class HeadOnly(Signal):
    """The gradient of the language-model head alone, tied or frozen as it may be."""

    word: ClassVar[str] = "head_only"
    silent: ClassVar[str] = (
        "the loss was made neither from the head's output nor by the fused head of TRL from "
        f"{OLDEST_TRL}; a kernel such as Liger's, or TRL's own of before, hides both"
    )

    def of(self, context: SignalContext) -> HeadCapture:
        """Find the head; refused where there is none, or one whose weight is not whole on this device."""
        model: Any = context.model
        decoder, _ = find_decoder(model)
        get: Any = getattr(model, "get_output_embeddings", None)
        head = None if get is None else get()
        weight = getattr(head, "weight", None)
        if weight is None:
            raise InputError(
                f"{type(model).__name__} has no language-model head, so that 'head_only' does not exist; expected a "
                "causal language model; fix: leave head_only out of signals"
            )
        if weight.ndim != 2 or not weight.numel() or hasattr(weight, "full_tensor"):
            raise InputError(
                "the head's weight is sharded, so that 'head_only' cannot be rebuilt from it; expected it whole on "
                "each device; fix: leave head_only out of signals"
            )
        return HeadCapture(self, context, decoder, tuple(weight.shape))


@dataclass(eq=False)
class _Pass:
    """What a micro-batch left.

    Attributes
    ----------
    sketches
        Shape ``(b, k)``, one row a sample, where the step's samples are recorded, else ``(1, k)``.
    norms
        The exact 2-norms of its rows, shape ``()`` each, on the device; None where they are not known.
    norm
        That of their sum.
    """

    sketches: torch.Tensor
    norms: list[torch.Tensor | None]
    norm: torch.Tensor | None


class HeadCapture(Capture):
    """Rebuilds the head's own gradient in each backward pass, and keeps its sketches alone.

    Where a step's single samples are recorded there is one sketch a sample, else one for the micro-batch. With
    several processes each checks the sketches of its own part.

    The gradient of a head of at most 2²⁷ entries is built up for its exact norm, micro-batch by micro-batch; that of a
    larger one only while its sketch is checked. There, as for single samples, norms come from the factors of positions
    that are not too many: ``|sum of g (x) h|² = sum over s, t of <g_s, g_t> <h_s, h_t>``.
    """

    def __init__(self, signal: Signal, context: SignalContext, decoder: nn.Module, shape: tuple[int, ...]) -> None:
        sketch = GradientSketch(shape, k=context.k, factored=True)
        super().__init__(signal, context, sketch, None if sketch.kind == "identity" else SketchCheck())
        self.decoder = decoder
        self.form = LogitForm.of(context.model.config, context.temperature)
        self._states: torch.Tensor | None = None  # of the forward pass under way
        self._dtype = torch.float32
        self._before: torch.Tensor | None = None  # gradient of the step's micro-batches but the latest
        self._latest: torch.Tensor | None = None  # gradient of the latest micro-batch

    @property
    def head(self) -> Any:
        """The head, looked up anew: wrappers may exchange it."""
        model: Any = self.context.model
        return model.get_output_embeddings()

    def register(self) -> None:
        """Hook decoder, head and model."""
        self._handles = [
            self.decoder.register_forward_hook(self._on_decoder),
            self.head.register_forward_hook(self._on_head),
            self.context.model.register_forward_hook(self._on_model, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Unhook them."""
        super().remove()
        self._states = None
        self._forget()

    def parts(self, micros: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        """Sum of the sketches, shape ``(k,)``."""
        return summed("sum", [one.sketches for one in self._passes(micros)], self.sketch.stored)

    def step(
        self, total: Mapping[str, torch.Tensor], micros: Sequence[MicroBatch], facts: StepFacts
    ) -> StepGradient | None:
        """Return the step's gradient, and compare this process's part with its sketch."""
        passes = self._passes(micros)
        norm = self._step_norm(passes) if facts.processes == 1 else None
        gradient = self._gradient()
        if self.check is not None and gradient is not None and passes:
            sketched = torch.cat([one.sketches for one in passes]).double().sum(dim=0).float()
            self.check.add(self.context.current()[0], gradient, sketched)
        self._forget()
        if not total["sum fired"]:
            return None
        return StepGradient(total["sum"], float(total["sum"].norm()) if self.sketch.kind == "identity" else norm)

    def micro_batch(self, micro: MicroBatch) -> Measured | None:
        """Sum over its samples."""
        found: _Pass | None = micro.caught.get(self.name)
        if found is None:
            return None
        whole = found.sketches.double().sum(dim=0)
        return whole, float(whole.norm()) if self.sketch.kind == "identity" else found.norm

    def samples(self, micro: MicroBatch) -> Iterable[Measured] | None:
        """One row a sample."""
        found: _Pass | None = micro.caught.get(self.name)
        return None if found is None else zip(found.sketches, found.norms, strict=True)

    def needed_parameters(self) -> list[nn.Parameter]:
        """Those of the decoder: the head's input asks for a gradient where one of them does."""
        own = [p for p in self.decoder.parameters() if p.requires_grad] or list(self.decoder.parameters())
        return own[::-1]

    def _passes(self, micros: Sequence[MicroBatch]) -> list[_Pass]:
        return [micro.caught[self.name] for micro in micros if self.name in micro.caught]

    def _step_norm(self, passes: Sequence[_Pass]) -> float | None:
        """Return the exact 2-norm of the sum of this process's micro-batches' gradients; None where it is not known."""
        if len(passes) == 1:
            norm = passes[0].norm
            return None if norm is None else float(norm)
        gradient = self._gradient() if self._is_whole else None
        return None if gradient is None else exact_norm(gradient) * self.context.share

    def _gradient(self) -> torch.Tensor | None:
        """The step's gradient so far, shape (V, H), float32, where it is built up."""
        if self._before is not None and self._latest is not None:
            self._before, self._latest = self._before.add_(self._latest), None
        return self._latest if self._before is None else self._before

    def _forget(self) -> None:
        self._before = self._latest = None

    @property
    def _is_whole(self) -> bool:
        """Whether the gradient of each micro-batch and step is built up, so that its norm is known."""
        return self.sketch.kind != "identity" and math.prod(self.sketch.shape) <= WHOLE_ENTRIES

    # ------------------------------------------------------------------ hooks

    def _on_decoder(self, module: nn.Module, args: Any, output: Any) -> None:
        hidden = final_states(output)
        if hidden is None or not torch.is_grad_enabled():
            return
        kind = hidden.device.type
        # As the fused head takes it: the decoder is called under the same autocast.
        self._dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        self._states = hidden.detach()

    def _on_head(self, module: nn.Module, args: Any, output: Any) -> None:
        _, micros = self.context.current()
        if not micros or not isinstance(output, torch.Tensor) or not output.requires_grad:
            return
        logits: Any = output
        micro, states = micros[-1], args[0].detach()

        def on_gradient(grad: torch.Tensor) -> None:
            with self.context.clock():
                grad = grad.detach()
                self._add(micro, (grad != 0).any(dim=-1), lambda at: CalledPositions(states[at], grad[at]))

        logits.register_hook(on_gradient)

    def _on_model(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        states, self._states = self._states, None
        log_probs, entropy = getattr(output, "log_probs", None), getattr(output, "entropy", None)
        _, micros = self.context.current()
        if states is None or not micros or log_probs is None or not log_probs.requires_grad:
            return
        micro, mask, found = micros[-1], output.label_mask, log_probs.detach()
        labels, dtype = kwargs.get("shift_labels"), torch.float32 if self.context.full_precision else self._dtype
        if labels is None:
            # Prompt learning puts vectors in front of the text, which have no label.
            gap = states.shape[1] - kwargs["labels"].shape[1]
            labels, states = functional.pad(kwargs["labels"], (gap, 0), value=IGNORED)[:, 1:], states[:, :-1]

        def on_gradients(grads: Sequence[torch.Tensor | None]) -> None:
            by_log_prob = torch.zeros_like(found) if grads[0] is None else grads[0].detach().float()
            by_entropy = None if len(grads) < 2 or grads[1] is None else grads[1].detach().float()

            def positions(at: torch.Tensor) -> FusedPositions:
                third = None if by_entropy is None else by_entropy[at]
                made = FusedPositions(self.head, self.form, dtype, states[at], labels[at], by_log_prob[at], third)
                require_same(made.log_probs, found[at], dtype)
                return made

            with self.context.clock():
                used = by_log_prob != 0 if by_entropy is None else (by_log_prob != 0) | (by_entropy != 0)
                self._add(micro, used & mask, positions)

        tensors = [log_probs] if entropy is None or not entropy.requires_grad else [log_probs, entropy]
        torch.autograd.graph.register_multi_grad_hook(tensors, on_gradients, mode="all")

    def _add(self, micro: MicroBatch, used: torch.Tensor, positions: Callable[[torch.Tensor], Positions]) -> None:
        """Sketch a micro-batch's positions, (sequences, T) bool, and add them to what it has."""
        step, _ = self.context.current()
        samples = len(micro.sample_ids)
        sequences = self.context.sequences
        if used.ndim != 2 or len(used) != sequences * samples:
            raise InputError(
                f"the head saw {tuple(used.shape)} positions for {samples} samples; expected {sequences} row(s) a "
                "sample; fix: padding_free=False, or leave head_only out of signals"
            )
        groups, apart = [used], self.context.with_samples(step)
        if apart:
            owner = torch.arange(len(used), device=used.device) % samples
            groups = [used & (owner == number)[:, None] for number in range(samples)]
        before: _Pass | None = micro.caught.get(self.name)
        if before is None and self._is_whole:
            self._before, self._latest = self._gradient(), None
        # Products of a whole micro-batch's positions are not to cost more than a pass through the head.
        limit = CHUNK_POSITIONS if apart else min(CHUNK_POSITIONS, self.sketch.shape[1])
        if self._is_whole and len(groups) == 1:
            limit = 0
        made = [self._sketch(group.nonzero(as_tuple=True), positions, limit) for group in groups]
        share = self.context.share
        sketches = torch.stack([sketched for sketched, _ in made]) * share
        norms = [None if norm is None else norm * share for _, norm in made]
        if before is not None:  # a second forward pass of the same samples
            sketches, norms = before.sketches + sketches, [None] * len(made)
        whole = norms[0] if len(made) == 1 else None
        if self._is_whole:
            whole = torch.zeros(()).double() if self._latest is None else device_norm(self._latest) * share
        micro.caught[self.name] = _Pass(sketches, [whole] if len(made) == 1 else norms, whole)

    def _sketch(
        self, at: tuple[torch.Tensor, ...], positions: Callable[..., Positions], limit: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sketch and exact norm, shape (), of the gradient of some positions; no norm of more than ``limit``."""
        device, count = at[0].device, len(at[0])
        total = torch.zeros(self.sketch.stored, dtype=torch.float32, device=device)
        norm = None if count else torch.zeros((), dtype=torch.float64, device=device)
        for start in range(0, count, CHUNK_POSITIONS):
            part = positions(tuple(index[start : start + CHUNK_POSITIONS] for index in at))
            gram = torch.zeros(count, count, dtype=torch.float64, device=device) if count <= limit else None
            total += self.sketch.sketch_product(self._through(part, gram), part.states)
            if gram is not None:
                # |sum of g (x) h|^2 = sum over s, t of <g_s, g_t> <h_s, h_t>
                states = part.states.double()
                norm = (gram * (states @ states.T)).sum().clamp(min=0.0).sqrt()
        return total, norm

    def _through(self, part: Positions, gram: torch.Tensor | None) -> Iterator[tuple[int, torch.Tensor]]:
        """Hand the blocks on, and add up what else is wanted of them."""
        for first, block in part.gradients():
            if gram is not None:
                gram += (block.T @ block).double()
            if self._is_whole or (self.check is not None and not self.check.done):
                if self._latest is None:
                    self._latest = torch.zeros(self.sketch.shape, dtype=torch.float32, device=block.device)
                self._latest[first : first + len(block)].addmm_(block, part.states)
            yield first, block
