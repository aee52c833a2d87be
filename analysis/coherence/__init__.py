"""How well gradients agree: between steps, and within a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from analysis.coherence.cosines import (
        BatchCoherence,
        CoherenceBlocks,
        StepSummary,
        batch_coherence,
        mean_pairwise_cosine,
        step_coherence,
        step_coherence_blocks,
        step_summary,
    )
    from analysis.coherence.gram import (
        conflict_share,
        gradient_confusion,
        gradient_diversity,
        gram_matrix,
        gram_measures,
        m_coherence,
        noise_scale,
    )
    from analysis.coherence.plots import batch_coherence_series, coherence_heat_maps, heat_map, shared_limit
    from analysis.coherence.study import BetweenSteps, SignalCoherence, WithinSteps, run_coherence
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "BatchCoherence",
    "BetweenSteps",
    "CoherenceBlocks",
    "SignalCoherence",
    "StepSummary",
    "WithinSteps",
    "batch_coherence",
    "batch_coherence_series",
    "coherence_heat_maps",
    "conflict_share",
    "gradient_confusion",
    "gradient_diversity",
    "gram_matrix",
    "gram_measures",
    "heat_map",
    "m_coherence",
    "mean_pairwise_cosine",
    "noise_scale",
    "run_coherence",
    "shared_limit",
    "step_coherence",
    "step_coherence_blocks",
    "step_summary",
]
