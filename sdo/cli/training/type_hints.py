"""Whether a value fits a type hint, and what to say when it does not."""

from __future__ import annotations

import enum
import types
from typing import Any, Literal, Union, get_args, get_origin

from sdo.errors import suggest

_LISTED = 8  # choices named in a message
NO_MATCH = object()  # None is a value


def convert(value: Any, hint: Any) -> Any:
    """Return `value` as a value of the type `hint`, or NO_MATCH.

    Known are int, float, bool, str, None, Literal, Enum, dict, list of these and unions of these; other types
    take everything. A bool is no int, an int is a float too, and a lone value stands for a list of one.

    Parameters
    ----------
    value
        Anything that YAML holds.
    hint
        A type as :func:`typing.get_type_hints` gives it.

    Returns
    -------
    Any
        The value, as float or as a list where the hint wants it so.
    """
    if get_origin(hint) in (Union, types.UnionType):
        return _convert_union(value, get_args(hint))
    if get_origin(hint) is Literal:
        fits = any(type(choice) is type(value) and choice == value for choice in get_args(hint))
    elif hint is float:
        return _float(value)
    elif get_origin(hint) is list:
        (inner,) = get_args(hint)
        items = [convert(item, inner) for item in (value if isinstance(value, list) else [value])]
        return NO_MATCH if any(item is NO_MATCH for item in items) else items
    elif hint is dict or get_origin(hint) is dict:
        fits = isinstance(value, dict)
    elif hint in (int, str, bool, list, type(None)):
        fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        fits = value in _choices(hint)
    else:
        fits = True
    return value if fits else NO_MATCH


def _float(value: Any) -> Any:
    """Return an int or float as float, else NO_MATCH; an int may be too large for a float."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else NO_MATCH
    except OverflowError:
        return NO_MATCH


def _convert_union(value: Any, members: tuple[Any, ...]) -> Any:
    """Try the members in order, None first: a list would take it for a list of one.

    ``SomeEnum | str`` means the values of the Enum, because TRL looks the string up in it.
    """
    if any(isinstance(member, type) and issubclass(member, enum.Enum) for member in members):
        members = tuple(member for member in members if member is not str)
    converted = (convert(value, member) for member in sorted(members, key=lambda member: member is not type(None)))
    return next((item for item in converted if item is not NO_MATCH), NO_MATCH)


def _choices(hint: Any) -> list[Any]:
    """Return the values to which a Literal or an Enum restricts, none for other types."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        found = [choice for member in get_args(hint) for choice in _choices(member)]
        # `str | Literal[False]` takes any string: naming only False would mislead.
        return [] if str in get_args(hint) and not all(isinstance(choice, str) for choice in found) else found
    return [item.value for item in hint] if isinstance(hint, type) and issubclass(hint, enum.Enum) else []


def wanted(hint: Any, value: Any) -> str:
    """Describe what a field takes, and how to fix the value that came.

    Parameters
    ----------
    hint
        Type of the field.
    value
        The value that does not fit it.

    Returns
    -------
    str
        The end of a sentence, such as "bool; write true or false".
    """
    choices = _choices(hint)
    if choices:
        close = suggest(str(value), choices)
        more = f" and {len(choices) - _LISTED} more" if len(choices) > _LISTED else ""
        listed = ", ".join(map(repr, choices[:_LISTED]))
        return f"one of {listed}{more}" + (f"; {close}".rstrip() if close else "")
    text = described(hint)
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if bool in members and str(value).lower() in ("yes", "no", "on", "off"):
        return f"{text}; write true or false"
    if str in members and isinstance(value, int | float):
        return f"{text}; put it in quotes"
    if int in members and isinstance(value, float) and value.is_integer():
        return f"{text}; write {int(value)}"
    return text


def described(hint: Any) -> str:
    """Name a type for people: "int or null", "list of str"."""
    if hint is type(None):
        return "null"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(described(member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is list:
        return f"list of {described(get_args(hint)[0])}"
    return str(getattr(get_origin(hint) or hint, "__name__", hint))


def shown(value: Any) -> str:
    """Show a value and its type, cut to one short line."""
    name = "null" if value is None else type(value).__name__
    shown = "nothing" if value is None else repr(value)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({'dict' if name == 'Located' else name})"
