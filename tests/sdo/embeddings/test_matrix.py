import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sdo import Embeddings, InputError
from sdo.embeddings.matrix import unit_rows, within_batch_cosine
from sdo.organizers.steps import Steps

GRID = 2.0**-24
matrices = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 6), st.integers(1, 9)),
    elements=st.floats(-1e6, 1e6, allow_subnormal=False),
)


def exactly_normalized(row):
    """The true unit row as fractions, up to a square root good to 200 bits."""
    exact = [Fraction(float(x)) for x in row]
    square = sum(x * x for x in exact)
    scale = 2**400
    root = Fraction(_isqrt(square.numerator * scale * square.denominator), square.denominator * 2**200)
    return [x / root for x in exact]


def _isqrt(n):
    import math

    return math.isqrt(n)


@given(matrices)
def test_rows_are_unit_and_on_the_grid(matrix):
    unit, valid = unit_rows(matrix)
    assert unit.dtype == np.float32
    assert (valid == (np.abs(matrix).max(axis=1) > 0)).all()
    assert (unit.astype(np.float64) / GRID == np.rint(unit.astype(np.float64) / GRID)).all()
    for row, got, good in zip(matrix, unit, valid, strict=True):
        if not good:
            assert not got.any()
            continue
        for truth, value in zip(exactly_normalized(row), got, strict=True):
            assert abs(truth - Fraction(float(value))) <= Fraction(1, 2**24)


@given(matrices, st.integers(-30, 30))
def test_scale_by_a_power_of_two_changes_nothing(matrix, power):
    first, _ = unit_rows(matrix)
    second, _ = unit_rows(np.ldexp(matrix, power))
    assert (first == second).all()


@given(hnp.arrays(np.float64, (5, 64), elements=st.floats(-1, 1)), st.randoms())
def test_dot_products_are_exact_in_any_order(matrix, random):
    unit, _ = unit_rows(matrix)
    wide = unit.astype(np.float64)
    order = list(range(64))
    random.shuffle(order)
    for a in range(5):
        for b in range(5):
            truth = sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(wide[a], wide[b], strict=True))
            shuffled = 0.0
            for i in order:
                shuffled += wide[a, i] * wide[b, i]
            assert Fraction(shuffled) == truth
            assert Fraction(float(wide[a] @ wide[b])) == truth


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes_and_strides_agree(dtype, tmp_path):
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((7, 5)).astype(dtype)
    plain = Embeddings.from_array(matrix)
    strided = np.zeros((14, 10), dtype=dtype)[::2, ::2]
    strided[:] = matrix
    assert not strided.flags.c_contiguous
    before = strided.copy()
    assert Embeddings.from_array(strided).fingerprint == plain.fingerprint
    assert Embeddings.from_array(np.asfortranarray(matrix)).fingerprint == plain.fingerprint
    assert (strided == before).all()
    np.save(tmp_path / "fortran.npy", np.asfortranarray(matrix))
    read = Embeddings.read(tmp_path / "fortran.npy")
    assert read.fingerprint == plain.fingerprint
    assert read.path == str(tmp_path / "fortran.npy")


def test_fingerprint_follows_content_not_length():
    matrix = np.random.default_rng(1).standard_normal((6, 4))
    other = matrix.copy()
    other[3, 2] += 0.01
    assert Embeddings.from_array(matrix).fingerprint == Embeddings.from_array(matrix * 4).fingerprint
    assert Embeddings.from_array(matrix).fingerprint != Embeddings.from_array(other).fingerprint


def test_wide_rows_do_not_overflow():
    unit, valid = unit_rows(np.full((1, 40_000), 1e30))
    assert valid.all()
    np.testing.assert_allclose(np.square(unit.astype(np.float64)).sum(), 1, atol=1e-3)


def test_invalid_rows_are_named():
    matrix = np.ones((12, 3))
    matrix[4, 1] = np.nan
    matrix[7] = 0
    matrix[9, 0] = -np.inf
    embeddings = Embeddings.from_array(matrix)
    assert np.flatnonzero(~embeddings.valid).tolist() == [4, 7, 9]
    with pytest.raises(InputError, match=r"3 of 12 embedding rows .*: 4, 7, 9;.*on_invalid='isolate'"):
        embeddings.require_valid()
    matrix[:] = 0
    with pytest.raises(InputError, match=r"12 of 12 .* 7, …"):
        Embeddings.from_array(matrix).require_valid()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(3), r"shape \(3,\); expected \(N, d\)"),
        (np.ones((2, 2, 2)), r"expected \(N, d\)"),
        (np.ones((0, 4)), "are empty"),
        (np.ones((4, 0)), "are empty"),
        (np.ones((3, 2), dtype=np.int64), "hold int64; expected float16, float32, float64 or bfloat16"),
        (np.array([["a", "b"]], dtype=object), "hold object"),
        (np.ma.masked_array(np.ones((3, 2)), mask=np.eye(3, 2)), "embeddings hold masked entries"),
        ([[1.0, 2.0], [3.0]], "embeddings make no array"),
    ],
)
def test_what_is_no_matrix_is_refused(array, message):
    with pytest.raises(InputError, match=message):
        Embeddings.from_array(array)


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        Embeddings.read(tmp_path / "missing.npy")
    (tmp_path / "text.npy").write_text("not an array")
    with pytest.raises(InputError, match="not a readable"):
        Embeddings.read(tmp_path / "text.npy")
    np.save(tmp_path / "objects.npy", np.array([[{}, 1]], dtype=object))
    with pytest.raises(InputError, match="holds Python objects"):
        Embeddings.read(tmp_path / "objects.npy")
    with (tmp_path / "archive.npy").open("wb") as file:
        np.savez(file, a=np.ones((2, 2)))
    with pytest.raises(InputError, match=r"archive of arrays; .* name it \.npz"):
        Embeddings.read(tmp_path / "archive.npy")
    (tmp_path / "empty.npy").write_bytes(b"")
    with pytest.raises(InputError, match="not a readable"):
        Embeddings.read(tmp_path / "empty.npy")


def test_bfloat16_is_read_exactly_from_arrays_tensors_and_files(tmp_path):
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    from safetensors.torch import save_file

    tensor = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).requires_grad_()
    wide = tensor.detach().to(torch.float64).numpy()  # every bfloat16 number is a float64 number
    expected = Embeddings.from_array(wide).fingerprint
    assert Embeddings.from_array(tensor).fingerprint == expected
    assert Embeddings.from_array(tensor.t().contiguous().t()).fingerprint == expected
    assert Embeddings.from_array(wide.astype(ml_dtypes.bfloat16)).fingerprint == expected
    save_file({"embeddings": tensor.detach().clone()}, tmp_path / "E.safetensors")
    assert Embeddings.read(tmp_path / "E.safetensors").fingerprint == expected
    for dtype in (torch.float16, torch.float32, torch.float64):
        other = tensor.detach().to(dtype)
        assert Embeddings.from_array(other).fingerprint == Embeddings.from_array(other.numpy()).fingerprint
    with pytest.raises(InputError, match="hold int64"):
        Embeddings.from_array(torch.ones(2, 2, dtype=torch.int64))


def test_bfloat16_that_numpy_saved_is_refused_with_the_reason(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    np.save(tmp_path / "E.npy", np.ones((2, 2), dtype=ml_dtypes.bfloat16))
    with pytest.raises(InputError, match=r"numpy\.save loses the type bfloat16; save the matrix with"):
        Embeddings.read(tmp_path / "E.npy")


def test_ids_name_rows_and_leave_the_fingerprint_alone():
    matrix = np.random.default_rng(0).standard_normal((4, 3))
    plain = Embeddings.from_array(matrix)
    named = Embeddings.from_array(matrix, ids=["d", "a", "c", "b"])
    assert plain.ids is None
    assert named.fingerprint == plain.fingerprint
    assert named.rows_of(["a", "b", "d"]).tolist() == [1, 3, 0]
    numbered = Embeddings.from_array(matrix, ids=np.array([7, 2, 9, 4], dtype=np.uint16))
    assert numbered.ids.dtype == np.int64
    assert numbered.rows_of([9, 9, 7]).tolist() == [2, 2, 0]
    assert numbered.rows_of(np.array([4], dtype=np.uint64)).tolist() == [3]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "b", "a"], r"embeddings: id 'a' stands in more than one row; expected each id once"),
        ([5, 6, 6], "id 6 stands in more than one row"),
        (["a", "b"], r"ids have shape \(2,\); expected \(3,\), one for each embedding row"),
        ([1.0, 2.0, 3.0], r"ids hold 1.0 \(float\); expected integers or strings"),
        ([True, 1, 2], r"ids hold True \(bool\)"),
        (["1", 2, 3], "ids mix integers and strings"),
        (["a", "a\0", "b"], "an id ends in a NUL character"),
        (np.array([b"a", b"b", b"c"]), "ids hold |S1; expected 64-bit integers or strings"),
        (np.array([1, 2, 2**64 - 1], dtype=np.uint64), "ids hold uint64; expected 64-bit integers or strings"),
        (np.ma.masked_array([1, 2, 3], mask=[1, 0, 0]), "embeddings: ids hold masked entries"),
    ],
)
def test_wrong_ids_are_refused(ids, message):
    with pytest.raises(InputError, match=message):
        Embeddings.from_array(np.eye(3), ids=ids)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["a", "x", "y"], r"^column 'id': 'x' \(row 1\) is not among the 3 ids of the embeddings, nor are 1 others"),
        ([0, 1], "column 'id' hold integers, the ids of the embeddings are strings; expected the same kind"),
        (np.array([None, "a"]), "column 'id' hold object"),
        (np.array([["a"], ["b"]]), r"column 'id' have shape \(2, 1\); expected \(n,\)"),
        (np.ma.masked_array(["a", "b"], mask=[1, 0]), "column 'id' hold masked entries"),
    ],
)
def test_unknown_keys_are_refused(keys, message):
    embeddings = Embeddings.from_array(np.eye(3), ids=["a", "b", "c"])
    with pytest.raises(InputError, match=message):
        embeddings.rows_of(keys, "column 'id'")
    with pytest.raises(InputError, match="bring no ids"):
        Embeddings.from_array(np.eye(3)).rows_of([1])


def test_a_key_too_large_for_64_bits_is_not_read_as_another():
    named = Embeddings.from_array(np.eye(2), ids=[-1, 5])
    with pytest.raises(InputError, match="keys hold uint64, such as 18446744073709551615; expected whole numbers"):
        named.rows_of(np.array([2**64 - 1], dtype=np.uint64))  # wrapped around, it would be -1
    assert named.rows_of([]).tolist() == []


def test_within_batch_cosine_is_the_mean_over_pairs_with_a_direction():
    matrix = np.random.default_rng(3).standard_normal((30, 7))
    matrix[[4, 9, 10, 11]] = 0
    unit, valid = unit_rows(matrix)
    batches = np.random.default_rng(4).permuted(np.tile(np.arange(30), (9, 1)), axis=1)[:, :5]
    batches[0] = [4, 9, 10, 11, 0]
    got = within_batch_cosine(unit, valid, *Steps.of(batches).trained())
    assert np.isnan(got[0])
    for value, batch in zip(got[1:], batches[1:], strict=True):
        pairs = [
            float(unit[a].astype(float) @ unit[b].astype(float))
            for a in batch
            for b in batch
            if a != b and valid[a] and valid[b]
        ]
        assert value == pytest.approx(np.mean(pairs), abs=1e-12)
    assert np.isnan(within_batch_cosine(unit, valid, *Steps.of(batches[:, :1]).trained())).all()


def test_core_imports_neither_torch_nor_transformers():
    code = (
        "import sys, sdo\n"
        "heavy = {'torch', 'transformers', 'sklearn', 'scipy', 'pyarrow', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
