import dataclasses
import enum
import math
from typing import Literal

import pytest

from sdo.cli.training.config import (
    RecorderOptions,
    apply_overrides,
    load_config,
    organizer_schema,
    parse_organizer,
    parse_section,
    split_trl,
)
from sdo.errors import InputError
from sdo.organizers.registry import organizer_spec

SECTION = organizer_schema(organizer_spec("sdo"))


class Strategy(enum.StrEnum):
    NO = "no"
    EPOCH = "epoch"


@dataclasses.dataclass
class Trainer:
    """Field types as TRL and transformers have them."""

    learning_rate: float = 1.0
    max_steps: int = -1
    max_length: int | None = 1
    bf16: bool | None = None
    fp16: bool = False
    run_name: str | None = None
    eval_strategy: Strategy | str = "no"
    report_to: str | list[str] | None = None
    model_init_kwargs: dict[str, object] | str | None = None
    debug: str | list[Strategy] = ""
    odd: str | Literal[False] | None = None
    hidden: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass
class Script:
    dataset_name: str = ""


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-1.5e+3", -1500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.inf", -math.inf),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("+3", 3),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("none", "none"),
        ("=", "="),
        ("1e-5x", "1e-5x"),
        ("e5", "e5"),
    ],
)
def test_scalars_are_the_same_in_files_and_on_the_command_line(tmp_path, text, value):
    read = load_config(write(tmp_path, f"key: {text}"))["key"]
    typed = apply_overrides({}, [f"--key={text}"])["key"]
    assert (read, type(read)) == (value, type(value))
    assert (typed, type(typed)) == (value, type(value))


def test_nan_and_quoted_scalars(tmp_path):
    config = load_config(write(tmp_path, "a: .NaN\nb: '1e-5'\nc: \"true\"\nd:\n"))
    assert math.isnan(config.pop("a"))
    assert config == {"b": "1e-5", "c": "true", "d": None}


def test_sections_are_mappings_and_merge_keys_work(tmp_path):
    config = load_config(write(tmp_path, "\ufefforganizer:\nbase: &b {k: 4, seed: 1}\nrecorder: {<<: *b, k: 5}\n"))
    assert config["organizer"] == {}
    assert config["recorder"] == {"k": 5, "seed": 1}
    assert load_config(write(tmp_path, "")) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"run\.yaml:3: 'a' is given twice \(first at .*run\.yaml:1\)"),
        ("organizer:\n  k: 4\n  k: 5", r"run\.yaml:3: 'k' is given twice"),
        ("a: [1", r"run\.yaml:1: not YAML"),
        ("a:\n\tb: 1", r"run\.yaml:2: not YAML"),
        ("a: 1\n---\nb: 2", r"run\.yaml:2: not YAML"),
        ("a: \x01", r"run\.yaml: not YAML"),
        ("a: !!int x", "not YAML"),
        ("a: !!bool maybe", "not YAML"),
        ("a: !!python/object/apply:os.getcwd []", "not YAML"),
        ("a: &x [*x]", "not YAML"),
        ("- 1", "a list, expected keys and values"),
        ("word", "a str, expected keys and values"),
        ("1: 2", r"run\.yaml:1: the key 1 is no name"),
        ("true: 2", "the key true is no name"),
        ("? [1]\n: 2", "a key is a sequence"),
        ("organizer: sdo", r"run\.yaml:1: organizer: got 'sdo' \(str\), expected keys and values under it"),
        ("recorder: [1]", r"recorder: got \[1\] \(list\)"),
    ],
)
def test_files_that_are_refused(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load_config(write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="cannot read"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    with pytest.raises(InputError, match="not UTF-8"):
        load_config(tmp_path / "latin.yaml")


def test_parse_section_fills_defaults_and_converts():
    assert parse_section("organizer", None, SECTION) == SECTION()
    options = parse_section("organizer", {"retain": 1, "seed": 3, "embeddings": "E.npy"}, SECTION)
    assert (options.retain, type(options.retain)) == (1.0, float)
    assert (options.seed, options.embeddings) == (3, "E.npy")
    assert parse_section("recorder", {"signals": "hidden"}, RecorderOptions).signals == ["hidden"]
    assert parse_section("recorder", {"signals": []}, RecorderOptions).signals == []
    assert parse_section("recorder", {"weight": None}, RecorderOptions).weight is None
    assert RecorderOptions().signals == ["weight", "hidden"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"k": "four"}, "organizer.k: got 'four' (str), expected int"),
        ({"k": "4"}, "organizer.k: got '4' (str), expected int"),
        ({"k": True}, "organizer.k: got True (bool), expected int"),
        ({"k": 4.0}, "organizer.k: got 4.0 (float), expected int; write 4"),
        ({"k": None}, "organizer.k: got nothing (null), expected int"),
        ({"retain": 10**400}, "organizer.retain: got 1000"),
        ({"exposure": "no"}, "organizer.exposure: got 'no' (str), expected bool; write true or false"),
        ({"exposure": 1}, "organizer.exposure: got 1 (int), expected bool"),
        ({"embeddings": 7}, "organizer.embeddings: got 7 (int), expected str or null; put it in quotes"),
        ({"seed": "x"}, "organizer.seed: got 'x' (str), expected int or null"),
        (
            {"visit": "covr"},
            "organizer.visit: got 'covr' (str), expected one of 'cover', 'anchor'; did you mean",
        ),
        (
            {"retian": 1},
            "organizer: unknown key 'retian'; did you mean 'retain'? known keys: name, embeddings, seed, id_column, k",
        ),
        ({"zzzz": 1}, "organizer: unknown key 'zzzz'; known keys: name"),
    ],
)
def test_parse_section_says_what_was_expected(values, message):
    with pytest.raises(InputError) as caught:
        parse_section("organizer", values, SECTION)
    assert str(caught.value).startswith(message)


def test_options_of_another_organizer_are_left_out_by_name():
    section, left_out = parse_organizer({"name": "uniform", "k": 8, "seed": 3})
    assert (section.name, section.seed, section.options, left_out) == ("uniform", 3, {}, ["k"])
    section, left_out = parse_organizer({"k": 8})
    assert (section.name, section.options["k"], section.options["retain"], left_out) == ("sdo", 8, 0.2, [])
    with pytest.raises(InputError, match="organizer: unknown key 'kk'"):
        parse_organizer({"name": "uniform", "kk": 8})
    with pytest.raises(InputError, match=r"organizer\.name: no organizer 'unifrom'; did you mean 'uniform'\?"):
        parse_organizer({"name": "unifrom"})
    with pytest.raises(InputError, match=r"organizer\.name: got 3 \(int\), expected str"):
        parse_organizer({"name": 3})


def test_parse_section_names_list_types_and_missing_fields():
    with pytest.raises(InputError, match=r"recorder.signals: got 7 \(int\), expected list of str"):
        parse_section("recorder", {"signals": 7}, RecorderOptions)

    @dataclasses.dataclass
    class Needs:
        path: str

    with pytest.raises(InputError, match=r"needs: missing .*'path'"):
        parse_section("needs", {}, Needs)


def test_messages_name_the_line(tmp_path):
    config = load_config(write(tmp_path, "seed: 1\norganizer:\n  k: four\n"))
    with pytest.raises(InputError, match=r"run\.yaml:3: organizer\.k: got 'four'"):
        parse_section("organizer", config["organizer"], SECTION)
    with pytest.raises(InputError, match=r"run\.yaml:1: unknown key 'seed'"):
        split_trl(config, (Trainer,))


def test_overrides_reach_the_top_level_and_the_sections():
    config = {"learning_rate": 1.0, "organizer": {"k": 2, "seed": 1}}
    argv = [
        "--learning-rate",
        "1e-5",
        "--organizer.k",
        "4",
        "--recorder.signals",
        "hidden",
        "weight",
        "--bf16",
        "--no_fp16",
    ]
    merged = apply_overrides(config, [*argv, "--max_steps=-1", "--organizer.no_exposure", "--report_to", "a", "b"])
    assert merged == {
        "learning_rate": 1e-5,
        "organizer": {"k": 4, "seed": 1, "exposure": False},
        "recorder": {"signals": ["hidden", "weight"]},
        "bf16": True,
        "fp16": False,
        "max_steps": -1,
        "report_to": ["a", "b"],
    }
    assert config == {"learning_rate": 1.0, "organizer": {"k": 2, "seed": 1}}


def test_overrides_take_negative_numbers_repeats_and_flow_style():
    argv = ["--max_steps", "-1", "--max_steps", "5", "--model_init_kwargs", '{"a": 1e-5, "b": [no]}']
    assert apply_overrides({}, argv) == {"max_steps": 5, "model_init_kwargs": {"a": 1e-5, "b": ["no"]}}


def test_numbers_on_the_command_line_may_be_names():
    merged = apply_overrides({}, ["--run_name", "010", "--organizer.embeddings", "7", "--recorder.signals", "1", "2"])
    assert split_trl(merged, (Trainer,)) == {"run_name": "010"}
    assert parse_section("organizer", merged["organizer"], SECTION).embeddings == "7"
    assert parse_section("recorder", merged["recorder"], RecorderOptions).signals == ["1", "2"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["x"], "unexpected argument 'x'"),
        (["--seed=3", "4"], "unexpected argument '4'"),
        (["-k", "4"], "unexpected argument '-k'"),
        (["--"], "unexpected argument '--'"),
        (["--=3"], "unexpected argument '--=3'"),
        (["--organizer."], "unexpected argument '--organizer.'"),
        (["--organizer", "4"], r"--organizer is a section; write --organizer\.KEY value"),
        (["--organiser.k", "4"], "unknown section 'organiser'; did you mean 'organizer'"),
        (["--organizer.k.x", "4"], r"unknown section 'organizer\.k'"),
        (["--model_init_kwargs", "{a"], "--model_init_kwargs:1: not YAML"),
    ],
)
def test_overrides_that_are_refused(argv, message):
    with pytest.raises(InputError, match=message):
        apply_overrides({}, argv)


@pytest.mark.parametrize("argv", [["--learning_rate"], ["--learning_rate", "--bf16"]])
def test_a_key_without_its_value_is_said(argv):
    with pytest.raises(InputError, match="--learning_rate came without a value, expected float"):
        split_trl(apply_overrides({}, argv), (Trainer,))


def test_an_override_of_a_bare_flag_forgets_that_it_was_bare():
    merged = apply_overrides({}, ["--bf16", "--bf16", "maybe"])
    with pytest.raises(InputError, match=r"^command line: bf16: got 'maybe' \(str\)"):
        split_trl(merged, (Trainer,))


def test_split_trl_converts_and_leaves_the_sections_out(tmp_path):
    text = """
learning_rate: "1e-5"
max_steps: "12"
max_length: null
eval_strategy: no
report_to: none
model_init_kwargs: {dtype: float32, nested: {a: 1}}
debug: anything
odd: some/tracker
dataset_name: words
organizer: {k: 4}
"""
    values = split_trl(load_config(write(tmp_path, text)), (Script, Trainer))
    assert values == {
        "learning_rate": 1e-5,
        "max_steps": 12,
        "max_length": None,
        "eval_strategy": "no",
        "report_to": "none",
        "model_init_kwargs": {"dtype": "float32", "nested": {"a": 1}},
        "debug": "anything",
        "odd": "some/tracker",
        "dataset_name": "words",
    }
    assert type(values["model_init_kwargs"]) is dict
    assert type(values["model_init_kwargs"]["nested"]) is dict


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"lerning_rate": 1},
            "did you mean 'learning_rate'? expected a field of Script, Trainer, or a section",
        ),
        ({"organiser": {}}, "did you mean 'organizer'?"),
        ({"hidden": 1}, "unknown key 'hidden'"),
        ({"k": 4}, "it belongs in the section 'organizer:', on the command line --organizer.k"),
        ({"sample_every": 4}, "it belongs in the section 'recorder:'"),
        ({"env": {}}, "set them before the command"),
        ({"learning_rate": "fast"}, "learning_rate: got 'fast' (str), expected float"),
        ({"learning_rate": "."}, "learning_rate: got '.' (str), expected float"),
        ({"max_steps": "1.5"}, "max_steps: got '1.5' (str), expected int"),
        ({"bf16": "yes"}, "expected bool or null; write true or false"),
        ({"eval_strategy": "epochs"}, "expected one of 'no', 'epoch'; did you mean 'epoch'?"),
        ({"odd": 3}, "odd: got 3 (int), expected str or False or null"),
    ],
)
def test_split_trl_says_what_was_expected(values, message):
    with pytest.raises(InputError) as caught:
        split_trl(values, (Script, Trainer))
    assert message in str(caught.value)


def test_split_trl_takes_the_defaults_of_the_real_classes():
    trl = pytest.importorskip("trl")
    classes = (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig)
    values = {
        field.name: field.default
        for config_class in classes
        for field in dataclasses.fields(config_class)
        if field.init and field.default is not dataclasses.MISSING
    }
    checked = split_trl(values, classes)
    assert checked.keys() == values.keys()
    assert all(checked[key] == value for key, value in values.items())
