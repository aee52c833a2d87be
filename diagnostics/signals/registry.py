"""The signals that are known by a word: to the recorder, run files, the doctor and the probe alike."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence

from diagnostics.signals.base import Signal
from diagnostics.signals.head import HeadOnly
from diagnostics.signals.hidden import Hidden
from diagnostics.signals.samples import Samples
from diagnostics.signals.weight import Weight
from sdo.errors import InputError, suggest

_ENTRY_POINTS = "sdo.signals"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
DEFAULT_SIGNALS = ("weight", "hidden")

_known: dict[str, type[Signal]] = {one.word: one for one in (Weight, Hidden, HeadOnly, Samples)}
_loaded = False


def register_signal(signal: type[Signal], *, replace: bool = False) -> type[Signal]:
    """Make a signal known by its word, to ``signals=("…",)`` and to run files; a decorator too.

    A package makes its own known without a call by an entry point ``sdo.signals`` that names the class.

    Parameters
    ----------
    signal
        The class.
    replace
        Whether another one of that word may be replaced.

    Raises
    ------
    InputError
        If it is no :class:`Signal`, has no word or no ``silent``, or the word is taken.
    """
    if not (isinstance(signal, type) and issubclass(signal, Signal)):
        raise InputError(f"register_signal got {signal!r}; expected a class derived from diagnostics.Signal")
    word = getattr(signal, "word", None)
    if not isinstance(word, str) or not _NAME.fullmatch(word) or not isinstance(getattr(signal, "silent", None), str):
        raise InputError(
            f"signal {signal.__name__} has word = {word!r}; expected `word` of letters, digits, '_', '-' and '.', and "
            "`silent`, why it can stay without a gradient"
        )
    if word in _known and _known[word] is not signal and not replace:
        raise InputError(f"signal {word!r} is known already; expected another word; fix: replace=True")
    _known[word] = signal
    return signal


def known_signals() -> tuple[str, ...]:
    """Return the words of all signals, ours first."""
    global _loaded
    if not _loaded:
        _loaded = True
        for entry in importlib.metadata.entry_points(group=_ENTRY_POINTS):
            if entry.name not in _known:
                register_signal(entry.load())
    return tuple(_known)


def signals_of(wanted: Sequence[str | Signal], weight: str | None = None) -> tuple[Signal, ...]:
    """Return the signals that are asked for, ours before others, else in their order.

    Parameters
    ----------
    wanted
        Signals, or texts as ``"hidden"``, ``"weight:model.layers.3.mlp.down_proj.weight"``,
        ``"late=samples:model.layers.2?.mlp.down_proj.weight"``: name, word and target.
    weight
        The parameter of a ``weight`` that names none.

    Raises
    ------
    InputError
        If there is none, one is not known, or two have one name.

    Examples
    --------
    >>> signals_of(["hidden", "weight", "late=weight:lm_head.weight"])
    (Weight('weight'), Weight('late=weight:lm_head.weight'), Hidden('hidden'))
    """
    if isinstance(wanted, str) or not isinstance(wanted, Sequence) or not wanted:
        raise InputError(f"signals are {wanted!r}; expected some of {', '.join(known_signals())}")
    found = [one if isinstance(one, Signal) else _of_text(one, wanted) for one in wanted]
    if weight is not None:
        found = [Weight(weight, name=one.name) if type(one) is Weight and one.target is None else one for one in found]
    for one in found:
        if not isinstance(one.name, str) or not _NAME.fullmatch(one.name):
            raise InputError(
                f"a signal has name {one.name!r}; expected letters, digits, '_', '-' and '.', since it names a folder"
            )
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(
            f"two signals are called {twice!r}; expected a name each; fix: '{twice}2={found[-1].word}:…', or name='…'"
        )
    order = known_signals()
    return tuple(sorted(found, key=lambda one: order.index(one.word) if one.word in order else len(order)))


def _of_text(text: object, wanted: Sequence[object]) -> Signal:
    known = known_signals()
    name, word, target = None, text, None
    if isinstance(text, str):
        head, colon, tail = text.partition(":")
        name, equal, word = head.rpartition("=")
        name, target = name if equal else None, tail if colon else None
    if not isinstance(word, str) or word not in known or target == "":
        raise InputError(
            f"signals are {list(wanted)}; {suggest(str(word), known)}expected some of {', '.join(known)}, with a "
            "target behind a colon where one is wanted, as 'weight:lm_head.weight'"
        )
    return _known[word](target, name=name)
