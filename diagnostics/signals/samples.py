"""The ``samples`` signal: each sample's own gradient of chosen linear layers, without a second backward pass.

A linear layer's gradient is ``sum over t of d_t (x) x_t``, with x_t its input and d_t the gradient of its output at
position t. Taken over the positions of one sample it is that sample's gradient: the very product that backward forms
for the whole batch, formed sample by sample. Each is added to a count-sketch and forgotten. The identity is that of
Goodfellow 2015, arXiv:1510.01799, as opacus, bergson and dattri use it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import nn

from diagnostics.signals.base import Capture, Measured, RowKind, Signal, SignalContext, StepFacts
from diagnostics.signals.micro_batch import MicroBatch
from diagnostics.signals.parameter_names import adapter_names, plain_name
from diagnostics.sketches.accuracy import SketchCheck
from diagnostics.sketches.count_sketch import GradientSketch
from sdo.errors import InputError


@dataclass(frozen=True)
class LinearLayers:
    """Linear layers of one shape, whose gradients are seen as one: theirs end to end.

    Attributes
    ----------
    names
        Of their weights, in the model's order.
    modules
        The layers.
    """

    names: tuple[str, ...]
    modules: tuple[nn.Linear, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the gradients end to end: (layers x out, in)."""
        return len(self.modules) * self.modules[0].out_features, self.modules[0].in_features


def find_layers(model: nn.Module, pattern: str) -> LinearLayers:
    """Find the linear layers whose weights' names match a pattern.

    Parameters
    ----------
    model
        The model in training.
    pattern
        As ``"model.layers.*.mlp.down_proj.weight"``, with ``*``, ``?`` and ``[…]`` of :mod:`fnmatch`; with or without
        what wrappers add to names. Layers may be frozen.

    Raises
    ------
    InputError
        If none matches, one is no ``torch.nn.Linear``, or their shapes differ.
    """
    adapters = adapter_names(model)
    # A wrapper of PEFT has its base layer's weight as a property.
    owners = {f"{name}.weight": module for name, module in model.named_modules() if "weight" in module._parameters}
    wanted = plain_name(pattern, adapters)
    found = {
        name: module
        for name, module in owners.items()
        if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(plain_name(name, adapters), wanted)
    }
    if not found:
        linear = [name for name, module in owners.items() if isinstance(module, nn.Linear)]
        raise InputError(
            f"samples: no parameter matches {pattern!r}; expected weights of linear layers, such as "
            f"{', '.join(linear[-3:]) or 'none in this model'}"
        )
    for name, module in found.items():
        if not isinstance(module, nn.Linear):
            raise InputError(
                f"samples: {name} belongs to a {type(module).__name__}; expected weights of torch.nn.Linear alone; "
                "fix: a narrower pattern"
            )
    shapes = {(module.out_features, module.in_features): name for name, module in reversed(found.items())}
    if len(shapes) > 1:
        seen = ", ".join(f"{name} {shape}" for shape, name in shapes.items())
        raise InputError(
            f"samples: {pattern!r} matches layers of several shapes ({seen}); expected one shape; fix: a signal each, "
            "with names of their own"
        )
    return LinearLayers(tuple(found), tuple(found.values()))


class Samples(Signal):
    """Each sample's gradient of chosen linear layers, as one sketch, with its exact norm beside it.

    Parameters
    ----------
    target
        Pattern of the weights' names, see :func:`find_layers`.
    name
        Its name in the run folder.

    Notes
    -----
    Its rows are those of single samples, at every ``sample_every``-th step of the recorder. With ``sketch_size=4096``
    the cosine of two samples has a standard error of about 0.016.

    Examples
    --------
    >>> str(Samples("model.layers.*.mlp.down_proj.weight"))
    'samples:model.layers.*.mlp.down_proj.weight'
    """

    word: ClassVar[str] = "samples"
    kinds: ClassVar[tuple[RowKind, ...]] = ("sample",)
    silent: ClassVar[str] = "no gradient reached the output of its layers: they are not part of the loss"

    def __init__(self, target: str | None = None, *, name: str | None = None) -> None:
        if not target:
            raise InputError(
                "samples got no pattern; expected the weights of linear layers; fix: "
                "'samples:model.layers.*.mlp.down_proj.weight', or Samples('…') in Python"
            )
        super().__init__(target, name=name)

    def of(self, context: SignalContext) -> SamplesCapture:
        """Find the layers."""
        if not context.sample_every:
            raise InputError("samples has rows of single samples alone, and sample_every is 0; fix: sample_every=1")
        return SamplesCapture(self, context, find_layers(context.model, str(self.target)))


@dataclass(eq=False)
class _Pass:
    """What the backward pass of a micro-batch left.

    Attributes
    ----------
    sketches
        Shape ``(b, k)``, float32.
    squares
        Shape ``(b,)``, float64, of the exact norms.
    seen
        Layers that brought their part.
    again
        Whether one came a second time, so that the norms are not known.
    first
        Shape of all layers end to end, the first sample's gradient; only while sketches are checked.
    """

    sketches: torch.Tensor
    squares: torch.Tensor
    seen: set[int] = field(default_factory=set)
    again: bool = False
    first: torch.Tensor | None = None


class SamplesCapture(Capture):
    """Forms each sample's gradient of the layers in the backward pass, and keeps its sketch."""

    def __init__(self, signal: Signal, context: SignalContext, layers: LinearLayers) -> None:
        sketch = GradientSketch(layers.shape, k=context.k)
        super().__init__(signal, context, sketch, None if sketch.kind == "identity" else SketchCheck())
        self.layers = layers

    def register(self) -> None:
        """Hook the layers."""
        self._handles = [
            module.register_forward_hook(self._hook(number)) for number, module in enumerate(self.layers.modules)
        ]

    def due(self, step: int) -> bool:
        """Only where rows of single samples are wanted."""
        return self.context.with_samples(step)

    def parts(self, micros: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        """Nothing: each process writes the rows of its own samples."""
        return {}

    def step(self, total: Mapping[str, torch.Tensor], micros: Sequence[MicroBatch], facts: StepFacts) -> None:
        """Compare the sketch of one sample with its gradient; a step has no row."""
        for micro in micros:
            found: _Pass | None = micro.caught.get(self.name)
            if self.check is not None and found is not None and found.first is not None:
                self.check.add(self.context.current()[0], found.first, found.sketches[0] / self.context.share)
                found.first = None

    def micro_batch(self, micro: MicroBatch) -> Measured | None:
        """Sum over its samples; its exact norm is not known."""
        found: _Pass | None = micro.caught.get(self.name)
        return None if found is None else (found.sketches.double().sum(dim=0), None)

    def samples(self, micro: MicroBatch) -> Iterable[Measured] | None:
        """One row a sample."""
        found: _Pass | None = micro.caught.get(self.name)
        if found is None:
            return None
        norms: Any = [None] * len(found.sketches) if found.again else found.squares.sqrt()
        return zip(found.sketches, norms, strict=True)

    def describe(self) -> dict[str, Any]:
        """Name the layers."""
        return super().describe() | {"parameter": ", ".join(self.layers.names), "layers": list(self.layers.names)}

    def needed_parameters(self) -> list[nn.Parameter]:
        """The first layer's weight: a gradient then reaches the outputs of all."""
        weight: Any = self.layers.modules[0].weight
        return [weight]

    def _hook(self, number: int) -> Callable[..., None]:
        def on_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            step, micros = self.context.current()
            if not micros or not self.due(step) or not isinstance(output, torch.Tensor) or not output.requires_grad:
                return
            micro, entered, hooked = micros[-1], args[0].detach(), cast(Any, output)
            self._require_rows(number, output, len(micro.sample_ids))

            def on_gradient(grad: torch.Tensor) -> None:
                with self.context.clock():
                    self._add(micro, number, grad.detach(), entered)

            hooked.register_hook(on_gradient)

        return on_forward

    def _require_rows(self, number: int, output: torch.Tensor, samples: int) -> None:
        rows = self.context.sequences * samples
        if output.ndim < 2 or len(output) != rows:
            raise InputError(
                f"samples: {self.layers.names[number]} gives an output of shape {tuple(output.shape)} for {samples} "
                f"samples; expected {rows} rows; fix: padding_free=False, or layers that see whole sequences"
            )

    def _add(self, micro: MicroBatch, number: int, grad: torch.Tensor, entered: torch.Tensor) -> None:
        """Add one layer's part of each sample's gradient."""
        samples, share = len(micro.sample_ids), self.context.share
        found: _Pass | None = micro.caught.get(self.name)
        if found is None:
            zeros = torch.zeros(samples, device=grad.device, dtype=torch.float64)
            found = _Pass(torch.zeros(samples, self.sketch.stored, device=grad.device), zeros)
            micro.caught[self.name] = found
            if self.check is not None and not self.check.done:
                found.first = torch.zeros(self.sketch.shape, device=grad.device)
        found.again |= number in found.seen
        found.seen.add(number)
        offset = number * self.layers.modules[0].out_features
        for sample in range(samples):
            # The sequences of one sample are `samples` rows apart.
            left = grad[sample::samples].reshape(-1, grad.shape[-1]).float()
            gradient = left.T @ entered[sample::samples].reshape(-1, entered.shape[-1]).float()
            found.sketches[sample] += self.sketch.sketch_shard(gradient, offset) * share
            found.squares[sample] += torch.linalg.vector_norm(gradient, dtype=torch.float64).square() * share**2
            if not sample and found.first is not None:
                found.first[offset : offset + len(gradient)] += gradient
