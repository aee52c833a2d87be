"""How often each sample is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from analysis.exposure.ledger import Exposure, exposure_entry, gini, plan_exposure, run_exposure
    from analysis.exposure.plots import coverage_curves, exposure_histogram, seed_differences
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "Exposure",
    "coverage_curves",
    "exposure_entry",
    "exposure_histogram",
    "gini",
    "plan_exposure",
    "run_exposure",
    "seed_differences",
]
