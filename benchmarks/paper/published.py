"""The balance figures that the paper prints, against what equal clusters would give by chance."""

from __future__ import annotations

import functools

import numpy as np

from analysis import cluster_balance

QUESTIONS, CLUSTERS = 1319, 164
# Of arXiv 2607.27273, uniform and SDO at 5k steps; accuracies there: 82.41 % and 82.89 %.
PUBLISHED = {"b20": (0.5594, 0.5750), "gini": (0.1100, 0.1038), "gap": (1.00, 0.80)}
ACCURACY = 0.8289
_NAMES = {"b20": "B-20%", "gini": "Gini", "gap": "gap"}


@functools.cache
def bands() -> dict[str, tuple[float, float]]:
    """Return where 95 % of each metric's values lie when all clusters are equally good.

    Clusters as equal in size as 1,319 questions allow: the paper's own sizes are not public, and unequal ones make the
    bands wider.
    """
    label = np.arange(QUESTIONS) % CLUSTERS
    correct = np.zeros(QUESTIONS)
    correct[: round(ACCURACY * QUESTIONS)] = 1.0
    found = cluster_balance(np.random.default_rng(617).permutation(correct), label, resamples=1999)
    return {name: band for name in PUBLISHED if (band := found.metrics[name].equal_band) is not None}


def balance_section() -> str:
    """Return the page's part on the published balance figures."""
    lines = ["### The published balance figures, and chance", ""]
    lines += [
        f"The paper measures balance over {CLUSTERS} clusters of {QUESTIONS:,} questions, {QUESTIONS / CLUSTERS:.0f} "
        f"each. If all clusters were equally good, at accuracy {ACCURACY:.1%}, the same metrics would lie in these "
        "bands in 95 of 100 cases (questions permuted over clusters of equal size):",
        "",
        "| metric | published, uniform → SDO | band of equal clusters | |",
        "|---|---|---|---|",
    ]
    for name, (uniform, sdo) in PUBLISHED.items():
        low, high = bands()[name]
        inside = [low <= value <= high for value in (uniform, sdo)]
        words = "both inside" if all(inside) else "one outside" if any(inside) else "both outside"
        lines.append(f"| {_NAMES[name]} | {uniform:.4g} → {sdo:.4g} | {low:.4g} to {high:.4g} | {words} |")
    lines += ["", "So these figures do not tell unequal clusters from equal ones, nor the two runs from each other."]
    return "\n".join(lines)
