"""The run folder's contract: names and counts, alone; writer and readers hold to it in their own tests."""

from pathlib import Path

import pytest

from sdo import InputError
from sdo.run_format import STREAMS, check_parts, check_rows, part_range, read_run_json

FOLDER = Path("run/steps")
README = Path(__file__).parents[2] / "README.md"


def test_the_table_in_the_readme_is_the_contract():
    text = README.read_text(encoding="utf-8")
    table = text[text.index("| path | a row is | columns |") :].split("\n\n")[0].splitlines()[3:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert [row[0] for row in rows] == [f"`{stream.path}/`" for stream in STREAMS]
    for (_, row, columns), stream in zip(rows, STREAMS, strict=True):
        assert row.startswith(stream.row)
        assert columns == ", ".join(stream.names)


def test_streams_are_sorted_by_columns_of_theirs_and_say_what_each_holds():
    for stream in STREAMS:
        assert set(stream.keys) <= set(stream.names)
        assert all(column.meaning and (column.nullable or not column.later) for column in stream.columns)


def parts(*ranges, rank=""):
    return [f"part-{rank}{first:08d}-{last:08d}.parquet" for first, last in ranges]


def test_names_tell_their_range():
    assert part_range(parts((3, 7))[0]) == (0, 3, 7)
    assert part_range(parts((3, 7), rank="r2-")[0]) == (2, 3, 7)
    assert part_range("part-00003.parquet") is None
    assert part_range("part-00000003-00000007 (copy).parquet") is None


def test_parts_that_follow_each_other_pass():
    check_parts(FOLDER, parts((4, 9), (0, 3), (10, 10)), first=0)
    check_parts(FOLDER, [*parts((0, 9), rank="r0-"), *parts((0, 4), (5, 9), rank="r1-")], first=0)
    check_parts(FOLDER, parts((7, 9)))  # of a run that began later, where nobody says when
    check_parts(FOLDER, [])
    check_parts(FOLDER, parts((0, 3), (9, 12)), first=0, last=4)  # what comes later is dropped on resuming


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (parts((0, 3), (6, 9)), r"run/steps lacks the steps 4 to 5: a part is missing"),
        (parts((4, 9)), "lacks the steps 0 to 3"),
        ([*parts((0, 9), rank="r0-"), *parts((5, 9), rank="r1-")], "lacks the steps 0 to 4"),
        (parts((0, 3), (3, 5)), "holds step 3 in two parts"),
        (parts((0, 9), (0, 4)), "in two parts"),
        (["part-00000000-00000003 (copy).parquet"], r"\(copy\)\.parquet is no part that a recorder writes"),
    ],
)
def test_parts_that_leave_out_or_repeat_are_refused(names, message):
    with pytest.raises(InputError, match=message):
        check_parts(FOLDER, names, first=0)


def test_rows_are_those_that_run_json_counts():
    path, counted = Path("run"), {"rows": {"steps": 5, "gradients/hidden": 7}, "status": "finished"}
    check_rows(path, counted, {"steps": 5, "gradients/hidden": 7, "evaluations": 3})
    check_rows(path, {**counted, "status": "running"}, {"steps": 6, "gradients/hidden": 9})  # killed after a part
    check_rows(path, {"status": "finished"}, {})  # an earlier version counts nothing
    for found, message in (
        ({"steps": 4, "gradients/hidden": 7}, "run/steps holds 4 rows, run.json counts 5: a part is missing"),
        ({"steps": 5}, "run/gradients/hidden holds 0 rows, run.json counts 7"),
        ({"steps": 6, "gradients/hidden": 7}, "run/steps holds 6 rows, run.json counts 5: a part was copied in"),
    ):
        with pytest.raises(InputError, match=message):
            check_rows(path, counted, found)
    with pytest.raises(InputError, match="holds 4 rows"):
        check_rows(path, {**counted, "status": "running"}, {"steps": 4, "gradients/hidden": 7})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("{", "cannot be read as JSON"),
        ("[]", 'does not describe a run: expected "format": "sdo-run"'),
        ("{}", "does not describe a run"),
    ],
)
def test_a_run_json_that_is_none_is_one_line(tmp_path, text, message):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read_run_json(tmp_path / "run.json")
