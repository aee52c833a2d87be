"""The balance figures that the paper prints, against what equal clusters would give by chance.

The paper's cluster sizes are not public, and the bands depend on them. ``python -m experiments.published GSM8K``
clusters the same 1,319 questions by their MiniLM embeddings, five times, and keeps the sizes beside the other figures.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis import cluster, cluster_balance
from sdo import Embeddings

SIZES = Path(__file__).parent / "results" / "gsm8k-cluster-sizes.json"
QUESTIONS, CLUSTERS = 1319, 164
# Of arXiv 2607.27273, uniform and SDO at 5k steps; accuracies there: 82.41 % and 82.89 %.
PUBLISHED = {"b20": (0.5594, 0.5750), "gini": (0.1100, 0.1038), "gap": (1.00, 0.80)}
ACCURACY = 0.8289
_SEEDS = (0, 1, 2, 3, 4)
_NAMES = {"b20": "B-20%", "gini": "Gini", "gap": "gap"}

Bands = dict[str, tuple[float, float]]


def write_sizes(source: Path) -> None:
    """Cluster GSM8K's test questions and keep the sizes.

    Parameters
    ----------
    source
        Folder with ``test_minilm.npy``.
    """
    embeddings = Embeddings.read(source / "test_minilm.npy")
    sizes = {str(seed): np.bincount(cluster(embeddings, CLUSTERS, seed=seed).labels).tolist() for seed in _SEEDS}
    SIZES.parent.mkdir(parents=True, exist_ok=True)
    SIZES.write_text(json.dumps(sizes) + "\n", encoding="utf-8")


def equal_sizes() -> list[int]:
    """Return the most even sizes of the clusters."""
    return np.bincount(np.arange(QUESTIONS) % CLUSTERS).tolist()


def bands(sizes: Sequence[int]) -> Bands:
    """Return where 95 % of each metric's values lie when all clusters are equally good.

    Parameters
    ----------
    sizes
        Questions of each cluster.
    """
    label = np.repeat(np.arange(len(sizes)), sizes)
    correct = np.zeros(len(label))
    correct[: round(ACCURACY * len(label))] = 1.0
    found = cluster_balance(np.random.default_rng(617).permutation(correct), label, resamples=1999)
    return {name: band for name in PUBLISHED if (band := found.metrics[name].equal_band) is not None}


@functools.cache
def all_bands() -> tuple[Bands, Bands]:
    """Return the bands for clusters of equal size, and the widest over the k-means clusterings of the questions."""
    each = [bands(sizes) for sizes in json.loads(SIZES.read_text(encoding="utf-8")).values()]
    widest = {name: (min(one[name][0] for one in each), max(one[name][1] for one in each)) for name in PUBLISHED}
    return bands(equal_sizes()), widest


def balance_section() -> str:
    """Return the page's part on the published balance figures."""
    equal, real = all_bands()
    lines = ["### The published balance figures, and chance", ""]
    lines += [
        f"The paper measures balance over {CLUSTERS} clusters of {QUESTIONS:,} questions, about "
        f"{QUESTIONS / CLUSTERS:.0f} each. Where would the same metrics lie in 95 of 100 cases if all clusters were "
        f"equally good, at accuracy {ACCURACY:.1%}? That depends on the clusters' sizes, which are not public: once "
        "for sizes as equal as can be, and once for those of k-means on MiniLM embeddings of the same questions (from "
        f"the lowest to the highest end of the bands of {len(_SEEDS)} seeds: at least 95 of 100).",
        "",
        "| metric | published, uniform → SDO | chance, equal sizes | chance, sizes of k-means |",
        "|---|---|---|---|",
    ]
    for name, pair in PUBLISHED.items():
        cells = [f"{low:.3f} to {high:.3f}: {_where(pair, low, high)}" for low, high in (equal[name], real[name])]
        lines.append(f"| {_NAMES[name]} | {pair[0]:.3f} → {pair[1]:.3f} | {cells[0]} | {cells[1]} |")
    inside = all(low <= value <= high for name, (low, high) in real.items() for value in PUBLISHED[name])
    verdict = (
        "Everything depends on the sizes: with those that k-means gives here, all published figures lie where equal "
        "clusters would put them, and none of them tells unequal clusters from equal ones."
        if inside
        else "Not all published figures lie where equal clusters of such sizes would put them."
    )
    paired = "Whether the two runs differ beyond noise takes their answers question by question."
    return "\n".join([*lines, "", f"{verdict} {paired}"])


def _where(pair: tuple[float, float], low: float, high: float) -> str:
    inside = sum(low <= value <= high for value in pair)
    return ("both outside", "one outside", "both inside")[inside]


if __name__ == "__main__":
    write_sizes(Path(sys.argv[1]))
