"""What planning costs: the first plan against one bare matrix product, and the walk over a million samples."""

from __future__ import annotations

import numpy as np

from benchmarks.results import interleaved, peak_gib, resident_gib, save, timed
from sdo import SDO, Embeddings
from sdo.organizers.exposure import draw_inverse_exposure, split_by_exposure
from sdo.organizers.walk import walk
from sdo.random_keys import HOT_DRAW, ORDER, order_by_keys, raw_keys

_SEED = 617


def clustered(n: int, d: int, clusters: int) -> np.ndarray:
    """Rows around cluster centers whose sizes fall off like Zipf's law, as topics of real corpora do."""
    rng = np.random.default_rng(_SEED)
    weight = 1.0 / np.arange(1, clusters + 1)
    centers = rng.standard_normal((clusters, d), dtype=np.float32)
    label = rng.choice(clusters, size=n, p=weight / weight.sum())
    return centers[label] + 1.5 * rng.standard_normal((n, d), dtype=np.float32)


def first_plan(n: int = 6796, d: int = 2560, rounds: int = 3) -> None:
    """Time the first epoch's plan and later ones at the paper's size, and the matrix product, in turn.

    A product is ``a @ b.T``; of a matrix with itself numpy computes one half and mirrors it. Both are printed.
    """
    embeddings = Embeddings.from_array(clustered(n, d, 200))
    unit, other = embeddings.unit, embeddings.unit.copy()
    later: list[float] = []

    def plan() -> None:
        made = SDO(embeddings, seed=_SEED).plan(8)
        with timed() as first:
            made.epoch(0)
        for epoch in range(1, 5):
            with timed() as took:
                made.epoch(epoch)
            later.append(took.wall / first.wall)

    took = interleaved(
        {
            "product": lambda: unit @ other.T,
            "half": lambda: unit @ unit.T,
            "plan": lambda: SDO(embeddings, seed=_SEED).plan(8).epoch(0),
        },
        rounds,
    )
    plan()
    product, half, first = took["product"], took["half"], took["plan"]
    print(
        f"N = {n}, d = {d}: first plan {first.wall:.2f} s = {first.wall / product.wall:.2f} float32 products "
        f"({first.cpu / product.cpu:.2f} in CPU time; bar 2), {first.wall / half.wall:.2f} of numpy's half product "
        f"({first.cpu / half.cpu:.2f} in CPU time)"
    )
    print(f"slowest of the next four epochs {max(later):.3f} of the first (bar 0.1)")
    result = {
        "n": n,
        "d": d,
        "first_seconds": round(first.wall, 2),
        "product_seconds": round(product.wall, 2),
        "of_product": round(first.wall / product.wall, 2),
        "of_product_cpu": round(first.cpu / product.cpu, 2),
        "of_half_product": round(first.wall / half.wall, 2),
        "of_half_product_cpu": round(first.cpu / half.cpu, 2),
        "later_of_first": round(max(later), 3),
    }
    save("plan", {**result, "peak_gib": round(peak_gib(), 2)})


def million_walk(n: int = 1_000_000, k: int = 4) -> None:
    """Time walk, ledger and split of one epoch at a million samples over a given graph: all of it in one thread."""
    rng = np.random.default_rng(_SEED)
    graph = (np.arange(n)[:, None] + rng.integers(1, 200, (n, k))) % n
    pool = np.arange(n)
    square = np.ones((4096, 4096), np.float32)
    batches = 0

    def one_epoch() -> None:
        nonlocal batches
        order = order_by_keys(raw_keys(_SEED, ORDER, 0, n), pool)
        walked = walk(order, graph[order], n, 8, cover=True)
        seen = np.bincount(walked.batches.ravel(), minlength=n)
        split = split_by_exposure(seen, 0, 2)
        keys = raw_keys(_SEED, HOT_DRAW, 0, n)[split.hot]
        draw_inverse_exposure(split.hot, seen[split.hot], keys, len(split.hot) // 5)
        batches = len(walked.batches)

    before = resident_gib()
    one_epoch()
    added = peak_gib() - before
    took = interleaved({"product": lambda: square @ square.T, "epoch": one_epoch}, rounds=2)
    epoch, product = took["epoch"], took["product"]
    print(
        f"N = {n:,}, K = {k}: {batches:,} batches in {epoch.wall:.2f} s, {epoch.cpu:.2f} s of CPU time (bar 4 s on one "
        f"core) = {epoch.cpu / product.cpu:.1f} float32 products of 4096 x 4096; added memory {added * 2**30 / n:.0f} "
        "bytes a sample"
    )
    result = {"n": n, "k": k, "seconds": round(epoch.wall, 2), "cpu_seconds": round(epoch.cpu, 2)}
    save(
        "walk",
        {**result, "of_product_cpu": round(epoch.cpu / product.cpu, 1), "bytes_a_sample": round(added * 2**30 / n)},
    )
