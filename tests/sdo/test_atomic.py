import os

import pytest

from sdo.atomic import write_atomically


def test_all_targets_change_or_none(tmp_path):
    first, second = tmp_path / "first.txt", tmp_path / "second.json"
    write_atomically({first: lambda file: file.write_text("old"), second: lambda file: file.write_text("old")})

    def fail(file):
        file.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically({first: lambda file: file.write_text("new"), second: fail})
    assert (first.read_text(), second.read_text()) == ("old", "old")
    assert sorted(os.listdir(tmp_path)) == ["first.txt", "second.json"]
    write_atomically({first: lambda file: file.write_text("new")})
    assert first.read_text() == "new"
