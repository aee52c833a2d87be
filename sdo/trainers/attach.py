"""Attach an organizer to a TRL or transformers trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from sdo.embeddings.belonging import match_texts, misplaced, read_record
from sdo.errors import InputError
from sdo.organizers.plan import Organizer, Plan, describe_difference
from sdo.selectors.selector import Selector
from sdo.trainers.checkpoints import dataset_digest
from sdo.trainers.completions import follow_completions
from sdo.trainers.ended import end_before_the_first_step, stop_at_once
from sdo.trainers.generation import CompletionCount, GenerationLayout, GenerationSampler, continue_generation
from sdo.trainers.ledger import TrainedLedger
from sdo.trainers.log_figures import log_scalars
from sdo.trainers.processes import Processes
from sdo.trainers.row_ids import RETIRED, batch_samples, bound_plan, dataset_ids_of, trainer_refusals
from sdo.trainers.sampler import OrganizedSampler, process_share
from sdo.trainers.selection import BatchSelection, require_offered, selection_refusals
from sdo.trainers.session import Schedule, TrainingSession

_STATE = "OrganizerCallback"


def attach(
    trainer: Trainer, organizer: Organizer, *, selector: Selector | None = None, id_column: str = "sample_id"
) -> Handle:
    """Let an organizer decide the batches of a trainer.

    Parameters
    ----------
    trainer
        An ``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer``, ``RewardTrainer`` (a pair is one sample), ``GRPOTrainer`` or
        ``RLOOTrainer`` of TRL (a prompt is one, see below), or a plain ``transformers.Trainer``, in one process or in
        each of several under DDP, with a map-style training dataset. Only this object changes.
    organizer
        :class:`~sdo.SDO` or :class:`~sdo.Uniform`.
    selector
        What of each step is trained, such as :class:`~sdo.RandomSelect`; all of it by default. For ``SFTTrainer`` and
        ``transformers.Trainer`` alone. *Planned* then counts what was offered, *trained* what was kept.
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

    Warns
    -----
    UserWarning
        If the record that ``sdo embed`` left beside the embeddings shows that the ids name other rows than those that
        were embedded. If another trainer of the same model had an organizer,
        as where a notebook's cell is run again: that one is detached, and its trainer refuses to train until it is
        given one again.

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
    for refusal in trainer_refusals(trainer):
        raise InputError(refusal)
    for refusal in [] if selector is None else selection_refusals(trainer, selector):
        raise InputError(refusal)
    dataset_ids, source = dataset_ids_of(trainer, organizer, id_column)
    plan = bound_plan(trainer, organizer, dataset_ids)
    _warn_of_other_rows(trainer.train_dataset, organizer, id_column)
    return Handle(trainer, plan, dataset_ids, source, selector)


def _warn_of_other_rows(dataset: Any, organizer: Organizer, id_column: str) -> None:
    """Hold the dataset's texts, where it still has them, against the record beside the embeddings."""
    path = None if organizer.embeddings is None else organizer.embeddings.path
    record = None if path is None else read_record(Path(path))
    columns = getattr(dataset, "column_names", None) or ()
    if path is None or record is None:
        return
    column = record["column"] if record["column"] in columns else "prompt"
    found = match_texts(record, dataset, dataset[id_column] if id_column in columns else None, column)
    # Other texts prove nothing here: TRL adds an end to a text, and a prompt may be made of what was embedded.
    if found == "by position" and id_column in columns:
        warnings.warn(misplaced(Path(path), column, id_column), stacklevel=3)


class Handle:
    """Returned by :func:`attach`: the plan, the ledgers, :meth:`detach`.

    Attributes
    ----------
    plan
        The plan that the trainer follows.
    sampler
        The sampler that hands it out.
    """

    def __init__(
        self,
        trainer: Trainer,
        plan: Plan,
        dataset_ids: NDArray[np.int64],
        source: str,
        selector: Selector | None = None,
    ) -> None:
        self.plan = plan
        self._trainer: Trainer | None = trainer
        positions = np.argsort(dataset_ids, kind="stable")
        layout = GenerationLayout.of(trainer.args)
        if layout is None:
            self.sampler = OrganizedSampler(plan, positions, trainer_epoch=self._trainer_epoch)
        else:
            self.sampler = GenerationSampler(plan, positions, layout=layout, trainer_epoch=self._trainer_epoch)
        self._session = TrainingSession.taken_by(trainer.model, trainer.state)
        self._session.ids.name_positions(dataset_ids, source)
        content = dataset_digest(trainer.train_dataset, dataset_ids)
        self._follower = None if layout is None else follow_completions(trainer)
        self._ledger = TrainedLedger(plan, self._session, 1 if layout is None else layout.optimizer_steps)
        self._selection = None if selector is None else BatchSelection(trainer, selector)
        self._callback = OrganizerCallback(plan, self._session, self._ledger, trainer, content, self._selection)
        self._session.schedule = Schedule(
            plan,
            self._ledger.trained,
            owner=lambda: trainer.state,
            check=self._callback.require_fit,
            release=self._retire,
            steps_per_batch=self._ledger.steps_per_batch,
            selection=self._selection,
        )
        trainer.add_callback(self._callback)
        # transformers calls it with the dataset or without, by position or by name (transformers#38226).
        trainer._get_train_sampler = lambda *args, **kwargs: self.sampler
        self._log = log_scalars(trainer)

    @property
    def trained(self) -> NDArray[np.int64]:
        """The trained ledger, shape ``(n,)``, aligned with ``plan.ids``: updates that really happened."""
        return self._ledger.trained

    def detach(self) -> None:
        """Leave the trainer as it was before :func:`attach`; a second call changes nothing."""
        if self._trainer is None:
            return
        del self._trainer._get_train_sampler
        self._trainer.remove_callback(self._callback)
        self._log.detach()
        self._session.schedule = None
        self._ledger.detach()
        if self._selection is not None:
            self._selection.detach()
        if self._follower is not None:
            self._follower.detach()
        self._trainer = None

    def _retire(self) -> None:
        """Leave the model to another trainer's organizer; this one's trainer must not go on without its own."""
        trainer = self._trainer
        self.detach()

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise InputError(
                "another trainer's organizer has taken over this trainer's model; expected one at a time; "
                "fix: attach an organizer to this trainer again"
            )

        setattr(refuse, RETIRED, True)
        if trainer is not None:
            trainer._get_train_sampler = refuse
        warnings.warn(
            "the organizer of an earlier trainer of this model was detached: a model trains under one at a time",
            stacklevel=4,
        )

    def _trainer_epoch(self) -> int:
        # From global_step and not from set_epoch, which does not always arrive when training resumes mid-epoch.
        if self._trainer is None:
            raise RuntimeError("this sampler's handle was detached; build the data loader anew")
        step: int = self._trainer.state.global_step
        return step // (self.sampler.steps_per_epoch * self._session.steps_per_batch)


class OrganizerCallback(TrainerCallback, ExportableState):
    """Keeps the trained ledger of a trainer, checks each step against the plan, and guards resuming.

    transformers stores its state in each checkpoint under the class's name.
    """

    def __init__(
        self,
        plan: Plan,
        session: TrainingSession,
        ledger: TrainedLedger,
        trainer: Trainer,
        content: str | None = None,
        selection: BatchSelection | None = None,
    ) -> None:
        self._plan, self._session, self._ledger = plan, session, ledger
        self._content, self._selection = content, selection
        self._trainer = trainer
        self._layout = GenerationLayout.of(trainer.args)
        self._completions: CompletionCount | None = None
        self._skipped: list[int] = []  # before the checkpoint that is resumed
        self._processes = Processes()
        self._ended = False

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must remember: what the plan is a function of, and updates that did not happen."""
        attributes: dict[str, Any] = {
            "plan": self._plan.describe(),
            "dataset": self._content,
            "skipped_steps": list(self._ledger.skipped),
        }
        if self._selection is not None:
            attributes["selector"] = self._selection.describe()
            attributes["selector_state"] = self._selection.selector.state()
            attributes["trained"] = self._ledger.trained.tolist()
        if self._layout is not None:
            attributes["steps_per_batch"] = self._ledger.steps_per_batch
        return {"args": {}, "attributes": attributes}

    def require_fit(self, args: Any, state: Any, loader: Any) -> None:
        """Refuse a trainer, a loader or a checkpoint that does not fit the plan any more.

        A recorder asks for it too, before it opens its folder.
        """
        if batch_samples(self._trainer) != self._plan.batch_size:
            unit = "optimizer step" if self._layout is None else "generation batch"
            raise InputError(
                f"one {unit} now takes {batch_samples(self._trainer)} samples; the plan was bound to "
                f"{self._plan.batch_size} by attach; fix: set batch size and accumulation before attach"
            )
        layout = GenerationLayout.of(args)
        if layout != self._layout:
            raise InputError(f"the trainer now has {layout}; attach found {self._layout}; fix: attach after the change")
        self._skipped = []
        if state.global_step > 0:
            self._skipped = _verify_checkpoint(state, self._plan, self._content, self._ledger.steps_per_batch)
            _verify_selector(state, self._selection)
        _check_drawn(loader, args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the trainer still fits the plan, verify a checkpoint and let ids travel."""
        # A recording that an interrupt left behind writes its ledger, which begins anew below.
        TrainingSession.end_recordings(self._trainer.model, state)
        self._processes = Processes.of(args)
        self._processes.same(self._plan.fingerprint, "the plan")
        self._processes.same(self._content or "unknown", "the dataset")
        self.require_fit(args, state, kwargs["train_dataloader"])
        self._ledger.resume(state.global_step, self._skipped)
        if self._selection is not None and state.global_step > 0:
            entry = state.stateful_callbacks[_STATE]["attributes"]
            self._selection.selector.load(entry["selector_state"])
            self._ledger.trained[:] = entry["trained"]
        if self._layout is not None:
            self._completions = CompletionCount(self._layout)
            continue_generation(self._trainer, self._layout)
        self._session.figures.clear()
        self._session.install(kwargs["train_dataloader"])
        self._ended = end_before_the_first_step(state, kwargs["train_dataloader"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop a run that had ended before it was resumed."""
        if self._ended:
            stop_at_once(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing happened in the epoch of a run that had ended, so that there is nothing to save or evaluate."""
        if self._ended:
            stop_at_once(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start a step's list of ids."""
        self._ledger.begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the loss scale."""
        self._session.update.begin(state.global_step, kwargs.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare what was trained with what was planned, then count it."""
        step, ledger = state.global_step - 1, self._ledger
        ledger.require_ids(step)
        planned = ledger.planned(step)
        if self._completions is not None:
            # Each process shuffles its part of a generation batch, so that only all of them make it up.
            ids = [i for part in self._processes.lists(ledger.ids) for i in part]
            self._completions.check(step, ids, planned.tolist())
        else:
            share = process_share(planned, int(args.train_batch_size), self._processes)
            kept = None if self._selection is None else self._selection.of_step(step)
            if kept is not None:
                require_offered(step, kept.candidates.sample_ids, share)
                share = kept.trained
                planned = np.array([i for part in self._processes.lists(share.tolist()) for i in part], np.int64)
            ledger.require_share(step, share)
        ledger.count(step, planned, skipped=self._session.update.skipped(step, kwargs.get("optimizer")))


def _verify_selector(state: Any, selection: BatchSelection | None) -> None:
    """Refuse to continue a checkpoint under another selector."""
    before = state.stateful_callbacks[_STATE]["attributes"].get("selector")
    now = None if selection is None else selection.describe()
    if before != now:
        raise InputError(
            f"the checkpoint at step {state.global_step} was trained with selector {before}, now it is {now}; expected "
            "the same, since other samples would be kept; fix: attach with the same selector, or start a new run"
        )


def _check_drawn(loader: Any, args: Any) -> None:
    """Refuse a loader whose batches have another size than the arguments say: its steps would not be the plan's."""
    drawn = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    # GRPO draws the completions of a whole generation batch at once.
    expected = args.train_batch_size * getattr(args, "steps_per_generation", 1)
    if drawn is not None and drawn != expected:
        raise InputError(
            f"the trainer's loader draws {drawn} samples at a time; expected {expected}, by its arguments; fix: set "
            "per_device_train_batch_size before the trainer is built, and resume with the checkpoint's where "
            "transformers takes that, as 5.0 does (transformers#43708)"
        )


def _verify_checkpoint(state: Any, plan: Plan, content: str | None, steps_per_batch: int) -> list[int]:
    """Refuse to continue a checkpoint under another plan, naming the first difference; return its skipped steps.

    ``content`` is the digest of the dataset, None where it has none.
    """
    entry = state.stateful_callbacks.get(_STATE)
    if not entry:
        raise InputError(
            f"the checkpoint at step {state.global_step} was written without an organizer; expected one that followed "
            "this plan; fix: start a new run, or resume without attach"
        )
    difference = describe_difference(entry["attributes"]["plan"], plan.describe())
    if difference is not None:
        raise InputError(
            f"the checkpoint at step {state.global_step} was written under another plan: {difference}; expected the "
            "same, since the batches would differ; fix: use the same organizer, or start a new run"
        )
    before = entry["attributes"].get("dataset")
    if before is not None and content is not None and before != content:
        raise InputError(
            f"the checkpoint at step {state.global_step} was trained on other rows under the same ids: dataset = "
            f"{before[:16]} then and {content[:16]} now; expected the same dataset, prepared in the same way; "
            "fix: use that, or start a new run"
        )
    before = entry["attributes"].get("steps_per_batch", 1)
    if before != steps_per_batch:
        raise InputError(
            f"at the checkpoint of step {state.global_step} a generation batch served {before} optimizer step(s), now "
            f"{steps_per_batch}; expected the same, since steps would train other prompts; fix: keep "
            "steps_per_generation * num_iterations / gradient_accumulation_steps"
        )
    skipped: list[int] = entry["attributes"].get("skipped_steps", [])
    return [step for step in skipped if step < state.global_step]
