"""Neighbors of many samples against plain faiss: time, recall and memory, each method in a process of its own.

Run: ``python -m benchmarks.neighbors_speed 100000``, or ``… 1000000 [sdo ivf hnsw]`` (40 minutes, two idle cores).
Each finished cell is written to ``benchmarks/results/neighbors-N-METHOD.json``.

Rows are made to look like sentence embeddings of one domain: a common direction (mean cosine about 0.35), 400 topics of
12 sub-topics whose sizes fall off, and noise whose spectrum falls off as 1/i^0.42 in amplitude. MiniLM's embeddings of
GSM8K have the same mean cosine, and similar nearest-neighbor cosines at 6,796 rows. They are written to a file once,
from which each method reads them in blocks, so that memory is what the method itself holds.

Flat search is timed on 2,000 of the queries and scaled up, before and after each other method; ratios are to the mean
of the two. CPU seconds stand beside wall seconds because they suffer less from what else the machine does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from benchmarks.results import peak_gib, save, timed

DIM, K, QUERIES, BLOCK = 384, 4, 2000, 65536
METHODS = ("sdo", "ivf", "hnsw")


def sentence_like(n: int, d: int = DIM, seed: int = 617) -> Iterator[NDArray[np.float32]]:
    """Yield blocks of together ``(n, d)`` float32 unit rows with the statistics of sentence embeddings."""
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
    for start in range(0, n, BLOCK):
        part = slice(start, start + BLOCK)
        noise = 0.58 * rng.standard_normal((len(of_topic[part]), d), dtype=np.float32) * scale
        block = common + topic[of_topic[part]] + subtopic[of_subtopic[part]] + noise
        yield block / np.linalg.norm(block, axis=1, keepdims=True)


def rows_file(n: int) -> Path:
    """Return the file of n rows under the temporary folder, made if it is not there."""
    path = Path(tempfile.gettempdir()) / f"sdo-benchmark-{n}x{DIM}.npy"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.npy")
        rows = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=(n, DIM))
        for number, block in enumerate(sentence_like(n)):
            rows[number * BLOCK : number * BLOCK + len(block)] = block
        rows.flush()
        part.rename(path)
    return path


def blocks(path: Path) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (first row, rows) of a file, each block read anew so that its pages are let go of."""
    n = len(np.load(path, mmap_mode="r"))
    for start in range(0, n, BLOCK):
        yield start, np.array(np.load(path, mmap_mode="r")[start : start + BLOCK])


def chosen_queries(n: int) -> NDArray[np.int64]:
    """Return the queries that flat search is timed on and recall is taken over."""
    return np.sort(np.random.default_rng(1).choice(n, min(n, QUERIES), replace=False))


def measure(method: str, path: Path) -> dict[str, Any]:
    """Time one method's graph of all rows in this process.

    Parameters
    ----------
    method
        ``flat`` or one of ``METHODS``.
    path
        The rows.

    Returns
    -------
    dict
        ``wall`` and ``cpu`` seconds (of flat: scaled up from the queries), ``found`` (the neighbors of the queries),
        ``peak_gib``; for ``sdo`` also ``later_seconds``, the slowest of three later epochs' graphs.
    """
    n = len(np.load(path, mmap_mode="r"))
    queries = chosen_queries(n)
    if method == "sdo":
        return measure_sdo(path, queries)
    if method == "flat":
        index = faiss.IndexFlatIP(DIM)
        for _, rows in blocks(path):
            index.add(rows)
        asked = np.array(np.load(path, mmap_mode="r")[queries])
        with timed() as took:
            found = index.search(asked, K + 1)[1]
        scale = n / len(queries)
        found = without_self(queries, found)
        return {"wall": took.wall * scale, "cpu": took.cpu * scale, "found": found, "peak_gib": peak_gib()}
    index = faiss_index(method, n)
    found = np.empty((n, K + 1), dtype=np.int64)
    with timed() as took:
        if method == "ivf":
            sample = np.sort(np.random.default_rng(2).choice(n, min(n, 39 * index.nlist), replace=False))
            index.train(np.array(np.load(path, mmap_mode="r")[sample]))
        for start, rows in blocks(path):
            index.add(rows)
            if method == "hnsw":
                print(f"hnsw: {start + len(rows):,} of {n:,} added", file=sys.stderr, flush=True)
        for start, rows in blocks(path):
            found[start : start + len(rows)] = index.search(rows, K + 1)[1]
    found = without_self(queries, found[queries])
    return {"wall": took.wall, "cpu": took.cpu, "found": found, "peak_gib": peak_gib()}


def measure_sdo(path: Path, queries: NDArray[np.int64]) -> dict[str, Any]:
    """Read, build and cut the lists as a plan does, then three later epochs."""
    from sdo import SDO, Embeddings

    with timed() as reading:
        embeddings = Embeddings.read(path)
    plan = SDO(embeddings, seed=617).plan(8)
    with timed() as took:
        graph = plan._graph(0, np.arange(len(embeddings)))  # type: ignore[attr-defined]
    found = graph[queries]
    del graph
    later = []
    plan.epoch(0)
    for epoch in range(1, 4):
        pool = plan._pool  # type: ignore[attr-defined]
        with timed() as again:
            plan._graph(epoch, pool)  # type: ignore[attr-defined]
        later.append(again.wall)
        plan.epoch(epoch)
    result = {"wall": took.wall, "cpu": took.cpu, "found": found, "peak_gib": peak_gib()}
    return result | {"later_seconds": max(later), "reading_seconds": reading.wall}


def faiss_index(method: str, n: int) -> faiss.Index:
    """Plain faiss at settings that its guidelines give for this size."""
    if method == "hnsw":
        index = faiss.IndexHNSWFlat(DIM, 32, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efSearch = 64
        return index
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(DIM), DIM, int(4 * n**0.5), faiss.METRIC_INNER_PRODUCT)
    index.nprobe = 32
    return index


def without_self(queries: NDArray[np.int64], found: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ``K`` nearest others."""
    own = found == queries[:, None]
    own[~own.any(axis=1), -1] = True
    return found[~own].reshape(len(found), -1)[:, :K]


def recall(found: list[list[int]], truth: list[list[int]]) -> float:
    """Return the share of the true neighbors that was found."""
    return float(np.mean([len(set(a) & set(b)) / K for a, b in zip(found, truth, strict=True)]))


def in_its_own_process(method: str, path: Path) -> dict[str, Any]:
    """Run :func:`measure` in a new process, whose memory nothing else has touched."""
    command = [sys.executable, "-m", "benchmarks.neighbors_speed", "--measure", method, str(path)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def compare(n: int, methods: list[str]) -> None:
    """Measure methods at one size, flat before and after each, and print a line for each."""
    path = rows_file(n)
    matrix_gib = n * DIM * 4 / 2**30
    before = in_its_own_process("flat", path)
    print(
        f"{n:,} x {DIM}  flat  {before['wall']:8.1f} s ({min(n, QUERIES):,} queries, scaled up), "
        f"peak {before['peak_gib'] / matrix_gib:.2f} matrices",
        flush=True,
    )
    for method in methods:
        one = in_its_own_process(method, path)
        after = in_its_own_process("flat", path)
        flat = {key: (before[key] + after[key]) / 2 for key in ("wall", "cpu")}
        cell = {
            "n": n,
            "d": DIM,
            "method": method,
            "seconds": round(one["wall"], 1),
            "cpu_seconds": round(one["cpu"], 1),
            "flat_seconds": round(flat["wall"], 1),
            "flat_cpu_seconds": round(flat["cpu"], 1),
            "of_flat": round(one["wall"] / flat["wall"], 4),
            "of_flat_cpu": round(one["cpu"] / flat["cpu"], 4),
            "recall": round(recall(one["found"], after["found"]), 4),
            "peak_matrices": round(one["peak_gib"] / matrix_gib, 3),
        }
        for key in ("later_seconds", "reading_seconds"):
            if key in one:
                cell[key] = round(one[key], 2)
        later = f", later epochs' graphs {one['later_seconds']:.1f} s" if "later_seconds" in one else ""
        print(
            f"{n:,} x {DIM}  {method:5} {one['wall']:8.1f} s = {cell['of_flat']:.3f} of flat "
            f"({cell['of_flat_cpu']:.3f} in CPU time), recall@{K} {cell['recall']:.3f}, "
            f"peak {cell['peak_matrices']:.2f} matrices{later}",
            flush=True,
        )
        save(f"neighbors-{n}-{method}", cell)
        before = after


def main(argv: list[str]) -> None:
    """Compare at one size, or, called by that, measure one method."""
    if argv[:1] == ["--measure"]:
        result = measure(argv[1], Path(argv[2]))
        print(json.dumps(result | {"found": result["found"].tolist()}))
        return
    methods = argv[1:] or list(METHODS)
    unknown = [method for method in methods if method not in METHODS]
    if not argv or not argv[0].isdigit() or unknown:
        raise SystemExit(f"usage: python -m benchmarks.neighbors_speed N [{'|'.join(METHODS)} ...]")
    started = time.perf_counter()
    compare(int(argv[0]), methods)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main(sys.argv[1:])
