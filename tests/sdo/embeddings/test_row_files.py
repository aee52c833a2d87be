import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdo.embeddings.row_files import READERS, require_columns, require_distinct_columns, whole_numbers
from sdo.errors import InputError


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


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        (".csv", b"a,b,a\n1,2,3\n", "^{path}: 'a' stands there 2 times; expected each name once; fix"),
        (".csv", b"a,b,b,b\n", "^{path}: 'b' stands there 3 times"),
        (".jsonl", b'{"a": 1}\n{"a": 1, "b": 2, "a": 3}\n', "^{path}, line 2: 'a' stands there 2 times"),
        (".jsonl", b'{"a": [{"role": "x", "role": "y"}]}\n', "^{path}, line 1: 'role' stands there 2 times"),
    ],
)
def test_a_name_that_stands_twice_is_refused(tmp_path, suffix, text, message):
    """Python would take the last of two values without a word."""
    path = tmp_path / f"a{suffix}"
    path.write_bytes(text)
    with pytest.raises(InputError, match=message.format(path=path)):
        list(READERS[suffix](path, ("a",)))


def test_two_columns_of_one_name_in_parquet_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    for read in (lambda: list(READERS[".parquet"](path, ("a",))), lambda: require_distinct_columns(path)):
        with pytest.raises(InputError, match="'a' stands there 2 times; expected each name once"):
            read()


def test_empty_names_behind_the_last_column_are_nobodys(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,,\nx,,\n")
    assert [row["a"] for _, row in READERS[".csv"](path, ("a",))] == ["x"]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "missing.csv"])
def test_headers_that_cannot_be_read_are_left_to_the_reader(tmp_path, name):
    if not name.startswith("missing"):
        (tmp_path / name).write_bytes(b"\xff\xfe")
    assert require_distinct_columns(tmp_path / name) is None
