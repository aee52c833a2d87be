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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from diagnostics.signals.weight import Clock, Current, HiddenTap, MicroBatch, WeightTap, final_states, find_decoder
from diagnostics.sketches.accuracy import SketchCheck, device_norm, exact_norm
from diagnostics.sketches.count_sketch import GradientSketch
from sdo.errors import InputError
from sdo.trainers.ids import IGNORED
from sdo.trainers.trainer_types import TrainerKind

BLOCK_ENTRIES = 1 << 24  # logits in float32 at a time: 64 MiB
KEPT_ENTRIES = 1 << 25  # up to here the logits are kept between the two passes over the vocabulary: 128 MiB
CHUNK_POSITIONS = 2048  # positions whose factors are in use at a time
WHOLE_ENTRIES = 1 << 27  # up to here the gradient itself is built up, for its norm: 512 MiB in float32
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


@dataclass(eq=False)
class HeadTap:
    """Rebuilds the head's own gradient in each backward pass, and keeps its sketches alone.

    Where a step's single samples are recorded there is one sketch a sample, else one for the micro-batch. ``share`` is
    as for ``WeightTap``; with several processes each checks the sketches of its own part.

    The gradient of a head of at most 2²⁷ entries is built up for its exact norm, micro-batch by micro-batch; that of a
    larger one only while its sketch is checked. There, as for single samples, norms come from the factors of positions
    that are not too many: ``|sum of g (x) h|² = sum over s, t of <g_s, g_t> <h_s, h_t>``.
    """

    model: Any
    decoder: nn.Module
    sketch: GradientSketch
    check: SketchCheck | None
    form: LogitForm
    full_precision: bool
    sequences: int
    sample_every: int
    current: Current
    clock: Clock
    share: float = 1.0
    _handles: list[Any] = field(default_factory=list)
    _states: torch.Tensor | None = None  # of the forward pass under way
    _dtype: torch.dtype = torch.float32
    _before: torch.Tensor | None = None  # gradient of the step's micro-batches but the latest
    _latest: torch.Tensor | None = None  # gradient of the latest micro-batch

    @classmethod
    def of(
        cls,
        model: Any,
        k: int,
        current: Current,
        clock: Clock,
        share: float = 1.0,
        *,
        kind: TrainerKind,
        args: Any,
        every: int,
    ) -> HeadTap:
        """Make the tap of a model's head.

        Parameters
        ----------
        model
            The model in training.
        k
            Length of the sketches.
        current, clock, share
            As for the other taps.
        kind, args
            The trainer's kind and arguments.
        every
            At every n-th step there are rows of single samples; 0 for never.

        Raises
        ------
        InputError
            If the model has no head, or one whose weight is not whole on this device.
        """
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
        sketch = GradientSketch(tuple(weight.shape), k=k, factored=True)
        temperature = 1.0 if kind.temperature is None else float(getattr(args, kind.temperature))
        return cls(
            model=model,
            decoder=decoder,
            sketch=sketch,
            check=None if sketch.kind == "identity" else SketchCheck(),
            form=LogitForm.of(model.config, temperature),
            full_precision=bool(getattr(args, "cast_lm_head_to_fp32", False)),
            sequences=kind.sequences,
            sample_every=every,
            current=current,
            clock=clock,
            share=share,
        )

    @property
    def head(self) -> Any:
        """The head, looked up anew: wrappers may exchange it."""
        return self.model.get_output_embeddings()

    def register(self) -> None:
        """Hook decoder, head and model."""
        self._handles = [
            self.decoder.register_forward_hook(self._on_decoder),
            self.head.register_forward_hook(self._on_head),
            self.model.register_forward_hook(self._on_model, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Unhook them."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._states = [], None
        self._forget()

    def fired(self, micros: list[MicroBatch]) -> bool:
        """Whether a gradient reached the head's output, or log-probabilities made from it, in this step."""
        return any(micro.head_only is not None for micro in micros)

    def with_samples(self, step: int) -> bool:
        """Whether the rows of single samples are wanted at a step."""
        return self.sample_every > 0 and step % self.sample_every == 0

    def step_norm(self, micros: list[MicroBatch]) -> float | None:
        """Return the exact 2-norm of the sum of this process's micro-batches' gradients; None where it is not known."""
        norms = [micro.head_norm for micro in micros if micro.head_only is not None]
        if len(norms) == 1:
            return None if norms[0] is None else float(norms[0])
        gradient = self._gradient() if self._is_whole else None
        return None if gradient is None else exact_norm(gradient) * self.share

    def check_step(self, step: int, micros: list[MicroBatch]) -> None:
        """Compare the sketch of a step's gradient with the gradient, which was built up for it, and forget that."""
        parts = [micro.head_only for micro in micros if micro.head_only is not None]
        gradient = self._gradient()
        if self.check is not None and gradient is not None and parts:
            self.check.add(step, gradient, torch.cat(parts).double().sum(dim=0).float())
        self._forget()

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
        _, micros = self.current()
        if not micros or not isinstance(output, torch.Tensor) or not output.requires_grad:
            return
        logits: Any = output
        micro, states = micros[-1], args[0].detach()

        def on_gradient(grad: torch.Tensor) -> None:
            with self.clock():
                grad = grad.detach()
                self._add(micro, (grad != 0).any(dim=-1), lambda at: CalledPositions(states[at], grad[at]))

        logits.register_hook(on_gradient)

    def _on_model(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        states, self._states = self._states, None
        log_probs, entropy = getattr(output, "log_probs", None), getattr(output, "entropy", None)
        _, micros = self.current()
        if states is None or not micros or log_probs is None or not log_probs.requires_grad:
            return
        micro, mask, found = micros[-1], output.label_mask, log_probs.detach()
        labels, dtype = kwargs.get("shift_labels"), torch.float32 if self.full_precision else self._dtype
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
                _require_same(made.log_probs, found[at], dtype)
                return made

            with self.clock():
                used = by_log_prob != 0 if by_entropy is None else (by_log_prob != 0) | (by_entropy != 0)
                self._add(micro, used & mask, positions)

        tensors = [log_probs] if entropy is None or not entropy.requires_grad else [log_probs, entropy]
        torch.autograd.graph.register_multi_grad_hook(tensors, on_gradients, mode="all")

    def _add(self, micro: MicroBatch, used: torch.Tensor, positions: Callable[[torch.Tensor], Positions]) -> None:
        """Sketch a micro-batch's positions, (sequences, T) bool, and add them to what it has."""
        step, _ = self.current()
        samples = len(micro.sample_ids)
        if used.ndim != 2 or len(used) != self.sequences * samples:
            raise InputError(
                f"the head saw {tuple(used.shape)} positions for {samples} samples; expected {self.sequences} row(s) a "
                "sample; fix: padding_free=False, or leave head_only out of signals"
            )
        groups, apart = [used], self.with_samples(step)
        if apart:
            owner = torch.arange(len(used), device=used.device) % samples
            groups = [used & (owner == number)[:, None] for number in range(samples)]
        if micro.head_only is None and self._is_whole:
            self._before, self._latest = self._gradient(), None
        # Products of a whole micro-batch's positions are not to cost more than a pass through the head.
        limit = CHUNK_POSITIONS if apart else min(CHUNK_POSITIONS, self.sketch.shape[1])
        if self._is_whole and len(groups) == 1:
            limit = 0
        made = [self._sketch(group.nonzero(as_tuple=True), positions, limit) for group in groups]
        sketches = torch.stack([sketched for sketched, _ in made]) * self.share
        norms = [None if norm is None else norm * self.share for _, norm in made]
        if micro.head_only is not None:  # a second forward pass of the same samples
            sketches, norms = micro.head_only + sketches, [None] * len(made)
        whole = norms[0] if len(made) == 1 else None
        if self._is_whole:
            whole = torch.zeros(()).double() if self._latest is None else device_norm(self._latest) * self.share
        micro.head_only, micro.head_norm = sketches, whole
        micro.head_norms = [whole] if len(made) == 1 else norms

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


Tap = WeightTap | HiddenTap | HeadTap


def _require_same(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse a head whose logits are made in another way than is known here."""
    known = torch.isfinite(expected)  # a loss that is no number says nothing of the head
    difference = float((found - expected)[known].abs().mean()) if bool(known.any()) else 0.0
    if not difference <= _ROUNDING.get(dtype, _ROUNDING_OF_HALF):
        raise InputError(
            f"'head_only' cannot be rebuilt: log-probabilities made from the head's weight differ by {difference:.2g} "
            "nats from the trainer's; expected the same up to rounding, so this model makes its logits in a way that "
            "is not known here; fix: leave head_only out of signals"
        )
