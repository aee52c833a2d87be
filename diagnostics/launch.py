"""Which trainers and launches are supported; the rest is refused by name, in the same words everywhere."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from sdo.errors import InputError


def check_launch(trainer_class: type, args: Any, supported: str) -> None:
    """Refuse trainers whose batches are not rows of their dataset, and runs on several devices.

    Parameters
    ----------
    trainer_class
        The trainer's class, or that of its arguments.
    args
        The trainer's arguments.
    supported
        The TRL class that is supported.

    Raises
    ------
    InputError
        Naming what came.
    """
    lineage = [cls for cls in trainer_class.__mro__ if cls.__module__.startswith("trl.")]
    base = [cls for cls in lineage if not cls.__name__.startswith("_")]
    # The first one: TRL's own descendants of SFTTrainer make their data themselves.
    if base and base[0].__name__ != supported:
        raise InputError(
            f"got a {base[0].__name__}; this version supports SFTTrainer and transformers.Trainer; "
            "mend: use one of them"
        )
    devices = max(int(getattr(args, "world_size", 1)), int(getattr(args, "n_gpu", 1)))
    if devices > 1:
        raise InputError(
            f"training runs on {devices} devices; this version supports one; mend: start one process and set "
            "CUDA_VISIBLE_DEVICES to one device"
        )


def require_positions(dataset: Any) -> None:
    """Refuse an iterable training dataset, whose rows have no positions to be known and asked for by.

    Parameters
    ----------
    dataset
        The training dataset.

    Raises
    ------
    InputError
        If it is not map-style.
    """
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not map_style or isinstance(dataset, IterableDataset):
        raise InputError(
            "the training dataset is iterable; expected a map-style dataset, whose rows have positions; "
            "mend: load it without streaming"
        )


def no_ids_came() -> str:
    """Return the words for a step whose batches brought no sample ids to the model."""
    return (
        "no sample ids reached the model in this step; expected them with each batch. They travel as one more "
        "argument: a compute_loss of your own must pass **inputs on to the model, and nothing may replace the data "
        "loader or the model after training began"
    )
