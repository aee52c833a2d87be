"""Rows of the gradient log from what a step's micro-batches left behind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from diagnostics.processes import Processes
from diagnostics.runlog import GradientRow
from diagnostics.signals import MicroBatch
from diagnostics.sketch import GradientSketch
from diagnostics.step_total import StepTotal

Row = tuple[GradientRow, NDArray[np.float32]]


def weight_rows(
    step: int, micros: list[MicroBatch], total: StepTotal, norm_state: str, processes: Processes
) -> Iterator[Row]:
    """Yield this process's rows of ``weight``: the step's, and those of its micro-batches where there are several.

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

    Yields
    ------
    tuple
        The row and its sketch, shape ``(k,)``, float32. With one micro-batch the step's row is that micro-batch's too.
    """
    if processes.leads and total.weight is not None:
        ids, tokens, norm = total.sample_ids, total.tokens, total.weight_norm
        yield make_row(step, "step", None, ids, tokens, norm, norm_state, total.weight, total.tied)
    if total.micro_batches > 1:
        for number, micro in enumerate(micros):
            if micro.weight is not None:
                ids, tokens, place = micro.sample_ids, sum(micro.tokens), number * processes.count + processes.rank
                exact, tied = micro.weight_norm, all(micro.tied)
                yield make_row(step, "micro_batch", place, ids, tokens, exact, norm_state, micro.weight, tied)


def hidden_rows(
    step: int,
    micros: list[MicroBatch],
    total: StepTotal,
    sketch: GradientSketch,
    norm_state: str,
    processes: Processes,
    with_samples: bool,
) -> Iterator[Row]:
    """Yield this process's rows of ``hidden``: as :func:`weight_rows`, and those of single samples where asked for.

    Parameters
    ----------
    step, micros, total, norm_state, processes
        As in :func:`weight_rows`.
    sketch
        Of vectors of the decoder's width; the identity unless they are longer than k.
    with_samples
        Whether to yield rows of single samples.

    Yields
    ------
    tuple
        The row and its sketch, shape ``(k,)``, float32.
    """

    def row(kind: str, number: int | None, ids: list[int], tokens: int, vector: torch.Tensor, tied: bool) -> Row:
        norm = float(vector.double().norm())
        return make_row(step, kind, number, ids, tokens, norm, norm_state, sketch.sketch(vector.float()), tied)

    if processes.leads and total.hidden is not None:
        yield row("step", None, total.sample_ids, total.tokens, total.hidden, total.tied)
    for number, micro in enumerate(micros):
        if micro.hidden is None:
            continue
        place = number * processes.count + processes.rank
        if total.micro_batches > 1:
            ids, tokens, vector = micro.sample_ids, sum(micro.tokens), micro.hidden.double().sum(dim=0)
            yield row("micro_batch", place, ids, tokens, vector, all(micro.tied))
        if with_samples:
            samples = zip(micro.sample_ids, micro.tokens, micro.hidden, micro.tied, strict=True)
            for sample, count, vector, tied in samples:
                yield row("sample", place, [sample], count, vector, tied)


def head_rows(
    step: int,
    micros: list[MicroBatch],
    total: StepTotal,
    sketch: GradientSketch,
    norm_state: str,
    processes: Processes,
    with_samples: bool,
) -> Iterator[Row]:
    """Yield this process's rows of ``head_only``, of the kinds that :func:`hidden_rows` has.

    Parameters
    ----------
    step, micros, total, sketch, norm_state, processes, with_samples
        As in :func:`hidden_rows`. Norms of single samples are exact; those of steps and micro-batches are known only
        from their sketches, which ``norm_state`` then says.
    """

    def row(kind: str, number: int | None, ids: list[int], tokens: int, vector: torch.Tensor, tied: bool) -> Row:
        norm = float(vector.norm()) if sketch.kind == "identity" else None
        return make_row(step, kind, number, ids, tokens, norm, norm_state, vector, tied)

    if processes.leads and total.head is not None:
        yield row("step", None, total.sample_ids, total.tokens, total.head, total.tied)
    for number, micro in enumerate(micros):
        if micro.head_only is None:
            continue
        place = number * processes.count + processes.rank
        if total.micro_batches > 1:
            ids, tokens, vector = micro.sample_ids, sum(micro.tokens), micro.head_only.double().sum(dim=0)
            yield row("micro_batch", place, ids, tokens, vector, all(micro.tied))
        if with_samples:
            samples = zip(micro.sample_ids, micro.tokens, micro.head_norms, micro.head_only, micro.tied, strict=True)
            for sample, count, norm, vector, tied in samples:
                yield make_row(step, "sample", place, [sample], count, norm, norm_state, vector, tied)


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
