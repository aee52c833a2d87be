"""Everything that is said about the balance of some runs, put together: what ``sdo balance`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.balance.cluster_texts import Prompts, central_rows, keywords, shown_text
from analysis.balance.clusters import Clustering, described_embeddings
from analysis.balance.duplicates import NEAR_DUPLICATE, duplicate_groups
from analysis.balance.metrics import MOVES_WITH_MEAN, wilson
from analysis.balance.per_cluster import LEVEL, MOVES, cluster_balance, compare_balance
from analysis.balance.predictions import Predictions
from analysis.balance.results import SMALL, Balance, BalanceComparison, Difference
from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError, counted

FORMAT = "sdo-balance"
FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class BalanceSummary:
    """Balance of several runs and their comparisons.

    Attributes
    ----------
    content
        All numbers as ``balance.json`` holds them: finite numbers and None with a ``reason``.
    balances
        Run name to its balance, the baseline among them.
    comparisons
        Run name to its comparison with the baseline.
    baseline
        Name of the baseline.
    keywords
        Label to keywords; empty without prompts.
    notes
        What a reader has to know about the questions, in words.
    """

    content: dict[str, Any]
    balances: dict[str, Balance]
    comparisons: dict[str, BalanceComparison]
    baseline: str
    keywords: dict[int, list[str]]
    notes: list[str]


@dataclass
class _Shared:
    """What the parts of a summary share."""

    runs: list[Predictions]
    rows: dict[str, NDArray[np.int64]]
    labels: NDArray[np.int64]
    groups: NDArray[np.int64]
    resamples: int
    seed: int
    notes: list[str] = field(default_factory=list)

    def union(self) -> NDArray[np.int64]:
        """Rows that any run answered, clusters and noise alike."""
        return np.unique(np.concatenate(list(self.rows.values())))


def summarize_balance(
    runs: Sequence[Predictions],
    clustering: Clustering,
    *,
    embeddings: Embeddings | None = None,
    prompts: Prompts | None = None,
    baseline: str | None = None,
    near_duplicate: float = NEAR_DUPLICATE,
    resamples: int = 999,
    seed: int = 0,
) -> BalanceSummary:
    """Compute the balance of each run, and compare each with the baseline on their common questions.

    Parameters
    ----------
    runs
        At least one; names differ.
    clustering
        Of N rows.
    embeddings
        N rows: for duplicates and central examples, and for ids where they bring some.
    prompts
        N texts: for duplicates, keywords and examples.
    baseline
        Name of a run; the first by default.
    near_duplicate
        Cosine from which questions of a cluster count as one; above 1 for exact duplicates only.
    resamples, seed
        As for `cluster_balance`.

    Raises
    ------
    InputError
        If lengths differ, names or ids are unknown, or a run has no question in a cluster.
    """
    names = [run.name for run in runs]
    reference = names[0] if baseline is None else baseline
    if reference not in names:
        raise InputError(f"no run is called {reference!r}; expected one of {', '.join(names)}; fix: --baseline")
    N = len(clustering.labels)
    for what, there in (("embeddings", embeddings), ("prompts", None if prompts is None else prompts.texts)):
        if there is not None and len(there) != N:
            raise InputError(
                f"{what} have {len(there)} rows, labels {N}; expected one of each a question, in one order"
            )
    keys = None if prompts is None else prompts.keys
    groups = duplicate_groups(clustering.labels, embeddings=embeddings, text_keys=keys, threshold=near_duplicate)
    rows = {run.name: run.rows(N, embeddings) for run in runs}
    shared = _Shared(list(runs), rows, clustering.labels, groups, resamples, seed, list(clustering.notes))
    _note_questions(shared, duplicates_known=embeddings is not None or prompts is not None)
    balances = {run.name: _balance_of(run, shared) for run in runs}
    base = runs[names.index(reference)]
    comparisons = {run.name: _comparison_of(base, run, shared) for run in runs if run is not base}
    shared.notes += dict.fromkeys(note for run in runs for note in run.notes)
    inside = shared.union()
    inside = inside[clustering.labels[inside] >= 0]
    only = np.full(N, -1, dtype=np.int64)
    only[inside] = clustering.labels[inside]
    words = {} if prompts is None else keywords(prompts.texts, only)
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "clusters": len(np.unique(only[inside])),
        "n": len(inside),
        "distinct": len(np.unique(groups[inside])),
        "requested_clusters": clustering.requested,
        "baseline": reference,
        "level": LEVEL,
        "resamples": resamples,
        "seed": seed,
        "accuracy": {name: _accuracy_entry(one) for name, one in balances.items()},
        "homogeneity": {name: _homogeneity_entry(one) for name, one in balances.items()},
        "runs": {name: _run_entry(one) for name, one in balances.items()},
        "logit_spread": {name: _with_reason({"value": one.logit}) for name, one in balances.items()},
        "comparisons": [_comparison_entry(reference, name, one) for name, one in comparisons.items()],
        "noise": _noise_entry(shared),
        "sources": _sources(shared, balances, clustering, embeddings, near_duplicate),
        "notes": shared.notes,
        "per_cluster": _per_cluster(only, shared, balances, embeddings, prompts, words),
    }
    return BalanceSummary(content, balances, comparisons, reference, words, shared.notes)


def _note_questions(shared: _Shared, *, duplicates_known: bool) -> None:
    """Note what of the questions is not as one would think."""
    labels, notes = shared.labels, shared.notes
    everyone = shared.union()
    inside = everyone[labels[everyone] >= 0]
    if len(everyone) < len(labels):
        notes.append(f"rows without a prediction in any run: {len(labels) - len(everyone)} of {len(labels)}")
    missed = len(np.unique(labels[labels >= 0])) - len(np.unique(labels[inside]))
    if missed:
        notes.append(f"clusters without a prediction in any run, left out: {missed}")
    if len(inside) < len(everyone):
        notes.append(f"noise (-1), shown apart, in no metric: {counted(len(everyone) - len(inside), 'question')}")
    for run in shared.runs:
        if len(run) < len(everyone):
            notes.append(
                f"{run.name} answers {len(run)} of {counted(len(everyone), 'question')}; its own values are on these"
            )
    if duplicates_known:
        twins = len(inside) - len(np.unique(shared.groups[inside]))
        notes.append(f"duplicates of another question of their cluster, dealt as one with it: {twins} of {len(inside)}")
    else:
        notes.append("duplicates were not looked for: that takes --embeddings or --prompts")
    sizes = np.unique(labels[inside], return_counts=True)[1]
    if (sizes < SMALL).any():
        notes.append(
            f"clusters of fewer than {SMALL} questions: {int((sizes < SMALL).sum())}, of one: {int((sizes == 1).sum())}"
        )
    measures = {run.name: _measure(run) for run in shared.runs if run.source}
    if len(set(measures.values())) > 1:
        told = "; ".join(f"{name}: {one}" for name, one in measures.items())
        notes.append(f"the runs are not measured alike, and differ by that too ({told})")
    binary = [bool(np.isin(run.score, (0.0, 1.0)).all()) for run in shared.runs]
    if len(set(binary)) > 1:
        notes.append(
            "some runs hold right and wrong answers, others averages: runs decoded in different ways differ in spread "
            "even where all clusters are equally good"
        )


def _measure(run: Predictions) -> str:
    """Say what the scores of a run are, as far as its source tells."""
    chosen = [f"{key} {run.source[key]}" for key in ("metric", "filter", "evaluation", "step") if key in run.source]
    return ", ".join(chosen) or "column correct"


def _balance_of(run: Predictions, shared: _Shared) -> Balance:
    rows = shared.rows[run.name]
    if not (shared.labels[rows] >= 0).any():
        raise InputError(f"no question of {run.name} is in a cluster; expected labels from 0 up for some of them")
    return cluster_balance(
        run.score,
        shared.labels[rows],
        group=shared.groups[rows],
        resamples=shared.resamples,
        seed=shared.seed,
    )


def _comparison_of(base: Predictions, run: Predictions, shared: _Shared) -> BalanceComparison:
    """Compare on the questions that both answered, in the order of their rows."""
    own, other = shared.rows[base.name], shared.rows[run.name]
    common, first, second = np.intersect1d(own, other, return_indices=True)
    if len(common) < max(len(own), len(other)):
        shared.notes.append(
            f"{run.name} against {base.name}: compared on the {counted(len(common), 'question')} that both answered "
            f"(others: {len(own) - len(common)} of {base.name}, {len(other) - len(common)} of {run.name})"
        )
    if not (shared.labels[common] >= 0).any():
        raise InputError(
            f"{run.name} and {base.name} have no question of a cluster in common; expected the same questions"
        )
    return compare_balance(
        base.score[first],
        run.score[second],
        shared.labels[common],
        group=shared.groups[common],
        resamples=shared.resamples,
        seed=shared.seed,
    )


def _with_reason(entry: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    if reason is None and None in entry.values():
        reason = "undefined at mean 0 or 1, or without a latent spread"
    return entry if reason is None else entry | {"reason": reason}


def _accuracy_entry(one: Balance) -> dict[str, Any]:
    return {"n": one.n, "accuracy": one.question_accuracy, "interval": list(one.question_interval)}


def _homogeneity_entry(one: Balance) -> dict[str, Any]:
    test = one.homogeneity
    return _with_reason({"statistic": test.statistic, "p": test.p}, test.reason)


def _run_entry(one: Balance) -> dict[str, Any]:
    entry = {}
    for name, metric in one.metrics.items():
        latent = {"value": metric.latent, "interval": _pair(metric.latent_interval)}
        band = _pair(metric.equal_band)
        entry[name] = _with_reason({"value": metric.value, "equal_band": band, "latent": latent}, metric.reason)
    return entry


def _comparison_entry(reference: str, name: str, one: BalanceComparison) -> dict[str, Any]:
    metrics = {}
    for metric, difference in one.metrics.items():
        metrics[metric] = _difference_entry(difference)
        if metric in MOVES_WITH_MEAN:
            metrics[metric]["note"] = MOVES
    return {
        "baseline": reference,
        "run": name,
        "n": one.n,
        "clusters": len(one.names),
        "balance": one.verdict,
        "accuracy": _difference_entry(one.question_accuracy),
        "metrics": metrics,
        "logit_spread": _difference_entry(one.logit),
        "clusters_that_differ": [int(label) for label, p in zip(one.names, one.cluster_p, strict=True) if p < LEVEL],
    }


def _difference_entry(one: Difference) -> dict[str, Any]:
    entry = {"difference": one.difference, "interval": _pair(one.interval), "p": one.p, "verdict": one.verdict}
    return entry if one.reason is None else entry | {"reason": one.reason}


def _pair(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _score_entry(score: NDArray[np.float64]) -> dict[str, Any]:
    if not len(score):
        return {"n": 0, "accuracy": None, "interval": None, "reason": "no question of the run is here"}
    mean = float(score.mean())
    return {"n": len(score), "accuracy": mean, "interval": wilson([mean], [len(score)])[0].tolist()}


def _noise_entry(shared: _Shared) -> dict[str, Any]:
    everyone = shared.union()
    runs = {run.name: _score_entry(run.score[shared.labels[shared.rows[run.name]] < 0]) for run in shared.runs}
    return {"n": int((shared.labels[everyone] < 0).sum()), "runs": runs}


def _sources(
    shared: _Shared,
    balances: dict[str, Balance],
    clustering: Clustering,
    embeddings: Embeddings | None,
    near_duplicate: float,
) -> dict[str, Any]:
    """Say where predictions, clusters and duplicates come from; `questions` are those in clusters."""
    runs = shared.runs
    known = {run.name: run.source or {"path": None, "reason": "the answers came from Python"} for run in runs}
    duplicates: dict[str, Any] = {"embeddings": None, "reason": "no embeddings were given: no near duplicates"}
    if embeddings is not None:
        duplicates = {"embeddings": described_embeddings(embeddings), "cosine": near_duplicate}
    return {
        "predictions": {
            run.name: {**known[run.name], "rows": len(run), "questions": balances[run.name].n} for run in runs
        },
        "clusters": dict(clustering.source),
        "near_duplicates": duplicates,
    }


def _per_cluster(
    only: NDArray[np.int64],
    shared: _Shared,
    balances: dict[str, Balance],
    embeddings: Embeddings | None,
    prompts: Prompts | None,
    words: dict[int, list[str]],
) -> list[dict[str, Any]]:
    """Describe each cluster that holds a question of some run; `only` is -1 for all other rows."""
    places = {name: {int(label): i for i, label in enumerate(one.names)} for name, one in balances.items()}
    central = central_rows(only, embeddings)
    labels, sizes = np.unique(only[only >= 0], return_counts=True)
    entries = []
    for label, size in zip(labels.tolist(), sizes.tolist(), strict=True):
        runs: dict[str, Any] = {}
        for name, one in balances.items():
            i = places[name].get(label)
            runs[name] = _score_entry(np.empty(0))
            if i is not None:
                runs[name] = {
                    "n": int(one.size[i]),
                    "accuracy": float(one.accuracy[i]),
                    "interval": one.interval[i].tolist(),
                }
        entry: dict[str, Any] = {"cluster": label, "n": size, "small": size < SMALL, "runs": runs}
        entry["example_rows"] = central[label]
        if prompts is None:
            entry |= {"keywords": None, "examples": None, "reason": "no prompts were given; fix: --prompts"}
        else:
            examples = [shown_text(prompts.texts[row]) for row in central[label]]
            entry |= {"keywords": words[label], "examples": examples}
        entries.append(entry)
    return entries
