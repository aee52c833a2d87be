import argparse
import json

import numpy as np
import pytest

from sdo import SDO, Embeddings, InputError
from sdo.cli import exposure
from sdo.cli.main import main
from tests import run_folders


def call(*arguments):
    parser = argparse.ArgumentParser()
    exposure.add_parser(parser.add_subparsers())
    args = parser.parse_args(["exposure", *map(str, arguments)])
    return args.run(args)


@pytest.fixture
def sources(tmp_path):
    np.save(tmp_path / "E.npy", np.random.default_rng(3).normal(size=(40, 6)).astype(np.float32))
    plan = SDO(Embeddings.read(tmp_path / "E.npy"), seed=1).plan(4)
    run = tmp_path / "run"
    run_folders.write_planned(run, plan, steps=12, dataset={"rows": 40})
    out = tmp_path / "PLAN.parquet"
    arguments = ["--embeddings", str(tmp_path / "E.npy"), "--batch-size", "4", "--epochs", "2", "--seed", "1"]
    assert main(["plan", *arguments, "--out", str(out)]) == 0
    return run, out, plan


def test_run_and_plan_side_by_side(sources, tmp_path, capsys):
    run, file, plan = sources
    out = tmp_path / "out"
    capsys.readouterr()
    assert call(run, file, "--out", out) == 0
    assert {one.name for one in out.iterdir()} == {"exposure.json", "exposure.png", "coverage.png"}
    first, second = json.loads((out / "exposure.json").read_text())["entries"]
    assert (first["counted"], second["counted"]) == ("trained", "planned")
    counts = plan.counts(12)
    assert (first["steps"], first["samples"], first["never"]) == (12, 40, int((counts == 0).sum()))
    assert {one["times"]: one["samples"] for one in first["histogram"]} == dict(enumerate(np.bincount(counts).tolist()))
    total = plan.epoch(1).exposure
    assert second["mean"] == pytest.approx(total.mean())
    assert [pool["size"] for pool in second["pools"]] == [len(plan.epoch(e).pool) for e in range(2)]
    seen = [len(set(plan.batches(0, s + 1).ravel().tolist())) for s in range(second["steps"])]
    assert second["half_seen_at"] == next(i + 1 for i, n in enumerate(seen) if n >= 20)
    printed = capsys.readouterr().out
    assert "the step counts differ" in printed
    assert "pool of organizer epoch" in printed


def test_what_is_never_reached_has_a_reason(tmp_path, capsys):
    writer = run_folders.RunWriter(tmp_path / "run").info(dataset={"rows": 100})
    writer.steps(0, 1, [[0, 1], [2, 3]])
    assert call(tmp_path / "run", "--out", tmp_path / "out") == 0
    (entry,) = json.loads((tmp_path / "out" / "exposure.json").read_text())["entries"]
    assert entry["half_seen_at"] is None
    assert entry["half_seen_at_reason"] == "4.0% of the samples were seen"
    assert "no organizer" in capsys.readouterr().out


def test_without_a_folder_it_prints_only(sources, capsys):
    run, _, _ = sources
    capsys.readouterr()
    assert call(run) == 0
    assert "trained" in capsys.readouterr().out


def test_wrong_input(sources, tmp_path):
    run, file, _ = sources
    (tmp_path / "text.parquet").write_text("no")
    (tmp_path / "folder").mkdir()
    for arguments, message in (
        ((tmp_path / "gone.parquet",), "does not exist"),
        ((tmp_path / "text.parquet",), "is no plan"),
        ((tmp_path / "folder",), "no run.json"),
        ((run, run), "came twice"),
        ((file, "--out", file), "is a file"),
        ((file, "--out", run), "is a run folder"),
    ):
        with pytest.raises(InputError, match=message):
            call(*arguments)


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        call("--help")
    assert stop.value.code == 0
    assert "example: sdo exposure" in capsys.readouterr().out


@pytest.mark.parametrize("epochs", [None, 3, [None], [{"pool": 3}], [{"organizer_epoch": None, "pool": 3}]])
def test_a_record_that_is_none_is_refused(sources, capsys, epochs):
    _, file, _ = sources
    record = file.with_suffix(".json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"epochs": epochs}))
    capsys.readouterr()
    assert main(["exposure", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{record}: epochs is {json.dumps(epochs)}; expected a list" in error


@pytest.mark.parametrize("name", ["exposure.parquet", "exposure.png", "coverage.png"])
def test_results_do_not_replace_what_was_read(sources, tmp_path, name):
    _, file, _ = sources
    folder = tmp_path / "plans"
    folder.mkdir()
    plan = file.rename(folder / name)
    if plan.suffix == ".parquet":
        file.with_suffix(".json").rename(plan.with_suffix(".json"))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError, match="would write over its own source"):
        call(plan, "--out", folder, "--overwrite")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
