"""Rows of the gradient log from what a step's micro-batches left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from diagnostics.recording.step_total import StepTotal
from diagnostics.run_folder.writer import GradientRow
from diagnostics.signals.weight import MicroBatch
from diagnostics.sketches.count_sketch import GradientSketch
from sdo.trainers.processes import Processes

Row = tuple[GradientRow, NDArray[np.float32]]


# A vector, a sketch of shape (k,), and the exact 2-norm of what it is of; None where that is not known.
Measured = tuple[torch.Tensor, float | torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of one step that this process writes.

    Parameters
    ----------
    step
        Counted from 0.
    micros
        This process's micro-batches.
    total
        The step over all processes; process 0 writes its row.
    norm_state
        Whether norms are raw or clipped, scaled or not, in words.
    processes
        Micro-batches are numbered over all of them, in the order of the batch.
    """

    step: int
    micros: Sequence[MicroBatch]
    total: StepTotal
    norm_state: str
    processes: Processes

    def weight(self) -> Iterator[Row]:
        """Yield the rows of ``weight``: the step's, and those of its micro-batches where there are several.

        Yields
        ------
        tuple
            The row and its sketch, shape ``(k,)``, float32. With one micro-batch the step's row is that micro-batch's
            too.
        """

        def part(micro: MicroBatch) -> Measured | None:
            return None if micro.weight is None else (micro.weight, micro.weight_norm)

        whole = None if self.total.weight is None else (self.total.weight, self.total.weight_norm)
        yield from self._rows(whole, part)

    def hidden(self, sketch: GradientSketch, *, with_samples: bool) -> Iterator[Row]:
        """Yield the rows of ``hidden``: as :meth:`weight`, and those of single samples where asked for.

        Parameters
        ----------
        sketch
            Of vectors of the decoder's width; the identity unless they are longer than k.
        with_samples
            Whether to yield rows of single samples.
        """

        def measured(vector: torch.Tensor) -> Measured:
            return sketch.sketch(vector.float()), float(vector.double().norm())

        def part(micro: MicroBatch) -> Measured | None:
            return None if micro.hidden is None else measured(micro.hidden.double().sum(dim=0))

        def samples(micro: MicroBatch) -> Iterable[Measured] | None:
            return None if micro.hidden is None else map(measured, micro.hidden)

        whole = None if self.total.hidden is None else measured(self.total.hidden)
        yield from self._rows(whole, part, *([samples] if with_samples else []))

    def head_only(self, sketch: GradientSketch, *, with_samples: bool) -> Iterator[Row]:
        """Yield the rows of ``head_only``, of the kinds that :meth:`hidden` has.

        Norms that are known only from a sketch, as ``norm_state`` then says, are those of a step of several processes,
        and where a head is too large (see :class:`diagnostics.signals.head.HeadTap`).
        """

        def measured(vector: torch.Tensor, norm: float | torch.Tensor | None) -> Measured:
            return vector, float(vector.norm()) if sketch.kind == "identity" else norm

        def part(micro: MicroBatch) -> Measured | None:
            if micro.head_only is None:
                return None
            return measured(micro.head_only.double().sum(dim=0), micro.head_norm)

        def samples(micro: MicroBatch) -> Iterable[Measured] | None:
            return None if micro.head_only is None else zip(micro.head_only, micro.head_norms, strict=True)

        whole = None if self.total.head is None else measured(self.total.head, self.total.head_norm)
        yield from self._rows(whole, part, *([samples] if with_samples else []))

    def _rows(
        self,
        whole: Measured | None,
        part: Callable[[MicroBatch], Measured | None],
        samples: Callable[[MicroBatch], Iterable[Measured] | None] = lambda micro: None,
    ) -> Iterator[Row]:
        """Yield the row of the step from process 0, and of each micro-batch its own and those of its samples."""
        total = self.total
        if self.processes.leads and whole is not None:
            yield self._row("step", None, total.sample_ids, total.tokens, whole, total.tied)
        for number, micro in enumerate(self.micros):
            place = number * self.processes.count + self.processes.rank
            measured = part(micro) if total.micro_batches > 1 else None
            if measured is not None:
                tokens, tied = sum(micro.tokens), all(micro.tied)
                yield self._row("micro_batch", place, micro.sample_ids, tokens, measured, tied)
            singles = samples(micro)
            if singles is not None:
                each = zip(micro.sample_ids, micro.tokens, micro.tied, singles, strict=True)
                for sample, tokens, tied, measured in each:
                    yield self._row("sample", place, [sample], tokens, measured, tied)

    def _row(
        self, kind: str, place: int | None, sample_ids: list[int], tokens: int, measured: Measured, tied: bool
    ) -> Row:
        vector, norm = measured
        return make_row(self.step, kind, place, sample_ids, tokens, norm, self.norm_state, vector, tied)


def make_row(
    step: int,
    kind: str,
    micro_batch: int | None,
    sample_ids: list[int],
    tokens: int,
    norm: float | torch.Tensor | None,
    norm_state: str,
    vector: torch.Tensor,
    tied: bool = False,
) -> Row:
    """Build one row; a gradient that has no direction becomes zeros with a reason.

    Parameters
    ----------
    step, kind, micro_batch, sample_ids, tokens, norm_state
        As in the run folder.
    norm
        Exact 2-norm; where it is not known, that of the sketch, which ``norm_state`` then says.
    vector
        Shape ``(k,)``, the sketch.
    tied
        Whether all samples are completions of groups whose rewards tie: what is there in place of zeros is rounding.
    """
    sketch = vector.detach().float().cpu().numpy()
    if norm is None:
        norm = float(np.linalg.norm(sketch.astype(np.float64)))
        norm_state += ", estimated from the sketch"
    norm = float(norm)
    reason = None
    if not np.isfinite(norm) or not np.isfinite(sketch).all():
        reason = "non-finite gradient"
    elif tied:
        reason = "zero gradient: all rewards of the group tie"
    elif norm == 0.0:
        reason = "zero gradient" if tokens else "zero gradient: no token carries a loss"
    if reason is not None:
        sketch = np.zeros_like(sketch)
    return (
        GradientRow(
            step=step,
            kind=kind,
            micro_batch=micro_batch,
            sample_ids=sample_ids,
            tokens=tokens,
            norm=norm if np.isfinite(norm) else None,
            norm_state=norm_state,
            reason=reason,
        ),
        sketch,
    )
