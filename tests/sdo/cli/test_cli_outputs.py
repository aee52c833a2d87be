import json
import math

import numpy as np
import pytest

from sdo.cli.outputs import Parts, aligned, array_writer, file_names, json_writer


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
    parts = Parts("some")
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


def test_tables_are_aligned():
    lines = [["", "n", "word"], ["long name", "10", "a"]]
    assert aligned(lines) == "            n  word\nlong name  10     a"
    assert aligned(lines, texts=2, last_text=True, indent="  ") == "             n   word\n  long name  10  a"
