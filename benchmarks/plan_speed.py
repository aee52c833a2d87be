"""What planning costs: the first plan against one bare matrix product, and the walk over a million samples."""

from __future__ import annotations

import time

import numpy as np

from sdo import SDO, Embeddings
from sdo.exposure import draw_inverse_exposure, split_by_exposure
from sdo.keys import HOT_DRAW, ORDER, order_by_keys, raw_keys
from sdo.locality import walk

_SEED = 617


def clustered(n: int, d: int, clusters: int) -> np.ndarray:
    """Rows around cluster centres whose sizes fall off like Zipf's law, as topics of real corpora do."""
    rng = np.random.default_rng(_SEED)
    weight = 1.0 / np.arange(1, clusters + 1)
    centres = rng.standard_normal((clusters, d), dtype=np.float32)
    label = rng.choice(clusters, size=n, p=weight / weight.sum())
    return centres[label] + 1.5 * rng.standard_normal((n, d), dtype=np.float32)


def first_plan(n: int = 6796, d: int = 2560) -> None:
    """Time the first epoch's plan and later ones at the paper's size."""
    embeddings = Embeddings.from_array(clustered(n, d, 200))
    product = min(_timed(lambda: embeddings.unit @ embeddings.unit.T) for _ in range(3))
    plan = SDO(embeddings, seed=_SEED).plan(8)
    times = [_timed(lambda e=e: plan.epoch(e)) for e in range(5)]
    print(f"N = {n}, d = {d}: one float32 matrix product {product:.2f} s")
    print(f"first epoch's plan {times[0]:.2f} s = {times[0] / product:.2f} products")
    later = max(times[1:])
    print(f"slowest of the next four {later:.3f} s = {later / times[0]:.3f} of the first")


def million_walk(n: int = 1_000_000, k: int = 4) -> None:
    """Time walk, ledger and split of one epoch at a million samples over a given graph, in one thread."""
    rng = np.random.default_rng(_SEED)
    graph = (np.arange(n)[:, None] + rng.integers(1, 200, (n, k))) % n
    pool = np.arange(n)
    product = _timed(lambda: np.ones((4096, 4096), np.float32) @ np.ones((4096, 4096), np.float32))
    started = time.perf_counter()
    order = order_by_keys(raw_keys(_SEED, ORDER, 0, n), pool)
    walked = walk(order, graph[order], n, 8, cover=True)
    seen = np.bincount(walked.batches.ravel(), minlength=n)
    split = split_by_exposure(seen, 0, 2)
    keys = raw_keys(_SEED, HOT_DRAW, 0, n)[split.hot]
    draw_inverse_exposure(split.hot, seen[split.hot], keys, len(split.hot) // 5)
    taken = time.perf_counter() - started
    print(f"N = {n}, K = {k}: {len(walked.batches)} batches in {taken:.2f} s")
    print(f"= {taken / product:.1f} float32 products of 4096 x 4096 ({product:.2f} s)")


def _timed(call: object) -> float:
    started = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - started
