"""Record: what each batch of a training run did to the gradients, in a run folder that anybody can open."""

from __future__ import annotations

from diagnostics.diagnosis import Diagnosis
from diagnostics.examination import doctor
from diagnostics.recorder import GradientRecorder
from diagnostics.scalars import log_scalars

__all__ = ["Diagnosis", "GradientRecorder", "doctor", "log_scalars"]
