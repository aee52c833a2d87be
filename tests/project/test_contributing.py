"""CONTRIBUTING.md names folders and files that are there, all rooms of the packages, and each word once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGES = ("sdo", "diagnostics", "analysis")


def table(heading):
    """Return the first column of the table under a heading."""
    body = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line.split("|")[1].strip() for line in body.splitlines() if line.startswith("| ")][1:]


def test_every_path_is_there():
    paths = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", TEXT)
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_room_has_its_line():
    rooms = {
        f"`{one.parent.relative_to(ROOT).as_posix()}/`"
        for name in PACKAGES
        for one in (ROOT / name).glob("*/__init__.py")
    }
    assert rooms <= set(table("Where things live"))


def test_each_word_stands_once_and_in_order():
    words = table("Words")
    assert words == sorted(set(words))
    assert len(words) > 30
