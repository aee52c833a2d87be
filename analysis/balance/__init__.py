"""How evenly correctness is spread over clusters of questions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from analysis.balance.cluster_texts import Prompts
    from analysis.balance.clusters import Clustering, cluster, given_labels, read_labels
    from analysis.balance.duplicates import duplicate_groups
    from analysis.balance.metrics import wilson
    from analysis.balance.per_cluster import cluster_balance, compare_balance
    from analysis.balance.plots import cluster_sizes, dumbbell, lorenz, ranked_clusters
    from analysis.balance.predictions import Predictions, read_all_predictions, read_predictions
    from analysis.balance.results import Balance, BalanceComparison, Difference, Homogeneity, MetricBalance
    from analysis.balance.summary import BalanceSummary, summarize_balance
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "Balance",
    "BalanceComparison",
    "BalanceSummary",
    "Clustering",
    "Difference",
    "Homogeneity",
    "MetricBalance",
    "Predictions",
    "Prompts",
    "cluster",
    "cluster_balance",
    "cluster_sizes",
    "compare_balance",
    "dumbbell",
    "duplicate_groups",
    "given_labels",
    "lorenz",
    "ranked_clusters",
    "read_all_predictions",
    "read_labels",
    "read_predictions",
    "summarize_balance",
    "wilson",
]
