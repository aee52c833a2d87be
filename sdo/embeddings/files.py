"""Files that hold an embedding matrix and, if wanted, the ids of its rows: ``.npy``, ``.npz``, ``.safetensors``.

numpy alone reads and writes all three. A safetensors file is eight bytes of length, a JSON header and raw
little-endian numbers (https://github.com/huggingface/safetensors#format). The package `safetensors` comes with
transformers, which planning and analysis do without; and into numpy it copies the matrix, where we map the file into
memory, and reads no bfloat16. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdo.checks import as_array
from sdo.errors import InputError

SUFFIXES = (".npy", ".npz", ".safetensors")
# As in the reference implementation of safetensors.
_MAX_HEADER = 100_000_000
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_WRITTEN = {"float64": "F64", "float32": "F32", "float16": "F16"}
_FIX = "fix: sdo embed --out writes .npy, .npz and .safetensors"


@dataclass(frozen=True, eq=False)
class MatrixFile:
    """What a file holds, unchecked but for its form.

    Attributes
    ----------
    matrix
        The array, mapped into memory where the format allows it. With `bfloat16` its type is uint16: the bits.
    ids
        One for each row, or None.
    bfloat16
        Whether `matrix` holds the bits of bfloat16 numbers.
    """

    matrix: NDArray[Any]
    ids: NDArray[Any] | None = None
    bfloat16: bool = False


def read_matrix_file(path: str | Path) -> MatrixFile:
    """Read a matrix, and the ids of its rows where the file has them.

    Parameters
    ----------
    path
        ``.npz``: arrays ``embeddings`` and ``ids``, or the only 2-D array of numbers and the only 1-D array of
        integers or strings. ``.safetensors``: tensor ``embeddings`` or the only 2-D one; ids in a 1-D int64 tensor
        ``ids`` or as a JSON list under the metadata key ``ids``. Anything else is read as ``.npy``.

    Raises
    ------
    InputError
        If the file is missing, is not of its format, holds Python objects, or leaves open which array is meant.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(
            f"embeddings {path}: no such file; expected a .npy, .npz or .safetensors file; fix: sdo embed makes one"
        )
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    return readers.get(file.suffix.lower(), _read_npy)(file)


def normalize_ids(ids: ArrayLike, rows: int, what: str) -> NDArray[Any]:
    """Check ids and return them as an array of int64 or of strings.

    Parameters
    ----------
    ids
        Shape ``(rows,)``: integers or strings, not mixed, each once.
    rows
        Rows of the matrix that they name.
    what
        Named in errors.

    Raises
    ------
    InputError
        Saying which rule is broken, and by which id.
    """
    if isinstance(ids, Sequence) and not isinstance(ids, str):
        odd = [i for i in ids if isinstance(i, bool) or not isinstance(i, str | int | np.integer)]
        if odd:
            raise InputError(f"{what}: ids hold {odd[0]!r:.60} ({type(odd[0]).__name__}); expected integers or strings")
        if len({isinstance(i, str) for i in ids}) > 1:
            raise InputError(f"{what}: ids mix integers and strings; expected one kind; fix: write all as strings")
        texts = np.array(ids) if ids else np.empty(0, dtype=np.int64)
        # numpy drops NUL characters at the end of a string, and with them the difference between two ids.
        if texts.dtype.kind == "U" and any(str(i).endswith("\0") for i in ids):
            raise InputError(f"{what}: an id ends in a NUL character; expected text")
        ids = texts
    array = as_array(ids, f"{what}: ids")
    if array.dtype.kind not in "iuU" or (array.dtype.kind == "u" and len(array) and array.max() > np.iinfo("i8").max):
        raise InputError(f"{what}: ids hold {array.dtype}; expected 64-bit integers or strings")
    if array.ndim != 1 or len(array) != rows:
        raise InputError(f"{what}: ids have shape {array.shape}; expected ({rows},), one for each embedding row")
    array = array.astype(np.int64) if array.dtype.kind != "U" else array
    order = np.argsort(array, kind="stable")
    twice = np.flatnonzero(array[order][1:] == array[order][:-1])
    if len(twice):
        first = int(order[twice + 1].min())
        raise InputError(f"{what}: id {array[first].item()!r} stands in more than one row; expected each id once")
    return array


def write_matrix_file(path: Path, matrix: NDArray[Any], ids: NDArray[Any] | None, *, suffix: str) -> None:
    """Write a matrix, row block by row block; the same input gives the same bytes.

    Parameters
    ----------
    path
        Written as it is, whatever its name ends in.
    matrix
        Shape ``(N, d)``, float16, float32 or float64; may be mapped from disk.
    ids
        As :func:`normalize_ids` returns them, or None.
    suffix
        ``".npy"``, which takes no ids, ``".npz"`` or ``".safetensors"``.

    Raises
    ------
    InputError
        If the format cannot hold the ids.
    """
    if suffix == ".safetensors":
        _write_safetensors(path, matrix, ids)
        return
    with path.open("wb") as file:  # given a name, numpy would add its own suffix
        if suffix == ".npz":
            arrays = {"embeddings": matrix} if ids is None else {"embeddings": matrix, "ids": ids}
            np.savez(file, allow_pickle=False, **arrays)
        elif ids is not None:
            raise InputError(f"{suffix} holds no ids; expected .npz or .safetensors")
        else:
            np.save(file, matrix, allow_pickle=False)


def _read_npy(file: Path) -> MatrixFile:
    try:
        with np.errstate(over="ignore"):  # a shape beyond all memory, which is refused below
            matrix = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError, OverflowError) as error:
        why = "holds Python objects" if "bjects in dtype" in str(error) else "is not a readable .npy file"
        raise InputError(
            f"embeddings {file} {why}; expected a float matrix written by numpy.save; "
            "fix: numpy.save(path, array.astype('float32'))"
        ) from error
    if not isinstance(matrix, np.ndarray):
        matrix.close()
        raise InputError(f"embeddings {file} is an archive of arrays; expected one matrix; fix: name it .npz")
    return MatrixFile(matrix)


def _read_npz(file: Path) -> MatrixFile:
    try:
        with file.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise InputError(f"embeddings {file} is a single array; expected an archive; fix: name it .npy")
            arrays = {name: archive[name] for name in archive.files}
    except InputError:
        raise
    except MemoryError as error:
        raise InputError(
            f"embeddings {file}: {str(error)[:120] or 'not enough memory'}; expected a matrix that fits in memory; "
            "fix: save it as .npy, which is read in place"
        ) from error
    except (ValueError, EOFError, OSError, KeyError, OverflowError, zipfile.BadZipFile, AttributeError) as error:
        why = "holds Python objects" if "bject arrays" in str(error) else "is not a readable .npz file"
        raise InputError(
            f"embeddings {file} {why}; expected the arrays embeddings and ids; "
            "fix: numpy.savez(path, embeddings=array.astype('float32'), ids=ids)"
        ) from error
    shapes = {name: (str(array.dtype.kind), array.ndim) for name, array in arrays.items()}
    name = _chosen(file, "embeddings", shapes, "fV", 2, "2-D float array")
    named = _chosen(file, "ids", shapes, "iuU", 1, "1-D id array") if _has_ids(shapes) else None
    return MatrixFile(arrays[name], None if named is None else arrays[named])


def _has_ids(shapes: dict[str, tuple[str, int]]) -> bool:
    return "ids" in shapes or any(kind in "iuU" and ndim == 1 for kind, ndim in shapes.values())


def _chosen(file: Path, name: str, shapes: dict[str, tuple[str, int]], kinds: str, ndim: int, what: str) -> str:
    """The array of that name, or else the only one of the wanted kind."""
    if name in shapes:
        return name
    fitting = [key for key, (kind, dims) in shapes.items() if kind in kinds and dims == ndim]
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(shapes) or "none"
    raise InputError(
        f"embeddings {file} hold {len(fitting) or 'no'} {what}{'s' if len(fitting) > 1 else ''} (arrays: {there}); "
        f"expected one, or one named {name}; {_FIX}"
    )


def _read_safetensors(file: Path) -> MatrixFile:
    try:
        header, start = _read_header(file)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        kinds = {
            name: ("f" if entry["dtype"] in _FLOATS else "i" if entry["dtype"] == "I64" else "?", len(entry["shape"]))
            for name, entry in tensors.items()
        }
        name = _chosen(file, "embeddings", kinds, "f", 2, "2-D float tensor")
        dtype = tensors[name]["dtype"]
        if dtype not in _FLOATS:
            raise InputError(f"embeddings {file} hold {dtype}; expected F64, F32, F16 or BF16 numbers")
        matrix = _map_tensor(file, start, tensors[name], _FLOATS[dtype])
        ids: NDArray[Any] | None = None
        listed = header.get("__metadata__", {}).get("ids")
        if "ids" in tensors:
            if tensors["ids"]["dtype"] != "I64":
                raise InputError(f"embeddings {file}: tensor ids holds {tensors['ids']['dtype']}; expected I64")
            ids = np.array(_map_tensor(file, start, tensors["ids"], "<i8"))
        elif listed is not None:
            parsed = json.loads(listed)
            if not isinstance(parsed, list):
                raise InputError(f"embeddings {file}: metadata ids is a JSON {type(parsed).__name__}; expected a list")
            ids = normalize_ids(parsed, len(matrix), f"embeddings {file}")
    except InputError:
        raise
    except (ValueError, OSError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise InputError(
            f"embeddings {file} is not a readable .safetensors file ({str(error)[:80]}); "
            f"expected a tensor embeddings of shape (N, d); {_FIX}"
        ) from error
    return MatrixFile(matrix, ids, bfloat16=dtype == "BF16")


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the offset at which the numbers begin."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if not 2 <= length <= min(_MAX_HEADER, file.stat().st_size - 8):
            raise ValueError(f"its header would be {length} bytes long")
        header = json.loads(stream.read(length).decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, 8 + length


def _map_tensor(file: Path, start: int, entry: dict[str, Any], dtype: str) -> NDArray[Any]:
    """Map one tensor into memory, after checking that its bytes are there."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError("a shape or an offset is no whole number")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if end - begin != size or start + end > file.stat().st_size:
        raise ValueError(f"{end - begin} bytes for shape {list(shape)}, or the file is cut short")
    if size == 0:
        return np.empty(shape, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r", offset=start + begin, shape=shape)


def _write_safetensors(path: Path, matrix: NDArray[Any], ids: NDArray[Any] | None) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    parts = [("embeddings", matrix, _WRITTEN[matrix.dtype.name])]
    if ids is not None and ids.dtype.kind == "U":
        header["__metadata__"]["ids"] = json.dumps(ids.tolist())
    elif ids is not None:
        parts.append(("ids", ids, "I64"))
    offset = 0
    for name, array, dtype in parts:
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of eight
    if len(text) > _MAX_HEADER:
        raise InputError(f"the ids need {len(text):,} bytes; .safetensors holds {_MAX_HEADER:,}; fix: write .npz")
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array, _ in parts:
            little = array.dtype.newbyteorder("<")
            for first in range(0, len(array), 4096):
                file.write(np.ascontiguousarray(array[first : first + 4096], dtype=little).tobytes())
