"""Rows that went missing while a trainer prepared its dataset: how many, and why."""

from __future__ import annotations

from typing import Any


def why_dropped(trainer: Any) -> str:
    """Say which rows a trainer of this kind leaves out, as far as its class and ``max_length`` tell.

    Parameters
    ----------
    trainer
        A transformers or TRL trainer.

    Returns
    -------
    str
        Such as ``"rows whose completion lies beyond max_length=512"``; what TRL 1.16 does. Where it is another
        trainer, that the reason is unknown.
    """
    names = {cls.__name__ for cls in type(trainer).__mro__}
    length = getattr(trainer.args, "max_length", None)
    if length is None:
        return "rows for a reason that is unknown"
    if "SFTTrainer" in names:
        whole = getattr(trainer, "completion_only_loss", False) is False
        return f"rows {'without a token to train on' if whole else 'whose completion lies'} beyond max_length={length}"
    if names & {"DPOTrainer", "KTOTrainer"}:
        return f"rows whose prompt alone takes max_length={length} tokens or more"
    if "RewardTrainer" in names:
        return f"rows longer than max_length={length}"
    return "rows for a reason that is unknown"


def dropped_rows(trainer: Any, before: int | None, *, evaluation: bool = False) -> str | None:
    """Say how many rows the trainer's dataset has lost.

    Parameters
    ----------
    trainer
        As in :func:`why_dropped`.
    before
        Rows that were given to it; None where nobody counted them.
    evaluation
        Whether the evaluation dataset is meant.

    Returns
    -------
    str or None
        One line, None where none is missing or that is not known.
    """
    dataset = trainer.eval_dataset if evaluation else trainer.train_dataset
    if before is None or not hasattr(dataset, "__len__") or len(dataset) >= before:
        return None
    left = before - len(dataset)
    said = f"TRL dropped {left:,} of {before:,} {'evaluation ' if evaluation else ''}rows: {why_dropped(trainer)}"
    return f"{said}; scores are numbered by the rows that are left" if evaluation else said


def empty_dataset(trainer: Any, before: int | None = None) -> str:
    """Say that nothing is left to train on, and what to do about it.

    Parameters
    ----------
    trainer, before
        As in :func:`dropped_rows`.
    """
    count = "" if before is None else f"{before:,} "
    return (
        f"the training dataset is empty: TRL dropped all {count}{why_dropped(trainer)}; expected at least one row; "
        "fix: a larger max_length, or shorter rows"
    )
