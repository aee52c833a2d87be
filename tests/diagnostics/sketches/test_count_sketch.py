"""The sketch against a slow implementation in plain Python, and its statistics against the theory."""

from __future__ import annotations

import gc
import json
import math
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diagnostics.sketches import chunks as pieces
from diagnostics.sketches import count_sketch as module
from diagnostics.sketches.accuracy import SketchCheck, cosine, exact_norm
from diagnostics.sketches.count_sketch import GradientSketch, hash_table
from sdo.errors import InputError

MASK = (1 << 64) - 1


def slow_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def slow_hash(seed: int, stage: int, n: int, buckets: int) -> tuple[int, int]:
    """Bucket and sign of entry n, in Python integers."""
    key = slow_mix((slow_mix(seed & MASK) + stage) & MASK)
    x = slow_mix((key + (n + 1) * 0x9E3779B97F4A7C15) & MASK)
    return (x >> 32) * buckets >> 32, -1 if x & 1 else 1


def slow_sketch(grad, k, seed, row_buckets=None, column_buckets=None):
    """Entry by entry, in Python floats (float64); zeros may be skipped since they add nothing."""
    cols = grad.shape[1]
    width = column_buckets or cols
    groups = 4 if cols % 4 == 0 else 2 if cols % 2 == 0 else 1
    out = [0.0] * k
    for r, c in zip(*np.nonzero(grad), strict=True):
        r, c, value = int(r), int(c), float(grad[r, c])
        sign = 1
        if row_buckets:
            r, sign = slow_hash(seed, 1, r * groups + c * groups // cols, row_buckets)
        if column_buckets:
            c, s = slow_hash(seed, 2, c, column_buckets)
            sign *= s
        bucket, s = slow_hash(seed, 3, r * width + c, k)
        out[bucket] += s * sign * value
    return np.array(out)


@pytest.fixture
def tiny_limits(monkeypatch):
    """Shrink every limit, so that small tensors go through stages, blocks and pieces."""
    for name, value in {
        "ROW_BUCKETS": 16,
        "COLUMN_BUCKETS": 24,
        "TABLE_ENTRIES": 16 * 24,
        "FOLD_ENTRIES": 2 * 16 * 10,
    }.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(pieces, "PIECE_ENTRIES", 50)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def head_gradients(count, vocabulary=3000, width=64, tokens=200, seed=0):
    """Low-rank gradients as of a language-model head: Zipf labels, hidden states sharing a direction."""
    rng = np.random.default_rng(seed)
    zipf = 1.0 / np.arange(1, vocabulary + 1)
    zipf /= zipf.sum()
    common = rng.standard_normal(width)
    grads = []
    for _ in range(count):
        labels = rng.choice(vocabulary, size=tokens, p=zipf)
        hidden = common + rng.standard_normal((tokens, width))
        grad = np.outer(zipf, hidden.sum(0))
        np.subtract.at(grad, labels, hidden)
        grads.append(torch.from_numpy((grad / tokens).astype(np.float32)))
    return grads


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, -3])
@pytest.mark.parametrize("buckets", [1, 3, 8192])
def test_hash_table_is_the_slow_hash(seed, buckets):
    table = hash_table(seed, 2, 200, buckets)
    for n in range(200):
        bucket, sign = slow_hash(seed, 2, n, buckets)
        assert table[n] == 2 * bucket + (sign < 0)


def test_hash_table_pieces_do_not_matter(monkeypatch):
    whole = hash_table(5, 1, 1000, 77)
    monkeypatch.setattr(pieces, "PIECE_ENTRIES", 64)
    np.testing.assert_array_equal(hash_table(5, 1, 1000, 77), whole)


def test_hash_table_is_pinned():
    """Stored sketches stay comparable: a change here needs a new version."""
    assert (module.SKETCH_VERSION, module.ROW_SKETCH_VERSION) == (2, 3)
    assert hash_table(0, 3, 6, 8192).tolist() == [13358, 7129, 6566, 13516, 10094, 11811]
    # The first output of splitmix64 from state 1234567, as published with its reference implementation.
    assert slow_mix(1234567 + 0x9E3779B97F4A7C15) == 6457827717110365317


def test_hash_is_even():
    table = hash_table(3, 3, 64_000, 64)
    counts = np.bincount(table, minlength=128)
    # 128 cells of 500 expected: chi-square with 127 degrees of freedom, mean 127, sd 16.
    assert abs(((counts - 500) ** 2 / 500).sum() - 127) < 4 * 16


@pytest.mark.parametrize("shape", [(3, 4), (12,), (2, 2, 3), ()])
def test_small_signals_are_stored_as_they_are(shape):
    grad = random(*shape) if shape else torch.tensor(2.5)
    sketcher = GradientSketch(shape, k=12)
    assert (sketcher.kind, sketcher.stored) == ("identity", grad.numel())
    out = sketcher.sketch(grad)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, grad.reshape(-1), rtol=0, atol=0)
    kept = out.clone()
    grad.zero_()
    torch.testing.assert_close(out, kept, rtol=0, atol=0)  # a copy, not a view


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("seed", [0, 11])
def test_flat_equals_slow(dtype, seed):
    grad = random(23, 17, dtype=dtype)
    sketcher = GradientSketch((23, 17), k=40, seed=seed)
    assert sketcher.kind == "count"
    expected = slow_sketch(grad.double().numpy(), 40, seed)
    np.testing.assert_allclose(sketcher.sketch(grad).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 4), (9, 8), (40, 12), (40, 30), (16, 19), (6, 130)])
@pytest.mark.usefixtures("tiny_limits")
def test_a_product_is_sketched_from_its_factors(shape):
    """With every rule: stored as it is, flat, rows hashed, rows and columns hashed."""
    left, right = random(shape[0], 7), random(7, shape[1])
    blocks = [(first, left[first : first + 5]) for first in range(0, shape[0], 5)]
    sketcher = GradientSketch(shape, k=40, seed=3)
    found = sketcher.sketch_product(iter(blocks), right)
    np.testing.assert_allclose(found, sketcher.sketch(left @ right), atol=1e-4)


def test_a_large_product_is_never_formed():
    """60,000 x 100 entries from 30 positions: nothing larger than the factor or its rows, hashed in four groups."""
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(t))
            return out

    left, right = random(60_000, 30), random(30, 100)
    sketcher = GradientSketch((60_000, 100), factored=True)
    sketcher.sketch_product([(0, left)], right)  # makes the tables
    with Sizes():
        found = sketcher.sketch_product([(0, left)], right)
    assert 0 < max(sizes) <= max(left.numel(), 4 * 2 * 4096 * 30)
    assert cosine(found, sketcher.sketch(left @ right)) > 0.99999


@pytest.mark.parametrize(
    ("shape", "rows", "cols"),
    [
        ((40, 12), 16, None),  # tall: rows hashed, in four groups of three columns
        ((40, 48), 16, 24),  # groups of twelve columns, each in blocks of ten and two
        ((40, 30), 16, 24),  # tall and wide: both
        ((5, 130), None, 24),  # wide: columns hashed
        ((1000,), None, 24),  # a vector is one row
        ((6, 20, 9), None, 24),  # experts: the first dimension stays
        ((50, 3, 3), 16, None),  # one group of nine columns
        ((40, 10), 16, None),  # two groups of five
        ((16, 24), None, None),  # as large as the flat table may be
    ],
)
@pytest.mark.usefixtures("tiny_limits")
def test_two_stages_equal_slow(shape, rows, cols):
    grad = random(*shape)
    sketcher = GradientSketch(shape, k=40, seed=3)
    assert (sketcher.row_buckets, sketcher.column_buckets) == (rows, cols)
    assert sketcher.kind == ("count_two_stage" if rows or cols else "count")
    matrix = grad.double().numpy().reshape((shape[0], -1) if len(shape) > 1 else (1, -1))
    expected = slow_sketch(matrix, 40, 3, rows, cols)
    np.testing.assert_allclose(sketcher.sketch(grad).numpy(), expected, atol=2e-5)


def test_two_stages_at_true_size_equal_slow():
    grad = torch.zeros(5000, 900)
    grad[::600] = random(9, 900)
    sketcher = GradientSketch((5000, 900), factored=True)
    assert sketcher.describe() == {
        "kind": "count_two_stage",
        "version": 3,
        "shape": [5000, 900],
        "k": 8192,
        "seed": 0,
        "stored": 8192,
        "row_buckets": 4096,
        "column_groups": 4,
        "column_buckets": None,
    }
    json.dumps(sketcher.describe(), allow_nan=False)
    expected = slow_sketch(grad.double().numpy(), 8192, 0, 4096)
    np.testing.assert_allclose(sketcher.sketch(grad).numpy(), expected, atol=2e-5)


def rows_that_meet(seed, shape, groups=4):
    """Pairs of rows that share a bucket in the first group of columns, in the order of the buckets."""
    buckets = hash_table(seed, 1, shape[0] * groups, module.ROW_BUCKETS).reshape(-1, groups)[:, 0] >> 1
    order = np.argsort(buckets, kind="stable")
    return [(order[at], order[at + 1]) for at in np.flatnonzero(np.diff(buckets[order]) == 0)]


@pytest.mark.parametrize(
    ("width", "factored", "expected"),
    [
        (600, False, 0.0),  # one stage
        (600, True, 0.25),  # two, the rows meet in one group of four
        (601, True, 1.0),  # two, and no way to divide the columns
    ],
)
def test_heavy_rows_that_meet_in_a_bucket(width, factored, expected):
    """As of a head of 9,000 rows: one row carries each gradient, in one direction; both rows share the first hash."""
    shape, direction = (9000, width), random(width)
    first, second = (torch.zeros(shape) for _ in range(2))
    pair = rows_that_meet(0, shape, groups=4 if width % 4 == 0 else 1)[0]
    for gradient, row in zip((first, second), pair, strict=True):
        gradient[row] = direction
    assert cosine(first, second) == 0.0
    sketcher = GradientSketch(shape, factored=factored)
    found = cosine(sketcher.sketch(first), sketcher.sketch(second))
    assert abs(found) == pytest.approx(expected, abs=4 / math.sqrt(8192))


def test_cosines_of_gradients_that_few_alike_rows_carry(monkeypatch):
    """As a head's; of the rows, two share a bucket in each of the hash functions, where rows are hashed first."""
    shape = (9000, 600)

    def rmse(groups, **options):
        """With rows that meet where there are so many groups, in the first of them."""
        pool = [row for seed in range(6) for row in rows_that_meet(seed, shape, groups)[seed]]
        assert len(set(pool)) == 12
        rng = np.random.default_rng(0)
        common, grads, squares = rng.standard_normal(shape[1]), [], []
        for _ in range(4):
            grad = np.zeros(shape, dtype=np.float32)
            rows = rng.permutation(pool)[:6]
            grad[rows] = np.arange(1, 7)[:, None] ** -0.5 * (common + 0.3 * rng.standard_normal((6, shape[1])))
            grads.append(torch.from_numpy(grad))
        for seed in range(6):
            sketcher, check = GradientSketch(shape, seed=seed, **options), SketchCheck(max_copies=4)
            for step, grad in enumerate(grads):
                check.add(step, grad, sketcher.sketch(grad))
            squares.append(check.result()["rmse"] ** 2)
        return math.sqrt(np.mean(squares))

    bar = 0.012
    assert rmse(1) < bar
    assert rmse(4) < bar
    in_four_groups = rmse(4, factored=True)  # rows chosen so that they meet in one of the four; of real heads few do
    monkeypatch.setattr(module, "COLUMN_GROUPS", (1,))
    assert rmse(1, factored=True) > max(
        3 * bar, 3 * in_four_groups
    )  # these gradients do show the fault that the groups of columns are for


def test_the_rule_bounds_the_tables():
    for shape in [(151936, 5120), (8192, 28672), (4096, 14336), (128, 2048, 768), (10**9,), (10**7, 1)]:
        sketcher = GradientSketch(shape)
        rows, cols = pieces.matrix_shape(shape)
        height, width = sketcher.row_buckets or rows, sketcher.column_buckets or cols
        assert height * width <= module.TABLE_ENTRIES
        assert sketcher.stored == 8192


@pytest.mark.parametrize("two_stage", [False, True])
def test_inner_products_are_unbiased(two_stage, request):
    if two_stage:
        request.getfixturevalue("tiny_limits")
    shape, k, seeds = (30, 14), 32, 600
    a = random(*shape, seed=1)
    b = 0.5 * a + random(*shape, seed=2)
    truth = float((a * b).sum())
    values = []
    for seed in range(seeds):
        sketcher = GradientSketch(shape, k=k, seed=seed)
        assert sketcher.kind == ("count_two_stage" if two_stage else "count")
        values.append(float(sketcher.sketch(a) @ sketcher.sketch(b)))
    standard_error = np.std(values, ddof=1) / math.sqrt(seeds)
    assert abs(np.mean(values) - truth) < 4 * standard_error
    if not two_stage:
        # Var = (|a|²|b|² + <a,b>² − 2 Σ a²b²) / k for a count-sketch.
        variance = (float(a.square().sum() * b.square().sum()) + truth**2) / k
        variance -= 2 * float((a.square() * b.square()).sum()) / k
        assert np.var(values, ddof=1) == pytest.approx(variance, rel=0.2)


@pytest.mark.parametrize("shape", [(50, 9), (40, 30), (9, 200), (2, 3)])
@pytest.mark.usefixtures("tiny_limits")
def test_linear_and_shards_add_up(shape):
    a, b = random(*shape, seed=1), random(*shape, seed=2)
    sketcher = GradientSketch(shape, k=40)
    torch.testing.assert_close(sketcher.sketch(a) + sketcher.sketch(b), sketcher.sketch(a + b))
    torch.testing.assert_close(sketcher.sketch(-3 * a), -3 * sketcher.sketch(a))
    cut = shape[0] // 2
    shards = sketcher.sketch_shard(a[:cut], 0) + sketcher.sketch_shard(a[cut:], cut)
    torch.testing.assert_close(shards, sketcher.sketch(a))


@pytest.mark.parametrize("shape", [(31, 14), (40, 30), (9, 200), (40, 3, 4), (3, 2)])
@pytest.mark.usefixtures("tiny_limits")
def test_strides_do_not_matter(shape):
    grad = random(*shape)
    sketcher = GradientSketch(shape, k=40)
    expected = sketcher.sketch(grad)
    transposed = grad.transpose(0, -1).contiguous().transpose(0, -1)
    wide = torch.zeros(*shape[:-1], 2 * shape[-1])
    wide[..., ::2] = grad
    for other in (transposed, wide[..., ::2]):
        assert not other.is_contiguous()
        assert torch.equal(sketcher.sketch(other), expected)
        assert exact_norm(other) == pytest.approx(exact_norm(grad), rel=1e-14)


def test_bfloat16_is_accumulated_in_float32():
    grad = torch.full((300, 300), 0.01, dtype=torch.bfloat16)
    sketcher = GradientSketch((300, 300), k=8)
    torch.testing.assert_close(sketcher.sketch(grad), sketcher.sketch(grad.float()), rtol=0, atol=0)


def test_autocast_and_autograd_are_left_out():
    grad = random(64, 64).requires_grad_()
    sketcher = GradientSketch((64, 64), k=64)
    expected = sketcher.sketch(grad)
    assert not expected.requires_grad
    norm, other = exact_norm(grad), cosine(grad, grad + 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sketcher.sketch(grad), expected)
        assert exact_norm(grad) == norm
        assert cosine(grad, grad + 1) == other


@pytest.mark.parametrize("shape", [(600, 700), (5000, 900)])
def test_threads_do_not_matter(shape):
    grad, threads = random(*shape), torch.get_num_threads()
    sketcher = GradientSketch(shape)
    try:
        sketches = []
        for count in (1, 2):
            torch.set_num_threads(count)
            sketches += [sketcher.sketch(grad), GradientSketch(shape).sketch(grad)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(sketches[0], other) for other in sketches[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "limits"),
    [
        ((90, 70), {}),
        ((70, 40), {"TABLE_ENTRIES": 700, "ROW_BUCKETS": 16}),
        ((70, 42), {"TABLE_ENTRIES": 700, "ROW_BUCKETS": 16}),
        ((70, 41), {"TABLE_ENTRIES": 700, "ROW_BUCKETS": 16}),
        ((12, 90), {"TABLE_ENTRIES": 200, "COLUMN_BUCKETS": 16}),
        ((50, 90), {"ROW_BUCKETS": 16, "TABLE_ENTRIES": 200, "COLUMN_BUCKETS": 16}),
    ],
)
def test_other_devices_get_the_same_sketch(monkeypatch, shape, limits, dtype):
    """Their way of adding up, run on the CPU; sums of whole numbers are exact, so that the order cannot blur them."""
    for name, value in limits.items():
        monkeypatch.setattr(f"diagnostics.sketches.count_sketch.{name}", value)
    monkeypatch.setattr("diagnostics.sketches.gpu._GATHER_ENTRIES", 256)
    sketcher = GradientSketch(shape, k=32)
    assert (sketcher.row_buckets, sketcher.column_buckets) == (limits.get("ROW_BUCKETS"), limits.get("COLUMN_BUCKETS"))
    grad = torch.randint(-9, 10, shape).to(dtype)
    expected = sketcher.sketch(grad)
    cpu = torch.device("cpu")
    tables = sketcher._parallel_tables(cpu, (0, 0), shape)
    assert torch.equal(tables.sketch(grad), expected)
    assert torch.equal(tables.sketch(grad.T.contiguous().T), expected)
    half = shape[0] // 2
    parts = [(0, half), (half, shape[0] - half)]
    # small integers: sums are exact in any order
    left, right = torch.randint(-3, 4, (shape[0], 5)).float(), torch.randint(-3, 4, (5, shape[1])).float()
    assert torch.equal(tables.sketch_product(left, right), sketcher.sketch(left @ right))
    shards = [sketcher._parallel_tables(cpu, (at, 0), (n, shape[1])).sketch(grad[at : at + n]) for at, n in parts]
    assert torch.equal(shards[0] + shards[1], expected)


@pytest.mark.parametrize("limits", [{}, {"TABLE_ENTRIES": 200, "COLUMN_BUCKETS": 16}])
def test_other_devices_get_the_same_sketch_of_a_vectors_parts(monkeypatch, limits):
    """A sharded vector is cut along the only row that its matrix has."""
    for name, value in limits.items():
        monkeypatch.setattr(f"diagnostics.sketches.count_sketch.{name}", value)
    sketcher, grad = GradientSketch((300,), k=32), torch.randint(-9, 10, (300,)).float()
    assert sketcher.column_buckets == limits.get("COLUMN_BUCKETS")
    for at, count in ((0, 130), (130, 170)):
        part = grad[at : at + count]
        tables = sketcher._parallel_tables(torch.device("cpu"), (0, at), (1, count))
        assert torch.equal(tables.sketch(part[None]), sketcher.sketch_shard(part, at))


def test_seeds_differ():
    grad = random(40, 40)
    first, second = (GradientSketch((40, 40), k=64, seed=seed).sketch(grad) for seed in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("k", [4096, 8192])
def test_cosines_of_head_gradients(k):
    grads = head_gradients(8)
    sketcher = GradientSketch((3000, 64), k=k)
    check = SketchCheck()
    for step, grad in enumerate(grads):
        check.add(step, grad, sketcher.sketch(grad))
    result = check.result()
    assert result["pairs"] == 28
    assert result["rmse"] < 2 / math.sqrt(k)
    assert result["max_abs_error"] < 6 / math.sqrt(k)


def test_no_reference_is_kept():
    for shape in [(2, 3), (200, 200)]:
        sketcher = GradientSketch(shape)
        grad = random(*shape)
        alive = weakref.ref(grad)
        sketcher.sketch(grad)
        check = SketchCheck()
        check.add(0, grad, sketcher.sketch(grad))
        exact_norm(grad)
        del grad
        gc.collect()
        assert alive() is None


def test_refusals():
    with pytest.raises(InputError, match="no entries"):
        GradientSketch((0, 4))
    with pytest.raises(InputError, match="sketch size k is 0"):
        GradientSketch((3, 4), k=0)
    sketcher = GradientSketch((3, 4))
    with pytest.raises(InputError, match=r"shape \(4, 3\).*\(3, 4\)"):
        sketcher.sketch(torch.zeros(4, 3))
    with pytest.raises(InputError, match="floating"):
        sketcher.sketch(torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(InputError, match="dense"):
        sketcher.sketch(torch.zeros(3, 4).to_sparse())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_equals_numpy(dtype, monkeypatch):
    grad = random(300, 70, dtype=dtype)
    expected = np.linalg.norm(grad.double().numpy())
    assert exact_norm(grad) == pytest.approx(expected, rel=1e-13)
    monkeypatch.setattr(pieces, "PIECE_ENTRIES", 64)
    assert exact_norm(grad) == pytest.approx(expected, rel=1e-13)
    assert exact_norm(grad.reshape(7, 30, 100)) == pytest.approx(expected, rel=1e-13)


def test_norm_at_the_edges():
    assert exact_norm(torch.zeros(5, 5)) == 0.0
    assert exact_norm(torch.zeros(0, 5)) == 0.0
    assert exact_norm(torch.tensor(-2.0)) == 2.0
    assert exact_norm(torch.full((1000,), 60000.0, dtype=torch.float16)) == pytest.approx(6e4 * math.sqrt(1000))
    assert exact_norm(torch.full((100,), 3e38)) == pytest.approx(3e39, rel=1e-6)
    assert exact_norm(torch.full((1,), 1e-45)) > 0.0
    assert exact_norm(torch.tensor([1.0, math.inf])) == math.inf
    assert math.isnan(exact_norm(torch.tensor([1.0, math.nan])))


def test_cosine():
    a, b = random(40, 30, seed=1), random(40, 30, seed=2)
    x, y = a.double().numpy().ravel(), b.double().numpy().ravel()
    assert cosine(a, b) == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-14)
    assert cosine(a, 7 * a) == pytest.approx(1.0, abs=1e-12)
    assert cosine(a, 7 * a) <= 1.0
    assert cosine(a, torch.zeros_like(a)) is None
    assert cosine(torch.full((4,), math.nan), torch.ones(4)) is None
    assert cosine(torch.full((4,), math.inf), torch.ones(4)) is None
    assert cosine(torch.full((4,), 3e38), torch.full((4,), 1e-30)) == pytest.approx(1.0)
    with pytest.raises(InputError, match="shapes"):
        cosine(a, b[:2])


def test_check_compares_and_releases():
    sketcher = GradientSketch((60, 60), k=128)
    grads = [random(60, 60, seed=seed) + 0.5 for seed in range(4)]
    sketches = [sketcher.sketch(grad) for grad in grads]
    check = SketchCheck(max_copies=3)
    zero = torch.zeros(60, 60)
    check.add(0, zero, sketcher.sketch(zero))
    for step in range(3):
        assert not check.done
        check.add(step + 1, grads[step], sketches[step])
        grads[step].add_(0.0)
    assert check.done
    check.add(9, grads[3], sketches[3])  # ignored
    errors = [cosine(sketches[i], sketches[j]) - cosine(grads[i], grads[j]) for i, j in [(0, 1), (0, 2), (1, 2)]]
    result = check.result()
    assert result["rmse"] == pytest.approx(math.sqrt(np.mean(np.square(errors))))
    assert result["max_abs_error"] == pytest.approx(np.abs(errors).max())
    assert (result["pairs"], result["steps"]) == (3, [1, 2, 3])
    assert (result["zero_gradients"], result["non_finite_gradients"]) == (1, 0)
    assert check._kept == []
    assert check.done
    assert check.result() == result
    json.dumps(result, allow_nan=False)


def test_check_keeps_copies():
    """The optimizer zeroes or reuses gradients in place; the check must not see that."""
    sketcher = GradientSketch((9, 9))
    check = SketchCheck(max_copies=2)
    buffer = random(9, 9)
    for step in range(2):
        check.add(step, buffer, sketcher.sketch(buffer))
        buffer.mul_(-1)
        buffer[0, 0] += 1
    assert check.result()["max_abs_error"] < 1e-6


@pytest.mark.parametrize(("max_bytes", "expected"), [(10**9, 8), (3 * 400 + 10, 3), (1, 2)])
def test_check_bounds_its_copies(max_bytes, expected):
    check = SketchCheck(max_bytes=max_bytes)
    grad = random(100)
    count = 0
    while not check.done:
        check.add(count, grad, grad)
        count += 1
    assert count == expected


def test_check_with_too_little():
    check = SketchCheck()
    check.add(0, torch.zeros(3), torch.zeros(3))
    check.add(1, torch.tensor([1.0, math.nan, 0.0]), torch.zeros(3))
    check.add(2, torch.ones(3), torch.ones(3))
    assert not check.done
    assert check.result() == {
        "pairs": 0,
        "reason": "1 usable gradients were seen; two are needed",
        "steps": [2],
        "zero_gradients": 1,
        "non_finite_gradients": 1,
    }


def test_check_counts_a_lost_sketch_as_zero():
    check = SketchCheck(max_copies=2)
    check.add(0, torch.ones(3), torch.zeros(2))
    check.add(1, torch.ones(3), torch.ones(2))
    assert check.result()["max_abs_error"] == pytest.approx(1.0)
