"""What loss scaling does to a step, read off the optimizer that accelerate prepared."""

from __future__ import annotations

from typing import Any


def loss_scale(optimizer: Any) -> float:
    """Return the factor that the loss is multiplied by under fp16 loss scaling, or 1."""
    scaler = getattr(optimizer, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def update_was_skipped(optimizer: Any, scale_before: float) -> bool:
    """Return whether the update was skipped because gradients overflowed.

    Parameters
    ----------
    optimizer
        As accelerate prepared it.
    scale_before
        :func:`loss_scale` before the update.

    Notes
    -----
    A fused optimizer skips inside its kernel, and accelerate then reports that it did not; that the scale was lowered
    tells in both cases.
    """
    return bool(getattr(optimizer, "step_was_skipped", False)) or loss_scale(optimizer) < scale_before
