"""``sdo report`` on recorded runs; the page itself is tested in tests/analysis/report."""

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="writes its runs with the recorder's own log")

from diagnostics.runlog import GradientRow, RunLog, StepRow
from sdo.cli.main import main


@pytest.fixture
def runs(tmp_path):
    """Two runs as the recorder writes them."""
    rng = np.random.default_rng(0)
    for name in ("uniform", "sdo"):
        info = {"signals": {"hidden": {"stored": 5}}, "organizer": {"name": name, "options": {"seed": 0}}}
        log = RunLog.create(tmp_path / name, info)
        for step in range(12):
            ids = rng.choice(9, 3, replace=False).tolist()
            log.add_step(StepRow(step, 0, step / 3, 2.0 - step / 10, 1e-3, 1.0, False, 1.0, False, 30, 0.5, 0.01, ids))
            for kind, group in (("step", [ids]), ("sample", [[i] for i in ids])):
                for one in group:
                    sketch = rng.normal(size=5).astype(np.float32)
                    row = GradientRow(step, kind, None, one, 10, float(np.linalg.norm(sketch)), "raw", None)
                    log.add_gradient("hidden", row, sketch)
        log.close()
    return [tmp_path / "uniform", tmp_path / "sdo"]


def call(*arguments):
    return main(["report", *map(str, arguments)])


def test_a_page_and_its_numbers_are_written(runs, tmp_path, capsys):
    out = tmp_path / "new" / "report.html"
    assert call(*runs, "--out", out, "--title", "Mine & yours") == 0
    assert str(out) in capsys.readouterr().out
    assert "<h1><bdi>Mine &amp; yours</bdi></h1>" in out.read_text()
    numbers = json.loads(out.with_suffix(".json").read_text())
    assert list(numbers["sections"]["training"]["runs"]) == ["uniform", "sdo"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["report.html", "report.json"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "r.html"], "neither run folders nor --predictions came"),
        (["uniform", "--out", "r.html", "--clusters", "3"], "--clusters came without --predictions"),
        (["uniform", "--out", "r.html", "--near-duplicate", "1"], "--near-duplicate came without"),
        (["uniform", "--out", "r.html", "--redraws", "-1"], "--redraws -1"),
        (["--predictions", "p.jsonl", "--out", "r.html"], "no clusters"),
        (["--predictions", "p.jsonl", "--labels", "L.npy", "--out", "r.html"], "p.jsonl"),
        (["uniform", "--out", "r.pdf"], "ends in .html"),
        (["nowhere", "--out", "r.html"], "nowhere is not a folder"),
        (["uniform", "uniform", "--out", "r.html"], "came twice"),
        (["uniform", "--out", "taken.html"], "exists"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(runs, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.html").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert call(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "taken.html").read_text() == "mine"


def test_predictions_alone_make_a_page(tmp_path):
    lines = [json.dumps({"sample_id": i, "correct": i % 3 > 0}) for i in range(30)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    np.save(tmp_path / "L.npy", np.arange(30) % 4)
    out = tmp_path / "report.html"
    assert call("--predictions", tmp_path / "p.jsonl", "--labels", tmp_path / "L.npy", "--out", out) == 0
    numbers = json.loads(out.with_suffix(".json").read_text())
    assert numbers["sections"]["balance"]["runs"]["p"]["mean"]["value"] == pytest.approx(2 / 3, abs=0.05)
    assert numbers["sections"]["coherence"]["state"] == "absent"


def test_what_is_read_is_not_written_over(tmp_path, capsys):
    (tmp_path / "preds.json").write_text("{}")
    np.save(tmp_path / "L.npy", np.arange(30) % 4)
    arguments = ["--predictions", tmp_path / "preds.json", "--labels", tmp_path / "L.npy", "--overwrite"]
    assert call(*arguments, "--out", tmp_path / "preds.html") == 2
    assert "write over its own source" in capsys.readouterr().err
    assert (tmp_path / "preds.json").read_text() == "{}"


def test_labels_of_another_length_are_wrong_input(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"sample_id": 70, "correct": 1}\n')
    np.save(tmp_path / "L.npy", np.arange(30) % 4)
    out = tmp_path / "report.html"
    assert call("--predictions", tmp_path / "p.jsonl", "--labels", tmp_path / "L.npy", "--out", out) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not out.exists()


def test_a_failed_section_is_named_and_the_page_written(runs, tmp_path, capsys):
    part = next((runs[0] / "gradients" / "hidden").glob("*.parquet"))
    part.write_bytes(b"PAR1")
    out = tmp_path / "report.html"
    assert call(*runs, "--out", out) == 1
    assert "'Coherence' failed" in capsys.readouterr().err
    assert "could not be computed" in out.read_text()


def test_the_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "example: sdo report" in capsys.readouterr().out


def test_a_page_that_is_there_is_replaced_when_told(runs, tmp_path):
    out = tmp_path / "report.html"
    out.write_text("old")
    assert call(runs[0], "--out", out, "--overwrite") == 0
    assert "SDO report" in out.read_text()
