import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sdo import Embeddings
from sdo.cli import embed
from sdo.cli.main import _Parser, main
from sdo.demo.word_problems import generate
from sdo.embeddings.lsa import lsa
from sdo.errors import InputError


def run(*argv):
    """Run the one command, without loading the others."""
    parser = _Parser(prog="sdo")
    embed.add_parser(parser.add_subparsers(parser_class=_Parser))
    args = parser.parse_args(["embed", *map(str, argv)])
    return args.run(args)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SDO_CACHE", str(tmp_path_factory.mktemp("cache")))


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
    assert record["options"] == {"dim": 8, "seed": 5}
    assert (record["source"], record["column"], record["limit"]) == ("train.jsonl", "question", 30)
    assert (record["rows"], record["dim"], record["zero_rows"]) == (30, 8, [])
    assert record["texts_sha256"] == hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    assert {"numpy", "scikit-learn", "sdo-toolkit"} <= record["versions"].keys()
    assert sorted(path.name for path in out.parent.iterdir()) == ["E.json", "E.npy"]
    assert out.stat().st_mode & 0o777 == source.stat().st_mode & 0o777  # as any file that the user makes
    captured = capsys.readouterr()
    first, second, last = captured.out.splitlines()
    assert first == f"sdo embed: source: file {source}, 30 texts"
    assert second.startswith("sdo embed: cache: miss, key " + record["cache_key"][:12])
    assert "30 rows x 8 columns, 0 zero" in last
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
        (["--out", "E.txt"], r"ends in \.npy or \.npz or \.safetensors"),
        (["--out", "E.npy", "--encoder", "bert"], "invalid choice"),
        (["--out", "E.npy", "--dim", "many"], "invalid int"),
        (["--out", "E.npy", "--dim", "0"], "dim is 0"),
        (["--out", "E.npy", "--limit", "0"], "limit is 0"),
        (
            ["--out", "E.npy", "--model", "m"],
            "--model belongs to --encoder sentence-transformers, and --encoder is lsa",
        ),
        (["--out", "E.npy", "--trust-remote-code"], "--trust-remote-code belongs to"),
        (["--out", "E.npy", "--encoder", "sentence-transformers"], "--model is missing; expected a folder or a hub id"),
        (["--out", "E.npy", "--encoder", "sentence-transformers", "--dim", "3"], "--dim belongs to --encoder lsa"),
        (
            ["--out", "E.npy", "--id-column", "id"],
            r"E\.npy cannot hold ids; expected --out with \.npz or \.safetensors",
        ),
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
    with pytest.raises(InputError, match="cannot be written: a file stands there"):
        run(source, "--column", "question", "--out", source / "E.npy")


# ---------------------------------------------------------------------- the cache


def test_equal_texts_and_options_are_taken_from_the_cache(source, tmp_path, capsys, monkeypatch):
    first, second = tmp_path / "E.npy", tmp_path / "F.npz"
    argv = ("--column", "question", "--dim", 99)  # too many: the warning belongs to the rows, hit or miss
    run(source, *argv, "--out", first)
    missed = capsys.readouterr()
    monkeypatch.setattr(embed, "lsa", lambda *_, **__: pytest.fail("computed again"))
    copy = source.rename(tmp_path / "renamed.jsonl")
    run(copy, *argv, "--out", second)
    hit = capsys.readouterr()
    assert "cache: miss" in missed.out
    assert "cache: hit" in hit.out
    assert "dim lowered from 99" in missed.err
    assert hit.err == missed.err
    assert Embeddings.read(second).fingerprint == Embeddings.read(first).fingerprint
    records = [json.loads(path.with_suffix(".json").read_text()) for path in (first, second)]
    assert records[0]["versions"] == records[1]["versions"]
    assert not list(tmp_path.glob(".*"))


def test_a_text_of_equal_length_or_another_option_is_a_miss(tmp_path, capsys):
    source, out = tmp_path / "s.jsonl", tmp_path / "E.npy"

    def made(*texts, options=("--dim", 2), extra=()):
        source.write_text("".join(json.dumps({"q": text}) + "\n" for text in texts))
        assert run(source, "--column", "q", *options, *extra, "--out", out, "--overwrite") == 0
        said = capsys.readouterr().out
        return "hit" if "cache: hit" in said else "miss" if "cache: miss" in said else "not used"

    texts = ("red fox", "red owl", "old fox")
    assert made(*texts) == "miss"
    before = out.read_bytes()
    assert made(*texts) == "hit"
    assert out.read_bytes() == before
    assert made("red fox", "red owl", "old owl") == "miss"
    assert made("red fox", "old fox", "red owl") == "miss"
    assert made(*texts, options=("--dim", 1)) == "miss"
    assert made(*texts, options=("--dim", 2, "--seed", 1)) == "miss"
    assert made(*texts, extra=("--no-cache",)) == "not used"
    assert made(*texts) == "hit"
    assert out.read_bytes() == before


def test_a_cache_that_cannot_be_written_costs_a_warning(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SDO_CACHE", str(source / "below a file"))
    assert run(source, "--column", "question", "--dim", 4, "--out", tmp_path / "E.npy") == 0
    assert "warning: not kept in the cache" in capsys.readouterr().err


# ---------------------------------------------------------------------- ids, chats, sizes


PROBLEMS = generate(6, seed=0)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("keys", [[f"q{i}" for i in range(6)], [10 * i for i in range(6)]], ids=["strings", "integers"])
def test_ids_go_beside_the_rows(tmp_path, suffix, keys):
    source, out = tmp_path / "s.jsonl", tmp_path / f"E{suffix}"
    rows = [{"uid": key, "m": [{"role": "user", "content": p.prompt}]} for key, p in zip(keys, PROBLEMS, strict=True)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(source, "--column", "m", "--role", "user", "--id-column", "uid", "--dim", 4, "--out", out) == 0
    read = Embeddings.read(out)
    assert read.ids.tolist() == keys
    texts = [p.prompt for p in PROBLEMS]
    assert read.fingerprint == Embeddings.from_array(lsa(texts, dim=4)).fingerprint
    record = json.loads(out.with_suffix(".json").read_text())
    assert (record["ids"], record["id_column"]) == ("strings" if keys[1] == "q1" else "integers", "uid")
    rows[3]["uid"] = keys[0]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=rf"column 'uid': id {keys[0]!r} stands in more than one row"):
        run(source, "--column", "m", "--id-column", "uid", "--out", out, "--overwrite")


def test_lsa_refuses_what_it_cannot_hold_in_memory(source, tmp_path, monkeypatch):
    monkeypatch.setattr(embed, "LSA_MAX_CHARACTERS", 100)
    message = r"^[\d,]+ characters of text; LSA fits on all of it in memory and takes 100 at most; fix: --encoder sent"
    with pytest.raises(InputError, match=message):
        run(source, "--column", "question", "--out", tmp_path / "E.npy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.jsonl"]


# ---------------------------------------------------------------------- sentence-transformers


def model_argv(source, model, out, *more):
    argv = (source, "--column", "question", "--encoder", "sentence-transformers", "--model", model, "--device", "cpu")
    return [*map(str, argv), "--out", str(out), *map(str, more)]


def test_offline_and_not_cached_is_one_line_and_exit_2(source, tmp_path, capsys):
    pytest.importorskip("sentence_transformers")
    assert main(["embed", *model_argv(source, "org/none", tmp_path / "E.npy")]) == 2
    line = capsys.readouterr().err
    assert len(line.splitlines()) == 1
    assert line.startswith("sdo embed: --model org/none (hub id), revision main, is not in the local cache")


def test_another_model_or_pooling_is_a_miss(source, tiny_bert, tmp_path, capsys):
    pytest.importorskip("sentence_transformers")
    import shutil

    def made(model, *more):
        assert run(*model_argv(source, model, tmp_path / "E.npy", "--overwrite", *more)) == 0
        said = capsys.readouterr().out
        assert f"model: local folder {model}" in said
        return "hit" if "cache: hit" in said else "miss"

    other = tmp_path / "other"
    shutil.copytree(tiny_bert, other)
    assert made(tiny_bert) == "miss"
    assert made(other) == "hit"  # known by its contents
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert made(other) == "miss"
    for more in (["--pooling", "cls"], ["--prompt", "query "], ["--max-length", "8"], ["--batch-size", "3"]):
        assert made(tiny_bert, *more) == "miss"
        assert made(tiny_bert, *more) == "hit"
    record = json.loads((tmp_path / "E.json").read_text())
    assert record["model_name"] == str(tiny_bert)
    assert record["made_with"] == {"pooling": "mean", "prompt": "", "max_length": 32, "dtype": "float32"}


def test_killed_and_run_again_it_continues_and_writes_the_same_bytes(source, tiny_bert, tmp_path, capsys, monkeypatch):
    pytest.importorskip("sentence_transformers")
    whole, killed = tmp_path / "whole.npy", tmp_path / "killed.npy"
    more = ("--no-cache", "--batch-size", 1)  # chunks of 16 texts: 16, 16, 8
    assert run(*model_argv(source, tiny_bert, whole, *more)) == 0
    # The real command in a process of its own, slowed down between its chunks so that there is time to kill it.
    slow = (
        "import sys, time; from sdo.embeddings.streaming import ResumableMatrix as M; append = M.append; "
        "M.append = lambda *a: (append(*a), time.sleep(60)); from sdo.cli.main import main; main(sys.argv[1:])"
    )
    argv = [sys.executable, "-c", slow, "embed", *model_argv(source, tiny_bert, killed, *more)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    progress = tmp_path / ".killed.npy.partial.json"
    deadline = time.monotonic() + 240
    while not progress.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert json.loads(progress.read_text())["done"] == 16
    assert not killed.exists()
    encoded = []
    encode = embed.SentenceEncoder.encode
    monkeypatch.setattr(
        embed.SentenceEncoder, "encode", lambda self, texts: encoded.append(len(texts)) or encode(self, texts)
    )
    capsys.readouterr()
    assert run(*model_argv(source, tiny_bert, killed, *more)) == 0
    assert "continues at row 16 of 40" in capsys.readouterr().out
    assert encoded == [1, 16, 8]  # one text tells the number of columns
    assert killed.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_minilm_agrees_with_the_published_rows(minilm, gsm8k, tmp_path):
    pytest.importorskip("sentence_transformers")
    out = tmp_path / "E.safetensors"
    argv = ["--column", "question", "--limit", "32", "--encoder", "sentence-transformers", "--model", str(minilm)]
    assert main(["embed", str(gsm8k / "train.jsonl"), *argv, "--out", str(out)]) == 0
    known = Embeddings.from_array(np.load(gsm8k / "train_minilm.npy", mmap_mode="r")[:32])
    assert (Embeddings.read(out).unit * known.unit).sum(axis=1).min() > 0.999
