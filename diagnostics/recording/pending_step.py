"""The row of a step while it waits for what the trainer logs of that step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from diagnostics.run_folder.rows import StepRow
from sdo.trainers.adapter import TrainerAdapter


class LoggedRow:
    """Holds the last step's row until the next step begins, since the trainer logs a step after its update.

    Parameters
    ----------
    training
        Whose log it is.
    """

    def __init__(self, training: TrainerAdapter) -> None:
        self._loss_is_logged = training.kind.loss_from == "log"
        self._max_grad_norm = float(training.settings.max_grad_norm or 0)
        self._filters = training.filters_losses
        self._row: StepRow | None = None
        self._micro_batches = 0
        self._sketch_norm: float | None = None
        self._logged_until = training.first_step  # updates that the trainer's logs of the loss cover

    @property
    def waits(self) -> bool:
        """Whether there is a row."""
        return self._row is not None

    def wait_with(self, row: StepRow, micro_batches: int, sketch_norm: float | None) -> None:
        """Hold a row.

        Parameters
        ----------
        row
            What is known of the step.
        micro_batches
            How many the step had.
        sketch_norm
            Norm of a sketch of its gradient, where there is one.
        """
        self._row, self._micro_batches, self._sketch_norm = row, micro_batches, sketch_norm

    def take(self) -> StepRow | None:
        """Return the row, and hold it no longer."""
        row, self._row = self._row, None
        return row

    def note(self, updates: int, logs: dict[str, Any]) -> None:
        """Put what the trainer logs into the row, if it is that step's.

        Parameters
        ----------
        updates
            Number of updates so far.
        logs
            Of them ``grad_norm``, the total before clipping, and ``loss``, which is a mean over the updates since the
            last log: that of one step where there was one.
        """
        row = self._row if self._row is not None and self._row.step == updates - 1 else None
        if row is not None and "grad_norm" in logs:
            norm = float(logs["grad_norm"])
            clipped = 0 < self._max_grad_norm < norm if row.clipped is None else row.clipped
            row = self._row = replace(row, grad_norm=norm, clipped=clipped)
        if "loss" in logs:
            single = updates - self._logged_until == 1
            if row is not None and single and self._loss_is_logged:
                loss = float(logs["loss"])
                self._row = replace(row, loss=None if self._was_replaced(loss) else loss)
            self._logged_until = updates

    def note_norm(self, norm: float, *, measured: bool) -> None:
        """Put the norm of the gradient over all parameters into the row, before clipping.

        Parameters
        ----------
        norm
            As clipping returned it, or as it was measured.
        measured
            Whether it was measured behind clipping, if there was any: then it is known where nothing was clipped.
        """
        row, limit = self._row, self._max_grad_norm
        if row is None:
            return
        clipped = row.clipped
        if clipped is None and limit and (not measured or norm < limit * (1 - 1e-4)):
            clipped = norm > limit
        known = not measured or clipped is False or (clipped is None and not limit)
        self._row = replace(row, grad_norm=norm if known else None, clipped=clipped)

    def _was_replaced(self, loss: float) -> bool:
        """Whether a logged loss of one step stands for one that was not finite.

        With ``logging_nan_inf_filter`` transformers leaves a micro-batch's loss out where it is not finite. Of a single
        micro-batch 0 is left, which a gradient contradicts; of several a sum of the others, when the gradient is hardly
        finite either.
        """
        norm = self._sketch_norm
        if not self._filters or norm is None:
            return False
        return (loss == 0 and norm != 0) if self._micro_batches == 1 else not math.isfinite(norm)
