"""What an organizer cannot be attached to, by name, and which sample each row of a training dataset is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import Trainer

from sdo.checks import integer_array
from sdo.errors import InputError
from sdo.organizers.plan import Organizer, Plan
from sdo.organizers.steps import Layout
from sdo.trainers.completions import unfollowed
from sdo.trainers.dropped import empty_dataset
from sdo.trainers.generation import GenerationLayout
from sdo.trainers.requirements import check_launch, require_positions

RETIRED = "organizer_was_detached"
"""Marks what stands in a trainer for its sampler since another trainer's organizer took over its model."""


def refusals(trainer: Any, organizer: Organizer, *, id_column: str = "sample_id") -> list[str]:
    """Return every reason why :func:`attach` would refuse, each with its remedy; nothing is changed.

    Parameters
    ----------
    trainer, organizer, id_column
        As for :func:`attach`.
    """
    found = list(trainer_refusals(trainer))
    if not found:  # the rows of a trainer that is refused anyway, packed for instance, would only confuse
        try:
            dataset_ids, _ = dataset_ids_of(trainer, organizer, id_column)
            bound_plan(trainer, organizer, dataset_ids)
        except InputError as error:
            found.append(str(error))
    return found


def trainer_refusals(trainer: Any) -> Iterator[str]:
    """Yield, by name, what is not supported."""
    if not isinstance(trainer, Trainer):
        yield f"attach got a {type(trainer).__name__}; expected a transformers or TRL trainer"
        return
    replaced = vars(trainer).get("_get_train_sampler")
    if replaced is not None and not hasattr(replaced, RETIRED):
        yield (
            "this trainer already has an organizer or another replaced sampler; expected none; "
            "fix: call detach() on the handle of the first attach"
        )
    try:
        check_launch(type(trainer), getattr(trainer, "args", None))
    except InputError as error:
        yield str(error)
        return
    if trainer.train_dataset is None:
        yield "the trainer has no train_dataset; expected the dataset that the embeddings belong to"
    else:
        try:
            require_positions(trainer.train_dataset)
        except InputError as error:
            yield str(error)
    layout = GenerationLayout.of(trainer.args)
    if layout is not None:
        yield from unfollowed(trainer)
        try:
            _ = layout.optimizer_steps
        except InputError as error:
            yield str(error)
    for option, (is_set, why) in refused_options(trainer).items():
        if is_set:
            yield f"{option} is set; an organizer cannot work with it: {why}"


def refused_options(trainer: Any) -> dict[str, tuple[bool, str]]:
    """Return for each option whether it is set, why that cannot be, and the remedy."""
    args = trainer.args
    return {
        "packing": (getattr(args, "packing", False), "a packed row mixes samples; fix: packing=False"),
        "auto_find_batch_size": (
            getattr(args, "auto_find_batch_size", False),
            "the plan is bound to one batch size; fix: set per_device_train_batch_size",
        ),
        "restore_callback_states_from_checkpoint": (
            args.restore_callback_states_from_checkpoint,
            "it replaces the organizer's callback by a copy; fix: leave it False",
        ),
        "ignore_data_skip": (
            args.ignore_data_skip,
            "a resumed run would train other batches; fix: leave it False",
        ),
        "model_init": (
            trainer.model_init is not None,
            "train() would build a model that the organizer has not seen; fix: pass model=model_init()",
        ),
        "loss_type 'kto'": (
            getattr(trainer, "calculate_KL", False),
            "its KL term pairs each prompt with the answer before it in the dataset, batch by batch; fix: "
            "loss_type='apo_zero_unpaired', or record without an organizer",
        ),
        "train_sampling_strategy": (
            getattr(args, "train_sampling_strategy", "random") in ("group_by_length", "batch_rebalance"),
            "it would compete with the organizer; fix: leave it 'random'",
        ),
        "group_by_length": (  # its name in transformers 5.0
            getattr(args, "group_by_length", False),
            "it would compete with the organizer; fix: leave it False",
        ),
    }


def dataset_ids_of(trainer: Any, organizer: Organizer, id_column: str) -> tuple[NDArray[np.int64], str]:
    """The sample id of each dataset position, shape (n,), and where it comes from."""
    dataset = trainer.train_dataset
    n_rows, n_samples = len(dataset), organizer.n_samples
    if not n_rows:
        raise InputError(empty_dataset(trainer, n_samples))
    if id_column in (getattr(dataset, "column_names", None) or ()):
        return _ids_of_column(np.asarray(dataset[id_column]), organizer, id_column)
    remedy = (
        f"fix: dataset = dataset.add_column({id_column!r}, list(range(len(dataset)))) on the dataset that was "
        "embedded, before it is filtered or shuffled and before the trainer is built"
    )
    # GRPO's option of this name is about the order of drawing, which the organizer decides; no row moves.
    if getattr(trainer.args, "shuffle_dataset", False) and GenerationLayout.of(trainer.args) is None:
        raise InputError(
            f"shuffle_dataset moved the rows and the dataset has no column {id_column!r}; expected ids; {remedy}"
        )
    if n_rows != n_samples:
        raise InputError(
            f"the training dataset has {n_rows} rows, the embeddings have {n_samples}, and there is no column "
            f"{id_column!r} to tell which belongs to which; expected as many; "
            + (remedy if n_samples > n_rows else "fix: embed the dataset that is trained on")
        )
    assumed = "" if organizer.embeddings is None else ", whose order is taken to be that of the embeddings"
    return np.arange(n_rows), f"position in the training dataset{assumed}"


def _ids_of_column(column: NDArray[Any], organizer: Organizer, id_column: str) -> tuple[NDArray[np.int64], str]:
    """The embedding rows that a column names, by key or by number, and that in words."""
    n_samples, embeddings = organizer.n_samples, organizer.embeddings
    if embeddings is not None and embeddings.ids is not None:
        rows = embeddings.rows_of(column, f"column {id_column!r}")
        source = f"row of the embeddings whose id is in column {id_column!r}"
    elif column.dtype.kind in "iu":
        rows, source = integer_array(column, f"column {id_column!r}"), f"column {id_column!r}, row of the embeddings"
    else:
        raise InputError(
            f"column {id_column!r} holds {column.dtype}; expected integers, the rows of the embeddings; "
            f"fix: dataset.add_column({id_column!r}, list(range(len(dataset)))) before the trainer is built, or keep "
            "the ids with the embeddings: sdo embed --id-column"
        )
    unique, first = np.unique(rows, return_index=True)
    if len(unique) < len(rows):
        twice = int(np.setdiff1d(np.arange(len(rows)), first)[0])
        raise InputError(
            f"column {id_column!r} holds {len(rows) - len(unique)} repeated ids, the first {column[twice].item()!r} "
            f"in row {twice}; expected each once"
        )
    if len(unique) and (unique[0] < 0 or unique[-1] >= n_samples):
        raise InputError(
            f"column {id_column!r} reaches from {unique[0]} to {unique[-1]}, but the embeddings have {n_samples} "
            f"rows; expected ids 0 to {n_samples - 1}; fix: embed the same dataset that is trained on"
        )
    return rows, source


def batch_samples(trainer: Trainer) -> int:
    """Samples of one batch of the plan over all processes, B: an optimizer step's, or a generation batch's prompts."""
    args = trainer.args
    layout = GenerationLayout.of(args)
    if layout is not None:
        return layout.prompts
    return int(args.train_batch_size) * int(args.gradient_accumulation_steps) * int(args.world_size)


def bound_plan(trainer: Trainer, organizer: Organizer, dataset_ids: NDArray[np.int64]) -> Plan:
    """Return the organizer's plan at the trainer's batch size and layout, if its loader can carry it out.

    Raises
    ------
    InputError
        If the organizer refuses, or its steps differ in size.
    """
    args = trainer.args
    layout = Layout(processes=int(args.world_size), accumulation=int(args.gradient_accumulation_steps))
    plan = organizer.plan(batch_samples(trainer), rows=dataset_ids, layout=layout)
    if plan.ragged:
        raise InputError(
            f"the steps of organizer {organizer.name!r} differ in size; expected steps of one size, since the "
            "trainer's loader draws as many samples at each"
        )
    return plan
