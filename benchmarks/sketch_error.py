"""What a gradient sketch costs and how far its cosines are off.

Prints, for a few parameter shapes, the time of one sketch and of the exact norm as a multiple of one plain
``grad.norm()`` in the same run, and for synthetic head gradients the error of the cosine by sketch size.

    python benchmarks/sketch_error.py [--threads 1] [--device cpu]
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from diagnostics.sketches.accuracy import SketchCheck, exact_norm
from diagnostics.sketches.count_sketch import GradientSketch

SHAPES = [(576, 1536), (49152, 576), (4096, 14336), (151936, 1024)]


def best_time(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the shortest of several timings, in seconds, after one unmeasured call."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def head_gradients(
    count: int, vocabulary: int, width: int, tokens: int, seed: int = 0, heavy: int = 0
) -> list[torch.Tensor]:
    """Return gradients as of a language-model head: Zipf labels, hidden states sharing one direction.

    The prediction is the Zipf distribution itself, so that a gradient is
    (Σ over tokens of (prediction − onehot(label)) ⊗ hidden) / tokens, of shape (vocabulary, width).

    With ``heavy``, that many labels are foreseen badly: half of each gradient's tokens have one of a third of them,
    drawn anew for it. Then few rows, alike in direction, carry a gradient, as measured on SmolLM2-135M, where the
    eight heaviest rows hold half of the squared norm.
    """
    rng = np.random.default_rng(seed)
    zipf = 1.0 / np.arange(1, vocabulary + 1)
    zipf /= zipf.sum()
    common = rng.standard_normal(width)
    missed = rng.choice(vocabulary, size=heavy, replace=False)
    share = 1.0 / np.arange(1, heavy // 3 + 1) ** 0.7
    share /= share.sum()
    grads = []
    for _ in range(count):
        hidden = common + rng.standard_normal((tokens, width))
        grad = np.outer(zipf, hidden.sum(axis=0))
        labels = rng.choice(vocabulary, size=tokens, p=zipf)
        if heavy:
            few = rng.permutation(missed)[: len(share)]
            labels[::2] = rng.choice(few, size=len(labels[::2]), p=share)
        np.subtract.at(grad, labels, hidden)
        grads.append(torch.from_numpy((grad / tokens).astype(np.float32)))
    return grads


def print_times(device: torch.device) -> None:
    """Print one line a shape and dtype."""
    print(f"{'shape':>16} {'dtype':>9} {'norm ms':>8} {'sketch ms':>10} {'sketch/norm':>12} {'exact/norm':>11}")
    for shape in SHAPES:
        sketcher = GradientSketch(shape)
        for dtype in (torch.float32, torch.bfloat16):
            grad = torch.randn(shape, device=device).to(dtype)
            norm, sketch, exact = (
                best_time(call, device)
                for call in (grad.norm, partial(sketcher.sketch, grad), partial(exact_norm, grad))
            )
            name = "x".join(map(str, shape))
            print(
                f"{name:>16} {str(dtype)[6:]:>9} {1e3 * norm:8.2f} {1e3 * sketch:10.2f} "
                f"{sketch / norm:12.1f} {exact / norm:11.1f}"
            )


def print_errors(device: torch.device, seeds: int) -> None:
    """Print the error of the cosines of eight gradients (28 pairs), over several hash seeds.

    Where rows are hashed first, errors differ between hash functions: the worst one's rmse stands beside.
    """
    for vocabulary, width, heavy in ((3000, 64, 0), (16384, 576, 0), (16384, 576, 60)):
        grads = [grad.to(device) for grad in head_gradients(8, vocabulary, width, tokens=800, heavy=heavy)]
        print(f"\nhead gradients {vocabulary}x{width}, {heavy} heavy rows")
        print(f"{'k':>6} {'kind':>16} {'RMSE':>8} {'worst hash':>10} {'max':>8} {'1/sqrt(k)':>10}")
        for k, factored in itertools.product((4096, 8192, 16384), (False, True)):
            squares, worst, kind = [], 0.0, ""
            for seed in range(seeds):
                sketcher = GradientSketch((vocabulary, width), k=k, seed=seed, factored=factored)
                kind = sketcher.kind
                if factored and sketcher.row_buckets is None:  # the same sketch as without
                    break
                check = SketchCheck(max_copies=len(grads))
                for step, grad in enumerate(grads):
                    check.add(step, grad, sketcher.sketch(grad))
                result = check.result()
                squares.append(result["rmse"] ** 2)
                worst = max(worst, result["max_abs_error"])
            if squares:
                rmse, largest = math.sqrt(sum(squares) / len(squares)), math.sqrt(max(squares))
                print(f"{k:6d} {kind:>16} {rmse:8.4f} {largest:10.4f} {worst:8.4f} {1 / math.sqrt(k):10.4f}")


def main(argv: list[str] | None = None) -> None:
    """Run both parts with the options in ``argv``, by default none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=8, help="hash seeds the errors are taken over")
    args = parser.parse_args(argv or [])
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    print_times(device)
    print_errors(device, args.seeds)


if __name__ == "__main__":
    main(sys.argv[1:])
