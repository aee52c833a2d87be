"""Explains what a training run did: run folders in, numbers with their uncertainty and pictures out."""

from __future__ import annotations

from analysis.coherence import (
    BatchCoherence,
    StepSummary,
    batch_coherence,
    mean_pairwise_cosine,
    step_coherence,
    step_summary,
)
from analysis.drawing import save
from analysis.estimates import Estimate, Spread, describe
from analysis.exposure import Exposure, gini, plan_exposure, run_exposure
from analysis.exposure_plots import coverage_curves, exposure_histogram, seed_differences
from analysis.gram import (
    conflict_share,
    gradient_confusion,
    gradient_diversity,
    gram_matrix,
    gram_measures,
    m_coherence,
    noise_scale,
)
from analysis.locality_plots import locality_cloud, locality_series
from analysis.locality_study import RunLocality, SignalLocality, run_locality
from analysis.plots import batch_coherence_series, coherence_heat_maps, heat_map, shared_limit
from analysis.redraw_tests import Association
from analysis.runs import GradientRows, Run
from analysis.sample_pairs import (
    SamplePairs,
    Slope,
    all_pairs,
    binned_pairs,
    mantel_test,
    pair_slope,
    pairs_within_steps,
)
from analysis.seeds import PairedComparison, Pairing, SeedComparison, compare_paired, compare_seeds, pair_runs

__all__ = [
    "Association",
    "BatchCoherence",
    "Estimate",
    "Exposure",
    "GradientRows",
    "PairedComparison",
    "Pairing",
    "Run",
    "RunLocality",
    "SamplePairs",
    "SeedComparison",
    "SignalLocality",
    "Slope",
    "Spread",
    "StepSummary",
    "all_pairs",
    "batch_coherence",
    "batch_coherence_series",
    "binned_pairs",
    "coherence_heat_maps",
    "compare_paired",
    "compare_seeds",
    "conflict_share",
    "coverage_curves",
    "describe",
    "exposure_histogram",
    "gini",
    "gradient_confusion",
    "gradient_diversity",
    "gram_matrix",
    "gram_measures",
    "heat_map",
    "locality_cloud",
    "locality_series",
    "m_coherence",
    "mantel_test",
    "mean_pairwise_cosine",
    "noise_scale",
    "pair_runs",
    "pair_slope",
    "pairs_within_steps",
    "plan_exposure",
    "run_exposure",
    "run_locality",
    "save",
    "seed_differences",
    "shared_limit",
    "step_coherence",
    "step_summary",
]
