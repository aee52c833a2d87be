import contextlib
import io
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

pytest.importorskip("trl", reason="the demo needs the extra train")

from sdo.cli import demo
from sdo.cli.main import main
from sdo.demo.families import same_family_share
from sdo.demo.folder import DemoFolder

STEPS, PROBLEMS = 8, 48
SMALL = ["--steps", str(STEPS), "--problems", str(PROBLEMS)]


def call(*arguments):
    """Run the command in this process; return its status, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["demo", *map(str, arguments)])
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One small demo; the tests that read it leave it as it is."""
    out = tmp_path_factory.mktemp("demo") / "new" / "demo"
    return out, *call("--out", out, *SMALL)


def table(folder):
    parts = sorted(folder.glob("part-*.parquet"))
    return list(itertools.chain.from_iterable(pq.ParquetFile(part).read().to_pylist() for part in parts))


def problems(out):
    return [json.loads(line) for line in (out / "train.jsonl").read_text(encoding="utf-8").splitlines()]


def report_of(out):
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_prints_stages_the_table_of_coherence_and_what_stands_first_in_the_report(made):
    out, status, printed, err = made
    assert status == 0
    assert err == ""
    stages, _, rest = printed.partition("\n\n")
    assert [line[9:].split(":")[0].split(",")[0] for line in stages.splitlines()] == [
        "loading torch and TRL",
        "writing 48 word problems to train on and their embeddings",
        "warming the model up on other problems",
        "training with uniform batches",
        "training with SDO's batches",
        "comparing the gradients of both runs",
        "writing the report",
        "done",
    ]
    assert all(line.startswith("[") and line[5:9] == " s] " for line in stages.splitlines())
    table, _, said = rest.partition("What stands first in the report:\n")
    batch = json.loads((out / "coherence" / "coherence.json").read_text())["runs"][1]["signals"]["hidden"]
    (line,) = [line for line in table.splitlines() if line.split()[:2] == ["sdo", "hidden"]]
    assert f"{batch['batch_coherence']['mean']:+.3f}" in line.split()
    said = " ".join(said.split())
    report = report_of(out)
    for text in (*(finding["words"] for finding in report["verdict"]), *report["alerts"]):
        assert f"- {text}" in said
    assert f"sdo demo --out {out}-seed-1 --seed 1" in said
    assert f"--batch-size {demo.BATCH} " in said


def test_both_runs_are_recorded_under_the_same_conditions(made):
    out = made[0]
    info = {name: json.loads((out / name / "run.json").read_text()) for name in demo.NAMES}
    for name, one in info.items():
        assert one["status"] == "finished"
        assert one["organizer"]["name"] == name
        assert set(one["signals"]) == {"weight", "hidden"}
        assert one["sketch_check"]["weight"]["rmse"] < 0.1
        assert len(table(out / name / "steps")) == STEPS
        kinds = {row["kind"] for row in table(out / name / "gradients" / "hidden")}
        assert kinds == {"step", "micro_batch", "sample"}
        assert len({row["step"] for row in table(out / name / "evaluations")}) == 5
        assert all(row["grad_norm"] > 0 for row in table(out / name / "steps"))
    for part in ("trainer", "seeds", "model", "embeddings", "signals", "dataset"):
        assert info["uniform"][part] == info["sdo"][part]
    # The same weights at the start: the same losses before the first update.
    first = [[row["score"] for row in table(out / n / "evaluations") if row["step"] == 0] for n in demo.NAMES]
    assert len(first[0]) == PROBLEMS // 4
    assert first[0] == first[1]


def test_the_problems_match_the_embeddings_and_do_not_overlap(made):
    out = made[0]
    rows = problems(out)
    held_out = [json.loads(line) for line in (out / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["sample_id"] for row in rows] == list(range(PROBLEMS))
    assert np.load(out / "embeddings.npy").shape == (PROBLEMS, 24)
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out}


def test_the_report_says_which_families_a_batch_holds(made):
    out = made[0]
    families = [row["family"] for row in problems(out)]
    section = report_of(out)["sections"]["families"]
    page = (out / "report.html").read_text(encoding="utf-8")
    for name in demo.NAMES:
        batches = [row["sample_ids"] for row in table(out / name / "steps")]
        pairs = [list(itertools.combinations(ids, 2)) for ids in batches]
        same = np.mean([np.mean([families[i] == families[j] for i, j in one]) for one in pairs])
        assert section["pairs_of_one_family"][name] == pytest.approx(same)
        assert f"{same:.1%}" in page
    assert section["chance"] == pytest.approx(
        np.mean([one == other for one, other in itertools.combinations(families, 2)])
    )
    assert "trained twice from the same weights" in page
    assert section["pairs_of_one_family"]["uniform"] < 0.2 < section["pairs_of_one_family"]["sdo"]


def test_pairs_of_one_family():
    assert same_family_share([0, 1, 2], ["a", "a", "b"]) == pytest.approx(1 / 3)
    assert same_family_share([0, 1], ["a", "a", "b"]) == 1.0
    assert same_family_share([2, 0], ["a", "a", "b"]) == 0.0


def test_the_report_holds_both_runs(made):
    out, _, printed, _ = made
    page, numbers = (out / "report.html").read_text(), report_of(out)
    assert str(out / "report.html") in printed
    assert len(page) < 1_000_000
    assert "<script" not in page
    shown = [key for key, part in numbers["sections"].items() if part["state"] == "shown"]
    assert shown == ["families", "training", "coherence", "locality", "exposure", "provenance", "reproduce"]
    assert list(numbers["sections"]["exposure"]["runs"]) == ["uniform", "sdo"]


def test_pictures_are_there_and_show_something(made):
    out, _, printed, _ = made
    for signal in ("weight", "hidden"):
        for kind in ("step", "batch"):
            path = out / "coherence" / f"{kind}-coherence-{signal}.png"
            assert path.name in printed
            pixels = np.asarray(Image.open(path).convert("RGB"))
            assert min(pixels.shape[:2]) > 300
            # Neither blank nor a mere message in black and gray.
            assert (np.ptp(pixels.astype(int), axis=2) > 60).sum() > 200


def test_every_file_is_listed(made):
    out = made[0]
    listed = json.loads((out / "demo.json").read_text())["files"]
    assert {out / name for name in listed} == {path for path in out.rglob("*") if path.is_file()} - {out / "demo.json"}


@pytest.mark.parametrize("sizes", [["--steps", "1"], ["--problems", "15"], ["--problems", "2001"], ["--seed", "-1"]])
def test_refuses_options_out_of_range(sizes, tmp_path):
    status, out, err = call("--out", tmp_path / "demo", *sizes)
    assert (status, out) == (2, "")
    assert err.startswith(f"sdo demo: {sizes[0]} is {sizes[1]}; expected a whole number from ")
    assert not list(tmp_path.iterdir())


def test_refuses_a_folder_in_use(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    before = files(tmp_path)
    status, out, err = call("--out", tmp_path)
    assert (status, out) == (2, "")
    assert "holds files" in err
    assert "--overwrite" in err
    status, _, err = call("--out", tmp_path / "notes.txt", "--overwrite")
    assert status == 2
    assert "is a file" in err
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("uniform/run.json", "{}", "run.json stands where the demo would write"),
        ("report.html", "mine", "report.html stands where"),
        ("coherence/deep/er.txt", "mine", "er.txt stands where"),
        ("demo.json", '{"format": "other", "files": []}', "is not the list of an earlier demo"),
        ("demo.json", "{", "is not the list of an earlier demo"),
        ("demo.json", '{"format": "sdo-demo", "files": 3}', "is not the list of an earlier demo"),
    ],
)
def test_overwrite_refuses_what_no_demo_wrote(name, content, says, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(content)
    before = files(tmp_path)
    status, out, err = call("--out", tmp_path, "--overwrite", *SMALL)
    assert (status, out) == (2, "")
    assert says in err
    assert files(tmp_path) == before


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.json").write_text("{}")
    out = tmp_path / "demo"
    out.mkdir()
    (out / "sdo").symlink_to(tmp_path / "elsewhere")
    (out / "demo.json").write_text('{"format": "sdo-demo", "files": ["sdo/run.json", "../elsewhere/run.json"]}')
    status, _, err = call("--out", out, "--overwrite", *SMALL)
    assert status == 2
    assert "stands where" in err
    assert (tmp_path / "elsewhere" / "run.json").exists()


def test_missing_packages_are_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    status, _, err = call("--out", tmp_path / "demo")
    assert status == 2
    assert err == "sdo demo: training needs trl; fix: pip install 'sdo-toolkit[train]'\n"
    assert not list(tmp_path.iterdir())


def test_an_early_end_leaves_a_folder_that_can_be_overwritten(tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_train", stop)
    out = tmp_path / "demo"
    assert call("--out", out, *SMALL)[0] == 130
    assert json.loads((out / "demo.json").read_text())["files"] == ["train.jsonl", "held_out.jsonl", "embeddings.npy"]
    folder = DemoFolder(out)
    folder.check(overwrite=True)
    with folder.claimed():
        assert [path.name for path in out.iterdir()] == ["demo.json"]


def test_a_list_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    folder = DemoFolder(tmp_path)
    with folder.claimed():
        (tmp_path / "train.jsonl").write_text("{}")
    before = (tmp_path / "demo.json").read_text()
    whole = Path.write_text

    def full(path, text, **options):
        whole(path, text[:9], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        folder._list()
    assert {path.name for path in tmp_path.iterdir()} == {"train.jsonl", "demo.json"}
    assert (tmp_path / "demo.json").read_text() == before


@pytest.mark.parametrize(("compared", "reported"), [(1, 0), (0, 1)])
def test_a_failed_part_is_passed_on(tmp_path, monkeypatch, compared, reported):
    # The slow parts are left out: this is about the status alone.
    monkeypatch.setattr(demo, "_train", lambda *args, **kwargs: None)
    monkeypatch.setattr(demo, "_compare", lambda out: (compared, "table\n"))
    monkeypatch.setattr(demo, "_report", lambda args, section: (reported, "words\n"))
    status, out, _ = call("--out", tmp_path / "demo", *SMALL)
    assert status == 1
    assert "\n\ntable\n\nwords\n\nAll of it on one page" in out


# Last, since it changes what the module's tests read.
def test_overwriting_gives_the_same_again_and_leaves_foreign_files(made):
    out = made[0]
    (out / "smooth").mkdir()
    (out / "smooth" / "coherence.json").write_text("mine")
    (out / "notes.txt").write_text("mine")
    before = report_of(out)["sections"]["families"]
    gradients = {name: table(out / name / "gradients" / "weight") for name in demo.NAMES}
    losses = {name: table(out / name / "evaluations") for name in demo.NAMES}
    assert call("--out", out, *SMALL, "--overwrite")[0] == 0
    assert report_of(out)["sections"]["families"] == before
    for name in demo.NAMES:
        assert table(out / name / "gradients" / "weight") == gradients[name]
        assert table(out / name / "evaluations") == losses[name]
    assert (out / "smooth" / "coherence.json").read_text() == (out / "notes.txt").read_text() == "mine"
    status, _, err = call("--out", out, *SMALL)
    assert status == 2
    assert "holds files" in err
