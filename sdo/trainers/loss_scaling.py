"""What loss scaling does to an update, read off the optimizer that accelerate prepared."""

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


class CurrentUpdate:
    """The update under way, looked at once however many ask.

    Attributes
    ----------
    loss_scale
        Its :func:`loss_scale`; 1 before the first update.
    """

    def __init__(self) -> None:
        self.loss_scale = 1.0
        self._begun: int | None = None
        self._ended: tuple[int | None, bool] = (None, False)

    def begin(self, step: int, optimizer: Any) -> None:
        """Note the loss scale before the update of a step, which falls when an update is skipped."""
        if step != self._begun:
            self.loss_scale, self._begun = loss_scale(optimizer), step

    def skipped(self, step: int, optimizer: Any) -> bool:
        """Return whether the update of a step was skipped, once it was due."""
        if step != self._ended[0]:
            self._ended = step, update_was_skipped(optimizer, self.loss_scale)
        return self._ended[1]
