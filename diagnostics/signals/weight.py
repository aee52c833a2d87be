"""Which gradient is meant, and how it is caught.

``weight``: the gradient of one named parameter, caught at the parameter, since fused losses never call the head's
module.
``hidden``: the sum over a sample's positions of the loss's gradient with respect to the final norm's output, one row a
sample.
``head_only``: the gradient of the language-model head alone, see :mod:`diagnostics.signals.head`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.state import GradientState
from torch import nn

from diagnostics.signals.losses import SampleLosses
from diagnostics.signals.objectives import loss_kind
from diagnostics.signals.parameter_names import adapter_names, resolve_name
from diagnostics.signals.shards import Place, local_part, place_of
from diagnostics.sketches.accuracy import SketchCheck, device_norm
from diagnostics.sketches.count_sketch import GradientSketch
from sdo.errors import InputError
from sdo.trainers.ids import BatchIds
from sdo.trainers.trainer_types import TrainerKind
from sdo.trainers.versions import OLDEST_TRL

SIGNALS = ("weight", "hidden", "head_only")
DEFAULT_SIGNALS = ("weight", "hidden")
# Why a signal can stay silent.
SILENT = {
    "weight": "its parameter got no gradient in backward: the loss does not reach it, or it is sharded",
    "hidden": "the decoder's output was not part of the loss, or gradients were disabled",
    "head_only": "the loss was made neither from the head's output nor by the fused head of TRL from "
    f"{OLDEST_TRL}; a kernel such as Liger's, or TRL's own of before, hides both",
}


@dataclass(eq=False)
class MicroBatch:
    """What one forward and backward pass left behind.

    Attributes
    ----------
    ids
        The b samples of the micro-batch, and their tokens.
    losses
        Their losses, where the forward pass gave them.
    weight
        Shape ``(k,)``, sketch of the parameter's gradient of this pass alone, as a share of the step's gradient.
    weight_norm
        The 2-norm of that share, exact, shape ``()``, on the device: to read it would wait for all work given to it so
        far.
    hidden
        Shape ``(b, H)``, float32, one gradient row a sample; shares of the step's gradient too.
    head_only
        Sketches of the head's own gradient, again as shares: shape ``(b, k)``, one row a sample, where the step's
        samples are recorded, else ``(1, k)``.
    head_norms
        The exact 2-norms of its rows, shape ``()`` each, on the device; None where they are not known.
    head_norm
        That of their sum.
    """

    ids: BatchIds
    losses: SampleLosses | None = None
    weight: torch.Tensor | None = None
    weight_norm: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    head_only: torch.Tensor | None = None
    head_norms: list[torch.Tensor | None] = field(default_factory=list)
    head_norm: torch.Tensor | None = None

    @classmethod
    def of(cls, ids: BatchIds, kind: TrainerKind, *, shifts: bool = True) -> MicroBatch:
        """Begin a micro-batch; a trainer's kind may know what the batch does not tell of its tokens.

        ``shifts`` is as for :class:`diagnostics.signals.losses.LossReader`.
        """
        if not shifts and ids.labels is not None:
            ids = replace(ids, tokens=ids.labels)
        if ids.tokens is None and kind.positions is not None:
            ids = replace(ids, tokens=(kind.positions,) * len(ids.sample_ids))
        return cls(ids)

    @property
    def sample_ids(self) -> list[int]:
        """The b samples."""
        return list(self.ids.sample_ids)

    @property
    def tokens(self) -> list[int]:
        """Tokens of each sample that carry a loss; zeros where nothing tells."""
        if self.losses is not None:
            counts: list[int] = self.losses.tokens.tolist()
            return counts
        return list(self.ids.tokens or [0] * len(self.ids.sample_ids))

    @property
    def tied(self) -> list[bool]:
        """Which samples have a gradient of zero because the rewards of their group tie."""
        return list(self.ids.tied or [False] * len(self.ids.sample_ids))


Current = Callable[[], tuple[int, list[MicroBatch]]]  # the step under way and its micro-batches so far
Clock = Callable[[], Any]  # a context that counts the time spent in it


@dataclass(frozen=True, eq=False)
class NamedWeight:
    """The parameter that the ``weight`` signal follows.

    Attributes
    ----------
    name
        Its name in ``named_parameters()``.
    parameter
        The tensor.
    tied
        Other names of the same tensor: its gradient is the sum over all of these uses.
    """

    name: str
    parameter: nn.Parameter
    tied: tuple[str, ...]


def find_weight(model: nn.Module, name: str | None = None) -> NamedWeight:
    """Find the parameter to follow.

    Parameters
    ----------
    model
        The model in training.
    name
        A parameter's name, with or without what wrappers add to it (see ``parameter_names.plain_name``); by
        default the last trainable matrix in the model's own order, which under LoRA is one of the adapter's.

    Raises
    ------
    InputError
        If there is no such parameter, several match, or it is frozen; the matches or the nearest trainable names are
        listed.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    trainable = {n: p for n, p in named.items() if p.requires_grad}
    if not trainable:
        raise InputError("the model has no trainable parameter; expected at least one to record")
    if name is None:
        # A tied head is listed last but is the embedding; only a parameter with one name is meant by "the last".
        own = [n for n, _ in model.named_parameters() if n in trainable and named[n].ndim >= 2]
        if not own:
            raise InputError("the model has no trainable matrix; expected one; fix: signals=['hidden']")
        name = own[-1]
    else:
        name = resolve_name(name, list(named), list(trainable), adapter_names(model))
    tied = tuple(n for n, p in named.items() if p is named[name] and n != name)
    return NamedWeight(name=name, parameter=named[name], tied=tied)


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


@dataclass(frozen=True)
class Update:
    """The gradient of the ``weight`` signal as the optimizer is given it: reduced, perhaps clipped, never scaled.

    Attributes
    ----------
    norm
        Its exact 2-norm, shape ``()``, on the device; of a sharded gradient that of this process's part.
    sketch
        Shape ``(k,)``; only where the raw gradient's norm has to be found through it.
    """

    norm: torch.Tensor
    sketch: torch.Tensor | None


@dataclass(eq=False)
class WeightTap:
    """Catches the gradient of one parameter, micro-batch by micro-batch and accumulated.

    Attributes
    ----------
    share
        What this process's gradients are multiplied by to become shares of the step's gradient: one over the number of
        processes, whose mean DDP takes.
    step_norm
        Exact 2-norm of the accumulated gradient before clipping, shape ``()``, on the device; None until the step's
        last backward pass. Of a sharded gradient that of this process's part; left None where this process alone does
        not know it.
    shard
        Shape ``(k,)``, sketch of this process's part of the accumulated gradient of a sharded parameter.
    """

    weight: NamedWeight
    sketch: GradientSketch
    check: SketchCheck | None
    current: Current
    clock: Clock
    place: Place | None = None
    share: float = 1.0
    step_norm: torch.Tensor | None = None
    shard: torch.Tensor | None = None
    _handles: list[Any] = field(default_factory=list)

    @classmethod
    def of(
        cls, model: nn.Module, name: str | None, k: int, current: Current, clock: Clock, share: float = 1.0
    ) -> WeightTap:
        """Make the tap of a parameter, as :func:`find_weight` finds it, with sketches of length k."""
        weight = find_weight(model, name)
        sketch, place = GradientSketch(tuple(weight.parameter.shape), k=k), place_of(weight.parameter)
        check = None if place else SketchCheck()  # no process has the whole of a sharded gradient
        return cls(weight=weight, sketch=sketch, check=check, current=current, clock=clock, place=place, share=share)

    def register(self) -> None:
        """Hook the parameter."""
        parameter: Any = self.weight.parameter
        self._handles = [
            parameter.register_hook(self._on_gradient),
            parameter.register_post_accumulate_grad_hook(self._on_accumulated),
        ]

    def remove(self) -> None:
        """Unhook it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin_step(self) -> None:
        """Forget the step before."""
        self.step_norm = self.shard = None

    def fired(self, micros: list[MicroBatch]) -> bool:
        """Whether the parameter got a gradient in this step."""
        return self.shard is not None or any(micro.weight is not None for micro in micros)

    def look_at_update(self, leads: bool) -> Update | None:
        """Look at the gradient that the optimizer is given, and compare the step's sketch with it.

        Clipping and unscaling multiply all of it by one number, which changes no cosine. Not done in backward, since
        the comparison waits for the device.

        Parameters
        ----------
        leads
            Whether this process writes the step's row.
        """
        grad = self.weight.parameter.grad
        if grad is None:
            return None
        if self.place is not None:
            part = local_part(grad)
            return Update(norm=device_norm(part if self.place.counts else part[:0]), sketch=None)
        step, micros = self.current()
        check = None if self.check is None or self.check.done else self.check
        if self.share == 1.0:
            if check is not None and self.step_norm is not None:
                check.add(step, grad, self.step_sketch(micros).float())
            return Update(norm=device_norm(grad), sketch=None)
        if not leads:
            return None
        sketched = self.sketch.sketch(grad)
        if check is not None:
            check.add(step, grad, sketched)
        return Update(norm=device_norm(grad), sketch=sketched)

    def _on_gradient(self, grad: torch.Tensor) -> None:
        """One backward pass alone; the parts of a shared parameter under reentrant checkpointing come one by one."""
        _, micros = self.current()
        if not micros or self.place is not None:
            return
        with self.clock():
            micro = micros[-1]
            sketched = self.sketch.sketch(grad.detach()) * self.share
            if micro.weight is None:
                micro.weight, micro.weight_norm = sketched, device_norm(grad.detach()) * self.share
            else:
                micro.weight = micro.weight + sketched
                micro.weight_norm = None

    def _on_accumulated(self, parameter: torch.Tensor) -> None:
        """The running sum of the step; after its last micro-batch this is what the optimizer will be given."""
        _, micros = self.current()
        if not micros or not GradientState().sync_gradients or parameter.grad is None:
            return
        with self.clock():
            if self.place is not None:
                part = local_part(parameter.grad)
                if not self.place.counts:
                    part = part[:0]
                self.shard = self.sketch.sketch_shard(part, self.place.offset if self.place.counts else 0)
                self.step_norm = device_norm(part)
            elif self.share == 1.0:
                single = len(micros) == 1 and micros[0].weight_norm is not None
                self.step_norm = micros[0].weight_norm if single else device_norm(parameter.grad)

    def step_sketch(self, micros: list[MicroBatch]) -> torch.Tensor:
        """Return this process's part of the step's sketch, shape ``(k,)``, float64: the sketch is linear."""
        if self.shard is not None:
            return self.shard.double()
        parts = [m.weight for m in micros if m.weight is not None]
        return torch.stack(parts).double().sum(dim=0) if parts else torch.zeros(self.sketch.stored).double()


@dataclass(eq=False)
class HiddenTap:
    """Catches the gradient at the decoder's output, one row a sample; ``share`` as for :class:`WeightTap`."""

    decoder: nn.Module
    sketch: GradientSketch
    check: SketchCheck | None
    sequences: int
    current: Current
    clock: Clock
    share: float = 1.0
    _handles: list[Any] = field(default_factory=list)

    @classmethod
    def of(
        cls, model: nn.Module, k: int, current: Current, clock: Clock, share: float = 1.0, *, sequences: int = 1
    ) -> HiddenTap:
        """Make the tap of a model, as :func:`find_decoder` finds it, with sketches of length k.

        ``sequences`` is how many a sample has in one forward pass, see :class:`sdo.trainers.trainer_types.TrainerKind`.
        """
        if loss_kind(model) == "ForQuestionAnswering":
            raise InputError(
                "signal 'hidden' does not exist for a model of answers' starts and ends: its loss is a softmax over "
                "the positions, so that their gradients sum to zero; fix: signals=['weight']"
            )
        decoder, width = find_decoder(model)
        sketch = GradientSketch((width,), k=k)
        check = None if sketch.kind == "identity" else SketchCheck()
        return cls(decoder, sketch, check, sequences, current, clock, share)

    def register(self) -> None:
        """Hook the decoder."""
        self._handles = [self.decoder.register_forward_hook(self._on_forward)]

    def remove(self) -> None:
        """Unhook it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def fired(self, micros: list[MicroBatch]) -> bool:
        """Whether a gradient reached the decoder's output in this step."""
        return any(micro.hidden is not None for micro in micros)

    def check_step(self, step: int, total: torch.Tensor) -> None:
        """Compare the sketch of a step's vector with the vector; only vectors longer than a sketch need it."""
        if self.check is not None:
            self.check.add(step, total.float(), self.sketch.sketch(total.float()))

    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        hidden = final_states(output)
        _, micros = self.current()
        if hidden is None or not hidden.requires_grad or not micros:
            return
        micro = micros[-1]
        samples = len(micro.sample_ids)
        if hidden.ndim != 3 or hidden.shape[0] != self.sequences * samples:
            rows = "one row" if self.sequences == 1 else f"{self.sequences} rows"
            raise InputError(
                f"the hidden states have shape {tuple(hidden.shape)} for {samples} samples; expected {rows} a sample; "
                "fix: padding_free=False, or signals=['weight']"
            )

        def on_gradient(grad: torch.Tensor) -> None:
            with self.clock():
                summed = grad.detach().sum(dim=1, dtype=torch.float64) * self.share
                rows = summed.view(self.sequences, samples, -1).sum(dim=0).float()
                micro.hidden = rows if micro.hidden is None else micro.hidden + rows

        hidden.register_hook(on_gradient)
