"""Explains what a training run did: run folders in, numbers with their uncertainty and pictures out."""

from __future__ import annotations

from analysis.balance import cluster_balance, compare_balance
from analysis.balance_metrics import wilson
from analysis.balance_plots import cluster_sizes, dumbbell, lorenz, ranked_clusters
from analysis.balance_results import Balance, BalanceComparison, Difference, Homogeneity, MetricBalance
from analysis.balance_summary import BalanceSummary, summarise_balance
from analysis.cluster_texts import Prompts
from analysis.clusters import Clustering, cluster, duplicate_groups, given_labels, read_labels
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
from analysis.predictions import Predictions, read_predictions
from analysis.runs import GradientRows, Run

__all__ = [
    "Balance",
    "BalanceComparison",
    "BalanceSummary",
    "BatchCoherence",
    "Clustering",
    "CoherenceBlocks",
    "Difference",
    "Estimate",
    "GradientRows",
    "Homogeneity",
    "MetricBalance",
    "Predictions",
    "Prompts",
    "Run",
    "Spread",
    "StepSummary",
    "batch_coherence",
    "batch_coherence_series",
    "cluster",
    "cluster_balance",
    "cluster_sizes",
    "coherence_heat_maps",
    "compare_balance",
    "conflict_share",
    "describe",
    "dumbbell",
    "duplicate_groups",
    "given_labels",
    "gradient_confusion",
    "gradient_diversity",
    "gram_matrix",
    "gram_measures",
    "heat_map",
    "lorenz",
    "m_coherence",
    "mean_pairwise_cosine",
    "noise_scale",
    "ranked_clusters",
    "read_labels",
    "read_predictions",
    "save",
    "shared_limit",
    "step_coherence",
    "step_coherence_blocks",
    "step_summary",
    "summarise_balance",
    "wilson",
]
