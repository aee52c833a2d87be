"""One measure for all files that are compared: which metric, filter, evaluation and step, from what each file has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from sdo.errors import InputError

_PREFERRED = ("exact_match", "acc", "acc_norm")
_NAMED = 5  # steps named in a message
_Name = TypeVar("_Name")


def common_metric(
    held: Mapping[str, Mapping[str, Sequence[str]]], metric: str | None, under: str | None
) -> tuple[str, str]:
    """Choose a metric and a filter for all sample logs.

    Parameters
    ----------
    held
        File to filter to the metrics whose values lie in [0, 1] in all rows of that filter, in the order of the file.
    metric, under
        What was asked for, each; None to choose it: the first filter of the first file under which all files have a
        metric (the one asked for) in [0, 1]; exact_match, acc, acc_norm or else the first of those metrics.

    Returns
    -------
    metric, filter

    Raises
    ------
    InputError
        If a file lacks the filter that was asked for, or the files have none in common that will do.
    """
    for file, filters in held.items():
        if under is not None and under not in filters:
            raise InputError(f"{file} has no filter {under!r}; filters there: {', '.join(filters)}; fix: --filter")
    there = list(held.values())
    common = _in_each([list(filters) for filters in there]) if under is None else [under]
    for one in common:
        usable = [name for name in there[0][one] if all(name in other[one] for other in there)]
        if metric in usable:
            return str(metric), one
        if metric is None and usable:
            return next((name for name in _PREFERRED if name in usable), usable[0]), one
    if metric is not None and common:
        return metric, common[0]  # reading it names the row that does not fit
    said = {
        file: ", ".join(f"{', '.join(names) or 'none'} (filter {one})" for one, names in filters.items())
        for file, filters in held.items()
    }
    raise InputError(
        f"{_which(said)}: no metric whose values lie in [0, 1] in all rows{_in_all(said)}; metrics in [0, 1] there: "
        f"{_listed(said)}; fix: --metric, --filter, or give logs that have one"
    )


def common_evaluation(
    held: Mapping[str, Sequence[str]], usable: Mapping[str, Sequence[str]], evaluation: str | None
) -> str:
    """Choose an evaluation for all run folders.

    Parameters
    ----------
    held
        Folder to its evaluations.
    usable
        Folder to those with all scores in [0, 1].
    evaluation
        What was asked for; None to choose it: ``correct``, or else the only usable one that all have.

    Raises
    ------
    InputError
        If a folder lacks the evaluation that was asked for, or it is open which one to take.
    """
    names = _in_each(held.values())
    if evaluation is None:
        fit = _in_each(usable.values())
        evaluation = "correct" if "correct" in names else fit[0] if len(fit) == 1 else None
        which = "which evaluation is meant is open"
    else:
        which = f"no evaluation {evaluation!r}{_in_all(held)}"
    if evaluation not in names:
        said = {
            folder: f"{', '.join(names)} (with all scores in [0, 1]: {', '.join(usable[folder]) or 'none'})"
            for folder, names in held.items()
        }
        raise InputError(f"{_which(said)}: {which}; there: {_listed(said)}; fix: --evaluation NAME")
    return evaluation


def common_step(held: Mapping[str, Sequence[int]], evaluation: str, step: int | None) -> int:
    """Choose a step for all run folders.

    Parameters
    ----------
    held
        Folder to the steps at which it was evaluated, ascending.
    evaluation
        Its name, for messages.
    step
        What was asked for; None for the latest that all have.

    Raises
    ------
    InputError
        If a folder was not evaluated at the step that was asked for, or the folders have no step in common.
    """
    common = _in_each(held.values())
    if step is None and common:
        return common[-1]
    if step in common:
        return step
    said = {folder: ", ".join(map(str, steps[-_NAMED:])) for folder, steps in held.items()}
    if step is None:
        raise InputError(
            f"{_which(said)}: {evaluation} was evaluated at no step that all have; the last steps are {_listed(said)}; "
            "fix: give runs that were evaluated at the same step"
        )
    raise InputError(
        f"{_which(said)}: {evaluation} was not evaluated at step {step}{_in_all(said)}; the last steps are "
        f"{_listed(said)}; fix: --step"
    )


def _in_each(held: Iterable[Sequence[_Name]]) -> list[_Name]:
    """What all have, in the order of the first."""
    first, *others = held
    return [one for one in first if all(one in other for other in others)]


def _which(said: Mapping[str, str]) -> str:
    return next(iter(said)) if len(said) == 1 else f"{len(said)} predictions"


def _in_all(said: Mapping[str, object]) -> str:
    return "" if len(said) == 1 else " in all of them"


def _listed(said: Mapping[str, str]) -> str:
    if len(said) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{file}: {text}" for file, text in said.items())
