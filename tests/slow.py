"""Which tests are slow: a measurement, kept in ``slow.txt``. ``make quick`` leaves them out, CI runs all.

``python tests/slow.py JUNIT.xml`` writes the list anew from the durations that ``pytest --junitxml`` recorded: what ran
is judged again, what did not run keeps its place. `make slow-list` does both.
"""

from __future__ import annotations

import functools
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

FOLDER = "tests/launches/"  # all of it: starts training in several processes
LIST = Path(__file__).with_name("slow.txt")
ROOT = LIST.parent.parent
SECONDS = 1.0  # of one test function, over all its parameters


def function_of(nodeid: str) -> str:
    """Return ``file::function`` of a test, without its parameters."""
    return nodeid.partition("[")[0]


def is_slow(nodeid: str) -> bool:
    """Return whether a test belongs to the slow ones."""
    return nodeid.startswith(FOLDER) or function_of(nodeid) in read_list()


@functools.cache
def read_list() -> frozenset[str]:
    """Return the functions in the list."""
    return frozenset(LIST.read_text(encoding="utf-8").split())


def seconds_of(junit: Path) -> dict[str, float]:
    """Return the seconds of each test function that ran: set up, call and tear down, over all its parameters."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(junit).iter("testcase"):  # noqa: S314 - pytest wrote it a moment ago
        file = Path(*case.attrib["classname"].split(".")).with_suffix(".py")
        if case.find("skipped") is None and (ROOT / file).is_file() and not file.as_posix().startswith(FOLDER):
            seconds[function_of(f"{file.as_posix()}::{case.attrib['name']}")] += float(case.attrib["time"])
    return dict(seconds)


def judged(listed: frozenset[str], seconds: dict[str, float]) -> list[str]:
    """Return the list after a run in which tests took so many seconds."""
    return sorted((listed - seconds.keys()) | {name for name, each in seconds.items() if each >= SECONDS})


if __name__ == "__main__":
    names = judged(read_list() if LIST.exists() else frozenset(), seconds_of(Path(sys.argv[1])))
    LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    print(f"{len(names)} slow tests in {LIST}")
