"""What the tests of locality cost: re-draws of a 3,000-step SDO plan with both tests, against a bare product."""

from __future__ import annotations

import time

import numpy as np

from analysis.locality.association import MatrixTest, SeriesTest
from analysis.locality.redraw import Redraws
from analysis.locality.redraw_tests import run_tests, worker_count
from benchmarks.locality_levels import PAPER_N, embeddings_here
from sdo import SDO


def main(steps: int = 3000, width: int = 8192, redraws: int = 39) -> None:
    """Time some re-draws, and say what 999 of them take."""
    embeddings, name = embeddings_here()
    rng = np.random.default_rng(617)
    centroid = rng.standard_normal((steps, embeddings.dim), dtype=np.float32)
    square = rng.standard_normal((steps, steps), dtype=np.float32)
    product = min(_timed(lambda: square @ centroid) for _ in range(5))
    plan = SDO(embeddings, seed=617).plan(8, rows=np.arange(PAPER_N))
    plan.batches(0, steps)
    numbers = np.arange(steps)
    built = time.perf_counter()
    tests = [
        MatrixTest(numbers, rng.standard_normal((steps, width), dtype=np.float32)),
        SeriesTest(numbers, rng.standard_normal(steps)),
    ]
    built = time.perf_counter() - built
    workers = worker_count()
    few = _timed(lambda: run_tests(Redraws(plan, embeddings), tests, 1, workers=workers))
    many = _timed(lambda: run_tests(Redraws(plan, embeddings), tests, 1 + redraws, workers=workers))
    each = (many - few) / redraws
    print(f"{steps} steps, gradients of {width}, embeddings: {name}; {workers} threads")
    print(f"one float32 product {steps} x {steps} x {embeddings.dim}: {product:.3f} s")
    print(f"a re-draw, both tests, planning included: {each:.3f} s = {each / product:.2f} products")
    print(f"once a run: {built + few:.1f} s; so 999 re-draws take {built + few + 998 * each:.0f} s")


def _timed(call: object) -> float:
    started = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - started
