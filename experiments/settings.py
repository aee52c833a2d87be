"""What one setting trains: its YAML file at one of two scales, and the cells that it falls into."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sdo.cli.training.config import parse_organizer
from sdo.errors import InputError

FOLDER = Path(__file__).parent / "settings"
SCALES = ("paper", "small")
METHODS = ("sft", "dpo", "grpo")
_TOP = {"title", "method", "arms", "checkpoints", "run", "scales"}
_SCALE = {"material", "seeds", "run", "checkpoints", "note"}
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


@dataclass(frozen=True)
class Cell:
    """One training: an arm with a seed.

    Parameters
    ----------
    group, arm
        Which table the arm belongs to, and its name.
    organizer
        What the arm changes in the run's ``organizer:`` section.
    seed
        Of the order of the data, and of the trainer.
    """

    group: str
    arm: str
    organizer: Mapping[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """Stem of the cell's files."""
        return f"{self.arm}-{self.seed}"


@dataclass(frozen=True)
class Setting:
    """One setting at one scale.

    Parameters
    ----------
    name, scale
        Stem of the YAML file, and ``"paper"`` or ``"small"``.
    title
        What is trained on what, in words.
    method
        The training command: ``"sft"``, ``"dpo"`` or ``"grpo"``.
    arms
        Group -> arm -> what it changes in the organizer. The first arm of the first group is the baseline.
    seeds
        Group -> seeds.
    checkpoints
        Evaluations after the one at the start, evenly spaced.
    run
        What the training command is given, but for what a cell and the material decide.
    material
        ``make`` names a function of :mod:`experiments.material`, the rest are its arguments.
    note
        What a reader of the results should know, or nothing.
    """

    name: str
    scale: str
    title: str
    method: str
    arms: Mapping[str, Mapping[str, Mapping[str, Any]]]
    seeds: Mapping[str, tuple[int, ...]]
    checkpoints: int
    run: Mapping[str, Any]
    material: Mapping[str, Any]
    note: str = ""

    @property
    def label(self) -> str:
        """Name of the folders of this setting and scale."""
        return f"{self.name}-{self.scale}"

    @property
    def baseline(self) -> str:
        """The arm that all others are compared with."""
        return next(iter(next(iter(self.arms.values()))))

    def cells(self, groups: tuple[str, ...] = ()) -> Iterator[Cell]:
        """Yield the cells of some groups, all by default, seed by seed, so that a part of them is balanced."""
        chosen = groups or tuple(self.arms)
        longest = max(len(self.seeds[group]) for group in chosen)
        for number in range(longest):
            for group in chosen:
                for arm, changes in self.arms[group].items():
                    if number < len(self.seeds[group]):
                        yield Cell(group, arm, changes, self.seeds[group][number])


def load(name: str, scale: str, folder: Path = FOLDER) -> Setting:
    """Read a setting.

    Parameters
    ----------
    name
        Stem of the file in `folder`.
    scale
        One of :data:`SCALES` that the file has.
    folder
        Where the files are.

    Raises
    ------
    InputError
        There is no such file or scale, a key is unknown, or an arm is no organizer's.
    """
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise InputError(f"there is no setting {name!r}; expected one of {', '.join(known)}")
    file = folder / f"{name}.yaml"
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    _keys(file, "top level", tree, _TOP)
    if scale not in tree["scales"]:
        raise InputError(f"{file.name} has no scale {scale!r}; expected {' or '.join(tree['scales'])}")
    chosen = tree["scales"][scale]
    _keys(file, scale, chosen, _SCALE)
    if tree["method"] not in METHODS:
        raise InputError(f"{file.name}: method is {tree['method']!r}; expected one of {', '.join(METHODS)}")
    if set(chosen["seeds"]) != set(tree["arms"]):
        raise InputError(
            f"{file.name}: seeds are given for {sorted(chosen['seeds'])}; expected all of {list(tree['arms'])}"
        )
    run = merged(tree["run"], chosen.get("run", {}))
    names: set[str] = set()
    for arms in tree["arms"].values():
        for arm, changes in arms.items():
            if not _NAME.fullmatch(arm) or arm in names:
                raise InputError(f"{file.name}: arm {arm!r} is there twice, or has other signs than a-z, 0-9 and -")
            names.add(arm)
            parse_organizer(merged(run.get("organizer", {}), changes or {}))
    return Setting(
        name=name,
        scale=scale,
        title=tree["title"],
        method=tree["method"],
        arms={group: {arm: changes or {} for arm, changes in arms.items()} for group, arms in tree["arms"].items()},
        seeds={group: tuple(chosen["seeds"][group]) for group in tree["arms"]},
        checkpoints=chosen.get("checkpoints", tree.get("checkpoints", 5)),
        run=run,
        material=chosen["material"],
        note=chosen.get("note", ""),
    )


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` put over it, section by section."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def _keys(file: Path, where: str, found: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(found) - known)
    if unknown:
        raise InputError(
            f"{file.name}, {where}: unknown key {unknown[0]!r}; expected some of {', '.join(sorted(known))}"
        )
