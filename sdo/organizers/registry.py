"""The organizers that are known by name: to commands, run files, re-draws, the doctor and tables alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError, suggest
from sdo.organizers.plan import Organizer
from sdo.organizers.sdo import SDO, Graph, Locality, OnInvalid, Visit
from sdo.organizers.uniform import Uniform

GROUP = "sdo.organizers"  # entry points of other packages
NEEDS = ("embeddings", "groups", "lengths", "features")


@dataclass(frozen=True, eq=False)
class OrganizerInputs:
    """What an organizer is made from, beside its options.

    Attributes
    ----------
    n_samples
        Number of samples N.
    embeddings
        One row a sample, or None.
    groups, lengths, features
        What other organizers ask for, or None.
    """

    n_samples: int
    embeddings: Embeddings | None = None
    groups: Any = None
    lengths: Any = None
    features: Any = None


@dataclass(frozen=True)
class OrganizerSpec:
    """An organizer as others know it.

    Attributes
    ----------
    name
        As in ``sdo plan --organizer NAME``, ``organizer.name`` of run files, and run.json; the organizer's own.
    make
        Called with :class:`OrganizerInputs`, then the options and ``seed`` by keyword; returns the organizer.
    options
        A dataclass whose fields, all with defaults, are the options; ``metadata={"help": …}`` of a field explains it.
        ``seed`` is not among them.
    needs
        Which inputs it cannot do without: some of "embeddings", "groups", "lengths", "features".
    """

    name: str
    make: Callable[..., Organizer]
    options: type
    needs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.replace("-", "_").isidentifier():
            raise InputError(f"the name of an organizer is {self.name!r}; expected letters, digits, - and _")
        if not isinstance(self.options, type) or not dataclasses.is_dataclass(self.options):
            raise InputError(f"options of organizer {self.name!r} is {self.options!r}; expected a dataclass")
        for option in dataclasses.fields(self.options):
            if option.name in ("name", "embeddings", "seed", "id_column"):
                raise InputError(
                    f"organizer {self.name!r} has an option {option.name!r}, which every organizer has; expected "
                    "others; fix: leave it out"
                )
            if option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING:
                raise InputError(f"option {option.name!r} of organizer {self.name!r} has no default; expected one")
        unknown = sorted(set(self.needs) - set(NEEDS))
        if unknown:
            raise InputError(f"organizer {self.name!r} needs {unknown[0]!r}; expected some of {', '.join(NEEDS)}")

    @property
    def option_names(self) -> tuple[str, ...]:
        """The names of its options, in their order."""
        return tuple(option.name for option in dataclasses.fields(self.options))


@dataclass(frozen=True)
class SDOOptions:
    """The options of :class:`~sdo.SDO`, which checks their ranges."""

    k: int = dataclasses.field(default=4, metadata={"help": "neighbors per anchor"})
    delta_tau: float = dataclasses.field(default=2, metadata={"help": "rise of the exposure threshold per epoch"})
    retain: float = dataclasses.field(default=0.2, metadata={"help": "share of hot samples that stay in the pool"})
    visit: Visit = dataclasses.field(
        default="cover", metadata={"help": "whether brought neighbors still anchor: no (cover), yes (anchor)"}
    )
    graph: Graph = dataclasses.field(default="dynamic", metadata={"help": "neighbors in the pool, or over all samples"})
    locality: Locality = dataclasses.field(
        default="knn", metadata={"help": "real neighbors, random ones, or none (shuffle)"}
    )
    exposure: bool = dataclasses.field(default=True, metadata={"help": "false: every sample stays in the pool"})
    on_invalid: OnInvalid = dataclasses.field(
        default="raise", metadata={"help": "rows with NaN or zero: refuse them, or let them anchor alone (isolate)"}
    )


@dataclass(frozen=True)
class UniformOptions:
    """:class:`~sdo.Uniform` has none but the seed."""


def _make_sdo(inputs: OrganizerInputs, **options: Any) -> Organizer:
    assert inputs.embeddings is not None  # noqa: S101 - make_organizer has looked
    return SDO(inputs.embeddings, **options)


def _make_uniform(inputs: OrganizerInputs, **options: Any) -> Organizer:
    return Uniform(inputs.n_samples if inputs.embeddings is None else inputs.embeddings, **options)


_SPECS: dict[str, OrganizerSpec] = {
    "sdo": OrganizerSpec("sdo", _make_sdo, SDOOptions, frozenset({"embeddings"})),
    "uniform": OrganizerSpec("uniform", _make_uniform, UniformOptions),
}


def register_organizer(spec: OrganizerSpec, *, replace: bool = False) -> None:
    """Make an organizer known by its name; an installed package does it with an entry point "sdo.organizers".

    Parameters
    ----------
    spec
        The organizer.
    replace
        Whether it may take the place of one of the same name.

    Raises
    ------
    InputError
        If the name is taken.

    Examples
    --------
    >>> from sdo.organizers.registry import OrganizerSpec, UniformOptions, register_organizer
    >>> register_organizer(OrganizerSpec("uniform", lambda inputs, seed: None, UniformOptions))
    Traceback (most recent call last):
    ...
    sdo.errors.InputError: an organizer 'uniform' is registered already; expected a new name; fix: replace=True
    """
    if not isinstance(spec, OrganizerSpec):
        raise InputError(f"register_organizer got {type(spec).__name__}; expected an OrganizerSpec")
    if spec.name in _SPECS and not replace:
        raise InputError(f"an organizer {spec.name!r} is registered already; expected a new name; fix: replace=True")
    _SPECS[spec.name] = spec


def organizer_names() -> tuple[str, ...]:
    """Return the names of all organizers, those of installed packages among them."""
    return tuple(dict.fromkeys([*_SPECS, *(entry.name for entry in entry_points(group=GROUP))]))


def registered_organizers() -> tuple[OrganizerSpec, ...]:
    """Return those that are here without loading another package."""
    return tuple(_SPECS.values())


def organizer_spec(name: str) -> OrganizerSpec:
    """Return what is known of an organizer; a package that brings it is loaded.

    Raises
    ------
    InputError
        If there is none of this name, or its package cannot be loaded.
    """
    if name not in _SPECS:
        for entry in entry_points(group=GROUP):
            if entry.name != name:
                continue
            try:
                spec = entry.load()
            except Exception as error:  # whatever another package does when it is imported
                raise InputError(
                    f"organizer {name!r} of {entry.value} cannot be loaded: {type(error).__name__}: {error}"
                ) from error
            if not isinstance(spec, OrganizerSpec) or spec.name != name:
                raise InputError(
                    f"entry point {name!r} of {GROUP} is {entry.value}; expected an OrganizerSpec {name!r}"
                )
            _SPECS[name] = spec
            break
        else:
            known = organizer_names()
            raise InputError(f"no organizer {name!r}; {suggest(str(name), known)}known: {', '.join(known)}")
    return _SPECS[name]


def make_organizer(name: str, inputs: OrganizerInputs, options: Mapping[str, Any]) -> Organizer:
    """Make an organizer by its name.

    Parameters
    ----------
    name
        Of a registered organizer.
    inputs
        What it is made from.
    options
        Its options and ``seed``; what is left out has its default.

    Raises
    ------
    InputError
        If name or option is unknown, an input that it needs is missing, or it refuses an option.
    """
    spec = organizer_spec(name)
    for need in NEEDS:
        if need in spec.needs and getattr(inputs, need) is None:
            raise InputError(f"organizer {name!r} needs {need}, and there are none; expected {_NEED_WORDS[need]}")
    known = (*spec.option_names, "seed")
    for option in options:
        if option not in known:
            raise InputError(
                f"organizer {name!r} has no option {option!r}; {suggest(option, known)}known: {', '.join(known)}"
            )
    organizer = spec.make(inputs, **options)
    if organizer.name != name:
        raise InputError(f"organizer {name!r} calls itself {organizer.name!r}; expected the name it is registered by")
    return organizer


_NEED_WORDS = {
    "embeddings": "a matrix, one row a sample; fix: sdo embed makes one",
    "groups": "the group of each sample",
    "lengths": "the length of each sample",
    "features": "the features of each sample",
}


def option_help(spec: OrganizerSpec) -> list[tuple[str, str]]:
    """Return each option with what it does and its default, for help texts."""
    hints, lines = get_type_hints(spec.options), []
    for option in dataclasses.fields(spec.options):
        factory = option.default_factory
        default = option.default if factory is dataclasses.MISSING else factory()
        choices = get_args(hints[option.name]) if get_origin(hints[option.name]) is Literal else ()
        known = f" ({', '.join(map(str, choices))})" if choices else ""
        lines.append((option.name, f"{option.metadata.get('help', '')}{known} (default: {default})".strip()))
    return lines
