"""Rows of the gradient log from what a step's micro-batches left behind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from diagnostics.runlog import GradientRow
from diagnostics.signals import MicroBatch, WeightTap
from diagnostics.sketch import GradientSketch

Row = tuple[GradientRow, NDArray[np.float32]]


def weight_rows(step: int, micros: list[MicroBatch], norm: float | None, norm_state: str) -> Iterator[Row]:
    """Yield a step's rows of ``weight``: the step's, and its micro-batches' where there are several.

    Parameters
    ----------
    step
        Counted from 0.
    micros
        The step's micro-batches.
    norm
        Exact norm of the accumulated gradient.
    norm_state
        Whether norms are raw or clipped, scaled or not, in words.

    Yields
    ------
    tuple
        The row and its sketch, shape ``(k,)``, float32. With one micro-batch the step's row is that micro-batch's too.
    """
    fired = [m for m in micros if m.weight is not None]
    if not fired:
        return
    total = WeightTap.step_sketch(fired)
    tied = all(all(_tied(micro)) for micro in micros)
    yield make_row(step, "step", None, _ids(micros), _tokens(micros), norm, norm_state, total, tied)
    if len(micros) > 1:
        for number, micro in enumerate(micros):
            if micro.weight is not None:
                ids, tokens, tied = micro.sample_ids, sum(micro.tokens), all(_tied(micro))
                norm, sketch = micro.weight_norm, micro.weight
                yield make_row(step, "micro_batch", number, ids, tokens, norm, norm_state, sketch, tied)


def hidden_rows(
    step: int, micros: list[MicroBatch], sketch: GradientSketch, norm_state: str, with_samples: bool
) -> Iterator[Row]:
    """Yield a step's rows of ``hidden``: as :func:`weight_rows`, and those of single samples where asked for.

    Parameters
    ----------
    step, micros, norm_state
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
    sums = {n: m.hidden.double().sum(dim=0) for n, m in enumerate(micros) if m.hidden is not None}
    if not sums:
        return

    def row(kind: str, number: int | None, ids: list[int], tokens: int, vector: torch.Tensor, tied: bool) -> Row:
        norm = float(vector.double().norm())
        return make_row(step, kind, number, ids, tokens, norm, norm_state, sketch.sketch(vector.float()), tied)

    total = torch.stack(list(sums.values())).sum(dim=0)
    yield row("step", None, _ids(micros), _tokens(micros), total, all(all(_tied(micro)) for micro in micros))
    for number, micro in enumerate(micros):
        if micro.hidden is None:
            continue
        if len(micros) > 1:
            yield row("micro_batch", number, micro.sample_ids, sum(micro.tokens), sums[number], all(_tied(micro)))
        if with_samples:
            samples = zip(micro.sample_ids, micro.tokens, micro.hidden, _tied(micro), strict=True)
            for sample, count, vector, tied in samples:
                yield row("sample", number, [sample], count, vector, tied)


def head_rows(
    step: int, micros: list[MicroBatch], sketch: GradientSketch, norm_state: str, with_samples: bool
) -> Iterator[Row]:
    """Yield a step's rows of ``head_only``, of the kinds that :func:`hidden_rows` has.

    Parameters
    ----------
    step, micros, sketch, norm_state, with_samples
        As in :func:`hidden_rows`. Norms of single samples are exact; those of steps and micro-batches are known only
        from their sketches, which ``norm_state`` then says.
    """
    sums = {n: m.head_only.double().sum(dim=0) for n, m in enumerate(micros) if m.head_only is not None}
    if not sums:
        return

    def norm_of(vector: torch.Tensor) -> float | None:
        return float(vector.norm()) if sketch.kind == "identity" else None

    total = torch.stack(list(sums.values())).sum(dim=0)
    tied = all(all(_tied(micro)) for micro in micros)
    yield make_row(step, "step", None, _ids(micros), _tokens(micros), norm_of(total), norm_state, total, tied)
    for number, micro in enumerate(micros):
        if micro.head_only is None:
            continue
        if len(micros) > 1:
            ids, tokens, part = micro.sample_ids, sum(micro.tokens), sums[number]
            tied = all(_tied(micro))
            yield make_row(step, "micro_batch", number, ids, tokens, norm_of(part), norm_state, part, tied)
        if with_samples:
            rows = zip(micro.sample_ids, micro.tokens, micro.head_norms, micro.head_only, _tied(micro), strict=True)
            for sample, count, norm, row, tied in rows:
                yield make_row(step, "sample", number, [sample], count, norm, norm_state, row, tied)


def sample_coherence(micros: list[MicroBatch]) -> float | None:
    """Mean pairwise cosine of the samples' ``hidden`` gradients within a step.

    Parameters
    ----------
    micros
        The step's micro-batches.

    Returns
    -------
    float or None
        In [-1, 1]: ``(|sum u|**2 - m) / (m (m - 1))`` over the m unit gradients u, in float64. None with fewer than two
        that are finite and not zero. `analysis.batch_coherence` says the same of a stored run; source as there.
    """
    rows = [micro.hidden[~torch.tensor(_tied(micro))].double() for micro in micros if micro.hidden is not None]
    if not rows:
        return None
    norms = torch.linalg.vector_norm(torch.cat(rows), dim=1)
    usable = torch.isfinite(norms) & (norms > 0)
    unit = torch.cat(rows)[usable] / norms[usable, None]
    count = len(unit)
    if count < 2:
        return None
    total = float(unit.sum(dim=0).square().sum())
    return min(1.0, max(-1.0, (total - count) / (count * (count - 1))))


def make_row(
    step: int,
    kind: str,
    micro_batch: int | None,
    sample_ids: list[int],
    tokens: int,
    norm: float | None,
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


def _tokens(micros: list[MicroBatch]) -> int:
    return sum(sum(micro.tokens) for micro in micros)


def _tied(micro: MicroBatch) -> list[bool]:
    """Which samples have a gradient of zero because the rewards of their group tie."""
    return list(micro.ids.tied or [False] * len(micro.sample_ids))


def _ids(micros: list[MicroBatch]) -> list[int]:
    return [i for micro in micros for i in micro.sample_ids]
