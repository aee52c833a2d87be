"""Explains what a training run did: run folders in, numbers with their uncertainty and pictures out."""

from __future__ import annotations

from analysis.balance.cluster_balance import cluster_balance, compare_balance
from analysis.balance.cluster_texts import Prompts
from analysis.balance.clusters import Clustering, cluster, duplicate_groups, given_labels, read_labels
from analysis.balance.metrics import wilson
from analysis.balance.plots import cluster_sizes, dumbbell, lorenz, ranked_clusters
from analysis.balance.predictions import Predictions, read_all_predictions, read_predictions
from analysis.balance.results import Balance, BalanceComparison, Difference, Homogeneity, MetricBalance
from analysis.balance.summary import BalanceSummary, summarise_balance
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
from analysis.coherence.study import SignalCoherence, run_coherence
from analysis.drawing import save
from analysis.estimates import Estimate, Spread, describe
from analysis.exposure.ledger import Exposure, exposure_entry, gini, plan_exposure, run_exposure
from analysis.exposure.plots import coverage_curves, exposure_histogram, seed_differences
from analysis.locality.plots import locality_cloud, locality_series, signal_clouds
from analysis.locality.redraw_tests import Association
from analysis.locality.sample_pairs import (
    SamplePairs,
    Slope,
    all_pairs,
    binned_pairs,
    mantel_test,
    pair_slope,
    pairs_within_steps,
)
from analysis.locality.study import RunLocality, SignalLocality, run_locality
from analysis.run_folder.gradient_rows import GradientRows
from analysis.run_folder.run import Run
from analysis.seeds.compare import (
    PairedComparison,
    Pairing,
    SeedComparison,
    UnpairedComparison,
    compare_paired,
    compare_seeds,
    compare_unpaired,
    pair_runs,
)

__all__ = [
    "Association",
    "Balance",
    "BalanceComparison",
    "BalanceSummary",
    "BatchCoherence",
    "Clustering",
    "CoherenceBlocks",
    "Difference",
    "Estimate",
    "Exposure",
    "GradientRows",
    "Homogeneity",
    "MetricBalance",
    "PairedComparison",
    "Pairing",
    "Predictions",
    "Prompts",
    "Run",
    "RunLocality",
    "SamplePairs",
    "SeedComparison",
    "SignalCoherence",
    "SignalLocality",
    "Slope",
    "Spread",
    "StepSummary",
    "UnpairedComparison",
    "all_pairs",
    "batch_coherence",
    "batch_coherence_series",
    "binned_pairs",
    "cluster",
    "cluster_balance",
    "cluster_sizes",
    "coherence_heat_maps",
    "compare_balance",
    "compare_paired",
    "compare_seeds",
    "compare_unpaired",
    "conflict_share",
    "coverage_curves",
    "describe",
    "dumbbell",
    "duplicate_groups",
    "exposure_entry",
    "exposure_histogram",
    "gini",
    "given_labels",
    "gradient_confusion",
    "gradient_diversity",
    "gram_matrix",
    "gram_measures",
    "heat_map",
    "locality_cloud",
    "locality_series",
    "lorenz",
    "m_coherence",
    "mantel_test",
    "mean_pairwise_cosine",
    "noise_scale",
    "pair_runs",
    "pair_slope",
    "pairs_within_steps",
    "plan_exposure",
    "ranked_clusters",
    "read_all_predictions",
    "read_labels",
    "read_predictions",
    "run_coherence",
    "run_exposure",
    "run_locality",
    "save",
    "seed_differences",
    "shared_limit",
    "signal_clouds",
    "step_coherence",
    "step_coherence_blocks",
    "step_summary",
    "summarise_balance",
    "wilson",
]
