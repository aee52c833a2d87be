import argparse
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdo import InputError
from sdo.cli import compare
from tests import run_folders


def call(*arguments):
    parser = argparse.ArgumentParser()
    compare.add_parser(parser.add_subparsers())
    args = parser.parse_args(["compare", *map(str, arguments)])
    return args.run(args)


def write(path, seed, scores, name="eval_loss"):
    writer = run_folders.RunWriter(path, {}).info(seeds={"seed": seed})
    folder = writer.path / "evaluations"
    folder.mkdir()
    rows = [(step, name, i, value) for step, values in scores.items() for i, value in enumerate(values)]
    types = (pa.int64(), pa.string(), pa.int64(), pa.float64())
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)]
    names = ("step", "name", "sample_id", "score")
    pq.write_table(pa.table(dict(zip(names, columns, strict=True))), folder / "part-00000000-00000000.parquet")
    return path


@pytest.fixture
def sides(tmp_path):
    gaps = (0.3, 0.1, 0.2)
    baseline = [write(tmp_path / f"u{s}", s, {4: [1.0, 2.0], 8: [1.0, 1.0]}) for s in (1, 2, 3)]
    against = [
        write(tmp_path / f"s{s}", s, {4: [1.0 - gap, 2.0 - gap], 8: [0.9, 0.9]})
        for s, gap in zip((1, 2, 3), gaps, strict=True)
    ]
    return baseline, against


def test_compares_each_checkpoint(sides, tmp_path, capsys):
    baseline, against = sides
    out = tmp_path / "out"
    assert call("--baseline", *baseline, "--against", *against[::-1], "--out", out) == 0
    report = json.loads((out / "compare.json").read_text())
    assert report["paired_by"] == "seed"
    assert report["against"] == list(map(str, against))
    (measure,) = report["measures"]
    first, second = measure["checkpoints"]
    assert (first["step"], first["n"]) == (4, 3)
    assert first["mean"] == pytest.approx(-0.2)
    assert first["cohens_d_paired"] == pytest.approx(-2.0)
    assert first["t"] == pytest.approx(-2.0 * 3**0.5)
    assert (first["sign_flip_p"], first["smallest_sign_flip_p"]) == (0.25, 0.25)
    assert (second["t"], second["p"], second["reason"]) == (None, None, "all differences are equal")
    assert {file.name for file in out.iterdir()} == {"compare.json", "compare-eval_loss.png"}
    printed = capsys.readouterr().out
    assert "paired by their seeds: 1, 2, 3" in printed
    assert "3 pairs are few: no sign-flip p can be below 0.25" in printed
    assert "2 comparisons were made" in printed
    assert "d (paired)" in printed


def test_a_side_of_several_kinds_and_other_settings_are_said_aloud(sides, capsys):
    baseline, against = sides
    for path, k in zip(against, (2, 4, 4), strict=True):
        info = json.loads((path / "run.json").read_text())
        info |= {"organizer": {"name": "sdo", "options": {"k": k}}, "trainer": {"learning_rate": 1e-3}}
        (path / "run.json").write_text(json.dumps(info))
    assert call("--baseline", *baseline, "--against", *against) == 0
    printed = capsys.readouterr().out
    assert f"--against holds 2 kinds of run ({against[0]}; {against[1]}, {against[2]})" in printed
    assert "--baseline holds" not in printed
    assert "differ in more than their batches: trainer learning_rate is" in printed


def test_groups_are_said_aloud_when_seeds_do_not_pair(tmp_path, capsys):
    sides = [
        [write(tmp_path / f"{side}{i}", 7, {4: [float(i * i + (side == "b"))]}) for i in range(6)] for side in "ab"
    ]
    assert call("--baseline", *sides[0], "--against", *sides[1], "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "do not pair the runs (a side has a seed twice): the sides are compared as two groups" in printed
    assert "p (Welch)" in printed
    assert "few" not in printed
    report = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert (report["paired_by"], report["paired_by_reason"]) == (None, "a side has a seed twice")
    # The order of the runs on a side is of no account.
    assert call("--baseline", *sides[0][::-1], "--against", *sides[1][2:], *sides[1][:2]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[1] == printed.splitlines()[1]
    assert call("--baseline", *sides[0][:3], "--against", *sides[1][:2]) == 0
    assert "3 and 2 runs are few: no permutation p can be below 0.1" in capsys.readouterr().out


def test_runs_without_a_partner_of_their_seed_are_left_out_and_named(sides, tmp_path, capsys):
    baseline, against = sides
    assert call("--baseline", *baseline, "--against", *against[:2], "--out", tmp_path / "out") == 0
    report = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert report["against"] == list(map(str, against[:2]))
    assert report["left_out"] == [str(baseline[2])]
    assert f"no run of their seed: {baseline[2]}" in capsys.readouterr().out


def test_wrong_input(sides, tmp_path):
    baseline, against = sides
    other = [write(tmp_path / f"o{s}", s, {4: [1.0]}, name="accuracy") for s in (1, 2, 3)]
    for first, second, message in (
        (baseline[:1], against[:1], "one seed gives no verdict"),
        (baseline[:1], against[1:], "1 and 2 runs are to be compared; expected at least two of each"),
        (baseline, baseline, "came twice"),
        (baseline, other, "no evaluation in common"),
        ([tmp_path / "gone", *baseline], against, "is not a folder"),
    ):
        with pytest.raises(InputError, match=message):
            call("--baseline", *first, "--against", *second, "--out", tmp_path / "out")
        assert not (tmp_path / "out").exists()
    part = next((baseline[0] / "evaluations").iterdir())
    part.write_bytes(part.read_bytes()[:50])
    with pytest.raises(InputError, match="cut off in writing"):
        call("--baseline", *baseline, "--against", *against)


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        call("--help")
    assert stop.value.code == 0
    assert "example: sdo compare" in capsys.readouterr().out
