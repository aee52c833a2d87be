"""Attach an organizer to a TRL or transformers trainer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from diagnostics.batch_ids import BatchIds, IdChannel
from diagnostics.completions import follow_completions, unfollowed
from diagnostics.launch import check_launch, no_ids_came, require_positions
from diagnostics.processes import Processes
from diagnostics.scalars import log_scalars
from diagnostics.scaling import loss_scale, update_was_skipped
from sdo.checkpoints import dataset_digest
from sdo.embeddings import within_batch_cosine
from sdo.errors import InputError
from sdo.grpo import CompletionCount, GenerationLayout, GenerationSampler, continue_generation
from sdo.organizer import Organizer
from sdo.plan import Plan, describe_difference
from sdo.sampler import OrganizedSampler, process_share

_STATE = "OrganizerCallback"


def attach(trainer: Trainer, organizer: Organizer, *, id_column: str = "sample_id") -> Handle:
    """Let an organizer decide the batches of a trainer.

    Parameters
    ----------
    trainer
        An ``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer`` or ``RewardTrainer`` of TRL (a pair is one sample) or a plain
        ``transformers.Trainer``, in one process or in each of several under DDP, with a map-style training dataset.
        Only this object changes.
    organizer
        :class:`~sdo.SDO` or :class:`~sdo.Uniform`.
    id_column
        Column of the training dataset that says which embedding row belongs to a sample: a key into the embeddings'
        ids where they bring some, else the row's number. Without the column the position serves, as long as preparing
        the dataset neither dropped nor shuffled anything. What plans and run folders call ``sample_id`` is always the
        number of the embedding row.

    Returns
    -------
    Handle
        The plan, the ledgers and :meth:`Handle.detach`.

    Raises
    ------
    InputError
        If trainer, dataset and embeddings do not fit together; nothing has changed then.

    Notes
    -----
    One optimizer step trains exactly one batch of ``per_device_train_batch_size * gradient_accumulation_steps *
    world_size`` samples, over all processes. A trainer epoch keeps its length of ``ceil(N / B)`` steps; SDO's own
    epochs run on underneath. The trainer's log carries ``sdo/…`` figures, see :func:`diagnostics.log_scalars`.

    Under GRPO and RLOO a sample is a prompt, and a batch of the plan is the ``generation_batch_size //
    num_generations`` distinct prompts of a generation batch; the completions of a prompt stay one group. It serves
    ``steps_per_generation * num_iterations / gradient_accumulation_steps`` optimizer steps, which must be a whole
    number; a trainer epoch is ``ceil(N / B)`` generation batches, and each counts as one exposure of its prompts, at
    its first update. ``shuffle_dataset`` has no say: the plan is the order.
    """
    for refusal in _refusals(trainer):
        raise InputError(refusal)
    dataset_ids, source = _dataset_ids(trainer, organizer, id_column)
    plan = organizer.plan(_batch_samples(trainer), rows=dataset_ids)
    return Handle(trainer, plan, dataset_ids, source)


class Handle:
    """What :func:`attach` did to a trainer, and how to undo it.

    Attributes
    ----------
    plan
        The plan that the trainer follows.
    sampler
        The sampler that hands it out.
    """

    def __init__(self, trainer: Trainer, plan: Plan, dataset_ids: NDArray[np.int64], source: str) -> None:
        self.plan = plan
        self._trainer: Trainer | None = trainer
        positions = np.argsort(dataset_ids, kind="stable")
        layout = GenerationLayout.of(trainer.args)
        if layout is None:
            self.sampler = OrganizedSampler(plan, positions, trainer_epoch=self._trainer_epoch)
        else:
            self.sampler = GenerationSampler(plan, positions, layout=layout, trainer_epoch=self._trainer_epoch)
        self._channel = IdChannel.of(trainer.model)
        if self._channel.plan is not None:
            raise InputError(
                "this model already trains under an organizer; expected one at a time; "
                "mend: call detach() on the handle of the first attach"
            )
        self._channel.plan = plan
        self._channel.steps_per_batch = 1 if layout is None else layout.optimizer_steps
        self._channel.name_positions(dataset_ids, source)
        content = dataset_digest(trainer.train_dataset, dataset_ids)
        self._follower = None if layout is None else follow_completions(trainer)
        self._callback = OrganizerCallback(plan, self._channel, trainer, content)
        self._channel.trained = self._callback.trained
        trainer.add_callback(self._callback)
        # transformers calls it with the dataset or without, by position or by name (transformers#38226).
        trainer._get_train_sampler = lambda *args, **kwargs: self.sampler
        self._log = log_scalars(trainer)

    @property
    def trained(self) -> NDArray[np.int64]:
        """The trained ledger, shape ``(n,)``, aligned with ``plan.ids``: updates that really happened."""
        return self._callback.trained

    def detach(self) -> None:
        """Leave the trainer as it was before :func:`attach`; a second call changes nothing."""
        if self._trainer is None:
            return
        del self._trainer._get_train_sampler
        self._trainer.remove_callback(self._callback)
        self._log.detach()
        self._channel.plan = self._channel.trained = None
        self._channel.steps_per_batch = 1
        self._channel.unsubscribe(self._callback.note_ids)
        if self._follower is not None:
            self._follower.detach()
        self._trainer = None

    def _trainer_epoch(self) -> int:
        # From global_step and not from set_epoch, which does not always arrive when training resumes mid-epoch.
        if self._trainer is None:
            raise RuntimeError("this sampler's handle was detached; build the data loader anew")
        step: int = self._trainer.state.global_step
        return step // (self.sampler.steps_per_epoch * self._channel.steps_per_batch)


class OrganizerCallback(TrainerCallback, ExportableState):
    """Keeps the trained ledger, checks each step against the plan, and guards resuming.

    transformers stores its state in each checkpoint under the class's name.
    """

    def __init__(self, plan: Plan, channel: IdChannel, trainer: Trainer, content: str | None = None) -> None:
        self._plan = plan
        self._content = content
        self._channel = channel
        self._trainer = trainer
        self._ids: list[int] = []
        self._layout = GenerationLayout.of(trainer.args)
        self._completions: CompletionCount | None = None
        self._loss_scale = 1.0
        self._skipped: list[int] = []
        self._counted = -1  # the latest batch of the plan that is in the ledger
        self._processes = Processes()
        self.trained = np.zeros(len(plan.ids), dtype=np.int64)
        channel.subscribe(self.note_ids)

    def note_ids(self, ids: BatchIds) -> None:
        """Collect the ids of a micro-batch, as they came with the batch itself."""
        self._ids.extend(ids.sample_ids)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must remember: what the plan is a function of, and updates that did not happen."""
        attributes: dict[str, Any] = {
            "plan": self._plan.describe(),
            "dataset": self._content,
            "skipped_steps": list(self._skipped),
        }
        if self._layout is not None:
            attributes["steps_per_batch"] = self._channel.steps_per_batch
        return {"args": {}, "attributes": attributes}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the trainer still fits the plan, verify a checkpoint and let ids travel."""
        if _batch_samples(self._trainer) != self._plan.batch_size:
            unit = "optimizer step" if self._layout is None else "generation batch"
            raise InputError(
                f"one {unit} now takes {_batch_samples(self._trainer)} samples; the plan was bound to "
                f"{self._plan.batch_size} by attach; mend: set batch size and accumulation before attach"
            )
        layout = GenerationLayout.of(args)
        if layout != self._layout:
            raise InputError(
                f"the trainer now has {layout}; attach found {self._layout}; mend: attach after the change"
            )
        self._processes = Processes.of(args)
        self._processes.same(self._plan.fingerprint, "the plan")
        self._processes.same(self._content or "unknown", "the dataset")
        self._skipped = []
        if state.global_step > 0:
            self._skipped = _verify_checkpoint(state, self._plan, self._content, self._channel.steps_per_batch)
        _check_drawn(kwargs["train_dataloader"], args)
        self._count_trained(state.global_step)
        if self._layout is not None:
            self._completions = CompletionCount(self._layout)
            continue_generation(self._trainer, self._layout)
        self._channel.scalars.clear()
        self._channel.install(kwargs["train_dataloader"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start a step's list of ids."""
        self._ids = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember the loss scale, which falls when an update is skipped."""
        self._loss_scale = loss_scale(kwargs.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare what was trained with what was planned, then count it."""
        step = state.global_step - 1
        batch = step // self._channel.steps_per_batch
        planned = self._plan.batch(batch)
        if not self._ids:
            raise RuntimeError(f"step {step}: {no_ids_came()}")
        if self._completions is not None:
            # Each process shuffles its part of a generation batch, so that only all of them make it up.
            ids = [i for part in self._processes.lists(self._ids) for i in part]
            self._completions.check(step, ids, planned.tolist())
        else:
            self._check_share(step, process_share(planned, int(args.train_batch_size), self._processes))
        if update_was_skipped(kwargs.get("optimizer"), self._loss_scale):
            self._skipped.append(step)
        elif batch != self._counted:  # once, at its first update
            self.trained[self._plan.positions(planned)] += 1
            self._counted = batch
        self._note_scalars(planned)

    def _check_share(self, step: int, expected: NDArray[np.int64]) -> None:
        if sorted(self._ids) != sorted(expected.tolist()):
            raise RuntimeError(
                f"step {step} trained samples {sorted(self._ids)}, but the plan holds {sorted(expected.tolist())}; "
                "something else changed the data loader of this trainer"
            )

    def _count_trained(self, steps: int) -> None:
        """Set the ledger to what the steps before ``steps`` trained: the batches that had at least one update."""
        each = self._channel.steps_per_batch
        batches = -(-steps // each)
        self.trained[:] = self._plan.counts(batches)
        self._counted = batches - 1
        for batch, skipped in Counter(step // each for step in self._skipped).items():
            if skipped == min(each, steps - batch * each):
                self.trained[self._plan.positions(self._plan.batch(batch))] -= 1
                if batch == self._counted:
                    self._counted = -1

    def _note_scalars(self, batch: NDArray[np.int64]) -> None:
        scalars, embeddings = self._channel.scalars, self._plan.organizer.embeddings
        scalars.put("coverage", float((self.trained > 0).mean()))
        if embeddings is not None:
            cosine = float(within_batch_cosine(embeddings.unit, embeddings.valid, batch[None])[0])
            if not math.isnan(cosine):
                scalars.add("within_batch_cosine", cosine)


def _batch_samples(trainer: Trainer) -> int:
    """Samples of one batch of the plan over all processes, B: an optimizer step's, or a generation batch's prompts."""
    args = trainer.args
    layout = GenerationLayout.of(args)
    if layout is not None:
        return layout.prompts
    return int(args.train_batch_size) * int(args.gradient_accumulation_steps) * int(args.world_size)


def _check_drawn(loader: Any, args: Any) -> None:
    """Refuse a loader whose batches have another size than the arguments say: its steps would not be the plan's."""
    drawn = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    # GRPO draws the completions of a whole generation batch at once.
    expected = args.train_batch_size * getattr(args, "steps_per_generation", 1)
    if drawn is not None and drawn != expected:
        raise InputError(
            f"the trainer's loader draws {drawn} samples at a time; expected {expected}, by its arguments; mend: set "
            "per_device_train_batch_size before the trainer is built, and resume with the checkpoint's where "
            "transformers takes that, as 5.0 does (transformers#43708)"
        )


def refusals(trainer: Any, organizer: Organizer, *, id_column: str = "sample_id") -> list[str]:
    """Return every reason why :func:`attach` would refuse, each with its remedy; nothing is changed.

    Parameters
    ----------
    trainer, organizer, id_column
        As for :func:`attach`.
    """
    found = list(_refusals(trainer))
    if not found:  # the rows of a trainer that is refused anyway, packed for instance, would only confuse
        try:
            dataset_ids, _ = _dataset_ids(trainer, organizer, id_column)
            organizer.plan(_batch_samples(trainer), rows=dataset_ids)
        except InputError as error:
            found.append(str(error))
    return found


def _refusals(trainer: Any) -> Iterator[str]:
    """Yield, by name, what is not supported."""
    if not isinstance(trainer, Trainer):
        yield f"attach got a {type(trainer).__name__}; expected a transformers or TRL trainer"
        return
    if "_get_train_sampler" in vars(trainer):
        yield (
            "this trainer already has an organizer or another replaced sampler; expected none; "
            "mend: call detach() on the handle of the first attach"
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
    for option, (is_set, why) in _refused_options(trainer).items():
        if is_set:
            yield f"{option} is set; an organizer cannot work with it: {why}"


def _refused_options(trainer: Any) -> dict[str, tuple[bool, str]]:
    """Return for each option whether it is set, why that cannot be, and the remedy."""
    args = trainer.args
    return {
        "packing": (getattr(args, "packing", False), "a packed row mixes samples; mend: packing=False"),
        "auto_find_batch_size": (
            getattr(args, "auto_find_batch_size", False),
            "the plan is bound to one batch size; mend: set per_device_train_batch_size",
        ),
        "restore_callback_states_from_checkpoint": (
            args.restore_callback_states_from_checkpoint,
            "it replaces the organizer's callback by a copy; mend: leave it False",
        ),
        "ignore_data_skip": (
            args.ignore_data_skip,
            "a resumed run would train other batches; mend: leave it False",
        ),
        "model_init": (
            trainer.model_init is not None,
            "train() would build a model that the organizer has not seen; mend: pass model=model_init()",
        ),
        "loss_type 'kto'": (
            getattr(trainer, "calculate_KL", False),
            "its KL term pairs each prompt with the answer before it in the dataset, batch by batch; mend: "
            "loss_type='apo_zero_unpaired', or record without an organizer",
        ),
        "train_sampling_strategy": (
            getattr(args, "train_sampling_strategy", "random") in ("group_by_length", "batch_rebalance"),
            "it would compete with the organizer; mend: leave it 'random'",
        ),
        "group_by_length": (  # its name in transformers 5.0
            getattr(args, "group_by_length", False),
            "it would compete with the organizer; mend: leave it False",
        ),
    }


def _dataset_ids(trainer: Any, organizer: Organizer, id_column: str) -> tuple[NDArray[np.int64], str]:
    """The sample id of each dataset position, shape (n,), and where it comes from."""
    dataset = trainer.train_dataset
    n_rows, n_samples = len(dataset), organizer.n_samples
    if id_column in (getattr(dataset, "column_names", None) or ()):
        return _ids_of_column(np.asarray(dataset[id_column]), organizer, id_column)
    remedy = (
        f"mend: dataset = dataset.add_column({id_column!r}, list(range(len(dataset)))) on the dataset that was "
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
            + (remedy if n_samples > n_rows else "mend: embed the dataset that is trained on")
        )
    return np.arange(n_rows), "position in the training dataset"


def _ids_of_column(column: NDArray[Any], organizer: Organizer, id_column: str) -> tuple[NDArray[np.int64], str]:
    """The embedding rows that a column names, by key or by number, and that in words."""
    n_samples, embeddings = organizer.n_samples, organizer.embeddings
    if embeddings is not None and embeddings.ids is not None:
        rows = embeddings.rows_of(column, f"column {id_column!r}")
        source = f"row of the embeddings whose id is in column {id_column!r}"
    elif column.dtype.kind in "iu":
        rows, source = column.astype(np.int64), f"column {id_column!r}, row of the embeddings"
    else:
        raise InputError(
            f"column {id_column!r} holds {column.dtype}; expected integers, the rows of the embeddings; "
            f"mend: dataset.add_column({id_column!r}, list(range(len(dataset)))) before the trainer is built, or keep "
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
            f"rows; expected ids 0 to {n_samples - 1}; mend: embed the same dataset that is trained on"
        )
    return rows, source


def _verify_checkpoint(state: Any, plan: Plan, content: str | None, steps_per_batch: int) -> list[int]:
    """Refuse to continue a checkpoint under another plan, naming the first difference; return its skipped steps.

    ``content`` is the digest of the dataset, None where it has none.
    """
    entry = state.stateful_callbacks.get(_STATE)
    if not entry:
        raise InputError(
            f"the checkpoint at step {state.global_step} was written without an organizer; expected one that followed "
            "this plan; mend: start a new run, or resume without attach"
        )
    difference = describe_difference(entry["attributes"]["plan"], plan.describe())
    if difference is not None:
        raise InputError(
            f"the checkpoint at step {state.global_step} was written under another plan: {difference}; expected the "
            "same, since the batches would differ; mend: use the same organizer, or start a new run"
        )
    before = entry["attributes"].get("dataset")
    if before is not None and content is not None and before != content:
        raise InputError(
            f"the checkpoint at step {state.global_step} was trained on other rows under the same ids: dataset = "
            f"{before[:16]} then and {content[:16]} now; expected the same dataset, prepared in the same way; "
            "mend: use that, or start a new run"
        )
    before = entry["attributes"].get("steps_per_batch", 1)
    if before != steps_per_batch:
        raise InputError(
            f"at the checkpoint of step {state.global_step} a generation batch served {before} optimizer step(s), now "
            f"{steps_per_batch}; expected the same, since steps would train other prompts; mend: keep "
            "steps_per_generation * num_iterations / gradient_accumulation_steps"
        )
    skipped: list[int] = entry["attributes"].get("skipped_steps", [])
    return [step for step in skipped if step < state.global_step]
