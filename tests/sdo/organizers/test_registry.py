"""Organizers by name, and one of a third party through every door that asks the registry."""

import dataclasses
import inspect
import json
from importlib.metadata import EntryPoint
from typing import get_type_hints

import numpy as np
import pyarrow.parquet as pq
import pytest

from analysis import plan_exposure
from sdo import SDO, InputError, Uniform
from sdo.cli.main import main
from sdo.organizers import registry
from sdo.organizers.registry import (
    OrganizerInputs,
    SDOOptions,
    UniformOptions,
    make_organizer,
    option_help,
    organizer_names,
    organizer_spec,
    register_organizer,
    registered_organizers,
)
from tests.third_party import BLOCKS, Blocks

MATRIX = np.random.default_rng(0).standard_normal((12, 3))
EMBEDDINGS = SDO(MATRIX).embeddings


@pytest.fixture
def blocks(monkeypatch):
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    register_organizer(BLOCKS)
    return BLOCKS


@pytest.mark.parametrize(("cls", "options"), [(SDO, SDOOptions), (Uniform, UniformOptions)])
def test_the_options_are_the_constructors_keywords_with_their_defaults(cls, options):
    keywords = [p for p in inspect.signature(cls.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [(p.name, p.default) for p in keywords] == [
        *((option.name, option.default) for option in dataclasses.fields(options)),
        ("seed", 0),
    ]
    hints = get_type_hints(cls.__init__)
    assert {name: hints[name] for name in get_type_hints(options)} == get_type_hints(options)
    assert all(option.metadata["help"] for option in dataclasses.fields(options))


def test_known_names_make_what_the_classes_make():
    made = make_organizer("sdo", OrganizerInputs(12, EMBEDDINGS), {"k": 2, "seed": 3})
    assert made.plan(4).fingerprint == SDO(MATRIX, k=2, seed=3).plan(4).fingerprint
    made = make_organizer("uniform", OrganizerInputs(12), {"seed": 3})
    assert made.plan(4).fingerprint == Uniform(12, seed=3).plan(4).fingerprint
    assert [spec.name for spec in registered_organizers()][:2] == ["sdo", "uniform"]


@pytest.mark.parametrize(
    ("name", "inputs", "options", "message"),
    [
        ("sd", OrganizerInputs(3), {}, r"no organizer 'sd'; did you mean 'sdo'\? known: sdo, uniform"),
        ("sdo", OrganizerInputs(3), {}, "organizer 'sdo' needs embeddings, and there are none; expected a matrix"),
        ("uniform", OrganizerInputs(3), {"k": 4}, "organizer 'uniform' has no option 'k'; known: seed"),
        ("uniform", OrganizerInputs(3), {"sed": 4}, r"has no option 'sed'; did you mean 'seed'\?"),
    ],
)
def test_what_cannot_be_made_is_refused(name, inputs, options, message):
    with pytest.raises(InputError, match=message):
        make_organizer(name, inputs, options)


@dataclasses.dataclass
class TakesSeed:
    seed: int = 0


@dataclasses.dataclass
class NoDefault:
    size: int


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "my organizer"}, "the name of an organizer is 'my organizer'; expected letters, digits"),
        ({"options": int}, "options of organizer 'blocks' is <class 'int'>; expected a dataclass"),
        ({"options": TakesSeed}, "organizer 'blocks' has an option 'seed', which every organizer has"),
        ({"options": NoDefault}, "option 'size' of organizer 'blocks' has no default; expected one"),
        ({"needs": frozenset({"labels"})}, "organizer 'blocks' needs 'labels'; expected some of embeddings, groups"),
    ],
)
def test_a_spec_that_cannot_serve_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(BLOCKS, **changes)


def test_a_taken_name_is_kept_unless_it_is_to_be_replaced(blocks):
    with pytest.raises(InputError, match="an organizer 'blocks' is registered already"):
        register_organizer(BLOCKS)
    other = dataclasses.replace(BLOCKS, needs=frozenset())
    register_organizer(other, replace=True)
    assert organizer_spec("blocks") is other
    with pytest.raises(InputError, match="register_organizer got str; expected an OrganizerSpec"):
        register_organizer("blocks")


def test_an_organizer_that_calls_itself_otherwise_is_refused(blocks):
    register_organizer(dataclasses.replace(BLOCKS, name="cubes"))
    with pytest.raises(InputError, match="organizer 'cubes' calls itself 'blocks'"):
        make_organizer("cubes", OrganizerInputs(12, EMBEDDINGS), {})


def test_an_installed_package_brings_an_organizer(monkeypatch):
    def entries(*, group):
        assert group == "sdo.organizers"
        return [
            EntryPoint("blocks", "tests.third_party:BLOCKS", group),
            EntryPoint("gone", "no_such_package:SPEC", group),
            EntryPoint("wrong", f"{__name__}:MATRIX", group),
        ]

    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    monkeypatch.setattr(registry, "entry_points", entries)
    assert organizer_names() == ("sdo", "uniform", "blocks", "gone", "wrong")
    assert organizer_spec("blocks") is BLOCKS
    with pytest.raises(InputError, match="organizer 'gone' of no_such_package:SPEC cannot be loaded: Mod"):
        organizer_spec("gone")
    with pytest.raises(InputError, match="is test_registry:MATRIX; expected an OrganizerSpec 'wrong'"):
        organizer_spec("wrong")


def test_help_names_each_option_with_choices_and_default():
    lines = dict(option_help(organizer_spec("sdo")))
    assert lines["k"] == "neighbors per anchor (default: 4)"
    assert "(cover, anchor)" in lines["visit"]


def test_sdo_plan_takes_it_with_its_own_options(blocks, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("E.npy", MATRIX)
    argv = [
        "plan",
        "--embeddings",
        "E.npy",
        "--batch-size",
        "5",
        "--organizer",
        "blocks",
        "--epochs",
        "2",
        "--seed",
        "1",
    ]
    assert main([*argv, "--turn", "2", "--out", "P.parquet"]) == 0
    printed = capsys.readouterr().out
    columns = ["epoch", "steps", "pool", "blocks", "exposure", "min/mean/max", "cosine", "uniform"]
    assert printed.splitlines()[0].split() == columns
    plan = Blocks(EMBEDDINGS, turn=2, seed=1).plan(5)
    assert pq.read_table("P.parquet").column("sample_id").to_pylist() == plan.flat(0, 4)[0].tolist()
    record = json.loads((tmp_path / "P.json").read_text())
    assert (record["name"], record["options"], record["epochs"][1]["blocks"]) == ("blocks", {"turn": 2, "seed": 1}, 2)
    assert plan_exposure(tmp_path / "P.parquet").times.tolist() == plan.counts(4).tolist()
    assert main([*argv, "--turn", "-2", "--out", "Q.parquet"]) == 2
    assert "turn is -2; expected a whole number from 0" in capsys.readouterr().err
    assert main([*argv, "--k", "2", "--out", "Q.parquet"]) == 2
    assert "organizer blocks has --turn" in capsys.readouterr().err
    assert not (tmp_path / "Q.parquet").exists()


def test_sdo_plan_needs_no_embeddings_where_the_organizer_needs_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["plan", "--organizer", "uniform", "--batch-size", "4", "--epochs", "1", "--out", "P.parquet"]
    assert main([*argv, "--samples", "12"]) == 0
    assert pq.read_table("P.parquet").column("sample_id").to_pylist() == Uniform(12).plan(4).epoch(0).steps.ids.tolist()
    assert main([*argv, "--overwrite"]) == 2
    assert "--embeddings and --samples are missing; expected one of them" in capsys.readouterr().err
    assert main([*argv, "--overwrite", "--organizer", "sdo", "--samples", "12"]) == 2
    assert "organizer sdo needs --embeddings" in capsys.readouterr().err
