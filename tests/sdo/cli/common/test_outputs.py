import json
import math
import os

import numpy as np
import pyarrow.parquet as pq
import pytest
from run_folders import write_planned

from sdo import SDO
from sdo.cli.common.outputs import (
    Outputs,
    aligned,
    array_writer,
    check_out_folder,
    check_outputs,
    check_place,
    file_names,
    json_writer,
    missing_folders,
    try_folder,
)
from sdo.cli.main import main
from sdo.errors import InputError


def test_file_names_are_safe_and_differ():
    assert list(file_names(["a/run", "a-run", "../..", "$x y", ""]).values()) == [
        "a-run",
        "a-run-2",
        "run",
        "x-y",
        "run-2",
    ]


def test_file_names_fit_every_file_system():
    names = ["Run", "run", "RUN-2", "größer" * 30, "大" * 100, "GRÖSSER" * 30]
    found = list(file_names(names).values())
    assert found[:3] == ["Run", "run-2", "RUN-2-2"]
    assert found[4] == "大" * 26
    assert all(len(one.encode()) <= 84 for one in found)
    assert len({one.casefold() for one in found}) == len(names)


def test_a_part_that_fails_is_named_and_the_others_go_on(capsys):
    parts = Outputs("some")
    assert parts.attempt("first", lambda: 3) == 3
    assert parts.attempt("second", lambda: 1 / 0) is None
    assert (parts.failed, parts.files) == (["second"], [])
    assert capsys.readouterr().err == "sdo some: second failed: division by zero\n"


def test_writers(tmp_path):
    json_writer({"größe": [1, None]})(tmp_path / "a.tmp")
    assert json.loads((tmp_path / "a.tmp").read_text(encoding="utf-8")) == {"größe": [1, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_writer({"x": math.nan})
    array_writer(np.arange(3))(tmp_path / "b.tmp")
    assert np.load(tmp_path / "b.tmp").tolist() == [0, 1, 2]


def test_a_lone_surrogate_in_a_name_is_written_as_an_escape(tmp_path):
    json_writer({"path": "a\udcff"})(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"path": "a\udcff"}


def test_a_cell_stays_on_its_line():
    assert aligned([["a\nb", "1"], ["c", "22"]]) == "a\\nb   1\nc     22"


def test_tables_are_aligned():
    lines = [["", "n", "word"], ["long name", "10", "a"]]
    assert aligned(lines) == "            n  word\nlong name  10     a"
    assert aligned(lines, texts=2, last_text=True, indent="  ") == "             n   word\n  long name  10  a"


# ---------------------------------------------------------------------- where results may go


def tree(folder):
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Two runs, their embeddings, predictions and texts, in the working folder."""
    monkeypatch.chdir(tmp_path)
    np.save("E.npy", np.random.default_rng(0).standard_normal((20, 4)))
    plan = SDO("E.npy", k=2, seed=1).plan(4)
    for name, seed in (("a", 0), ("b", 1), ("c", 2), ("d", 3)):
        run = write_planned(tmp_path / "runs" / name, plan, steps=6, seed=seed)
        run.evaluations("eval_loss", {2: [1.0, 2.0], 4: [0.5, 1.0 + seed]})
    rows = [{"sample_id": i, "correct": i % 2, "q": f"text {i}"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


COMMANDS = {
    "coherence": "runs/a --out {}",
    "locality": "runs/b --embeddings E.npy --redraws 9 --out {}",
    "exposure": "runs/b --out {}",
    "balance": "rows.jsonl --embeddings E.npy --clusters 2 --resamples 99 --out {}",
    "compare": "--baseline runs/a runs/b --against runs/c runs/d --out {}",
    "report": "runs/b --redraws 0 --out {}/page.html",
    "plan": "--embeddings E.npy --batch-size 4 --out {}/P.parquet",
    "embed": "rows.jsonl --column q --out {}/F.npy",
    "demo": "--out {}",
}


@pytest.mark.parametrize("out", ["runs/a", "runs/a/steps", "runs/a/new/deep", "link/steps", "runs/../link"])
@pytest.mark.parametrize("command", COMMANDS)
def test_results_never_go_into_a_run_folder(place, capsys, command, out):
    os.symlink("runs/a", "link")
    before = tree(place)
    assert main([command, *COMMANDS[command].format(out).split(), "--overwrite"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "run folder" in line
    assert "fix: choose another --out" in line
    assert tree(place) == before
    assert pq.read_table("runs/a/steps").num_rows == 6


def test_a_damaged_run_is_still_a_run_folder(place):
    (place / "runs/a/run.json").write_text('{"format": "sdo-run", "form')
    with pytest.raises(InputError, match="is in the run folder"):
        check_place(place / "runs/a/results")
    (place / "run.json").write_text('{"format": "of something else"}')
    check_place(place / "results")


@pytest.mark.parametrize(
    ("command", "over"),
    [
        ("balance rows.jsonl --labels labels/labels.npy --out labels", "labels/labels.npy"),
        ("balance labels/balance.json --labels L.npy --out labels", "labels/balance.json"),
        ("balance r=labels/balance.json --labels L.npy --out alias", "alias/balance.json"),
        ("report --predictions page.json --embeddings E.npy --clusters 2 --out page.html", "page.json"),
        ("report --predictions x=page.json --embeddings E.npy --clusters 2 --out page.html", "page.json"),
        ("embed page.json --column q --out page.npy", "page.json"),
        ("embed page.json --column q --out link.npy", "link.json"),
        ("plan --embeddings E.npy --batch-size 4 --out E.parquet", "E.json"),
    ],
)
def test_results_never_replace_what_is_read(place, capsys, command, over):
    """By another name of the same file too, and the record beside a matrix belongs to it."""
    (place / "labels").mkdir()
    np.save("labels/labels.npy", np.arange(20) % 3)
    np.save("L.npy", np.arange(20) % 3)
    (place / "labels/balance.json").write_bytes((place / "rows.jsonl").read_bytes())
    (place / "page.json").write_bytes((place / "rows.jsonl").read_bytes())
    (place / "E.json").write_text("{}")
    os.symlink("labels", "alias")
    os.symlink("page.json", "link.json")
    before = tree(place)
    assert main([*command.split(), "--overwrite"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"would write over its own source {over}" in line
    assert tree(place) == before


def test_results_never_go_into_a_folder_that_is_read(place, capsys):
    """A JSON file among the rows of a dataset would be taken for rows."""
    (place / "data").mkdir()
    (place / "rows.jsonl").rename(place / "data" / "train.jsonl")
    before = tree(place)
    assert main(["embed", "data", "--column", "q", "--out", "data/vectors/F.npy"]) == 2
    assert "is in the folder data, which is read" in capsys.readouterr().err
    assert tree(place) == before


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("rows.jsonl/x", "Not a directory"),
        ("/proc/nothing/x", "No such file"),
        ("n" * 300, "File name too long"),
        ("loop/x", "Too many levels of symbolic links"),
        ("a\0b", "null byte"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_and_leaves_nothing(place, out, message):
    os.symlink("loop", "loop")
    before = tree(place)
    for check in (lambda: check_out_folder(place / out, overwrite=True), lambda: try_folder(place / out / "deeper")):
        with pytest.raises(InputError, match=message) as caught:
            check()
        assert "fix: choose another --out" in str(caught.value)
    assert tree(place) == before


@pytest.mark.parametrize("name", ["n" * 221 + ".npy", "ä" * 120 + ".npy"])
def test_a_name_that_is_too_long_is_refused(place, name):
    with pytest.raises(InputError, match=r"has a name of 2\d\d bytes; expected at most 220"):
        check_outputs(place / name, ".npy", overwrite=False)
    check_outputs(place / ("n" * 216 + ".npy"), ".npy", overwrite=False)


def test_a_trial_leaves_no_new_folder(place):
    before = tree(place)
    try_folder(place / "new" / "deeper")
    check_out_folder(place / "new" / "deeper", overwrite=False)
    check_outputs(place / "new" / "deeper" / "E.npy", ".npy", overwrite=False)
    assert tree(place) == before
    assert missing_folders(place / "new" / "deeper") == [place / "new" / "deeper", place / "new"]
