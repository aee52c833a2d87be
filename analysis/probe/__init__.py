"""What an organizer's batches would do to the gradients, asked before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from analysis.probe.batches import ArmProbe, ObservedBatches, ProbeRows, SizeLine
    from analysis.probe.design import Arm, ProbeDesign, design_probe
    from analysis.probe.plots import probe_arms, probe_curve, probe_figure
    from analysis.probe.results import advice
    from analysis.probe.study import SignalProbe, Verdict, probe_signal
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "Arm",
    "ArmProbe",
    "ObservedBatches",
    "ProbeDesign",
    "ProbeRows",
    "SignalProbe",
    "SizeLine",
    "Verdict",
    "advice",
    "design_probe",
    "probe_arms",
    "probe_curve",
    "probe_figure",
    "probe_signal",
]
