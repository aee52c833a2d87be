import csv
import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdo.embeddings.sources import Selection, open_source, survey
from sdo.errors import InputError

ROWS = [
    {"id": "a", "q": "é, one", "chat": [{"role": "system", "content": "S"}, {"role": "user", "content": "one"}]},
    {
        "id": "b",
        "q": 'line\nbreak "two"',
        "chat": [
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "<think>hm</think>no"},
            {"role": "user", "content": "more"},
        ],
    },
    {"id": "c", "q": "", "chat": [{"role": "user", "content": "three"}, {"role": "assistant", "content": "yes"}]},
]
TEXTS = [row["q"] for row in ROWS]


def texts(name, column="q", *, split=None, limit=None, **options):
    return [text for _, text in open_source(str(name), split=split).texts(Selection(column, **options), limit=limit)]


def write(folder, kind):
    path = folder / f"train.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["id", "q"], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_files_give_the_same_texts_ids_and_digest(tmp_path, kind):
    path = write(tmp_path, kind)
    assert texts(path) == TEXTS
    assert texts(path, limit=2) == TEXTS[:2]
    found = survey(open_source(str(path)), Selection("q", id_column="id"))
    assert (found.rows, found.characters, found.ids) == (3, sum(map(len, TEXTS)), ["a", "b", "c"])
    assert found.texts_sha256 == hashlib.sha256(json.dumps(TEXTS).encode()).hexdigest()
    with pytest.raises(InputError, match=r"no column 'none'; columns there: 'id', 'q'"):
        texts(path, "none")
    with pytest.raises(InputError, match="no column 'uid'; columns there"):
        texts(path, id_column="uid")
    with pytest.raises(InputError, match="is a file and has neither splits nor configurations"):
        open_source(str(path), split="train")


def test_the_call_of_a_tool_has_no_words(tmp_path):
    path = tmp_path / "calls.jsonl"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    chats = [[call, {"role": "assistant", "content": "done"}], [call]]
    path.write_text("".join(json.dumps({"q": chat}) + "\n" for chat in chats))
    assert texts(path, role="assistant", limit=1) == ["done"]
    with pytest.raises(
        InputError, match="line 2: column 'q' holds no text of role 'assistant'; roles there: assistant"
    ):
        texts(path, role="assistant")
    path.write_text('{"q": [{"role": "user", "content": null}]}')
    with pytest.raises(InputError, match="line 1: column 'q' holds the content None; expected a string"):
        texts(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chats_are_reduced_to_one_role(tmp_path, kind):
    path = write(tmp_path, kind)
    assert texts(path, "chat") == ["one", "two\n\nmore", "three"]
    assert texts(path, "chat", role="user") == texts(path, "chat")
    with pytest.raises(InputError, match=r"holds no message of role 'assistant'; roles there: system, user"):
        texts(path, "chat", role="assistant")
    with pytest.raises(InputError, match="column 'q' holds text; expected a chat, as role is 'user'"):
        texts(path, role="user")


def test_chat_contents_in_parts_and_chats_of_other_forms(tmp_path):
    path = tmp_path / "chat.jsonl"
    parts = [{"type": "text", "text": "look"}, {"type": "image"}, {"type": "text", "text": "here"}]
    path.write_text(json.dumps({"m": [{"role": "user", "content": parts}]}))
    assert texts(path, "m") == ["look\nhere"]
    path.write_text(json.dumps({"m": [{"from": "human", "value": "x"}]}))
    with pytest.raises(InputError, match=r"holds the message .*; expected \{'role': ..., 'content': ...\}"):
        texts(path, "m")
    path.write_text(json.dumps({"m": [{"role": "user", "content": None}]}))
    with pytest.raises(InputError, match="holds the content None; expected a string"):
        texts(path, "m")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>a\nb</think>\n\nanswer", "answer"),
        ("opened by the template</think>answer", "answer"),
        ("say <think>never closed", "say"),
        ("<think>a</think>x<think>b</think>y", "xy"),
        (" untouched ", " untouched "),
    ],
)
def test_think_blocks_are_left_out_where_asked(tmp_path, text, left):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"q": text}))
    assert texts(path, strip_think=True) == [left]
    assert texts(path) == [text]


def test_json_lines_skip_blank_lines_and_the_byte_order_mark(tmp_path):
    path = tmp_path / "texts.jsonl"
    # U+2028 is a line end for str.splitlines, not for JSON Lines.
    rows = [{"q": "é"}, {"q": "a\u2028b", "other": 1}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes(b"\xef\xbb\xbf" + f"{lines[0]}\r\n\n   \n{lines[1]}".encode())
    assert texts(path) == ["é", "a\u2028b"]
    assert texts(path, limit=1) == ["é"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows"),
        (b"\n \n", "holds no rows"),
        (b'{"q": "a"}\n{"q": ', "line 2: not JSON"),
        (b'{"q": "a"}\n\n["q"]', "line 3: a JSON list"),
        (b'{"question": "a", "id": 1}', "line 1: no column 'q'; columns there: 'question', 'id'"),
        (b"{}", "columns there: none"),
        (b'{"q": "a"}\n{"q": 3}', r"line 2: column 'q' holds 3 \(int\)"),
        (b'{"q": null}', "line 1: column 'q' is null; expected a string or a chat"),
        (b'{"q": "\xff"}', "line 1: not UTF-8"),
        (b"[" * 100_000, "line 1: not JSON"),
    ],
)
def test_json_lines_say_what_is_wrong_and_where(tmp_path, content, message):
    path = tmp_path / "texts.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        texts(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows"),
        (b"q\n", "holds no rows"),
        (b"q,id\na\n", "line 2: another number of fields than the header's 2"),
        (b"q\na,b\n", "line 2: another number of fields"),
        (b"q\n\xff\n", "not UTF-8"),
        (b'q\n"a', "not CSV"),
    ],
)
def test_csv_says_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "texts.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        texts(path)


def test_csv_ids_are_integers_only_if_all_are_written_so(tmp_path):
    path = tmp_path / "t.csv"
    for column, ids in ((["10", "-2", "0"], [10, -2, 0]), (["007", "1"], ["007", "1"]), (["1", "x"], ["1", "x"])):
        path.write_text("uid,q\n" + "".join(f"{uid},text\n" for uid in column))
        assert survey(open_source(str(path)), Selection("q", id_column="uid")).ids == ids


def test_ids_of_a_wrong_kind_are_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    for value in ("1.5", "true", "null", "[1]"):
        path.write_text(f'{{"q": "a", "id": {value}}}')
        with pytest.raises(InputError, match=r"line 1: id column 'id' holds .*; expected an integer or a string"):
            texts(path, id_column="id")


def test_names_that_lead_nowhere_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.txt").write_text("x")
    (tmp_path / "bad.parquet").write_text("x")
    for name, message in {
        "none.jsonl": "none.jsonl: no such file or folder; expected a .jsonl",
        "a/b/c": "a/b/c: no such file or folder",
        f"{tmp_path}/empty": "holds no data files; expected a .jsonl",
        "t.txt": r"ends in \.txt; expected \.jsonl, \.csv or \.parquet",
    }.items():
        with pytest.raises(InputError, match=message):
            open_source(name)
    with pytest.raises(InputError, match="is no readable Parquet file"):
        texts("bad.parquet")
    with pytest.raises(InputError, match="limit is 0"):
        texts("bad.parquet", limit=0)


def test_a_folder_counts_if_it_holds_data_and_else_the_hub_is_meant(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "org" / "data"
    folder.mkdir(parents=True)
    # datasets#5228: an empty folder of the hub id's name must not hide it. Offline it says so at once.
    with pytest.raises(
        InputError, match=r"org/data \(hub id\), split train: .*[Oo]ffline.*has to be in the local cache"
    ):
        open_source("org/data")
    write(folder, "jsonl")
    source = open_source("org/data")
    assert source.name == "folder org/data, split train"
    assert [text for _, text in source.texts(Selection("q"))] == TEXTS
    assert texts("org/data", "chat", split="train[1:]") == ["two\n\nmore", "three"]
    with pytest.raises(InputError, match=r"org/data \(folder\), split test: "):
        open_source("org/data", split="test")
    with pytest.raises(InputError, match=r"folder org/data, split train: no column 'none'; columns there: 'id', 'q'"):
        texts("org/data", "none")


def test_datasets_saved_to_disk_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "two")
    assert texts(tmp_path / "one") == TEXTS
    assert texts(tmp_path / "two", split="test") == TEXTS[:1]
    with pytest.raises(InputError, match="no such split; splits there: train, test"):
        open_source(str(tmp_path / "two"), split="validation")
