"""What a signal is: a quantity that can be asked for, and its capture in one training.

A :class:`Signal` says which gradient is meant. Its :class:`Capture` hooks one model and reads that gradient out:
recorder, doctor and run folder ask these two and know no signal by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from diagnostics.signals.micro_batch import Clock, Current, MicroBatch
from diagnostics.sketches.accuracy import SketchCheck
from diagnostics.sketches.count_sketch import GradientSketch

RowKind = Literal["step", "micro_batch", "sample"]
# A sketch, shape (k,), and the exact 2-norm of what it is of; None where that is not known.
Measured = tuple[torch.Tensor, float | torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class SignalContext:
    """The training that a signal is caught in.

    Attributes
    ----------
    model
        The model in training.
    current
        Returns the number of the step under way and its micro-batches so far.
    clock
        A context that counts the recorder's own time.
    k
        Length of the sketches.
    sample_every
        Rows of single samples are wanted at every n-th step; 0 for never.
    share
        What this process's gradients are multiplied by to become shares of the step's gradient: one over the number of
        processes, whose mean DDP takes.
    sequences
        Sequences of one sample in a forward pass, in blocks: 2 for pairs.
    temperature
        The number by which the trainer divides the logits.
    full_precision
        Whether the trainer makes the logits in float32 whatever the model's dtype.
    """

    model: nn.Module
    current: Current
    clock: Clock
    k: int
    sample_every: int = 0
    share: float = 1.0
    sequences: int = 1
    temperature: float = 1.0
    full_precision: bool = False

    def with_samples(self, step: int) -> bool:
        """Whether rows of single samples are wanted at a step."""
        return self.sample_every > 0 and step % self.sample_every == 0


@dataclass(frozen=True)
class StepFacts:
    """What is known of a step besides gradients: the processes that took part, and the loss scale."""

    processes: int
    loss_scale: float


@dataclass(frozen=True, eq=False)
class StepGradient:
    """One signal's gradient of a whole step, over all processes.

    Attributes
    ----------
    sketch
        Shape ``(k,)``.
    norm
        Exact 2-norm before clipping; None where it is not known.
    clipped
        Whether the optimizer was given a shorter one; None where that cannot be told.
    same_direction
        False where the processes' shares do not add up to what the optimizer was given.
    figures
        Numbers about the step for the trainer's log.
    """

    sketch: torch.Tensor
    norm: float | None
    clipped: bool | None = None
    same_direction: bool = True
    figures: Mapping[str, float] = field(default_factory=dict)


class Signal(ABC):
    """A gradient that can be recorded. One of your own derives from it, see :func:`diagnostics.register_signal`.

    Parameters
    ----------
    target
        What of the model is meant, where a signal takes that.
    name
        Its name in the run folder; letters, digits, ``_``, ``-`` and ``.``. By default the signal's word.

    Attributes
    ----------
    word
        By which it is asked for, as in ``signals=("weight", "hidden")``.
    kinds
        The kinds of row that it has.
    silent
        Why it can stay without a gradient, in words.
    """

    word: ClassVar[str]
    kinds: ClassVar[tuple[RowKind, ...]] = ("step", "micro_batch", "sample")
    silent: ClassVar[str]

    def __init__(self, target: str | None = None, *, name: str | None = None) -> None:
        self.target = target
        self.name = self.word if name is None else name

    @abstractmethod
    def of(self, context: SignalContext) -> Capture:
        """Find what is meant in a model, and return what catches it.

        Raises
        ------
        InputError
            Where the model lacks it.
        """

    def __str__(self) -> str:
        """The signal as text: ``weight``, ``samples:model.layers.*.mlp.down_proj.weight``, ``late=weight:…``."""
        named = "" if self.name == self.word else f"{self.name}="
        return f"{named}{self.word}" + ("" if self.target is None else f":{self.target}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signal) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


class Capture(ABC):
    """Catches one signal in one training: hooked, read out after each step, and unhooked.

    Attributes
    ----------
    signal
        What is caught.
    context
        The training.
    sketch
        How a gradient is stored.
    check
        Compares the sketches of the first steps with the gradients; None where there is nothing to compare.
    """

    def __init__(
        self, signal: Signal, context: SignalContext, sketch: GradientSketch, check: SketchCheck | None
    ) -> None:
        self.signal, self.context = signal, context
        self.sketch, self.check = sketch, check
        self._handles: list[Any] = []

    # ------------------------------------------------------------------ life cycle

    @abstractmethod
    def register(self) -> None:
        """Hook the model; what is hooked goes into ``_handles``."""

    def remove(self) -> None:
        """Unhook it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin_step(self) -> None:  # noqa: B027 - most have nothing to forget
        """Forget the step before."""

    def before_update(self, leads: bool) -> None:  # noqa: B027 - most do not look at it
        """Look at the gradient that the optimizer is given; `leads` is whether this process writes the step's row."""

    # ------------------------------------------------------------------ reading out

    @property
    def name(self) -> str:
        """Under which :attr:`MicroBatch.caught` holds what was found."""
        return self.signal.name

    def due(self, step: int) -> bool:
        """Whether the signal is caught at a step at all."""
        return True

    def fired(self, micros: Sequence[MicroBatch]) -> bool:
        """Whether a gradient came in this step."""
        return any(self.name in micro.caught for micro in micros)

    @abstractmethod
    def parts(self, micros: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        """Return what is to be summed over the processes, in one collective: the same names and shapes in each."""

    @abstractmethod
    def step(self, total: Mapping[str, torch.Tensor], micros: Sequence[MicroBatch], facts: StepFacts) -> Any:
        """Return the step's :class:`StepGradient` from the sums of :meth:`parts`, float64; None where none fired.

        Called once a step, after :meth:`before_update`; here the sketch is compared with the gradient.
        """

    @abstractmethod
    def micro_batch(self, micro: MicroBatch) -> Measured | None:
        """Return the gradient of one micro-batch; None where the signal did not fire."""

    def samples(self, micro: MicroBatch) -> Iterable[Measured] | None:
        """Return the gradient of each of its samples, in order; None where they are not known."""
        return None

    def check_pass(self, number: int, micro: MicroBatch) -> None:  # noqa: B027 - not all can
        """Compare the sketch of a pass just made with the gradient, where that is at hand; `number` tells passes."""

    # ------------------------------------------------------------------ words

    def describe(self) -> dict[str, Any]:
        """Return what run.json says of the signal."""
        return {
            "parameter": None,
            "shape": list(self.sketch.shape),
            "tied": False,
            "tied_with": [],
            "stored": self.sketch.stored,
            "sketch": self.sketch.describe(),
        }

    @abstractmethod
    def needed_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of which one must ask for a gradient so that the signal fires, the cheapest first."""

    @property
    def gradient_bytes(self) -> int:
        """Memory of one gradient, as :attr:`check` copies it."""
        return math.prod(self.sketch.shape) * 4


def summed(name: str, rows: Sequence[torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """Sum rows, shapes ``(…, width)``, and tell whether there were any: parts ``"<name> fired"`` and ``name``."""
    sums = [row.double().reshape(-1, width).sum(dim=0) for row in rows]
    return {
        f"{name} fired": torch.tensor(bool(sums)),
        name: torch.stack(sums).sum(dim=0) if sums else torch.zeros(width),
    }
