"""Which gradient is meant, and how it is caught.

``weight``: the gradient of one named parameter. ``hidden``: that with respect to the final norm's output, summed over a
sample's positions. ``head_only``: that of the language-model head alone. ``samples``: each sample's gradient of chosen
linear layers. ``base`` says what a signal is, ``registry`` knows them by their words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from diagnostics.signals.base import Capture, Signal, SignalContext, StepFacts, StepGradient
    from diagnostics.signals.head import HeadOnly
    from diagnostics.signals.hidden import Hidden
    from diagnostics.signals.micro_batch import MicroBatch
    from diagnostics.signals.registry import register_signal
    from diagnostics.signals.sample_vectors import SampleVectors
    from diagnostics.signals.samples import Samples
    from diagnostics.signals.weight import Weight
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "Capture",
    "HeadOnly",
    "Hidden",
    "MicroBatch",
    "SampleVectors",
    "Samples",
    "Signal",
    "SignalContext",
    "StepFacts",
    "StepGradient",
    "Weight",
    "register_signal",
]
