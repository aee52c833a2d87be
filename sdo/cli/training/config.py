"""Options of the training commands: the run file, typed sections, overrides from the command line.

A run file holds the keys of TRL and transformers at its top level and ours in the sections ``organizer:`` and
``recorder:``. The steps are :func:`load_config`, :func:`apply_overrides`, then :func:`parse_section` for each
section and :func:`split_trl` for the rest. Scalars follow :mod:`sdo.cli.training.yaml12`: ``1e-5`` is a number, only
``true`` and ``false`` are booleans, so ``eval_strategy: no`` means what it says.

TRL's TrlParser knows no sections; from a file it takes ``max_steps: true`` and ``[3]``, reads ``010`` as 8, lets the
second of two equal keys win, fails on ``eval_strategy: no``, and says no line of the file. So we read it ourselves.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from sdo.cli.training.type_hints import NO_MATCH, convert, described, shown, wanted
from sdo.cli.training.yaml12 import Located, parse_value, parse_yaml
from sdo.errors import InputError, suggest
from sdo.organizers.registry import OrganizerSpec, organizer_spec, registered_organizers

SECTIONS = ("organizer", "recorder")

_BARE = "command line, no value"
_NUMERIC = re.compile(r"[-+.0-9]")
_KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")
_Schema = TypeVar("_Schema")


@dataclass
class OrganizerSection:
    """The section ``organizer:``, as far as it is the same for all organizers; each adds its own options.

    Parameters
    ----------
    name
        Of a registered organizer.
    embeddings
        Path of the matrix, one row a sample.
    seed
        Seed of the plan; None takes the seed of the training.
    id_column
        Column of the data set that holds the row of the embedding, or its key.
    """

    name: str = "sdo"
    embeddings: str | None = None
    seed: int | None = None
    id_column: str = "sample_id"

    @property
    def options(self) -> dict[str, Any]:
        """The organizer's own options, by name."""
        return {name: getattr(self, name) for name in organizer_spec(self.name).option_names}


def organizer_schema(spec: OrganizerSpec) -> type[OrganizerSection]:
    """Return the section ``organizer:`` of one organizer as a dataclass."""
    hints = get_type_hints(spec.options)
    own: list[Any] = [
        (option.name, hints[option.name], _default(option)) for option in dataclasses.fields(spec.options)
    ]
    named = ("name", str, field(default=spec.name))
    return dataclasses.make_dataclass(f"OrganizerSection_{spec.name}", [named, *own], bases=(OrganizerSection,))


def _default(option: dataclasses.Field[Any]) -> Any:
    if option.default is dataclasses.MISSING and option.default_factory is not dataclasses.MISSING:
        return field(default_factory=option.default_factory)
    return field(default=option.default)


def parse_organizer(values: Mapping[str, Any]) -> tuple[OrganizerSection, list[str]]:
    """Turn the section ``organizer:`` into its dataclass.

    Parameters
    ----------
    values
        The section's keys and values.

    Returns
    -------
    section
        Of the organizer that ``name`` says.
    left_out
        Keys that are options of other organizers: a run file may hold those of several, and the command line choose.

    Raises
    ------
    InputError
        As :func:`parse_section`, and for a name that nobody registered.
    """
    common = parse_section("organizer", {k: v for k, v in values.items() if k == "name"}, OrganizerSection)
    try:
        spec = organizer_spec(common.name)
    except InputError as error:
        raise InputError(f"{_place(values, 'name')}organizer.name: {error}") from error
    schema = organizer_schema(spec)
    others = {name for other in registered_organizers() for name in other.option_names} - set(_fields(schema))
    left_out = [key for key in values if key in others]
    kept = _copy(values)
    for key in left_out:
        del kept[key]
    return parse_section("organizer", kept, schema), left_out


@dataclass
class RecorderOptions:
    """The section ``recorder:``.

    Parameters
    ----------
    out
        Run folder; needed.
    weight
        Name of the parameter whose gradient is recorded; None takes the last trainable matrix.
    signals
        Names of the recorded signals.
    sample_every
        A row for each sample at every n-th step; 0 writes none.
    sketch_size
        Entries of a sketch.
    evaluations
        Whether scores of evaluations are kept.
    """

    out: str | None = None
    weight: str | None = None
    signals: list[str] = field(default_factory=lambda: ["weight", "hidden"])
    sample_every: int = 10
    sketch_size: int = 8192
    evaluations: bool = True


def load_config(path: str | Path) -> Located:
    """Read a run file.

    Parameters
    ----------
    path
        YAML file in UTF-8.

    Returns
    -------
    Located
        Its keys and values, a plain ``dict`` to others; empty for an empty file. The sections are mappings,
        empty where the file leaves them empty.

    Raises
    ------
    InputError
        If the file cannot be read, is not YAML, holds something else than keys and values, or gives a key
        twice. The message names file and line.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; expected a YAML file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    values = parse_yaml(text, str(path))
    if values is None:
        values = Located()
    if not isinstance(values, Located):
        raise InputError(f"{path}: a {type(values).__name__}, expected keys and values such as 'learning_rate: 1e-5'")
    for section in SECTIONS:
        if section in values:
            values[section] = _section(values, section)
    return values


def apply_overrides(config: Mapping[str, Any], argv: Sequence[str]) -> Located:
    """Lay options of the command line over those of a run file.

    Understood are ``--key value``, ``--key=value``, ``--key a b`` (a list), ``--flag`` (true), ``--no_flag``
    (false) and, for the sections, ``--organizer.k 4``. Hyphens in keys count as underscores, the last of
    several wins. Values follow the scalar rules of the run file; one that starts with ``{`` or ``[`` is read
    as YAML.

    Parameters
    ----------
    config
        From :func:`load_config`, or any mapping; it is left as it is.
    argv
        Arguments without ``--config`` and its value.

    Returns
    -------
    Located
        The merged options.

    Raises
    ------
    InputError
        If an argument is none of these forms or names an unknown section.
    """
    merged = _copy(config)
    index = 0
    while index < len(argv):
        token = argv[index]
        key, equals, attached = token.removeprefix("--").partition("=")
        if not _KEY.fullmatch(key) or not token.startswith("--"):
            raise InputError(f"unexpected argument {token!r}; options are written --key value or --key=value")
        index += 1
        texts = [attached] if equals else []
        while not equals and index < len(argv) and _is_value(argv[index]):
            texts.append(argv[index])
            index += 1
        target, name = _target(merged, key.replace("-", "_"))
        if texts:
            values = [parse_value(text, f"--{key}") for text in texts]
            target[name] = values[0] if len(values) == 1 else values
            target.raw[name] = texts[0] if len(texts) == 1 else texts
            target.origin[name] = "command line"
        else:
            target[name.removeprefix("no_")] = not name.startswith("no_")
            target.raw.pop(name.removeprefix("no_"), None)
            target.origin[name.removeprefix("no_")] = _BARE
    return merged


def parse_section(section: str, values: Mapping[str, Any] | None, schema: type[_Schema]) -> _Schema:
    """Turn a section into its dataclass.

    Parameters
    ----------
    section
        Name for messages, such as "organizer"; "" where the keys are options of a command.
    values
        The section's keys and values; None counts as empty.
    schema
        A dataclass with fields of type int, float, bool, str, Literal, list of these, or one of these or
        None. A bool is no int, an int is a float too, and a lone value stands for a list of one.

    Returns
    -------
    _Schema
        An instance; absent keys have their defaults.

    Raises
    ------
    InputError
        If a key is unknown or missing, or a value has the wrong type.

    Examples
    --------
    >>> parse_section("recorder", {"sample_every": 5}, RecorderOptions).sample_every
    5
    """
    values = {} if values is None else values
    fields = _fields(schema)
    for key in values:
        if key not in fields:
            known = f"known keys: {', '.join(fields)}"
            raise InputError(f"{_place(values, key)}{section}: unknown key {key!r}; {suggest(key, fields)}{known}")
    named = {key: f"{section}.{key}" if section else f"--{key.replace('_', '-')}" for key in fields}
    checked = {key: _checked(values, key, hint, named[key]) for key, hint in fields.items() if key in values}
    try:
        return schema(**checked)
    except TypeError as error:
        raise InputError(f"{section}: {str(error).partition(') ')[2] or error}") from error


def split_trl(values: Mapping[str, Any], config_classes: tuple[type, ...]) -> dict[str, Any]:
    """Check the keys outside the sections against the dataclasses that will take them.

    Parameters
    ----------
    values
        Merged options; the sections in it are left out of the answer.
    config_classes
        Dataclasses, for example TRL's ScriptArguments, SFTConfig and ModelConfig.

    Returns
    -------
    dict[str, Any]
        Key -> value, of plain types, with numeric strings (``"1e-5"``) turned into numbers where the field
        takes no string. Fields of types other than those of :func:`parse_section`, dict and Enum pass
        unchecked.

    Raises
    ------
    InputError
        If no class has the key, or a value has the wrong type.
    """
    fields: dict[str, Any] = {}
    for config_class in config_classes:
        fields = {**_fields(config_class), **fields}
    answer: dict[str, Any] = {}
    for key in values:
        if key in SECTIONS:
            continue
        if key not in fields:
            raise InputError(f"{_place(values, key)}unknown key {key!r}; {_why_unknown(key, fields, config_classes)}")
        answer[key] = _plain(_checked(values, key, fields[key], key, coerce=True))
    return answer


def _why_unknown(key: str, fields: Mapping[str, Any], config_classes: tuple[type, ...]) -> str:
    """Say what to do about a key that none of TRL's classes has."""
    own = {name for spec in registered_organizers() for name in _fields(organizer_schema(spec))}
    for section, known in zip(SECTIONS, (own, _fields(RecorderOptions)), strict=True):
        if key in known:
            return f"it belongs in the section '{section}:', on the command line --{section}.{key}"
    if key == "env":
        return "environment variables are not set here; set them before the command: NAME=value sdo ..."
    names = ", ".join(config_class.__name__ for config_class in config_classes)
    sections = ", ".join(SECTIONS)
    return f"{suggest(key, [*fields, *SECTIONS])}expected a field of {names}, or a section ({sections})"


def _is_value(token: str) -> bool:
    """Tell a value from the next key: negative numbers are values."""
    return not token.startswith("-") or not isinstance(parse_value(token, ""), str)


def _section(values: Mapping[str, Any], section: str) -> Located:
    """Return a section as a mapping, empty where nothing was written under it."""
    found = values.get(section)
    if found is None:
        return Located()
    if not isinstance(found, Mapping):
        raise InputError(f"{_place(values, section)}{section}: got {shown(found)}, expected keys and values under it")
    return _copy(found)


def _target(merged: Located, key: str) -> tuple[Located, str]:
    """Return the mapping and the name that a key of the command line means."""
    section, dot, name = key.rpartition(".")
    if not dot and key in SECTIONS:
        raise InputError(f"--{key} is a section; write --{key}.KEY value")
    if not dot:
        return merged, key
    if section not in SECTIONS:
        raise InputError(
            f"--{key}: unknown section {section!r}; {suggest(section, SECTIONS)}known: {', '.join(SECTIONS)}"
        )
    merged[section] = _section(merged, section)
    return merged[section], name


def _copy(values: Mapping[str, Any]) -> Located:
    """Copy a mapping one level deep, with its places."""
    copied = Located(values, getattr(values, "origin", None))
    copied.raw = dict(getattr(values, "raw", {}))
    return copied


def _fields(schema: type) -> dict[str, Any]:
    """Return name -> type of the fields that a dataclass takes."""
    hints = get_type_hints(schema)
    return {item.name: hints[item.name] for item in dataclasses.fields(schema) if item.init}


def _checked(values: Mapping[str, Any], key: str, hint: Any, name: str, *, coerce: bool = False) -> Any:
    """Return the value of a key as `hint` wants it, or say what was expected."""
    value = values[key]
    converted = convert(value, hint)
    raw = getattr(values, "raw", {})
    if converted is NO_MATCH and key in raw:
        # On the command line nobody can put a number in quotes to make it a string.
        converted = convert(raw[key], hint)
    if converted is NO_MATCH and coerce and isinstance(value, str):
        number = parse_value(value, name) if _NUMERIC.match(value) else value
        converted = convert(number, hint)
    if converted is NO_MATCH and getattr(values, "origin", {}).get(key) == _BARE:
        raise InputError(f"--{name} came without a value, expected {described(hint)}")
    if converted is NO_MATCH:
        raise InputError(f"{_place(values, key)}{name}: got {shown(value)}, expected {wanted(hint, value)}")
    return converted


def _place(values: Mapping[str, Any], key: str) -> str:
    """Return "file:line: " of a key where it is known."""
    origin = getattr(values, "origin", {}).get(key)
    return "" if origin is None else f"{origin}: "


def _plain(value: Any) -> Any:
    """Turn mappings with places into plain dicts, throughout."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
