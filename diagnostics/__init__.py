"""Record: what each batch of a training run did to the gradients, in a run folder that anybody can open."""

from __future__ import annotations

from sdo.errors import absent_package

try:
    from diagnostics.examination.diagnosis import Diagnosis
    from diagnostics.examination.examine import doctor
    from diagnostics.recording.recorder import GradientRecorder
    from diagnostics.signals import Samples, Signal, Weight, register_signal
    from sdo.trainers.log_figures import log_scalars
except ModuleNotFoundError as error:
    absent = absent_package(error)
    if absent not in ("torch", "transformers", "accelerate"):
        raise
    needed = f"diagnostics needs {absent}; fix: pip install 'sdo-toolkit[train]'"
    raise ModuleNotFoundError(needed, name=absent) from None

__all__ = ["Diagnosis", "GradientRecorder", "Samples", "Signal", "Weight", "doctor", "log_scalars", "register_signal"]
