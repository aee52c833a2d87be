from pathlib import Path

import pytest

from sdo.cli.run_options import shortest_suffix, unique_names
from sdo.errors import InputError


def test_names_are_the_shortest_unique_suffix():
    paths = [Path("/x/a/run"), Path("/x/b/run"), Path("/x/b/other")]
    assert unique_names(paths) == ["a/run", "b/run", "other"]
    with pytest.raises(InputError, match="came twice"):
        unique_names([Path("/x/a"), Path("/x/b/../a")])
    assert shortest_suffix(("/", "a", "b"), [("/", "b")]) == "a/b"
    assert shortest_suffix(("/", "a"), [("/", "b", "a")]) == "/a"
