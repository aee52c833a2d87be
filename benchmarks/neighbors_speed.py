"""Neighbours of many samples against plain faiss: time, recall and memory, each method in a process of its own.

Run: ``python -m benchmarks.neighbors_speed 100000`` or ``… 1000000`` (the latter takes most of an hour).

Rows are made to look like sentence embeddings of one domain: a common direction (mean cosine about 0.35), 400 topics of
12 sub-topics whose sizes fall off, and noise whose spectrum falls off as 1/i^0.42 in amplitude. MiniLM's embeddings of
GSM8K have the same mean cosine, and similar nearest-neighbour cosines at 6,796 rows.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import faiss
import numpy as np
from numpy.typing import NDArray

DIM, K, QUERIES = 384, 4, 2000
METHODS = ("flat", "ivf", "hnsw", "sdo")


def sentence_like(n: int, d: int = DIM, seed: int = 617) -> NDArray[np.float32]:
    """Return ``(n, d)`` float32 unit rows with the statistics of sentence embeddings."""
    rng = np.random.default_rng(seed)
    scale = np.arange(1, d + 1) ** -0.42
    scale = (scale / np.linalg.norm(scale)).astype(np.float32)
    common = rng.standard_normal(d).astype(np.float32)
    common *= 0.59 / np.linalg.norm(common)
    topics, subtopics = 400, 12
    topic = 0.42 * rng.standard_normal((topics, d), dtype=np.float32) * scale
    subtopic = 0.42 * rng.standard_normal((topics * subtopics, d), dtype=np.float32) * scale
    share = np.arange(1, topics + 1) ** -0.6
    of_topic = rng.choice(topics, size=n, p=share / share.sum())
    of_subtopic = of_topic * subtopics + rng.integers(subtopics, size=n)
    rows = np.empty((n, d), dtype=np.float32)
    for start in range(0, n, 65536):
        part = slice(start, start + 65536)
        noise = 0.58 * rng.standard_normal((len(of_topic[part]), d), dtype=np.float32) * scale
        block = common + topic[of_topic[part]] + subtopic[of_subtopic[part]] + noise
        rows[part] = block / np.linalg.norm(block, axis=1, keepdims=True)
    return rows


def measure(method: str, n: int) -> dict[str, float]:
    """Time one method's graph of all rows in this process.

    Parameters
    ----------
    method
        One of ``METHODS``. Flat is timed on a share of the queries and scaled up; its answers are the truth.
    n
        Rows.

    Returns
    -------
    dict
        ``seconds``, ``flat_seconds`` (of the same run, scaled up from the queries), ``recall`` (at 4, on the same
        queries), ``peak_gib`` and ``matrix_gib``; for ``sdo`` also
        ``later_seconds``, the slowest of three later epochs' graphs.
    """
    from sdo import SDO, Embeddings

    rows = sentence_like(n)
    queries = np.sort(np.random.default_rng(1).choice(n, min(n, QUERIES), replace=False))
    result: dict[str, float] = {"matrix_gib": rows.nbytes / 2**30}
    if method == "sdo":
        embeddings = Embeddings.from_array(rows)
        rows = embeddings.unit
    truth_started = time.perf_counter()
    truth = _without_self(queries, faiss.knn(rows[queries], rows, K + 1, metric=faiss.METRIC_INNER_PRODUCT)[1])
    flat_seconds = (time.perf_counter() - truth_started) * n / len(queries)
    result["flat_seconds"] = flat_seconds
    started = time.perf_counter()
    if method == "flat":
        result |= {"seconds": flat_seconds, "recall": 1.0}
    elif method == "sdo":
        plan = SDO(embeddings, seed=617).plan(8)
        graph = plan._graph(0, np.arange(n))  # type: ignore[attr-defined]
        result["seconds"] = time.perf_counter() - started
        result["recall"] = _recall(graph[queries], truth)
        epochs, walks = [], [plan.epoch(0)]
        for e in range(1, 4):
            pool = plan._pool  # type: ignore[attr-defined]
            began = time.perf_counter()
            plan._graph(e, pool)  # type: ignore[attr-defined]
            epochs.append(time.perf_counter() - began)
            walks.append(plan.epoch(e))
        result["later_seconds"] = max(epochs)
    else:
        index = _faiss_index(method, n)
        index.train(rows)
        index.add(rows)
        found = np.empty((n, K + 1), dtype=np.int64)
        for start in range(0, n, 65536):
            found[start : start + 65536] = index.search(rows[start : start + 65536], K + 1)[1]
        result["seconds"] = time.perf_counter() - started
        result["recall"] = _recall(_without_self(queries, found[queries]), truth)
    result["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return result


def _faiss_index(method: str, n: int) -> faiss.Index:
    """Plain faiss at settings that its guidelines give for this size."""
    if method == "hnsw":
        index = faiss.IndexHNSWFlat(DIM, 32, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efSearch = 64
        return index
    lists = int(4 * n**0.5)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(DIM), DIM, lists, faiss.METRIC_INNER_PRODUCT)
    index.nprobe = 32
    return index


def _without_self(queries: NDArray[np.int64], found: NDArray[np.int64]) -> NDArray[np.int64]:
    own = found == queries[:, None]
    own[~own.any(axis=1), -1] = True
    return found[~own].reshape(len(found), -1)[:, :K]


def _recall(found: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    return float(np.mean([len(set(a) & set(b)) / K for a, b in zip(found.tolist(), truth.tolist(), strict=True)]))


def main(argv: list[str]) -> None:
    """Measure all methods at one size, each in its own process, and print a table."""
    if len(argv) == 2:
        print(json.dumps(measure(argv[0], int(argv[1]))))
        return
    n = int(argv[0])
    results = {}
    for method in METHODS:
        command = [sys.executable, "-m", "benchmarks.neighbors_speed", method, str(n)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        results[method] = json.loads(out.splitlines()[-1])
        one, flat = results[method], results["flat"]
        later = f", later epochs' graphs {one['later_seconds']:.1f} s" if "later_seconds" in one else ""
        print(
            f"{n:,} x {DIM}  {method:5} {one['seconds']:8.1f} s = {one['seconds'] / flat['seconds']:6.3f} of flat, "
            f"recall@{K} {one['recall']:.3f}, peak {one['peak_gib'] / one['matrix_gib']:.2f} matrices{later}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
