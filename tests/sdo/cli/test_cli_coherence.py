import argparse
import json

import numpy as np
import pytest
from PIL import Image

from sdo.cli import coherence
from sdo.errors import InputError
from tests import run_folders


def call(*arguments):
    parser = argparse.ArgumentParser()
    coherence.add_parser(parser.add_subparsers())
    args = parser.parse_args(["coherence", *map(str, arguments)])
    return args.run(args)


def read(out):
    def refuse(constant):
        raise AssertionError(constant)

    return json.loads((out / "coherence.json").read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.fixture
def runs(tmp_path):
    paths = [tmp_path / "uniform", tmp_path / "sdo"]
    for seed, path in enumerate(paths):
        run_folders.write_training(path, steps=12, pull=seed, seed=seed, signals=("weight", "hidden"))
    return paths


def test_writes_numbers_matrices_and_pictures(runs, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    assert call(*runs, "--out", out) == 0
    expected = {"coherence.json"}
    for signal in ("weight", "hidden"):
        expected |= {f"step-coherence-{signal}.png", f"batch-coherence-{signal}.png"}
        expected |= {f"step-coherence-{signal}-{name}.npy" for name in ("uniform", "sdo")}
    assert {file.name for file in out.iterdir()} == expected
    report = read(out)
    assert set(report["files"]) | {"coherence.json"} == expected
    assert report["failed"] == []
    assert [run["name"] for run in report["runs"]] == ["uniform", "sdo"]
    first = report["runs"][0]
    assert first["recorder_share"] == pytest.approx(0.01 / 0.51)
    assert first["loss"] == {"first_step": 0, "first": 2.0, "last_step": 11, "last": pytest.approx(2 / 12)}
    assert first["within_batch_cosine"] is None
    assert first["within_batch_cosine_reason"] == "the run notes no embeddings file"
    matrix = np.load(out / "step-coherence-hidden-sdo.npy")
    assert matrix.dtype == np.float32
    assert matrix.shape == (12, 12)
    hidden = report["runs"][1]["signals"]["hidden"]
    assert hidden["step_coherence"]["mean"] == pytest.approx(matrix[np.triu_indices(12, 1)].mean(), abs=1e-6)
    assert hidden["step_coherence"]["mean_pairs"] == 66
    assert hidden["batch_coherence"]["between"] == "samples"
    assert hidden["batch_coherence"]["steps"] == 12
    assert hidden["batch_coherence"]["one_step_measures"]["m_coherence"]["count"] == 12
    assert hidden["sketch_check"] is None
    assert hidden["sketch_check_reason"]
    printed = capsys.readouterr()
    assert "gives no verdict" in printed.out
    assert len([line for line in printed.out.splitlines() if "weight" in line and "2.0%" in line]) == 2
    assert printed.err == ""


def test_one_signal_and_smoothing(runs, tmp_path):
    assert call(runs[0], "--out", tmp_path / "raw", "--signal", "hidden") == 0
    assert call(runs[0], "--out", tmp_path / "soft", "--signal", "hidden", "--smooth", "4") == 0
    raw, soft = read(tmp_path / "raw"), read(tmp_path / "soft")
    assert soft["smooth"] == 4
    assert list(raw["runs"][0]["signals"]) == ["hidden"]
    assert raw["runs"][0]["signals"] == soft["runs"][0]["signals"]
    name = "step-coherence-hidden-uniform.npy"
    assert np.load(tmp_path / "soft" / name)[0, 1:].mean() != np.load(tmp_path / "raw" / name)[0, 1:].mean()


def test_embedding_cosine_of_the_batches(tmp_path):
    matrix = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    np.save(tmp_path / "E.npy", matrix)
    path = tmp_path / "run"
    run_folders.write_training(path, steps=4, embeddings={"path": str(tmp_path / "E.npy")})
    assert call(path, "--out", tmp_path / "a") == 0
    from analysis import Run

    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    batches = Run.open(path).steps().column("sample_ids").to_pylist()
    each = [np.mean([unit[i] @ unit[j] for i in ids for j in ids if i != j]) for ids in batches]
    entry = read(tmp_path / "a")["runs"][0]
    assert entry["within_batch_cosine"] == pytest.approx(np.mean(each), abs=1e-6)
    assert entry["within_batch_cosine_steps"] == 4
    for embeddings, reason in (
        ({"path": "gone.npy"}, "is not there"),
        ({"path": str(tmp_path / "E.npy"), "fingerprint": "0"}, "fingerprint differs"),
        ({"path": str(path / "run.json")}, "not a readable .npy file"),
    ):
        run_folders.RunWriter(path, {"hidden": 16}).info(embeddings=embeddings)
        assert call(path, "--out", tmp_path / "a", "--overwrite") == 0
        assert reason in read(tmp_path / "a")["runs"][0]["within_batch_cosine_reason"]
    np.save(tmp_path / "E.npy", matrix[:3])
    run_folders.RunWriter(path, {"hidden": 16}).info(embeddings={"path": str(tmp_path / "E.npy")})
    assert call(path, "--out", tmp_path / "a", "--overwrite") == 0
    assert "no rows of the embeddings" in read(tmp_path / "a")["runs"][0]["within_batch_cosine_reason"]


def test_a_run_with_hardly_any_data(tmp_path, capsys):
    writer = run_folders.RunWriter(tmp_path / "run", {"hidden": 3}).info(status="running")
    writer.gradients("hidden", [{"step": 0, "kind": "step", "sketch": np.zeros(3)}], 0, 0)
    assert call(writer.path, "--out", tmp_path / "out") == 0
    entry = read(tmp_path / "out")["runs"][0]
    assert entry["loss"] is None
    assert entry["loss_reason"]
    assert entry["recorder_share"] is None
    assert entry["recorder_share_reason"]
    step, batch = (entry["signals"]["hidden"][key] for key in ("step_coherence", "batch_coherence"))
    assert (step["steps"], step["undefined"], step["mean"]) == (1, 1, None)
    assert step["mean_reason"]
    assert batch["mean"] is None
    assert batch["reason"] == "the run recorded no sample and no micro-batch gradients"
    assert " -" in capsys.readouterr().out


def test_a_signal_of_single_samples_alone(tmp_path, capsys):
    """As `samples` records it: there is nothing between steps, and the picture within them stands."""
    rng = np.random.default_rng(0)
    writer = run_folders.RunWriter(tmp_path / "run", {"samples": 3}).info()
    rows = [
        {"step": t, "kind": "sample", "micro_batch": 0, "sample_ids": [i], "sketch": rng.normal(size=3)}
        for t in range(5)
        for i in range(3)
    ]
    writer.gradients("samples", rows, 0, 4)
    assert call(tmp_path / "run", "--out", tmp_path / "out") == 0
    entry = read(tmp_path / "out")
    step, batch = (entry["runs"][0]["signals"]["samples"][key] for key in ("step_coherence", "batch_coherence"))
    assert (step["steps"], step["mean"], step["matrix"]) == (0, None, None)
    assert step["matrix_reason"] == "the run has no row of a step for this signal"
    assert (batch["between"], batch["steps"]) == ("samples", 5)
    assert entry["files"] == ["batch-coherence-samples.png"]
    assert entry["failed"] == []
    assert "no picture of step coherence, samples: it has rows of single samples" in capsys.readouterr().out


def test_micro_batches_stand_in_for_samples_and_are_told_apart(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    run_folders.write_training(tmp_path / "a", steps=5, k=3)
    writer = run_folders.RunWriter(tmp_path / "b", {"hidden": 3}).info()
    rows = [
        {"step": t, "kind": "micro_batch", "micro_batch": i, "sketch": rng.normal(size=3)}
        for t in range(5)
        for i in range(1 + (t > 0))
    ]
    writer.gradients("hidden", rows, 0, 4)
    drawn = {}
    import analysis

    draw = analysis.batch_coherence_series
    monkeypatch.setattr(analysis, "batch_coherence_series", lambda s, **o: drawn.update(s, of=o["of"]) or draw(s, **o))
    assert call(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out") == 0
    batch = read(tmp_path / "out")["runs"][1]["signals"]["hidden"]["batch_coherence"]
    assert (batch["between"], batch["steps"], batch["undefined_steps"]) == ("micro-batches", 4, 1)
    assert "one_step_measures" not in batch
    assert set(drawn) == {"a, samples", "b, micro-batches", "of"}
    assert drawn["of"] == "micro-batches or samples"
    table = capsys.readouterr().out.splitlines()
    assert " between " in table[0]
    assert " samples " in next(line for line in table if line.startswith("a "))
    assert " micro-batches " in next(line for line in table if line.startswith("b "))


def test_a_run_without_batch_coherence_is_not_called_one_of_samples(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for name, kind, count in (("a", "micro_batch", 2), ("b", "step", 1)):
        rows = [
            {"step": t, "kind": one, "micro_batch": i, "sketch": rng.normal(size=3)}
            for t in range(5)
            for one in {kind, "step"}
            for i in range(count if one == kind else 1)
        ]
        run_folders.RunWriter(tmp_path / name, {"hidden": 3}).info().gradients("hidden", rows, 0, 4)
    drawn = {}
    import analysis

    draw = analysis.batch_coherence_series
    monkeypatch.setattr(analysis, "batch_coherence_series", lambda s, **o: drawn.update(o, s=s) or draw(s, **o))
    assert call(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out") == 0
    assert drawn["of"] == "micro-batches"
    assert set(drawn["s"]) == {"a", "b"}


def test_runs_of_one_name_are_told_apart(tmp_path):
    for part in "ab":
        run_folders.write_training(tmp_path / part / "run", steps=4)
    assert call(tmp_path / "a" / "run", tmp_path / "b" / "run", "--out", tmp_path / "out") == 0
    names = {file.name for file in (tmp_path / "out").glob("*.npy")}
    assert names == {"step-coherence-hidden-a-run.npy", "step-coherence-hidden-b-run.npy"}


def test_wrong_input_writes_nothing(runs, tmp_path):
    out = tmp_path / "out"
    empty = run_folders.RunWriter(tmp_path / "empty", {"weight": 3}).info()
    other = run_folders.RunWriter(tmp_path / "other", {"head": 3}).info()
    cut = run_folders.write_training(tmp_path / "cut", steps=4).path
    part = next((cut / "gradients" / "hidden").iterdir())
    part.write_bytes(part.read_bytes()[:100])
    for arguments, message in (
        ((tmp_path / "gone",), "is not a folder"),
        ((runs[0], runs[0]), "came twice"),
        ((empty.path,), "recorded no gradients"),
        ((runs[0], other.path), "no signal in common"),
        ((runs[0], "--signal", "head"), "no signal 'head'"),
        ((cut,), part.name),
        ((runs[0], "--smooth", "0"), "--smooth is 0"),
        ((*runs, "--smooth", "13"), "--smooth 13: .*uniform has 12 steps; expected at most as many"),
    ):
        with pytest.raises(InputError, match=message):
            call(*arguments, "--out", out)
        assert not out.exists()


def test_a_full_folder_is_left_alone_unless_told(runs, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match="holds files"):
        call(runs[0], "--out", out)
    with pytest.raises(InputError, match="is a file"):
        call(runs[0], "--out", out / "mine.txt")
    assert [file.name for file in out.iterdir()] == ["mine.txt"]
    assert call(runs[0], "--out", out, "--overwrite") == 0
    assert (out / "mine.txt").read_text() == "keep"


def test_a_run_too_long_for_its_matrix_gets_means_over_blocks(runs, tmp_path, monkeypatch, capsys):
    whole = tmp_path / "whole"
    call(*runs, "--out", whole, "--signal", "hidden")
    monkeypatch.setattr("sdo.cli.coherence.MATRIX_STEPS", 11)
    out = tmp_path / "out"
    assert call(*runs, "--out", out, "--signal", "hidden") == 0
    assert "12 steps; the matrix of all pairs would take" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {file.name for file in whole.iterdir()}
    for one, other in zip(read(out)["runs"], read(whole)["runs"], strict=True):
        # Blocks of one step, since 12 fit: the same numbers.
        assert one["signals"]["hidden"]["step_coherence"] == other["signals"]["hidden"]["step_coherence"]
        name = one["signals"]["hidden"]["step_coherence"]["matrix"]
        np.testing.assert_allclose(np.load(out / name), np.load(whole / name), atol=1e-6)
    with Image.open(out / "step-coherence-hidden.png") as one, Image.open(whole / "step-coherence-hidden.png") as other:
        assert one.size == other.size


def test_a_part_that_fails_is_named_and_the_rest_is_written(runs, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("no\nink")

    monkeypatch.setattr("analysis.coherence_heat_maps", fail)
    monkeypatch.setattr("analysis.coherence.study.batch_coherence", fail)
    out = tmp_path / "out"
    assert call(runs[0], "--out", out, "--signal", "hidden") == 1
    error = capsys.readouterr().err
    assert "step-coherence-hidden.png failed: no ink" in error
    assert "batch_coherence of hidden in run uniform failed" in error
    report = read(out)
    assert "step-coherence-hidden.png" in report["failed"]
    entry = report["runs"][0]["signals"]["hidden"]
    assert entry["batch_coherence"] is None
    assert entry["batch_coherence_reason"] == "it could not be computed"
    assert entry["step_coherence"]["mean"] is not None
    assert report["files"] == ["step-coherence-hidden-uniform.npy"]


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        call("--help")
    assert stop.value.code == 0
    assert "example: sdo coherence" in capsys.readouterr().out
