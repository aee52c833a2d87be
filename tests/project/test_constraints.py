"""The constraint files say what they say they are: the oldest and the newest versions that the suite passes on."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {"ruff", "mypy", "import-linter", "pre-commit"}  # they check the source, once, with the newest


def requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    found = [Requirement(line) for line in project["dependencies"] + extras]
    return [needed for needed in found if needed.name != project["name"]]


def test_the_remedies_name_the_oldest_trl():
    compat = pytest.importorskip("sdo.trainers.versions")
    (bound,) = {str(needed.specifier) for needed in requirements() if needed.name == "trl"}
    assert bound == f">={compat.OLDEST_TRL}"


def pins(name):
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    pairs = [line.split("==") for line in lines if line]
    return {canonicalize_name(name): Version(version.split("+")[0]) for name, version in pairs}


def test_the_oldest_set_is_the_lower_bounds():
    oldest, checked = pins("constraints-oldest.txt"), 0
    for needed in requirements():
        name = canonicalize_name(needed.name)
        bounds = [Version(part.version) for part in needed.specifier if part.operator == ">="]
        if name in oldest and name not in TOOLS and bounds:
            assert oldest[name] == bounds[0], f"{needed}: constraints-oldest.txt holds {oldest[name]}"
            checked += 1
    assert checked > 15


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_whatever_is_needed_for_development_is_pinned_within_its_bounds(name):
    pinned = pins(name)
    of_benchmarks = {"gguf", "reasoning-gym"}
    needed_here = [needed for needed in requirements() if needed.name not in of_benchmarks]
    for needed in needed_here:
        assert canonicalize_name(needed.name) in pinned, f"{name} does not pin {needed.name}"
        assert needed.specifier.contains(pinned[canonicalize_name(needed.name)], prereleases=True), str(needed)
