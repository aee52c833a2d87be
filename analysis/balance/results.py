"""What is found out about the balance of a run and about the difference between two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Interval = tuple[float, float]

SMALL = 5  # clusters with fewer questions are flagged


@dataclass(frozen=True)
class MetricBalance:
    """One metric of one run, all values as fractions of 1.

    Attributes
    ----------
    value
        The raw value; for ``spread`` the latent value itself.
    equal_band
        Where 95 % of the values lie if all clusters are equally good. A description, not an interval of the value.
        None where no deal of the scores changes the value.
    latent
        The metric of the clusters' underlying accuracies.
    latent_interval
        95 % interval of `latent`: Q-profile for ``spread``, parametric bootstrap for the others.
    reason
        Why something is None; None where all is there.
    """

    value: float | None
    equal_band: Interval | None
    latent: float | None
    latent_interval: Interval | None
    reason: str | None = None


@dataclass(frozen=True)
class Homogeneity:
    """Are all clusters equally good? Permutation test of Pearson's statistic, with the reason where there is none."""

    statistic: float | None
    p: float | None
    reason: str | None = None


@dataclass(frozen=True, eq=False)
class Balance:
    """Balance of one run over C clusters.

    Attributes
    ----------
    n, distinct
        Questions in the clusters, and how many without duplicates.
    names
        Shape ``(C,)``, labels of the clusters that hold questions, ascending.
    size
        Shape ``(C,)``, questions of each.
    accuracy
        Shape ``(C,)``, mean score of each.
    interval
        Shape ``(C, 2)``, Wilson intervals.
    question_accuracy
        Mean score over the questions: each counts once, whatever its cluster. ``mean`` of `metrics` is over clusters.
    question_interval
        Its Wilson interval; duplicates count as fewer questions (see `QuestionUnits.effective`).
    metrics
        ``mean``, ``b20``, ``cv``, ``gini``, ``gap``, ``spread``.
    homogeneity
        Test of equal clusters.
    logit
        Standard deviation of the log-odds of the underlying accuracies, None where undefined.
    ranked_band
        Shape ``(2, C)``: where 95 % of the i-th lowest accuracies lie if all clusters are equally good.
    lorenz_band
        Shape ``(2, C + 1)``: the same for the Lorenz curve; NaN if all scores are 0.
    """

    n: int
    distinct: int
    names: NDArray[np.int64]
    size: NDArray[np.int64]
    accuracy: Array
    interval: Array
    question_accuracy: float
    question_interval: Interval
    metrics: Mapping[str, MetricBalance]
    homogeneity: Homogeneity
    logit: float | None
    ranked_band: Array
    lorenz_band: Array

    @property
    def small(self) -> NDArray[np.bool_]:
        """Shape ``(C,)``: clusters of fewer than five questions."""
        return self.size < SMALL


@dataclass(frozen=True)
class Difference:
    """A metric of a run minus that of the baseline, by the swap test; nothing of it lies outside what is possible.

    Attributes
    ----------
    difference
        Fractions of 1.
    interval
        Of ``mean`` by `score_interval`, of the others the difference minus the quantiles of its distribution under
        swapping, cut to the values that the difference can take: it holds 0 exactly where p is not below 0.05. None
        where 95 % of the swaps leave no difference.
    p
        Two-sided; at least 1/(resamples + 1). None where no swap makes a difference.
    verdict
        ``"better"``, ``"worse"`` or ``"undetermined"``.
    reason
        Why something is None, or why p below 0.05 is no verdict.
    """

    difference: float | None
    interval: Interval | None
    p: float | None
    verdict: str
    reason: str | None = None


@dataclass(frozen=True, eq=False)
class BalanceComparison:
    """Two runs on the same questions.

    Attributes
    ----------
    n, distinct
        Questions compared, and how many without duplicates.
    names
        Shape ``(C,)``, labels of the clusters.
    size
        Shape ``(C,)``, questions of each.
    baseline, run
        Shape ``(C,)``, accuracies of each cluster.
    question_accuracy
        Difference of the accuracies over questions: interval by `paired_interval`, p by the exact sign test of the
        questions that the runs score differently (McNemar's exact test of single answers). A verdict needs both.
    metrics
        As in `Balance`. The verdict of ``spread`` is the verdict on balance.
    logit
        Difference of the latent spread of log-odds.
    cluster_p
        Shape ``(C,)``: exact sign test of each cluster, adjusted for their number (Holm 1979); 1 for a cluster whose
        questions both runs score alike.
    """

    n: int
    distinct: int
    names: NDArray[np.int64]
    size: NDArray[np.int64]
    baseline: Array
    run: Array
    question_accuracy: Difference
    metrics: Mapping[str, Difference]
    logit: Difference
    cluster_p: Array

    @property
    def verdict(self) -> str:
        """The verdict on balance."""
        return self.metrics["spread"].verdict
