"""The run folder, written: append-only and crash-safe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from diagnostics.run_folder.rows import GradientRow, StepRow
    from diagnostics.run_folder.writer import RunLog, check_free, steps_recorded
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "GradientRow",
    "RunLog",
    "StepRow",
    "check_free",
    "steps_recorded",
]
