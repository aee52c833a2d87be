"""Run folders, read as arrays and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from analysis.run_folder.curves import (
        Evaluation,
        Training,
        evaluation_curves,
        evaluations,
        loss_curves,
        reward_curves,
        rewards,
        training,
    )
    from analysis.run_folder.gradient_rows import GradientRows
    from analysis.run_folder.overview import run_overview
    from analysis.run_folder.run import Run
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "Evaluation",
    "GradientRows",
    "Run",
    "Training",
    "evaluation_curves",
    "evaluations",
    "loss_curves",
    "reward_curves",
    "rewards",
    "run_overview",
    "training",
]
