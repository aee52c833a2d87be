"""One training run being recorded: its hooks on the model, the step that is under way, and its run folder."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from diagnostics.recording.current_step import CurrentStep
from diagnostics.recording.gradient_rows import StepRows
from diagnostics.recording.outcomes import Outcomes
from diagnostics.recording.pending_step import LoggedRow
from diagnostics.recording.step_total import StepTotal, total_step
from diagnostics.run_folder.provenance import describe_run
from diagnostics.run_folder.resume import require_same_run
from diagnostics.run_folder.rows import StepRow
from diagnostics.run_folder.writer import RunLog, check_free
from diagnostics.signals.base import Signal, SignalContext
from diagnostics.signals.captures import Captures
from diagnostics.signals.losses import LossReader
from diagnostics.signals.objectives import shifts_labels
from sdo.errors import InputError
from sdo.organizers.steps import EpochPlan
from sdo.run_format import SELECTION
from sdo.trainers.adapter import TrainerAdapter
from sdo.trainers.completions import CompletionFollower, follow_completions, trainer_needed
from sdo.trainers.requirements import no_ids_came, require_trained_tokens
from sdo.trainers.session import Schedule, TrainingSession


class RecorderOptions(Protocol):
    """What to record, and where; see :class:`diagnostics.GradientRecorder`."""

    @property
    def out(self) -> Path: ...  # noqa: D102 - as the recorder says
    @property
    def signals(self) -> tuple[Signal, ...]: ...  # noqa: D102
    @property
    def sample_every(self) -> int: ...  # noqa: D102
    @property
    def sketch_size(self) -> int: ...  # noqa: D102
    @property
    def evaluations(self) -> bool: ...  # noqa: D102
    @property
    def trainer(self) -> Any: ...  # noqa: D102


class Recording:
    """One training being recorded, from its start to its end. Build it with :meth:`start`.

    Attributes
    ----------
    log
        The run folder.
    outcomes
        Losses, rewards and held-out scores.
    """

    def __init__(
        self,
        options: RecorderOptions,
        training: TrainerAdapter,
        session: TrainingSession,
        current: CurrentStep,
        captures: Captures,
        outcomes: Outcomes,
        log: RunLog,
        undo: ExitStack,
    ) -> None:
        self.log, self.outcomes = log, outcomes
        self._options, self._session, self._current = options, session, current
        self._captures, self._undo = captures, undo
        self._processes, self._owner, self._first_step = training.processes, training.owner, training.first_step
        self._device = next(training.model.parameters()).device
        self._logged = LoggedRow(training)
        self._learning_rate: float | None = None
        self._seconds_in_rows = 0.0

    @classmethod
    def start(cls, options: RecorderOptions, training: TrainerAdapter) -> Recording:
        """Open the run folder and hook the model; on any error nothing is written and no hook is left.

        Parameters
        ----------
        options
            The recorder.
        training
            What is about to begin.

        Raises
        ------
        InputError
            As :class:`~diagnostics.GradientRecorder` says.
        """
        processes, kind = training.processes, training.kind
        with ExitStack() as undo:
            session, current, captures, reader = processes.together(lambda: _prepare(options, training, undo))
            follower = None
            if kind.generates:
                follower = processes.together(lambda: _follow(session, options.trainer))
                undo.callback(follower.detach)
            log = _open_log(options, training, session, captures)
            outcomes = Outcomes(training, reader, current, log, evaluations=options.evaluations)
            if follower is not None:
                follower.subscribe(outcomes)
                undo.callback(follower.unsubscribe, outcomes)
            session.figures.clear()
            session.subscribe(current.begin_micro_batch)
            undo.callback(session.unsubscribe, current.begin_micro_batch)
            training.carry_ids(session)
            undo.callback(captures.remove)
            captures.register()
            hook = training.model.register_forward_hook(outcomes.after_forward, with_kwargs=True)
            undo.callback(hook.remove)
            return cls(options, training, session, current, captures, outcomes, log, undo.pop_all())

    @property
    def steps_done(self) -> int:
        """Number of updates so far."""
        return self._current.number + 1 if self._logged.waits else self._current.number

    def release(self) -> None:
        """Let go of the model; what was not flushed is lost. A second call changes nothing."""
        self._undo.close()

    def end_when_taken(self, end: Callable[[], None]) -> None:
        """Call `end` if another training takes the model while this one has not ended."""
        entry = (self._owner, end)
        self._session.recordings.append(entry)
        self._undo.callback(self._session.recordings.remove, entry)

    # ------------------------------------------------------------------ one step

    def begin_step(self, step: int) -> None:
        """Start collecting a step; the one before it is complete now."""
        with self._current.clock():
            self._write_pending()
            self.log.maybe_flush()
        self._captures.begin_step()
        self.outcomes.begin_step()
        self._current.begin(step)

    def before_update(self, optimizer: Any) -> None:
        """Look at the gradient that the optimizer is given: clipping makes it shorter than the raw one."""
        with self._current.clock():
            self._session.update.begin(self._current.number, optimizer)
            self._learning_rate = float(optimizer.param_groups[0]["lr"]) if optimizer is not None else None
            self._captures.before_update(self._processes.leads)  # by now the gradient is unscaled

    def end_step(self, trainer_epoch: float | None, optimizer: Any, *, saving: bool, loss: float | None = None) -> None:
        """Write the step's gradients and keep its row until the trainer has logged.

        Parameters
        ----------
        trainer_epoch
            The trainer's epoch after the update, a fraction.
        optimizer
            Tells whether the update was skipped.
        saving
            Whether a checkpoint is about to be written. Process 0 does that, and must find the others' rows on disk.
        loss
            Of the step, where forward passes do not tell it.
        """
        if self._device.type == "cuda":
            # What is read next would wait for the step's own work and count it as the recorder's.
            torch.cuda.synchronize(self._device)
        current, update = self._current, self._session.update
        seconds, first = current.seconds, current.number == self._first_step
        with current.clock():
            if first:
                try:
                    self._processes.together(self._require_signals)
                except BaseException:
                    self.release()
                    raise
            total = total_step(
                self._processes,
                current.micro_batches,
                self._captures,
                update.loss_scale,
                losses=self.outcomes.losses,
                saving=saving,
            )
            if total.loss is None and loss is not None:
                total, self.outcomes.loss_is_given = replace(total, loss=loss), True
            row = StepRow(
                step=current.number,
                organizer_epoch=self._organizer_epoch(),
                trainer_epoch=trainer_epoch,
                loss=total.loss,
                learning_rate=self._learning_rate,
                grad_norm=None,
                clipped=total.clipped,
                loss_scale=update.loss_scale,
                skipped=update.skipped(current.number, optimizer),
                tokens=total.tokens,
                seconds=seconds,
                recorder_seconds=0.0,
                sample_ids=total.sample_ids,
            )
            self._write_gradients(total)
            self._write_selection()
            if first:
                self.outcomes.look_at_first(total)
            current.micro_batches = []
            if total.saving:
                self.flush_others()
        # All of the recorder's time since the last row, so that flushes and evaluations are in a row too.
        row = replace(row, recorder_seconds=current.recorder_seconds - self._seconds_in_rows)
        self._logged.wait_with(row, total.micro_batches, total.sketch_norm)
        self._seconds_in_rows = current.recorder_seconds

    def flush_others(self, *, needed: bool = True) -> None:
        """Let every process but 0 write its rows, where it finds that needed, and wait for that."""
        if self._processes.count > 1:
            if needed and not self._processes.leads:
                self.log.flush()
            self._processes.wait()

    def note_log(self, updates: int, logs: dict[str, Any]) -> None:
        """Put what the trainer logs of one step into the step's row, see :meth:`LoggedRow.note`."""
        self._logged.note(updates, logs)

    def note_norm(self, norm: float, *, measured: bool) -> None:
        """Put the norm of the whole gradient into the step's row, see :meth:`LoggedRow.note_norm`."""
        self._logged.note_norm(norm, measured=measured)

    def _require_signals(self) -> None:
        """After the first step every signal must have fired; silence is never written as zeros."""
        if not self._current.micro_batches:
            raise RuntimeError(f"step {self._current.number}: {no_ids_came()}")
        self._captures.require_fired(self._current.number, self._current.micro_batches)

    def _write_gradients(self, total: StepTotal) -> None:
        step = self._current.number
        norm_state = "raw" if self._session.update.loss_scale == 1.0 else "raw, scaled"
        every = self._options.sample_every
        with_samples = every > 0 and step % every == 0
        rows = StepRows(step, self._current.micro_batches, total, norm_state, self._processes, with_samples)
        for name, capture in self._captures.named.items():
            for row, sketch in rows.of(capture):
                self.log.add_gradient(name, row, sketch)
        if not total.same_direction and step == self._first_step:
            warnings.warn(
                "the processes' gradients do not add up to the one that the optimizer was given, as under a "
                "communication hook that compresses them; rows of 'weight' hold their sum",
                stacklevel=2,
            )
        for figure, value in total.figures.items():
            self._session.figures.add(figure, value)
        if self._captures.all_checked:
            self._write_checks()

    def _write_selection(self) -> None:
        """Write what the step was offered and what of it was kept; with several processes a collective call."""
        schedule, step = self._session.schedule, self._current.number
        if schedule is None or schedule.selection is None:
            return
        found, processes = schedule.selection.of_step(step), self._processes
        offered = found.candidates
        numbers = offered.micro_batch * processes.count + processes.rank
        columns = {
            "sample_id": processes.lists(offered.sample_ids.tolist()),
            "micro_batch": processes.lists(numbers.tolist()),
            "kept": processes.lists(found.kept.astype(np.int64).tolist()),
        }
        rows = {name: np.concatenate(parts).astype(np.int64) for name, parts in columns.items()}
        score = np.concatenate(processes.numbers(found.score))
        order = np.argsort(rows["micro_batch"], kind="stable")
        self.log.add_rows(
            SELECTION.path,
            {
                "step": np.full(len(order), step),
                "sample_id": rows["sample_id"][order],
                "micro_batch": rows["micro_batch"][order].astype(np.int32),
                "kept": rows["kept"][order].astype(np.bool_),
                "score": score[order],
            },
        )

    def _write_pending(self) -> None:
        row = self._logged.take()
        if row is None:
            return
        self.log.add_step(row)
        if self._session.schedule is not None:
            epoch, stop = _epoch_of(self._session.schedule, row.step)
            if row.step == stop - 1:
                self._write_exposure(self._session.schedule, epoch)

    def _organizer_epoch(self) -> int | None:
        schedule = self._session.schedule
        return None if schedule is None else _epoch_of(schedule, self._current.number)[0].organizer_epoch

    # ------------------------------------------------------------------ folder

    def flush(self) -> None:
        """Write everything that is complete."""
        with self._current.clock():
            self._write_pending()
            self.log.flush()

    def close(self, global_step: int, status: str = "finished") -> None:
        """Write what is left, the exposure of an unfinished organizer epoch included, and let go of the model.

        Parameters
        ----------
        global_step
            Number of updates.
        status
            ``"finished"``, or ``"failed"`` where training ended by an error.
        """
        self._write_pending()
        self._write_checks()
        if status == "finished":
            self.flush_others()
        schedule = self._session.schedule
        if schedule is not None and global_step > 0:
            epoch, stop = _epoch_of(schedule, global_step - 1)
            if global_step < stop:
                self._write_exposure(schedule, epoch)
        self.log.close(status)
        self.release()

    def abandon(self) -> bool:
        """Let go of the model where training ended without a word; a folder without a single row is given up.

        Returns
        -------
        bool
            Whether there is a run, which has failed.
        """
        if self.log.is_empty and not self._logged.waits:
            self.release()
            self.log.withdraw()
            return False
        self.close(self.steps_done, "failed")
        return True

    def _write_exposure(self, schedule: Schedule, epoch: EpochPlan) -> None:
        ids = schedule.plan.ids
        trained = schedule.trained.copy()
        self.log.add_exposure(epoch.organizer_epoch, ids, epoch.exposure, trained, np.isin(ids, epoch.pool))

    def _write_checks(self) -> None:
        """Write how far sketched cosines were from exact ones."""
        checks = self._captures.take_checks()
        if checks:
            self.log.update_info(sketch_check={**self.log.info.get("sketch_check", {}), **checks})


def _prepare(
    options: RecorderOptions, training: TrainerAdapter, undo: ExitStack
) -> tuple[TrainingSession, CurrentStep, Captures, LossReader]:
    """Refuse what cannot be recorded, and find what can."""
    training.require()
    model, kind = training.model, training.kind
    require_trained_tokens(training.dataset, shifts=shifts_labels(model))
    TrainingSession.end_recordings(model, training.owner)
    if training.processes.leads and not _continues(options, training):
        check_free(options.out)  # before another trainer's organizer leaves the model to this one
    kind.require([signal.word for signal in options.signals])
    reader = LossReader(model, kind)
    current = CurrentStep(training.first_step, kind, shifts=reader.shifts)
    context = SignalContext(
        model,
        current=lambda: (current.number, current.micro_batches),
        clock=current.clock,
        k=options.sketch_size,
        sample_every=options.sample_every,
        share=1 / training.processes.count,  # DDP takes the mean of what its processes found
        **training.logits,
    )
    captures = Captures(options.signals, context)
    session = TrainingSession.taken_by(model, training.owner)
    undo.callback(session.close_if_unused)
    training.require_schedule(session)
    return session, current, captures, reader


def _continues(options: RecorderOptions, training: TrainerAdapter) -> bool:
    """Whether a checkpoint is resumed whose run folder is there."""
    return training.first_step > 0 and (options.out / "run.json").exists()


def _follow(session: TrainingSession, trainer: Any) -> CompletionFollower:
    """Hear of completions, rewards and losses, from the organizer's follower or from one of our own."""
    if session.follower is None and trainer is None:
        raise InputError(trainer_needed())
    return follow_completions(trainer) if session.follower is None else session.follower.share()


def _open_log(
    options: RecorderOptions, training: TrainerAdapter, session: TrainingSession, captures: Captures
) -> RunLog:
    """Create the run folder, or continue that of the checkpoint that is resumed."""
    processes, out, step = training.processes, options.out, training.first_step
    run_id = uuid.UUID(bytes=bytes(processes.lists(list(uuid.uuid4().bytes))[0])).hex
    info = {"run_id": run_id, **describe_run(training, session, captures.named)}
    if not processes.lists([_continues(options, training)])[0][0]:
        return processes.leader_first(lambda: RunLog.create(out, info, rank=processes.rank))

    def resume() -> RunLog:
        require_same_run(out, training.resumed_runs, step, info["organizer"])
        return RunLog.resume(out, step, info, rank=processes.rank)

    log = processes.leader_first(resume)
    captures.forget_checks(log.info.get("sketch_check", {}))  # the first steps were checked before
    return log


def _epoch_of(schedule: Schedule, step: int) -> tuple[EpochPlan, int]:
    """The organizer epoch that holds an optimizer step, and the first optimizer step after it."""
    epoch = schedule.plan.epoch_of(step // schedule.steps_per_batch)
    return epoch, epoch.stop * schedule.steps_per_batch
