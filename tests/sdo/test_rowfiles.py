import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdo.errors import InputError
from sdo.rowfiles import READERS, require_columns, whole_numbers


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_each_reader_names_where_a_row_stands(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        path.write_text('\ufeff{"a": "x", "b": 1}\n\n{"a": "y"}\n', encoding="utf-8")
    elif suffix == ".csv":
        path.write_text("a,b\nx,1\ny,2\n")
    else:
        pq.write_table(pa.table({"a": ["x", "y"], "b": [1, 2]}), path)
    rows = list(READERS[suffix](path, ("a",)))
    assert [row["a"] for _, row in rows] == ["x", "y"]
    places = {".jsonl": ["line 1", "line 3"], ".csv": ["line 2", "line 3"], ".parquet": ["row 0", "row 1"]}[suffix]
    assert [where for where, _ in rows] == [f"{path}, {place}" for place in places]


def test_parquet_reads_the_named_columns_alone(tmp_path):
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "a.parquet")
    assert [row for _, row in READERS[".parquet"](tmp_path / "a.parquet", ("a", "a"))] == [{"a": 1}]
    with pytest.raises(InputError, match="no column 'c'; columns there: 'a', 'b'"):
        list(READERS[".parquet"](tmp_path / "a.parquet", ("a", "c")))


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        (".jsonl", b'{"a": 1}\n[1]\n', "line 2: a JSON list; expected an object"),
        (".jsonl", b"{a}\n", "line 1: not JSON"),
        (".jsonl", b'{"a": "\xff"}\n', "line 1: not UTF-8"),
        (".csv", b"a,b\n1\n", "line 2: another number of fields than the header's 2"),
        (".csv", b"a\n\xff\n", "not UTF-8"),
        (".parquet", b"PAR1", "no readable Parquet file"),
    ],
)
def test_broken_files_are_named_with_their_line(tmp_path, suffix, text, message):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(text)
    with pytest.raises(InputError, match=message):
        list(READERS[suffix](path, ("a",)))


def test_columns_and_whole_numbers():
    require_columns(["a"], ["b", "a"], "here")
    with pytest.raises(InputError, match="here: no column 'x'; columns there: none"):
        require_columns(["x"], [], "here")
    assert whole_numbers(["0", "-4", "12"]) == [0, -4, 12]
    assert whole_numbers(["0", "007"]) == ["0", "007"]
