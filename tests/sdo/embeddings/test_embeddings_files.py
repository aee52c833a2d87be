import json
import struct
import zipfile

import numpy as np
import pytest

from sdo import Embeddings, InputError
from sdo.embeddings.files import SUFFIXES, read_matrix_file, write_matrix_file
from sdo.embeddings.matrix import _from_bfloat16

MATRIX = np.random.default_rng(0).standard_normal((9, 5)).astype(np.float32)
STRINGS = np.array([f"ü{i}" for i in range(9)])
NUMBERS = np.arange(9, dtype=np.int64)[::-1] * 2**40


def save(path, header, numbers=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + numbers)
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("ids", [None, STRINGS, NUMBERS], ids=["plain", "strings", "integers"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_round_trips_give_the_same_rows_ids_and_bytes(tmp_path, suffix, ids, dtype):
    path, again = tmp_path / f"E{suffix}", tmp_path / "again"
    if suffix == ".npy" and ids is not None:
        with pytest.raises(InputError, match=r"\.npy holds no ids"):
            write_matrix_file(path, MATRIX, ids, suffix=suffix)
        return
    strided = np.zeros((18, 5), dtype)[::2]
    strided[:] = MATRIX
    write_matrix_file(path, strided, ids, suffix=suffix)
    write_matrix_file(again, strided, ids, suffix=suffix)
    assert path.read_bytes() == again.read_bytes()
    read = Embeddings.read(path)
    assert read.fingerprint == Embeddings.from_array(strided).fingerprint
    if ids is None:
        assert read.ids is None
    else:
        assert read.ids.tolist() == ids.tolist()


def test_the_safetensors_package_reads_ours_and_we_read_its(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "ours.safetensors"
    write_matrix_file(path, MATRIX, NUMBERS, suffix=".safetensors")
    theirs = numpy.load_file(path)
    np.testing.assert_array_equal(theirs["embeddings"], MATRIX)
    np.testing.assert_array_equal(theirs["ids"], NUMBERS)
    numpy.save_file({"x": MATRIX, "label": np.zeros(9)}, path, metadata={"ids": json.dumps(STRINGS.tolist())})
    read = read_matrix_file(path)
    np.testing.assert_array_equal(read.matrix, MATRIX)
    assert read.ids.tolist() == STRINGS.tolist()


def test_every_bfloat16_number_is_read_exactly(tmp_path):
    torch = pytest.importorskip("torch")
    bits = np.arange(2**16, dtype=np.uint16)
    truth = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(torch.float64).numpy()
    header = {"e": {"dtype": "BF16", "shape": [256, 256], "data_offsets": [0, 2**17]}}
    held = read_matrix_file(save(tmp_path / "E.safetensors", header, bits.astype("<u2").tobytes()))
    assert held.bfloat16
    with np.errstate(invalid="ignore"):  # signalling NaN among them
        np.testing.assert_array_equal(_from_bfloat16(held.matrix).astype(np.float64).ravel(), truth)
    assert (
        Embeddings.read(tmp_path / "E.safetensors").fingerprint
        == Embeddings.from_array(truth.reshape(256, 256)).fingerprint
    )


def test_arrays_of_other_names_serve_where_they_leave_no_doubt(tmp_path):
    np.savez(tmp_path / "E.npz", vectors=MATRIX, keys=STRINGS, scale=np.float32(3))
    read = Embeddings.read(tmp_path / "E.npz")
    assert read.ids.tolist() == STRINGS.tolist()
    np.savez(tmp_path / "E.npz", embeddings=MATRIX, other=MATRIX, ids=NUMBERS, labels=NUMBERS)
    assert Embeddings.read(tmp_path / "E.npz").ids.tolist() == NUMBERS.tolist()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"a": MATRIX, "b": MATRIX},
            r"hold 2 2-D float arrays \(arrays: a, b\); expected one, or one named embeddings",
        ),
        ({"ids": NUMBERS}, r"hold no 2-D float array \(arrays: ids\)"),
        ({"e": MATRIX, "a": NUMBERS, "b": STRINGS}, r"hold 2 1-D id arrays .* or one named ids"),
        ({"e": MATRIX, "ids": np.array([{}] * 9)}, "holds Python objects; expected the arrays embeddings and ids"),
        ({"embeddings": MATRIX, "ids": np.ones(9)}, "ids hold float64; expected 64-bit integers or strings"),
        ({"embeddings": MATRIX, "ids": NUMBERS[:8]}, r"ids have shape \(8,\); expected \(9,\)"),
        ({"embeddings": MATRIX, "ids": NUMBERS.reshape(3, 3)}, r"ids have shape \(3, 3\)"),
        ({"embeddings": NUMBERS, "ids": NUMBERS}, "hold int64; expected float16"),
    ],
)
def test_npz_that_leave_doubt_or_break_a_rule_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "E.npz", **arrays)
    with pytest.raises(InputError, match=message) as caught:
        Embeddings.read(tmp_path / "E.npz")
    assert len(str(caught.value).splitlines()) == 1


E = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "its header would be 1 bytes long"),
        (b"[1, 2]", "its header is no JSON object"),
        (b"not JSON", "not a readable .safetensors file"),
        (b"\xff\xfe", "not a readable"),
        ({}, r"hold no 2-D float tensor \(arrays: none\)"),
        ({"a": E, "b": E}, "hold 2 2-D float tensors"),
        ({"embeddings": {**E, "dtype": "I32"}}, "hold I32; expected F64, F32, F16 or BF16"),
        ({"embeddings": {**E, "data_offsets": [0, 12]}}, r"12 bytes for shape \[2, 2\]"),
        ({"embeddings": {**E, "shape": [4, 4], "data_offsets": [0, 64]}}, "or the file is cut short"),
        ({"embeddings": {**E, "shape": [-2, -2]}}, "no whole number"),
        ({"embeddings": {**E, "shape": [0, 2], "data_offsets": [0, 0]}}, r"are empty, shape \(0, 2\)"),
        ({"embeddings": {"dtype": "F32"}}, "not a readable"),
        ({"embeddings": 3}, "not a readable"),
        ({"embeddings": E, "ids": {"dtype": "I32", "shape": [4], "data_offsets": [0, 16]}}, "holds I32; expected I64"),
        ({"embeddings": E, "__metadata__": {"ids": '{"a": 1}'}}, "metadata ids is a JSON dict; expected a list"),
        ({"embeddings": E, "__metadata__": {"ids": '["a"]'}}, r"ids have shape \(1,\); expected \(2,\)"),
        ({"embeddings": E, "__metadata__": {"ids": '["a", null]'}}, r"ids hold None \(NoneType\)"),
    ],
)
def test_broken_safetensors_are_refused(tmp_path, header, message):
    path = save(tmp_path / "E.safetensors", header, np.ones(4, "<f4").tobytes())
    with pytest.raises(InputError, match=message) as caught:
        Embeddings.read(path)
    assert len(str(caught.value).splitlines()) == 1


def test_files_that_are_not_what_their_names_say_are_refused(tmp_path):
    for suffix in (".npz", ".safetensors"):
        for content in (b"", b"short", b"PK\x03\x04" + b"x" * 40):
            path = tmp_path / f"E{suffix}"
            path.write_bytes(content)
            with pytest.raises(InputError, match=f"not a readable {suffix}"):
                Embeddings.read(path)
    with (tmp_path / "E.npz").open("wb") as file:
        np.save(file, MATRIX)
    with pytest.raises(InputError, match=r"single array; .* name it \.npy"):
        Embeddings.read(tmp_path / "E.npz")
    with pytest.raises(InputError, match=r"no such file; expected a \.npy, \.npz or \.safetensors"):
        Embeddings.read(tmp_path / "none.safetensors")


@pytest.mark.parametrize("shape", [f"({2**40}, 64)", f"({2**62}, 64)", f"({10**30}, 2)", "(-3, 4)"])
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_header_that_claims_more_than_there_is_gets_one_line(tmp_path, shape, suffix):
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)
    path = tmp_path / f"E{suffix}"
    path.write_bytes(array)
    if suffix == ".npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("embeddings.npy", array)
    with pytest.raises(InputError, match=r"is not a readable|Unable to allocate .* expected a matrix that fits"):
        read_matrix_file(path)
