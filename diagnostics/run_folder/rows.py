"""The rows of steps and gradients, and the tables that they are written as."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sdo.run_format import GRADIENTS, STEPS
from sdo.run_schema import schema_of


@dataclass(frozen=True, slots=True)
class StepRow:
    """One optimizer step; None where a value is not known, ``seconds`` without ``recorder_seconds``."""

    step: int  # global_step before the update, from 0
    organizer_epoch: int | None
    trainer_epoch: float | None
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None  # as the trainer reports it: over all parameters, before clipping
    clipped: bool | None
    loss_scale: float
    skipped: bool  # no update: a gradient overflowed under loss scaling
    tokens: int
    seconds: float
    recorder_seconds: float
    sample_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class GradientRow:
    """One gradient of a signal; its sketch is given beside it."""

    step: int
    kind: str  # "step", "micro_batch" or "sample"
    micro_batch: int | None
    sample_ids: Sequence[int]
    tokens: int
    norm: float | None  # exact 2-norm; None with a reason
    norm_state: str  # raw or clipped, scaled or not, in words
    reason: str | None = None  # why the sketch is zeros; None for a usable gradient


def with_reason(row: GradientRow, sketch: NDArray[np.float32]) -> tuple[GradientRow, NDArray[np.float32]]:
    """Return a row and its sketch, set to zeros in place where the gradient has no direction.

    Where no reason is given, a norm of 0 gets "zero gradient", a norm that is not finite becomes null with "non-finite
    gradient", and a sketch that is not finite gets "non-finite sketch".
    """
    norm, reason = row.norm, row.reason
    if norm is not None and not math.isfinite(norm):
        norm, reason = None, reason or "non-finite gradient"
    elif norm == 0.0:
        reason = reason or "zero gradient"
    elif not np.isfinite(sketch).all():
        reason = reason or "non-finite sketch"
    if reason is not None:
        sketch[:] = 0.0
    return replace(row, norm=norm, reason=reason), sketch


def step_table(rows: Sequence[StepRow]) -> pa.Table:
    """Return rows of steps as a table; numbers that are not finite become null."""
    return pa.Table.from_pylist([_finite(asdict(row)) for row in rows], schema=schema_of(STEPS))


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    bad = {k for k, v in row.items() if isinstance(v, float | np.floating) and not math.isfinite(v)}
    return {k: None if k in bad else v for k, v in row.items()}


def gradient_table(rows: Sequence[tuple[GradientRow, NDArray[np.float32]]], stored: int) -> pa.Table:
    """Return rows of gradients with their sketches of `stored` entries."""
    small = pa.Table.from_pylist([asdict(row) for row, _ in rows], schema=schema_of(GRADIENTS))
    values = pa.array(np.concatenate([sketch for _, sketch in rows]))
    field = schema_of(GRADIENTS, stored).field("sketch")
    return small.append_column(field, pa.FixedSizeListArray.from_arrays(values, stored))
