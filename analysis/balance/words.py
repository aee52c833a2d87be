"""What ``sdo balance`` and the report call the metrics, and how both explain them."""

from __future__ import annotations

NAMES = {
    "mean": "mean over clusters",
    "b20": "B-20%",
    "cv": "CV",
    "gini": "Gini",
    "gap": "gap, points",
    "spread": "latent spread",
}
ACCURACY = "accuracy over questions"
CAVEAT = (
    "A verdict on balance or accuracy is on these answers, not on how the models were trained: that takes several "
    "seeds."
)
WORDS = (
    "The accuracy over questions counts every question once, the mean over clusters every cluster: they differ where "
    "small clusters are easier or harder than large ones.",
    "Raw values are over the clusters' accuracies: B-20% the mean of the lowest fifth, CV the standard deviation over "
    "the mean, Gini the mean absolute difference of two clusters over twice the mean, gap the largest minus the "
    "smallest. They hold mostly noise where clusters are small.",
    "Equal clusters: where 95 % of the values lie if all clusters are equally good. Latent: the metric of the "
    "clusters' underlying accuracies, from a beta distribution fitted to what the noise leaves, with a 95 % interval.",
    "B-20%, CV, Gini and gap move with the mean; the latent spread, the standard deviation of the underlying "
    "accuracies, alone carries the verdict on balance: less is better. Runs are compared by swapping their answers to "
    "the same question, their accuracies over questions by an exact sign test; compare runs that were decoded alike.",
    CAVEAT,
)
