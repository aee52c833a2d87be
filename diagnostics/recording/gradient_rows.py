"""Rows of the gradient log from what a step's micro-batches left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from diagnostics.recording.step_total import StepTotal
from diagnostics.run_folder.rows import GradientRow
from diagnostics.signals.base import Capture, Measured
from diagnostics.signals.micro_batch import MicroBatch
from sdo.trainers.processes import Processes

Row = tuple[GradientRow, NDArray[np.float32]]


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
    with_samples
        Whether rows of single samples are wanted.
    """

    step: int
    micros: Sequence[MicroBatch]
    total: StepTotal
    norm_state: str
    processes: Processes
    with_samples: bool

    def of(self, capture: Capture) -> Iterator[Row]:
        """Yield one signal's rows: of the step from process 0, of micro-batches where there are several, of samples.

        With one micro-batch the step's row is that micro-batch's too. Where a norm is not known, ``norm_state`` says
        that it is the sketch's.
        """
        total, kinds = self.total, capture.signal.kinds
        whole = total.gradients.get(capture.name) if "step" in kinds else None
        if self.processes.leads and whole is not None:
            yield self._row("step", None, total.sample_ids, total.tokens, (whole.sketch, whole.norm), total.tied)
        for number, micro in enumerate(self.micros):
            place = number * self.processes.count + self.processes.rank
            part = capture.micro_batch(micro) if total.micro_batches > 1 and "micro_batch" in kinds else None
            if part is not None:
                tokens, tied = sum(micro.tokens), all(micro.tied)
                yield self._row("micro_batch", place, micro.sample_ids, tokens, part, tied)
            singles = capture.samples(micro) if self.with_samples and "sample" in kinds else None
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
