"""Explains what a training run did: run folders in, numbers with their uncertainty and pictures out."""

from __future__ import annotations

from analysis.coherence import (
    BatchCoherence,
    CoherenceBlocks,
    StepSummary,
    batch_coherence,
    mean_pairwise_cosine,
    step_coherence,
    step_coherence_blocks,
    step_summary,
)
from analysis.drawing import save
from analysis.estimates import Estimate, Spread, describe
from analysis.gram import (
    conflict_share,
    gradient_confusion,
    gradient_diversity,
    gram_matrix,
    gram_measures,
    m_coherence,
    noise_scale,
)
from analysis.plots import batch_coherence_series, coherence_heat_maps, heat_map, shared_limit
from analysis.runs import GradientRows, Run

__all__ = [
    "BatchCoherence",
    "CoherenceBlocks",
    "Estimate",
    "GradientRows",
    "Run",
    "Spread",
    "StepSummary",
    "batch_coherence",
    "batch_coherence_series",
    "coherence_heat_maps",
    "conflict_share",
    "describe",
    "gradient_confusion",
    "gradient_diversity",
    "gram_matrix",
    "gram_measures",
    "heat_map",
    "m_coherence",
    "mean_pairwise_cosine",
    "noise_scale",
    "save",
    "shared_limit",
    "step_coherence",
    "step_coherence_blocks",
    "step_summary",
]
