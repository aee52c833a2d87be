"""The ``weight`` signal: the gradient of one named parameter.

It is caught at the parameter, since fused losses never call the head's module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate.state import GradientState
from torch import nn

from diagnostics.signals.base import Capture, Measured, RowKind, Signal, SignalContext, StepFacts, StepGradient
from diagnostics.signals.micro_batch import MicroBatch
from diagnostics.signals.parameter_names import adapter_names, resolve_name
from diagnostics.signals.shards import local_part, place_of
from diagnostics.sketches.accuracy import SketchCheck, device_norm
from diagnostics.sketches.count_sketch import GradientSketch
from sdo.errors import InputError

# A clipped gradient is shorter than the raw one by more than rounding can explain.
_CLIP_TOLERANCE = 1e-5
# The reduced sketch and that of the optimizer's gradient differ by a factor, and by no more than this in direction.
_SAME_DIRECTION = 0.99


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


class Weight(Signal):
    """The gradient of one parameter; by default the last trainable matrix, see :func:`find_weight`.

    Examples
    --------
    >>> Weight("model.layers.3.mlp.down_proj.weight", name="mlp3")
    Weight('mlp3=weight:model.layers.3.mlp.down_proj.weight')
    """

    word: ClassVar[str] = "weight"
    kinds: ClassVar[tuple[RowKind, ...]] = ("step", "micro_batch")
    silent: ClassVar[str] = "its parameter got no gradient in backward: the loss does not reach it, or it is sharded"

    def of(self, context: SignalContext) -> WeightCapture:
        """Find the parameter."""
        return WeightCapture(self, context, find_weight(context.model, self.target))


@dataclass(eq=False)
class _Pass:
    """What one micro-batch left: the sketch of its gradient, ``(k,)``, and its exact norm, ``()``, on the device."""

    sketch: torch.Tensor
    norm: torch.Tensor | None


class WeightCapture(Capture):
    """Catches the gradient of one parameter, micro-batch by micro-batch and accumulated.

    Attributes
    ----------
    weight
        The parameter.
    place
        Where this process's part of a sharded parameter lies; None for a whole one.
    step_norm
        Exact 2-norm of the accumulated gradient before clipping, shape ``()``, on the device: to read it would wait for
        all work given to it so far. None until the step's last backward pass. Of a sharded gradient that of this
        process's part; left None where this process alone does not know it.
    shard
        Shape ``(k,)``, sketch of this process's part of the accumulated gradient of a sharded parameter.
    """

    def __init__(self, signal: Signal, context: SignalContext, weight: NamedWeight) -> None:
        self.weight = weight
        self.place = place_of(weight.parameter)
        sketch = GradientSketch(tuple(weight.parameter.shape), k=context.k)
        # No process has the whole of a sharded gradient.
        super().__init__(signal, context, sketch, None if self.place else SketchCheck())
        self.step_norm: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None
        self._update: Update | None = None

    def register(self) -> None:
        """Hook the parameter."""
        parameter: Any = self.weight.parameter
        self._handles = [
            parameter.register_hook(self._on_gradient),
            parameter.register_post_accumulate_grad_hook(self._on_accumulated),
        ]

    def begin_step(self) -> None:
        """Forget the step before."""
        self.step_norm = self.shard = self._update = None

    def fired(self, micros: Sequence[MicroBatch]) -> bool:
        """Whether the parameter got a gradient in this step."""
        return self.shard is not None or super().fired(micros)

    def before_update(self, leads: bool) -> None:
        """Look at the gradient that the optimizer is given, and compare the step's sketch with it.

        Clipping and unscaling multiply all of it by one number, which changes no cosine. Not done in backward, since
        the comparison waits for the device.
        """
        grad = self.weight.parameter.grad
        if grad is None:
            return
        if self.place is not None:
            part = local_part(grad)
            self._update = Update(norm=device_norm(part if self.place.counts else part[:0]), sketch=None)
            return
        step, micros = self.context.current()
        check = None if self.check is None or self.check.done else self.check
        if self.context.share == 1.0:
            if check is not None and self.step_norm is not None:
                check.add(step, grad, self._step_sketch(micros).float())
            self._update = Update(norm=device_norm(grad), sketch=None)
        elif leads:
            sketched = self.sketch.sketch(grad)
            if check is not None:
                check.add(step, grad, sketched)
            self._update = Update(norm=device_norm(grad), sketch=sketched)

    def parts(self, micros: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        """The sketch, ``(k,)``, and the squares of the norms before and after clipping."""
        update = None if self._update is None else self._update.norm
        return {
            "fired": torch.tensor(self.fired(micros)),
            "squares": torch.stack([_square(self.step_norm), _square(update)]),
            "sketch": self._step_sketch(micros),
        }

    def step(
        self, total: Mapping[str, torch.Tensor], micros: Sequence[MicroBatch], facts: StepFacts
    ) -> StepGradient | None:
        """Return the step's gradient, and whether it was clipped."""
        if not total["fired"]:
            return None
        sketch, norm, clipped, same_direction = total["sketch"], None, None, True
        if self.place is not None or facts.processes == 1:
            norm, clipped = self._compare(total["squares"].tolist(), facts.loss_scale)
        elif self._update is not None and self._update.sketch is not None:
            norm, clipped, same_direction = _unclip(sketch, self._update, facts.loss_scale)
        return StepGradient(sketch, norm, clipped, same_direction)

    def micro_batch(self, micro: MicroBatch) -> Measured | None:
        """The sketch and norm of the pass alone."""
        found: _Pass | None = micro.caught.get(self.name)
        return None if found is None else (found.sketch, found.norm)

    def check_pass(self, number: int, micro: MicroBatch) -> None:
        """Compare the sketch with the parameter's gradient, which must be that of this pass alone."""
        grad = self.weight.parameter.grad
        if self.check is not None and self.sketch.kind != "identity" and grad is not None:
            self.check.add(number, grad, micro.caught[self.name].sketch)

    def describe(self) -> dict[str, Any]:
        """Name the parameter and what is tied to it."""
        tied = list(self.weight.tied)
        return super().describe() | {"parameter": self.weight.name, "tied": bool(tied), "tied_with": tied}

    def needed_parameters(self) -> list[nn.Parameter]:
        """The parameter itself."""
        return [self.weight.parameter]

    @property
    def gradient_bytes(self) -> int:
        """Memory of one gradient, in the parameter's dtype."""
        return self.weight.parameter.numel() * self.weight.parameter.element_size()

    def _on_gradient(self, grad: torch.Tensor) -> None:
        """One backward pass alone; the parts of a shared parameter under reentrant checkpointing come one by one."""
        _, micros = self.context.current()
        if not micros or self.place is not None:
            return
        with self.context.clock():
            caught, share = micros[-1].caught, self.context.share
            sketched = self.sketch.sketch(grad.detach()) * share
            before: _Pass | None = caught.get(self.name)
            if before is None:
                caught[self.name] = _Pass(sketched, device_norm(grad.detach()) * share)
            else:
                caught[self.name] = _Pass(before.sketch + sketched, None)

    def _on_accumulated(self, parameter: torch.Tensor) -> None:
        """The running sum of the step; after its last micro-batch this is what the optimizer will be given."""
        _, micros = self.context.current()
        if not micros or not GradientState().sync_gradients or parameter.grad is None:
            return
        with self.context.clock():
            if self.place is not None:
                part = local_part(parameter.grad)
                if not self.place.counts:
                    part = part[:0]
                self.shard = self.sketch.sketch_shard(part, self.place.offset if self.place.counts else 0)
                self.step_norm = device_norm(part)
            elif self.context.share == 1.0:
                only: _Pass | None = micros[0].caught.get(self.name) if len(micros) == 1 else None
                known = None if only is None else only.norm
                self.step_norm = device_norm(parameter.grad) if known is None else known

    def _step_sketch(self, micros: Sequence[MicroBatch]) -> torch.Tensor:
        """Return this process's part of the step's sketch, shape ``(k,)``, float64: the sketch is linear."""
        if self.shard is not None:
            return self.shard.double()
        parts = [micro.caught[self.name].sketch for micro in micros if self.name in micro.caught]
        return torch.stack(parts).double().sum(dim=0) if parts else torch.zeros(self.sketch.stored).double()

    def _compare(self, squares: list[float], loss_scale: float) -> tuple[float | None, bool | None]:
        """Norm of the raw gradient, known before the update, and whether the optimizer was given a shorter one."""
        if self.step_norm is None:
            return None, None
        # A norm's square overflows where the norm does not; with one process it is not needed.
        norm = math.sqrt(squares[0]) if self.place is not None else float(self.step_norm)
        if self._update is None or not norm:
            return norm, None
        given = math.sqrt(squares[1]) if self.place is not None else float(self._update.norm)
        return norm, given < norm / loss_scale * (1 - _CLIP_TOLERANCE)


def _square(norm: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(()).double() if norm is None else norm.double().square().cpu()


def _unclip(sketch: torch.Tensor, update: Update, loss_scale: float) -> tuple[float | None, bool | None, bool]:
    """Norm of the raw reduced gradient under DDP, whether it was clipped, and whether the directions agree.

    No process ever holds the raw reduced gradient g outside its backward pass: when callbacks are asked again it is
    clipped. Clipping multiplies it by some c, and as sketches are linear c is <S(cg), S(g)> / |S(g)|**2, with S(g) the
    sum of the processes' sketches; then |g| = |cg| / c.
    """
    given, norm = update.sketch, float(update.norm)
    if given is None or not norm:
        return (0.0 if not norm else None), None, True
    given = given.double().cpu()
    square, product = float(sketch @ sketch), float(sketch @ given)
    if not (math.isfinite(square) and math.isfinite(product)) or not square > 0:
        return None, None, True
    factor = product / square
    aligned = product >= _SAME_DIRECTION * math.sqrt(square) * float(given.norm())
    if factor <= 0:
        return None, None, aligned
    return norm / factor, factor * loss_scale < 1 - _CLIP_TOLERANCE, aligned
