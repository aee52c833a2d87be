import hashlib
import json

import numpy as np
import pytest

from sdo.cli import embed
from sdo.cli.main import _Parser
from sdo.encode import lsa
from sdo.errors import InputError
from sdo.wordproblems import generate


def run(*argv):
    """Run the one command, without loading the others."""
    parser = _Parser(prog="sdo")
    embed.add_parser(parser.add_subparsers(parser_class=_Parser))
    args = parser.parse_args(["embed", *map(str, argv)])
    return args.run(args)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"question": p.prompt}) + "\n" for p in generate(40, seed=0)))
    return path


def test_writes_matrix_and_record(source, tmp_path, capsys):
    out = tmp_path / "new" / "E.npy"
    assert run(source, "--column", "question", "--dim", 8, "--seed", 5, "--limit", 30, "--out", out) == 0
    texts = [p.prompt for p in generate(40, seed=0)][:30]
    rows = np.load(out, allow_pickle=False)
    np.testing.assert_array_equal(rows, lsa(texts, dim=8, seed=5))
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["encoder"] == "lsa"
    assert record["options"] == {"dim": 8, "seed": 5, "limit": 30}
    assert (record["source"], record["column"]) == ("train.jsonl", "question")
    assert (record["rows"], record["dim"], record["zero_rows"]) == (30, 8, [])
    assert record["texts_sha256"] == hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    assert {"numpy", "scikit-learn", "sdo-toolkit"} <= record["versions"].keys()
    assert sorted(path.name for path in out.parent.iterdir()) == ["E.json", "E.npy"]
    assert out.stat().st_mode & 0o777 == source.stat().st_mode & 0o777  # as any file that the user makes
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert "30 rows x 8 columns, 0 zero" in captured.out
    assert captured.err == ""


def test_names_zero_rows_and_lowered_dim(tmp_path, capsys):
    source, out = tmp_path / "s.jsonl", tmp_path / "E.npy"
    texts = ["red apple", "green apple", "", "\ud800"] + ["?"] * 12  # a lone surrogate is valid JSON
    source.write_text("".join(json.dumps({"q": text}) + "\n" for text in texts))
    assert run(source, "--column", "q", "--out", out) == 0
    assert json.loads(out.with_suffix(".json").read_text())["zero_rows"] == list(range(2, 16))
    error = capsys.readouterr().err
    assert "dim lowered from 256 to 2" in error
    assert "zero rows: 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 4 more" in error


def test_refuses_existing_files_before_reading(source, tmp_path):
    out = tmp_path / "E.npy"
    out.with_suffix(".json").write_text("{}")
    with pytest.raises(InputError, match=r"E\.json exists; .* add --overwrite"):
        run(tmp_path / "missing.jsonl", "--column", "question", "--out", out)
    assert run(source, "--column", "question", "--dim", 4, "--out", out, "--overwrite") == 0
    with pytest.raises(InputError, match=r"E\.npy exists"):
        run(source, "--column", "question", "--out", out)


def test_a_failed_write_leaves_the_old_files(source, tmp_path, monkeypatch):
    out = tmp_path / "E.npy"
    run(source, "--column", "question", "--dim", 4, "--out", out)
    before = out.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space left"):
        run(source, "--column", "question", "--dim", 5, "--out", out, "--overwrite")
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["E.json", "E.npy", "train.jsonl"]


def test_never_writes_over_the_source(tmp_path):
    source = tmp_path / "data.json"
    source.write_text('{"q": "a b"}\n{"q": "c d"}\n')
    with pytest.raises(InputError, match="would write over its own source"):
        run(source, "--column", "q", "--out", tmp_path / "data.npy", "--overwrite")


def test_a_missing_source_leaves_no_folder(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        run(tmp_path / "none.jsonl", "--column", "q", "--out", tmp_path / "new" / "E.npy")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--out", "E.txt"], r"ends in \.npy"),
        (["--out", "E.npy", "--encoder", "bert"], "invalid choice"),
        (["--out", "E.npy", "--dim", "many"], "invalid int"),
        (["--out", "E.npy", "--dim", "0"], "dim is 0"),
        (["--out", "E.npy", "--limit", "0"], "limit is 0"),
        ([], "--out"),
    ],
)
def test_wrong_arguments_are_refused(source, extra, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        run(source, "--column", "question", *extra)
    assert not list(tmp_path.glob("E.*"))


def test_refuses_folders_as_output(source, tmp_path):
    (tmp_path / "E.npy").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        run(source, "--column", "question", "--out", tmp_path / "E.npy", "--overwrite")
    with pytest.raises(InputError, match="cannot make the folder"):
        run(source, "--column", "question", "--out", source / "E.npy")
