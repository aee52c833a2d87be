"""The list of slow tests names tests that are there, and is written from durations."""

from __future__ import annotations

import ast

import pytest

from tests.slow import FOLDER, LIST, ROOT, SECONDS, is_slow, judged, read_list, seconds_of


def functions(file):
    """Return the names of the functions of a test file."""
    return {node.name for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body if hasattr(node, "name")}


def test_every_name_in_the_list_is_a_test():
    """A test that was renamed would come back into the quick run unseen; fix: rename it in tests/slow.txt too."""
    for file in sorted({name.partition("::")[0] for name in read_list()}):
        names = {name.partition("::")[2] for name in read_list() if name.startswith(f"{file}::")}
        assert names <= functions(file), file


def test_the_list_is_sorted_and_says_nothing_twice():
    lines = LIST.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))


def test_slow_tests_are_marked_at_collection(request):
    for item in request.session.items:
        assert (item.get_closest_marker("slow") is not None) == is_slow(item.nodeid), item.nodeid


def test_launches_are_slow_whatever_their_parameters_and_this_one_is_not(request):
    assert (ROOT / FOLDER).is_dir()
    assert is_slow(f"{FOLDER}test_ddp.py::test_new[2]")
    assert is_slow(f"{min(read_list())}[a::b]")
    assert not is_slow(request.node.nodeid)


def test_what_ran_is_judged_again_and_what_did_not_run_stays():
    seconds = {"a.py::slow_now": SECONDS, "a.py::quick_now": SECONDS / 2}
    assert judged(frozenset({"a.py::quick_now", "b.py::elsewhere"}), seconds) == ["a.py::slow_now", "b.py::elsewhere"]


def test_parameters_of_a_function_are_added_up_and_skipped_tests_do_not_count(tmp_path):
    here = "tests.project.test_slow"
    (tmp_path / "junit.xml").write_text(
        f'<testsuites><testsuite><testcase classname="{here}" name="test_x[1]" time="0.75"/>'
        f'<testcase classname="{here}" name="test_x[a::b]" time="0.5"/>'
        f'<testcase classname="{here}" name="test_y" time="0"><skipped/></testcase></testsuite></testsuites>'
    )
    assert seconds_of(tmp_path / "junit.xml") == {"tests/project/test_slow.py::test_x": pytest.approx(1.25)}
