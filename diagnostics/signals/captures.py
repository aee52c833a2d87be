"""The captures of a run's signals together: hooked, read out and checked as one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from diagnostics.signals.base import Capture, Signal, SignalContext, StepFacts, StepGradient
from diagnostics.signals.micro_batch import MicroBatch
from diagnostics.sketches.accuracy import SketchCheck


class Captures:
    """The captures of a training, by the names of their signals.

    Parameters
    ----------
    signals
        What is asked for.
    context
        The training.

    Raises
    ------
    InputError
        Where the model lacks one of them.
    """

    def __init__(self, signals: Sequence[Signal], context: SignalContext) -> None:
        self.named: dict[str, Capture] = {signal.name: signal.of(context) for signal in signals}

    def register(self) -> None:
        """Hook the model."""
        for capture in self.named.values():
            capture.register()

    def remove(self) -> None:
        """Unhook it."""
        for capture in self.named.values():
            capture.remove()

    def begin_step(self) -> None:
        """Forget the step before."""
        for capture in self.named.values():
            capture.begin_step()

    def before_update(self, leads: bool) -> None:
        """Look at the gradients that the optimizer is given."""
        for capture in self.named.values():
            capture.before_update(leads)

    def require_fired(self, step: int, micros: Sequence[MicroBatch]) -> None:
        """Raise a RuntimeError where a signal was silent in the first step: silence is never written as zeros."""
        for name, capture in self.named.items():
            if capture.due(step) and not capture.fired(micros):
                raise RuntimeError(f"signal {name!r} did not fire in the first step: {capture.signal.silent}")

    def parts(self, micros: Sequence[MicroBatch]) -> dict[tuple[str, str], torch.Tensor]:
        """Return what is to be summed over the processes, by signal and part."""
        return {
            (name, part): value for name, capture in self.named.items() for part, value in capture.parts(micros).items()
        }

    def steps(
        self, total: Mapping[tuple[str, str], torch.Tensor], micros: Sequence[MicroBatch], facts: StepFacts
    ) -> dict[str, StepGradient]:
        """Return the step's gradients from the sums, of those that fired."""
        found = {}
        for name, capture in self.named.items():
            own = {part: value for (signal, part), value in total.items() if signal == name}
            gradient = capture.step(own, micros, facts)
            if gradient is not None:
                found[name] = gradient
        return found

    @property
    def all_checked(self) -> bool:
        """Whether there are checks of sketches, and none still waits for a step."""
        return bool(self._checks) and all(check.done for check in self._checks.values())

    def take_checks(self) -> dict[str, Any]:
        """Return how far sketched cosines were from exact ones, by signal, and let go of the gradients kept for it."""
        found = {name: check.result() for name, check in self._checks.items()}
        self.forget_checks(found)
        return found

    def forget_checks(self, signals: Collection[str]) -> None:
        """Check no more sketches of some signals."""
        for name, capture in self.named.items():
            if name in signals:
                capture.check = None

    @property
    def _checks(self) -> dict[str, SketchCheck]:
        return {name: capture.check for name, capture in self.named.items() if capture.check is not None}
