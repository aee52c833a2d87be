"""Which trainers and launches are supported; the rest is refused by name, in the same words everywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from sdo.errors import InputError
from sdo.trainers.ids import IGNORED
from sdo.trainers.trainer_types import TrainerKind, kind_of


def check_launch(cls: type, args: Any) -> TrainerKind:
    """Refuse trainers whose batches are not rows of their dataset, and launches whose gradients cannot be followed.

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
    """Refuse launches whose batches or gradients cannot be followed; see :func:`process_refusals`.

    Parameters
    ----------
    args
        The trainer's arguments.

    Raises
    ------
    InputError
        Naming what came.
    """
    for refusal in process_refusals(args):
        raise InputError(refusal)


def process_refusals(args: Any) -> Iterator[str]:
    """Yield why the processes and devices of a launch are not supported, each with its remedy.

    Parameters
    ----------
    args
        The trainer's arguments.
    """
    gpus = int(getattr(args, "n_gpu", 1))
    if gpus > 1:
        yield (
            f"training runs on {gpus} devices in one process (nn.DataParallel), where gradients of copies cannot be "
            f"told apart; expected one process a device; fix: torchrun --nproc-per-node {gpus} …, or "
            "CUDA_VISIBLE_DEVICES set to one device"
        )
    if _uses_deepspeed(args):
        yield (
            "training runs under DeepSpeed, whose engine updates the weights inside backward and keeps the gradients; "
            "expected one process, DDP or FSDP2; fix: launch without DeepSpeed, with fsdp=True and "
            "fsdp_config={'version': 2} where memory needs sharding"
        )
    if _fsdp_version(args) == 1:
        yield (
            "training runs under FSDP version 1, which flattens parameters so that none has a gradient of its own; "
            "expected one process, DDP or FSDP2; fix: fsdp_config={'version': 2}, with accelerate launch "
            "fsdp_version: 2"
        )
    parallel = getattr(args, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        size = int(getattr(parallel, name, 1) or 1)
        if size > 1:
            yield (
                f"parallelism_config has {name} = {size}, so that several processes share a batch; expected each to "
                f"have batches of its own; fix: {name}=1, with fsdp_config={{'version': 2}} where memory needs "
                "sharding"
            )
    loaders = getattr(args, "accelerator_config", None)
    for name, refused, fix in (
        ("split_batches", True, "leave it out"),
        ("dispatch_batches", True, "leave it out"),
        ("even_batches", False, "leave it True; an organizer's batches divide evenly anyway"),
    ):
        if getattr(loaders, name, None) is refused:
            yield (
                f"accelerator_config has {name}={refused}; it changes what a step trains, or lets a process run out of "
                f"batches; expected the default; fix: {fix}"
            )


def _uses_deepspeed(args: Any) -> bool:
    from accelerate.state import AcceleratorState, DistributedType, is_initialized  # a loop may do without it

    asked = bool(getattr(args, "deepspeed", None)) or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    return asked or (is_initialized() and AcceleratorState().distributed_type == DistributedType.DEEPSPEED)


def _fsdp_version(args: Any) -> int | None:
    """The version of FSDP that a launch asks for, by arguments or by accelerate; None without FSDP."""
    from accelerate.state import AcceleratorState, is_initialized

    plugin = getattr(AcceleratorState(), "fsdp_plugin", None) if is_initialized() else None
    if plugin is not None:
        return int(getattr(plugin, "fsdp_version", 1))
    if getattr(args, "fsdp", None):
        settings = getattr(args, "fsdp_plugin_args", None) or {}
        return int(settings.get("fsdp_version") or (getattr(args, "fsdp_config", None) or {}).get("version") or 1)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        return int(os.environ.get("FSDP_VERSION", "1"))
    return None


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
            "fix: load it without streaming"
        )


def require_trained_tokens(dataset: Any, *, shifts: bool) -> None:
    """Refuse a training dataset with labels of which none is trained on: its loss is 0 or no number at every step.

    Rows are looked at up to the first that has such a label.

    Parameters
    ----------
    dataset
        The training dataset; one without a column of labels passes.
    shifts
        Whether the model predicts label t + 1 at position t, so that a row's first label does not count.

    Raises
    ------
    InputError
        If no row has one.
    """
    dataset = getattr(dataset, "inner", dataset)
    columns = getattr(dataset, "column_names", None) or ()
    if not {"labels", "input_ids"}.issubset(columns) or not len(dataset) or dataset.format["type"] == "custom":
        return
    dataset = dataset.with_format(None)
    for labels, ids in zip(dataset["labels"], dataset["input_ids"], strict=True):
        if not isinstance(labels, list) or not isinstance(ids, list):
            return
        first = 1 if shifts and len(labels) == len(ids) else 0
        if any(label != IGNORED for label in labels[first:]):
            return
    raise InputError(nothing_trained(f"the training dataset's {len(dataset)} row(s)"))


def nothing_trained(samples: str) -> str:
    """Return the words for samples of which no token is trained on."""
    return (
        f"no token of {samples} is trained on: every label is masked, or the only one of its row, so that the loss is "
        "0 whatever the model does; expected completions with text; fix: look at the columns that prompts and "
        "completions are taken from, and at max_length"
    )


def no_ids_came() -> str:
    """Return the words for a step whose batches brought no sample ids to the model."""
    return (
        "no sample ids reached the model in this step; expected them with each batch. They travel on its input_ids: a "
        "compute_loss of your own must hand that very tensor to the model, and nothing may replace the data loader or "
        "the model after training began"
    )
