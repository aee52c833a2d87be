"""Which trainers and launches are supported; the rest is refused by name, in the same words everywhere."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from diagnostics.kinds import TrainerKind, kind_of
from sdo.errors import InputError


def check_launch(cls: type, args: Any) -> TrainerKind:
    """Refuse trainers whose batches are not rows of their dataset, and launches that are not supported.

    Parameters
    ----------
    cls
        The trainer's class, or that of its arguments.
    args
        The trainer's arguments.

    Returns
    -------
    TrainerKind
        What has to be known of the trainer.

    Raises
    ------
    InputError
        Naming what came.
    """
    kind = kind_of(cls)
    check_devices(args)
    return kind


def check_devices(args: Any) -> None:
    """Refuse runs on several devices.

    Parameters
    ----------
    args
        The trainer's arguments.

    Raises
    ------
    InputError
        Naming how many.
    """
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
        "no sample ids reached the model in this step; expected them with each batch. They travel on its input_ids: a "
        "compute_loss of your own must hand that very tensor to the model, and nothing may replace the data loader or "
        "the model after training began"
    )
