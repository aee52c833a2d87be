"""Record: what each batch of a training run did to the gradients, in a run folder that anybody can open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from diagnostics.examination.diagnosis import Diagnosis
    from diagnostics.examination.examine import doctor
    from diagnostics.recording.recorder import GradientRecorder
    from diagnostics.signals.base import Signal
    from diagnostics.signals.registry import register_signal
    from diagnostics.signals.samples import Samples
    from diagnostics.signals.weight import Weight
    from sdo.trainers.log_figures import log_scalars
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "Diagnosis",
    "GradientRecorder",
    "Samples",
    "Signal",
    "Weight",
    "doctor",
    "log_scalars",
    "register_signal",
]
