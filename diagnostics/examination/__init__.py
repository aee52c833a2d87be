"""What recording a run would give and cost, found out without training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from diagnostics.examination.diagnosis import Diagnosis, SignalFinding
    from diagnostics.examination.examine import doctor
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "Diagnosis",
    "SignalFinding",
    "doctor",
]
