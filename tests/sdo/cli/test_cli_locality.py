import argparse
import json

import numpy as np
import pytest

from sdo import SDO, Embeddings, InputError, Uniform
from sdo.cli import locality
from tests import run_folders


def call(*arguments):
    parser = argparse.ArgumentParser()
    locality.add_parser(parser.add_subparsers())
    args = parser.parse_args(["locality", *map(str, arguments)])
    return args.run(args)


def read(out):
    def refuse(constant):
        raise AssertionError(constant)

    return json.loads((out / "locality.json").read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.fixture
def runs(tmp_path):
    np.save(tmp_path / "E.npy", np.random.default_rng(3).normal(size=(80, 6)).astype(np.float32))
    embeddings = Embeddings.read(tmp_path / "E.npy")
    paths = []
    for name, organizer in (("uniform", Uniform(embeddings, seed=1)), ("sdo", SDO(embeddings, seed=1))):
        plan = organizer.plan(6)
        path = tmp_path / "runs" / name
        run_folders.write_planned(path, plan, steps=105, effect=3.0, sample_every=1, embeddings_path=tmp_path / "E.npy")
        paths.append(path)
    return paths


def test_writes_numbers_and_pictures(runs, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    assert call(*runs, "--out", out, "--redraws", 39) == 0
    expected = {"locality.json"} | {
        f"{part}-{run}.png" for part in ("locality-hidden", "series") for run in ("uniform", "sdo")
    }
    assert {file.name for file in out.iterdir()} == expected
    report = read(out)
    assert set(report["files"]) | {"locality.json"} == expected
    assert (report["failed"], report["verdict"]) == ([], None)
    assert "one seed" in report["verdict_reason"]
    for run, name in zip(report["runs"], ("uniform", "sdo"), strict=True):
        assert (run["name"], run["redraws"]) == (name, 39)
        hidden = run["signals"]["hidden"]
        assert hidden["matrix"]["p"] == hidden["series"]["p"] == 1 / 40
        assert hidden["pairs"]["low"] > 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "One seed gives no verdict" in printed.out
    assert len([line for line in printed.out.splitlines() if line.startswith(("uniform", "sdo"))]) == 6
    assert "0.025" in printed.out


def test_moved_embeddings_are_given_and_verified(runs, tmp_path):
    (tmp_path / "E.npy").rename(tmp_path / "moved.npy")
    with pytest.raises(InputError, match="--embeddings"):
        call(runs[1], "--out", tmp_path / "out")
    np.save(tmp_path / "other.npy", np.random.default_rng(4).normal(size=(80, 6)))
    with pytest.raises(InputError, match="fingerprint differs"):
        call(runs[1], "--out", tmp_path / "out", "--embeddings", tmp_path / "other.npy")
    assert not (tmp_path / "out").exists()
    assert call(runs[1], "--out", tmp_path / "out", "--embeddings", tmp_path / "moved.npy", "--redraws", 9) == 0


def test_a_run_without_an_organizer_gets_no_p(runs, tmp_path, capsys):
    info = json.loads((runs[1] / "run.json").read_text())
    (runs[1] / "run.json").write_text(json.dumps({**info, "organizer": None}))
    assert call(runs[1], "--out", tmp_path / "out") == 0
    entry = read(tmp_path / "out")["runs"][0]
    assert entry["redraws"] == 0
    assert "no organizer" in entry["redraws_reason"]
    assert entry["signals"]["hidden"]["matrix"]["p"] is None
    assert entry["signals"]["hidden"]["matrix"]["value"] is not None
    assert "note: sdo: no p-values: the run had no organizer" in capsys.readouterr().out


def test_wrong_input_writes_nothing(runs, tmp_path):
    out = tmp_path / "out"
    bare = run_folders.RunWriter(tmp_path / "bare", {}).info()
    empty = run_folders.RunWriter(tmp_path / "empty", {"hidden": 4}).info()
    cut = next((runs[0] / "gradients" / "hidden").iterdir())
    cut.write_bytes(cut.read_bytes()[:100])
    for arguments, message in (
        ((tmp_path / "gone",), "is not a folder"),
        ((runs[1], runs[1]), "came twice"),
        ((bare.path,), "recorded no gradients"),
        ((empty.path,), "recorded no gradients"),
        ((runs[0],), cut.name),
        ((runs[1], "--signal", "head"), "no signal 'head'"),
        ((runs[1], "--redraws", "-1"), "--redraws is -1"),
    ):
        with pytest.raises(InputError, match=message):
            call(*arguments, "--out", out)
        assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match="holds files"):
        call(runs[1], "--out", out)
    assert call(runs[1], "--out", out, "--overwrite", "--redraws", 9) == 0
    assert (out / "mine.txt").read_text() == "keep"


def test_a_part_that_fails_is_named_and_the_rest_is_written(runs, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("no\nink")

    monkeypatch.setattr("analysis.locality_series", fail)
    out = tmp_path / "out"
    assert call(runs[1], "--out", out, "--redraws", 9) == 1
    assert "series-sdo.png failed: no ink" in capsys.readouterr().err
    assert read(out)["failed"] == ["series-sdo.png"]
    assert (out / "locality-hidden-sdo.png").is_file()
    monkeypatch.setattr("analysis.locality.study.run_tests", fail)
    assert call(*runs, "--out", out, "--redraws", 9, "--overwrite") == 1
    entry = read(out)["runs"][0]
    assert (entry["signals"], entry["signals_reason"]) == (None, "it could not be computed")


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        call("--help")
    assert stop.value.code == 0
    assert "example: sdo locality" in capsys.readouterr().out
