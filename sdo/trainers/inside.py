"""Organize and record from inside a trainer that a framework builds: by a callback alone, without the trainer itself.

A callback sees arguments, state, model and loader. The loader's sampler is exchanged where training begins; everything
that has been computed of the loader before must therefore stay true, and where it would not, training is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from sdo.errors import InputError
from sdo.organizers.plan import Organizer, Plan
from sdo.trainers.attach import OrganizerCallback
from sdo.trainers.checkpoints import dataset_digest
from sdo.trainers.ledger import TrainedLedger
from sdo.trainers.requirements import check_launch, require_positions
from sdo.trainers.row_ids import bound_plan, dataset_ids_of, refused_options
from sdo.trainers.sampler import OrganizedSampler
from sdo.trainers.session import Schedule, TrainingSession

# Whatever order these give, an organizer's replaces it: nothing else depends on it.
_REPLACED = ("RandomSampler", "SequentialSampler", "SeedableRandomSampler", "OrganizedSampler")


def _told(event: str) -> Callable[..., None]:
    """A callback's method that hands an event on."""

    def method(self: OrganizeAndRecord, *args: Any, **kwargs: Any) -> None:
        self._tell(event, *args, **kwargs)

    method.__name__, method.__doc__ = event, "Hand the event on to organizer and recorder."
    return method


class OrganizeAndRecord(TrainerCallback, ExportableState):
    """One callback that organizes a training and records it, for frameworks that build their trainer inside.

    Where the trainer object is at hand, ``attach`` and ``add_callback`` do more: see the notes.

    Parameters
    ----------
    organizer
        :class:`~sdo.SDO`, :class:`~sdo.Uniform` or another one.
    recorder
        A ``diagnostics.GradientRecorder``, or None.
    id_column
        As for :func:`~sdo.attach`, where the loader's dataset still has it (``remove_unused_columns=False``).

    Attributes
    ----------
    plan
        The plan that is followed; None before training.

    Raises
    ------
    InputError
        Where training begins: for what :func:`~sdo.attach` refuses, trainers that generate, loaders with a sampler of
        another kind, and data that does not fill the last step of a trainer epoch.

    Notes
    -----
    The trainer has counted its loader's micro-batches before a callback sees it. With N rows and B samples a step that
    count is an organizer's only where ``ceil(N / micro-batch)`` is a multiple of the accumulation. Figures of the
    organizer do not reach the trainer's log.
    """

    def __init__(self, organizer: Organizer, recorder: Any = None, *, id_column: str = "sample_id") -> None:
        self.plan: Plan | None = None
        self._organizer, self._recorder, self._id_column = organizer, recorder, id_column
        self._followed: _Followed | None = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must remember of organizer and recorder."""
        return {"args": {}, "attributes": {type(one).__name__: one.state() for one in self._inner()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Exchange the loader's sampler, then begin as organizer and recorder do."""
        name = type(self).__name__
        if state.global_step > 0:
            stored = (state.stateful_callbacks.get(name) or {}).get("attributes", {})
            state.stateful_callbacks.update(stored)
        self._leave()
        followed = _Followed(self._organizer, args, state, kwargs["model"], kwargs["train_dataloader"], self._id_column)
        self._followed, self.plan = followed, followed.plan
        try:
            self._tell("on_train_begin", args, state, control, **kwargs)
        except BaseException:
            self._leave()
            raise
        # A checkpoint written without this callback has no entry, and transformers fails on that at the next save.
        state.stateful_callbacks.setdefault(name, self.state())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the recording and let go of the model."""
        self._tell("on_train_end", args, state, control, **kwargs)
        self._leave()

    on_epoch_begin, on_epoch_end = _told("on_epoch_begin"), _told("on_epoch_end")
    on_step_begin, on_step_end = _told("on_step_begin"), _told("on_step_end")
    on_pre_optimizer_step = _told("on_pre_optimizer_step")
    on_save, on_log = _told("on_save"), _told("on_log")
    on_evaluate, on_predict = _told("on_evaluate"), _told("on_predict")

    def _tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        for one in self._inner():
            getattr(one, event)(*args, **kwargs)

    def _inner(self) -> list[Any]:
        organizing = [] if self._followed is None else [self._followed.callback]
        return organizing + ([] if self._recorder is None else [self._recorder])

    def _leave(self) -> None:
        if self._followed is not None:
            self._followed.release()
            self._followed = None


class _Followed:
    """A training that follows a plan, from where it begins to its end."""

    def __init__(self, organizer: Organizer, args: Any, state: Any, model: Any, loader: Any, id_column: str) -> None:
        dataset = getattr(loader.dataset, "inner", loader.dataset)
        # What a callback sees of the trainer, for functions that ask the trainer itself.
        trainer: Any = SimpleNamespace(args=args, state=state, model=model, train_dataset=dataset, model_init=None)
        kind = check_launch(type(args), args)
        if kind.generates:
            raise InputError(
                f"a {kind.trainer} draws its prompts in groups, which a callback cannot exchange; expected a trainer "
                "on rows of its dataset; fix: attach(trainer, organizer) where the trainer is built"
            )
        require_positions(dataset)
        for option, (is_set, why) in refused_options(trainer).items():
            if is_set:
                raise InputError(f"{option} is set; an organizer cannot work with it: {why}")
        ids, source = dataset_ids_of(trainer, organizer, id_column)
        self.plan = bound_plan(trainer, organizer, ids)
        drawn = _batch_sampler(loader)
        steps, each = self.plan.steps_per_epoch, int(args.gradient_accumulation_steps)
        if len(loader) != steps * each:
            raise InputError(
                f"the trainer counts {len(loader)} micro-batches an epoch, an organizer needs {steps * each}: {steps} "
                f"whole steps of {each}; fix: rows that fill the last step, or attach(trainer, organizer) where the "
                "trainer is built"
            )
        session = TrainingSession.taken_by(model, state)
        session.ids.name_positions(ids, source)
        self._ledger = TrainedLedger(self.plan, session)
        content = dataset_digest(dataset, ids)
        self.callback = OrganizerCallback(self.plan, session, self._ledger, trainer, content)
        self._session = session
        session.schedule = Schedule(
            self.plan, self._ledger.trained, lambda: state, check=self.callback.require_fit, release=self.release
        )
        positions = np.argsort(ids, kind="stable")
        drawn.sampler = OrganizedSampler(self.plan, positions, trainer_epoch=lambda: state.global_step // steps)

    def release(self) -> None:
        """Let go of the model; a second call changes nothing."""
        if self._session.schedule is not None and self._session.schedule.trained is self._ledger.trained:
            self._session.schedule = None
        self._ledger.detach()


def _batch_sampler(loader: Any) -> Any:
    """Return the batch sampler whose sampler gives the order of a training loader's rows."""
    found = getattr(loader, "base_dataloader", loader).batch_sampler
    while hasattr(found, "batch_sampler"):  # accelerate deals batches out to processes
        found = found.batch_sampler
    sampler = getattr(found, "sampler", None)
    if not isinstance(found, BatchSampler) or type(sampler).__name__ not in _REPLACED:
        raise InputError(
            f"the training loader draws by a {type(sampler or found).__name__}; expected one of "
            f"{', '.join(_REPLACED[:3])}, which an organizer can replace; fix: attach(trainer, organizer) where the "
            "trainer is built"
        )
    return found
