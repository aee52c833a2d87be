"""Record: what each batch of a training run did to the gradients, in a run folder that anybody can open."""

from __future__ import annotations

from diagnostics.recorder import GradientRecorder
from diagnostics.scalars import log_scalars

__all__ = ["GradientRecorder", "log_scalars"]
