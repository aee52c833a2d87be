from pathlib import Path

import pytest

from sdo.cli.common.run_options import run_name, shortest_suffix, unique_names
from sdo.errors import InputError


def test_names_are_the_shortest_unique_suffix():
    paths = [Path("/x/a/run"), Path("/x/b/run"), Path("/x/b/other")]
    assert unique_names(paths) == ["a/run", "b/run", "other"]
    with pytest.raises(InputError, match="came twice"):
        unique_names([Path("/x/a"), Path("/x/b/../a")])
    assert shortest_suffix(("/", "a", "b"), [("/", "b")]) == "a/b"
    assert shortest_suffix(("/", "a"), [("/", "b", "a")]) == "/a"


def test_names_stay_on_one_line_and_apart():
    paths = [Path("/x/a\nb"), Path("/x/a\\nb"), Path("/x/\x1b[31mred"), Path("/x/größe")]
    assert unique_names(paths) == [r"a\nb", r"a\\nb", r"\x1b[31mred", "größe"]
    assert run_name("\r\u202e\ud800") == r"\r\u202e\ud800"


def test_a_name_that_is_no_utf8_is_refused():
    with pytest.raises(InputError, match="the name is no UTF-8"):
        unique_names([Path("/x/a"), Path("/x/b\udcff")])
