"""Record: what each batch of a training run did to the gradients, in a run folder that anybody can open."""

from __future__ import annotations

try:
    from diagnostics.diagnosis import Diagnosis
    from diagnostics.examination import doctor
    from diagnostics.recorder import GradientRecorder
    from diagnostics.scalars import log_scalars
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("torch", "transformers", "accelerate"):
        raise
    needed = f"diagnostics needs {error.name}; mend: pip install 'sdo-toolkit[train]'"
    raise ModuleNotFoundError(needed, name=error.name) from None

__all__ = ["Diagnosis", "GradientRecorder", "doctor", "log_scalars"]
