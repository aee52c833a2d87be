"""The taps of a run's signals together: made from their names, hooked, read out and checked as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from diagnostics.signals.head import HeadTap, Tap
from diagnostics.signals.weight import SILENT, Clock, Current, HiddenTap, MicroBatch, WeightTap
from diagnostics.sketches.accuracy import SketchCheck
from sdo.trainers.trainer_types import TrainerKind

if TYPE_CHECKING:
    from diagnostics.recording.gradient_rows import Row, StepRows


def tap_makers(
    model: nn.Module,
    kind: TrainerKind,
    args: Any,
    *,
    weight: str | None,
    k: int,
    every: int,
    current: Current,
    clock: Clock,
    share: float = 1.0,
) -> dict[str, Callable[[], Tap]]:
    """Return, by the name of a signal, what makes its tap on a model.

    Parameters
    ----------
    model
        The model in training.
    kind, args
        The trainer's kind and arguments.
    weight
        The parameter of ``weight``, see :func:`diagnostics.signals.weight.find_weight`.
    k
        Length of the sketches.
    every
        At every n-th step there are rows of single samples; 0 for never.
    current, clock, share
        As :class:`~diagnostics.signals.weight.WeightTap` has them.

    Returns
    -------
    dict
        Each entry raises :class:`~sdo.InputError` where the model lacks the signal.
    """
    return {
        "weight": lambda: WeightTap.of(model, weight, k, current, clock, share),
        "hidden": lambda: HiddenTap.of(model, k, current, clock, share, sequences=kind.sequences),
        "head_only": lambda: HeadTap.of(model, k, current, clock, share, kind=kind, args=args, every=every),
    }


@dataclass(frozen=True)
class Taps:
    """The taps of a recording; None for a signal that it has not."""

    weight: WeightTap | None
    hidden: HiddenTap | None
    head: HeadTap | None

    @classmethod
    def of(cls, makers: dict[str, Callable[[], Tap]], signals: Collection[str]) -> Taps:
        """Make those of the signals that are wanted, from :func:`tap_makers`."""
        made: dict[str, Any] = {name: make() for name, make in makers.items() if name in signals}
        return cls(made.get("weight"), made.get("hidden"), made.get("head_only"))

    @property
    def named(self) -> dict[str, Tap]:
        """Those that there are, by the name of their signal."""
        taps = {"weight": self.weight, "hidden": self.hidden, "head_only": self.head}
        return {name: tap for name, tap in taps.items() if tap is not None}

    def register(self) -> None:
        """Hook the model."""
        for tap in self.named.values():
            tap.register()

    def remove(self) -> None:
        """Unhook it."""
        for tap in self.named.values():
            tap.remove()

    def require_fired(self, micros: list[MicroBatch]) -> None:
        """Raise a RuntimeError where a signal was silent in the first step: silence is never written as zeros."""
        for signal, tap in self.named.items():
            if not tap.fired(micros):
                raise RuntimeError(f"signal {signal!r} did not fire in the first step: {SILENT[signal]}")

    def rows(self, rows: StepRows, *, with_samples: bool) -> Iterator[tuple[str, Row]]:
        """Yield the rows of a step under the names of their signals, then compare its sketches with what they are of.

        Parameters
        ----------
        rows
            The step.
        with_samples
            Whether rows of single samples are wanted.
        """
        step, total = rows.step, rows.total
        if self.weight is not None:
            yield from (("weight", row) for row in rows.weight())
        if self.hidden is not None:
            yield from (("hidden", row) for row in rows.hidden(self.hidden.sketch, with_samples=with_samples))
            if total.hidden is not None:
                self.hidden.check_step(step, total.hidden)
        if self.head is not None:
            singles = self.head.with_samples(step)
            yield from (("head_only", row) for row in rows.head_only(self.head.sketch, with_samples=singles))
            self.head.check_step(step, list(rows.micros))

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
        for name, tap in self.named.items():
            if name in signals:
                tap.check = None

    @property
    def _checks(self) -> dict[str, SketchCheck]:
        return {name: tap.check for name, tap in self.named.items() if tap.check is not None}
