"""``sdo report`` on recorded runs; the page itself is tested in tests/analysis/report."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="writes its runs with the recorder's own log")

from diagnostics.run_folder.rows import GradientRow, StepRow
from diagnostics.run_folder.writer import RunLog
from sdo import Embeddings
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
        (["uniform", "--out", "r.html", "--redraws", "-1"], "--redraws is -1"),
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


def cells(page, heading):
    """First and second cell of the rows of the table with a caption."""
    table = page.split(f"<caption>{heading}</caption>")[1].split("</table>")[0]
    rows = [re.findall(r"<bdi>(.*?)</bdi>", row) for row in table.split("<tbody>")[1].split("</tr>")]
    return {row[0]: row[1:] for row in rows if row}


def test_provenance_names_predictions_and_what_clusters_rest_on(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text("\n".join(json.dumps({"sample_id": i, "correct": i % 3 > 0}) for i in range(24)))
    log = [
        {"doc_id": i, "resps": [], "filter": name, "exact_match": i % 2}
        for i in range(30)
        for name in ("strict", "flex")
    ]
    Path("samples.jsonl").write_text("\n".join(map(json.dumps, log)))
    np.save("E.npy", np.random.default_rng(0).normal(size=(30, 4)))
    predictions = ["--predictions", "p.jsonl", "log=./samples.jsonl", "--filter", "flex"]
    assert call(*predictions, "--embeddings", "E.npy", "--clusters", "3", "--seed", "5", "--out", "r.html") == 0
    found = json.loads(Path("r.json").read_text())["sections"]["provenance"]
    assert found["predictions"]["p"] == {
        "path": "p.jsonl",
        "format": "sample_id and correct",
        "rows": 24,
        "questions": 24,
    }
    assert {key: found["predictions"]["log"][key] for key in ("metric", "filter", "rows")} == {
        "metric": "exact_match",
        "filter": "flex",
        "rows": 30,
    }
    fingerprint = Embeddings.read("E.npy").fingerprint
    embeddings = {"path": "E.npy", "fingerprint": fingerprint, "rows": 30, "dim": 4}
    assert found["clusters"] == {"method": "k-means", "embeddings": embeddings, "k": 3, "seed": 5}
    shown = cells(Path("r.html").read_text(), "Predictions")
    assert shown["file or folder"] == ["p.jsonl", "samples.jsonl"]
    assert shown["filter"] == ["–", "flex"]
    shown = cells(Path("r.html").read_text(), "Clusters of questions")
    assert shown["fingerprint of embeddings"] == [fingerprint[:16]]
    assert (shown["asked for"], shown["seed of k-means"]) == (["3"], ["5"])


def test_provenance_of_a_runs_own_evaluation_and_of_given_labels(runs, tmp_path):
    log = RunLog.create(tmp_path / "own", {"signals": {}})
    log.add_evaluation(7, "correct", np.arange(6), np.arange(6) % 2)
    log.close()
    np.save(tmp_path / "L.npy", np.arange(6) % 2)
    out = tmp_path / "r.html"
    assert call(*runs, "--predictions", tmp_path / "own", "--labels", tmp_path / "L.npy", "--out", out) == 0
    found = json.loads(out.with_suffix(".json").read_text())["sections"]["provenance"]
    assert list(found["runs"]) == ["uniform", "sdo"]
    own = found["predictions"]["own"]
    assert (own["path"], own["evaluation"], own["step"]) == (str(tmp_path / "own"), "correct", 7)
    assert found["clusters"] == {"method": "given labels", "labels": str(tmp_path / "L.npy")}
    assert cells(out.read_text(), "Clusters of questions")["labels"] == [str(tmp_path / "L.npy")]


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
