"""YAML that does not lie: scalars by the core schema of YAML 1.2, no key given twice, a place for every key.

PyYAML follows YAML 1.1, in which ``1e-5`` is a string, ``no`` is false, ``010`` is eight and ``1:30`` is
ninety. Here ``1e-5`` and ``1E5`` are numbers, ``010`` is ten, and only ``true`` and ``false`` (in any case)
are booleans; ``no``, ``yes``, ``on``, ``off`` and dates stay strings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from sdo.errors import InputError

_TAG = "tag:yaml.org,2002:"


class Located(dict[str, Any]):
    """A mapping that remembers where each key was written, for messages.

    Attributes
    ----------
    origin
        Key -> place, such as "run.yaml:7".
    raw
        Key -> text as typed on the command line, so that ``--run_name 7`` can still be a string.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, origin: Mapping[str, str] | None = None) -> None:
        super().__init__(values or {})
        self.origin: dict[str, str] = dict(origin or {})
        self.raw: dict[str, Any] = {}


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2, without duplicate keys, with places."""

    # Emptied, not extended: the inherited resolvers are those of YAML 1.1.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - declared so in the base class

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping and look for duplicates, before ``<<`` brings in keys that may be overridden."""
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], str] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise InputError(f"{self.place(key)}: a key is a {key.id}, expected a name")
            if key.tag not in (_TAG + "str", _TAG + "merge"):
                raise InputError(f"{self.place(key)}: the key {key.value} is no name; put it in quotes")
            if (key.tag, key.value) in first:
                before = first[key.tag, key.value]
                raise InputError(f"{self.place(key)}: {key.value!r} is given twice (first at {before}); keep one")
            first[key.tag, key.value] = self.place(key)
        return node

    def place(self, node: yaml.Node) -> str:
        """Return file and line of a node."""
        return f"{self.name}:{node.start_mark.line + 1}"

    def construct_located(self, node: yaml.MappingNode) -> Located:
        """Build a mapping that knows its places; merged keys keep the place where they were written."""
        values = self.construct_mapping(node, deep=True)
        return Located(
            {str(key): value for key, value in values.items()},
            {k.value: self.place(k) for k, _ in node.value},
        )

    def construct_plain(self, node: yaml.ScalarNode) -> int | float | bool:
        """Read a number or a truth value as the core schema of YAML 1.2 does."""
        text = node.value.lower()
        if node.tag == _TAG + "bool":
            return {"true": True, "false": False}[text]
        if node.tag == _TAG + "int":
            # "010" is ten: the prefix decides the base only for 0x and 0o.
            return int(text, 0 if text[:2] in ("0x", "0o") else 10)
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
# Tag, pattern, possible first characters. The first match wins: integers stand before floats, which they
# match too.
for _name, _pattern, _first in (
    ("bool", "(?i:true|false)", "tTfF"),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", "<<", "<"),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), list(_first))
for _name in ("bool", "int", "float"):
    _Loader.add_constructor(_TAG + _name, _Loader.construct_plain)
_Loader.add_constructor(_TAG + "map", _Loader.construct_located)


def parse_yaml(text: str, name: str) -> Any:
    """Parse one YAML document.

    Parameters
    ----------
    text
        The document.
    name
        What messages call it, such as the path.

    Returns
    -------
    Any
        Mappings are :class:`Located`; None for an empty document.

    Raises
    ------
    InputError
        If it is not YAML, or a key is given twice or is not a name; the message gives `name` and the line.
    """
    try:
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_data()
    except InputError:
        raise
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise InputError(f"{name}{line}: not YAML ({error.problem or error.context})") from error
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:
        # ValueError and KeyError: an explicit tag such as `!!int` before something else.
        raise InputError(f"{name}: not YAML ({error})") from error


def parse_value(text: str, where: str) -> Any:
    """Read a value of the command line, called `where` in messages, by the same scalar rules.

    Raises
    ------
    InputError
        If a value that starts with ``{`` or ``[`` is not YAML.
    """
    if text.lstrip().startswith(("{", "[")):
        return parse_yaml(text, where)
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    if tag == _TAG + "null":
        return None
    if tag in (_TAG + "bool", _TAG + "int", _TAG + "float"):
        return loader.construct_plain(yaml.ScalarNode(tag, text))
    return text
