"""What captures have in common that keep one vector a sample: sums, rows and checks follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from diagnostics.signals.base import Capture, Measured, Signal, SignalContext, StepFacts, StepGradient, summed
from diagnostics.signals.micro_batch import MicroBatch
from diagnostics.sketches.accuracy import SketchCheck
from diagnostics.sketches.count_sketch import GradientSketch


class SampleVectors(Capture):
    """Keeps each sample's gradient of one tensor, shape ``(b, width)`` a micro-batch, float32.

    What derives from it hooks the model in :meth:`register`, calls :meth:`add` in the backward pass, and names a
    parameter in :meth:`needed_parameters`.

    Parameters
    ----------
    signal, context
        As for :class:`Capture`.
    width
        Entries of a gradient.
    """

    def __init__(self, signal: Signal, context: SignalContext, width: int) -> None:
        sketch = GradientSketch((width,), k=context.k)
        super().__init__(signal, context, sketch, None if sketch.kind == "identity" else SketchCheck())

    def add(self, micro: MicroBatch, gradients: torch.Tensor) -> None:
        """Add the gradients of a micro-batch, shape ``(sequences * b, width)``, as the backward pass gave them.

        A second call, for a second forward pass of the same samples, adds to the first.
        """
        sequences, samples = self.context.sequences, len(micro.sample_ids)
        shares = gradients.detach().double() * self.context.share
        # The sequences of one sample are `samples` rows apart.
        rows = shares.view(sequences, samples, -1).sum(dim=0).float()
        before = micro.caught.get(self.name)
        micro.caught[self.name] = rows if before is None else before + rows

    def parts(self, micros: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        """Sum of the gradients, shape ``(width,)``."""
        return summed("sum", [m.caught[self.name] for m in micros if self.name in m.caught], self.sketch.shape[0])

    def step(
        self, total: Mapping[str, torch.Tensor], micros: Sequence[MicroBatch], facts: StepFacts
    ) -> StepGradient | None:
        """Return the step's gradient."""
        if not total["sum fired"]:
            return None
        whole = total["sum"]
        sketched, norm = self._measured(whole)
        if self.check is not None:
            self.check.add(self.context.current()[0], whole.float(), sketched)
        return StepGradient(sketched, norm)

    def micro_batch(self, micro: MicroBatch) -> Measured | None:
        """Sum over its samples."""
        rows = micro.caught.get(self.name)
        return None if rows is None else self._measured(rows.double().sum(dim=0))

    def samples(self, micro: MicroBatch) -> Iterable[Measured] | None:
        """One row a sample."""
        rows = micro.caught.get(self.name)
        return None if rows is None else map(self._measured, rows)

    def check_pass(self, number: int, micro: MicroBatch) -> None:
        """Compare the sketch of the pass's sum with the sum."""
        if self.check is not None:
            whole = micro.caught[self.name].double().sum(dim=0).float()
            self.check.add(number, whole, self.sketch.sketch(whole))

    def _measured(self, vector: torch.Tensor) -> tuple[torch.Tensor, float]:
        return self.sketch.sketch(vector.float()), float(vector.double().norm())
