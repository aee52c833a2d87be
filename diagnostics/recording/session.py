"""One training run being recorded: its hooks on the model, the step that is under way, and its log."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from diagnostics.recording.evaluations import HeldOut
from diagnostics.recording.gradient_rows import StepRows
from diagnostics.recording.pending_step import LoggedRow
from diagnostics.recording.step_total import StepTotal, total_step
from diagnostics.run_folder.provenance import describe_run
from diagnostics.run_folder.resume import require_same_run
from diagnostics.run_folder.writer import RunLog, StepRow, check_free
from diagnostics.signals.base import SignalContext
from diagnostics.signals.captures import Captures
from diagnostics.signals.losses import LossReader
from diagnostics.signals.micro_batch import MicroBatch
from diagnostics.signals.objectives import shifts_labels
from sdo.errors import InputError
from sdo.organizers.plan import Plan
from sdo.organizers.steps import EpochPlan
from sdo.trainers.completions import CompletionFollower, Rewards, follow_completions, trainer_needed
from sdo.trainers.ids import BatchIds, IdChannel
from sdo.trainers.loss_scaling import loss_scale, update_was_skipped
from sdo.trainers.processes import Processes
from sdo.trainers.requirements import (
    check_launch,
    no_ids_came,
    nothing_trained,
    require_positions,
    require_trained_tokens,
)
from sdo.trainers.trainer_types import TrainerKind

if TYPE_CHECKING:
    from diagnostics.recording.recorder import GradientRecorder


class Recording:
    """The live part of a :class:`~diagnostics.GradientRecorder`, from the start of training to its end.

    Build it with :meth:`start`.

    Attributes
    ----------
    log
        The run folder.
    """

    def __init__(
        self,
        options: GradientRecorder,
        kind: TrainerKind,
        args: Any,
        model: nn.Module,
        state: Any,
        processes: Processes,
    ) -> None:
        first_step: int = state.global_step
        self._state = state
        self._taken: tuple[Any, Callable[[], None]] | None = None
        self._options = options
        self._kind = kind
        self._processes = processes
        self._first_step = first_step
        self._micros: list[MicroBatch] = []
        self._step = first_step
        self._seconds = 0.0  # spent by the recorder itself
        self._seconds_at_start = 0.0
        self._seconds_in_rows = 0.0
        self._step_started = 0.0
        self._logged = LoggedRow(kind, args, first_step)
        self._loss_scale = 1.0
        self._learning_rate: float | None = None
        self._reader = LossReader(model, kind)
        self._held_out = HeldOut(kind, processes, LossReader(model, kind))
        self._forward_hook: Any = None
        self.log: RunLog
        kind.require([signal.word for signal in options.signals])
        context = SignalContext(
            model,
            current=lambda: (self._step, self._micros),
            clock=self._clock,
            k=options.sketch_size,
            sample_every=options.sample_every,
            share=1 / processes.count,  # DDP takes the mean of what its processes found
            **kind.logits(args),
        )
        self._captures = Captures(options.signals, context)
        self._device = next(model.parameters()).device
        self._channel = IdChannel.taken_by(model, state)
        self._plan = self._channel.plan
        self._follower: CompletionFollower | None = None
        self._losses: list[torch.Tensor] = []  # of the step's micro-batches, where the trainer's own loss is written

    @classmethod
    def start(cls, options: GradientRecorder, args: Any, state: Any, model: nn.Module, loader: Any) -> Recording:
        """Open the run folder and hook the model; on any error nothing is written and no hook is left.

        Parameters
        ----------
        options
            The recorder.
        args, state
            The trainer's arguments and state.
        model
            The model in training.
        loader
            Its training data loader.

        Raises
        ------
        InputError
            As :class:`~diagnostics.GradientRecorder` says.
        """
        processes = Processes.of(args)
        made: list[Recording] = []
        try:
            processes.together(lambda: made.append(cls._prepare(options, args, state, model, loader, processes)))
            recording = made[0]
            if recording._kind.generates:
                processes.together(lambda: recording._follow(options.trainer))
            run_id = uuid.UUID(bytes=bytes(processes.lists(list(uuid.uuid4().bytes))[0])).hex
            about = describe_run(
                args, recording._kind, state, model, loader, recording._channel, recording._captures.named
            )
            info = {"run_id": run_id, **about}
            again = bool(processes.lists([cls._continues(options, state)])[0][0])
            opening = recording._resume_log if again else recording._create_log
            processes.leader_first(lambda: opening(info, state))
        except BaseException:
            for recording in made:
                recording.release()
            raise
        recording._channel.scalars.clear()
        recording._channel.subscribe(recording._begin_micro_batch)
        recording._channel.install(loader)
        recording._captures.register()
        recording._forward_hook = model.register_forward_hook(recording._after_forward, with_kwargs=True)
        return recording

    @staticmethod
    def _continues(options: GradientRecorder, state: Any) -> bool:
        """Whether a checkpoint is resumed whose run folder is there."""
        return bool(state.global_step > 0 and (options.out / "run.json").exists())

    @classmethod
    def _prepare(
        cls, options: GradientRecorder, args: Any, state: Any, model: nn.Module, loader: Any, processes: Processes
    ) -> Recording:
        """Refuse what cannot be recorded, and find what can."""
        kind = check_launch(type(args), args)
        require_positions(getattr(loader, "dataset", None))
        require_trained_tokens(getattr(loader, "dataset", None), shifts=shifts_labels(model))
        IdChannel.end_recordings(model, state)
        if processes.leads and not cls._continues(options, state):
            check_free(options.out)  # before another trainer's organizer leaves the model to this one
        recording = cls(options, kind, args, model, state, processes)
        if recording._channel.check is not None:
            recording._channel.check(args, state, loader)
        return recording

    @property
    def steps_done(self) -> int:
        """Number of updates so far."""
        return self._step + 1 if self._logged.waits else self._step

    def release(self) -> None:
        """Let go of the model; what was not flushed is lost."""
        self._captures.remove()
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None
        if self._follower is not None:
            self._follower.unsubscribe(self)
            self._follower.detach()
            self._follower = None
        if self._taken in self._channel.recordings:
            self._channel.recordings.remove(self._taken)
        self._channel.unsubscribe(self._begin_micro_batch)

    def end_when_taken(self, end: Callable[[], None]) -> None:
        """Call `end` if another training takes the model while this one has not ended."""
        self._taken = (self._state, end)
        self._channel.recordings.append(self._taken)

    # ------------------------------------------------------------------ one step

    def begin_step(self, step: int) -> None:
        """Start collecting a step; the one before it is complete now."""
        with self._clock():
            self._write_pending()
            self.log.maybe_flush()
        self._step = step
        self._micros, self._losses = [], []
        self._captures.begin_step()
        self._seconds_at_start = self._seconds
        self._step_started = time.perf_counter()

    def before_update(self, optimizer: Any) -> None:
        """Look at the gradient that the optimizer is given: clipping makes it shorter than the raw one."""
        with self._clock():
            self._loss_scale = loss_scale(optimizer)
            self._learning_rate = float(optimizer.param_groups[0]["lr"]) if optimizer is not None else None
            self._captures.before_update(self._processes.leads)  # by now the gradient is unscaled

    def end_step(self, trainer_epoch: float, optimizer: Any, *, saving: bool) -> None:
        """Write the step's gradients and keep its row until the trainer has logged.

        Parameters
        ----------
        trainer_epoch
            The trainer's epoch after the update, a fraction.
        optimizer
            Tells whether the update was skipped.
        saving
            Whether a checkpoint is about to be written. Process 0 does that, and must find the others' rows on disk.
        """
        self._wait_for_device()
        seconds = time.perf_counter() - self._step_started - (self._seconds - self._seconds_at_start)
        with self._clock():
            if self._step == self._first_step:
                try:
                    self._processes.together(self._require_signals)
                except BaseException:
                    self.release()
                    raise
            total = total_step(
                self._processes,
                self._micros,
                self._captures,
                self._loss_scale,
                losses=None if self._follower is None else self._losses,
                saving=saving,
            )
            row = StepRow(
                step=self._step,
                organizer_epoch=self._organizer_epoch(),
                trainer_epoch=trainer_epoch,
                loss=total.loss,
                learning_rate=self._learning_rate,
                grad_norm=None,
                clipped=total.clipped,
                loss_scale=self._loss_scale,
                skipped=update_was_skipped(optimizer, self._loss_scale),
                tokens=total.tokens,
                seconds=seconds,
                recorder_seconds=0.0,
                sample_ids=total.sample_ids,
            )
            self._write_gradients(total)
            if self._step == self._first_step:
                self._look_at_losses(total)
            self._micros = []
            if total.saving:
                self.flush_others()
        # All of the recorder's time since the last row, so that flushes and evaluations are in a row too.
        row = replace(row, recorder_seconds=self._seconds - self._seconds_in_rows)
        self._logged.wait_with(row, total.micro_batches, total.sketch_norm)
        self._seconds_in_rows = self._seconds

    def _look_at_losses(self, total: StepTotal) -> None:
        """After the first step it is known what losses and tokens are; say so where there are none."""
        if self._kind.loss_from == "forward":
            self._describe_numbers()
            if total.loss is None and self._reader.reason is not None:
                warnings.warn(f"the losses of the steps are not recorded: {self._reader.reason}", stacklevel=4)
            known = any(micro.losses is not None or micro.ids.tokens is not None for micro in self._micros)
            if known and not total.tokens:
                warnings.warn(nothing_trained(f"the {len(total.sample_ids)} sample(s) of the first step"), stacklevel=4)

    def _describe_numbers(self) -> None:
        """Let run.json say what the forward passes showed of the numbers' meaning."""
        found = self._kind.describe() | self._reader.meaning()
        if self._kind.score_from == "loss":
            scored = self._held_out.reader.meaning()
            found |= {name: value for name, value in scored.items() if name.startswith("score")}
            if scored.get("score"):
                found.pop("score_reason", None)
        if found != self.log.info.get("meaning"):
            self.log.update_info(meaning=found)

    def _organizer_epoch(self) -> int | None:
        return None if self._plan is None else self._epoch_of(self._plan, self._step)[0].organizer_epoch

    @property
    def _with_samples(self) -> bool:
        every = self._options.sample_every
        return every > 0 and self._step % every == 0

    def flush_others(self, *, needed: bool = True) -> None:
        """Let every process but 0 write its rows, where it finds that needed, and wait for that."""
        if self._processes.count > 1:
            if needed and not self._processes.leads:
                self.log.flush()
            self._processes.wait()

    def note_log(self, updates: int, logs: dict[str, Any]) -> None:
        """Put what the trainer logs of one step into the step's row, see :meth:`LoggedRow.note`."""
        self._logged.note(updates, logs)

    def _write_gradients(self, total: StepTotal) -> None:
        norm_state = "raw" if self._loss_scale == 1.0 else "raw, scaled"
        rows = StepRows(self._step, self._micros, total, norm_state, self._processes, self._with_samples)
        for name, capture in self._captures.named.items():
            for row, sketch in rows.of(capture):
                self.log.add_gradient(name, row, sketch)
        if not total.same_direction and self._step == self._first_step:
            warnings.warn(
                "the processes' gradients do not add up to the one that the optimizer was given, as under a "
                "communication hook that compresses them; rows of 'weight' hold their sum",
                stacklevel=2,
            )
        for figure, value in total.figures.items():
            self._channel.scalars.add(figure, value)
        if self._captures.all_checked:
            self._write_checks()

    def _write_pending(self) -> None:
        row = self._logged.take()
        if row is None:
            return
        self.log.add_step(row)
        if self._plan is not None:
            epoch, stop = self._epoch_of(self._plan, row.step)
            if row.step == stop - 1:
                self._write_exposure(epoch.organizer_epoch)

    def _epoch_of(self, plan: Plan, step: int) -> tuple[EpochPlan, int]:
        """The organizer epoch that holds an optimizer step, and the first optimizer step after it."""
        each = self._channel.steps_per_batch
        epoch = plan.epoch_of(step // each)
        return epoch, epoch.stop * each

    # ------------------------------------------------------------------ hooks

    def _begin_micro_batch(self, ids: BatchIds) -> None:
        self._micros.append(MicroBatch.of(ids, self._kind, shifts=self._reader.shifts))

    def _after_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        with self._clock():
            if self._follower is not None:
                return  # its tokens came with the ids, and an evaluation's completions are not rows of its dataset
            if module.training and self._micros and self._kind.loss_from == "forward":
                # A loss of the user's own trains on logits without labels; TRL then reads its metrics off a second
                # forward pass without gradients, which has them.
                if torch.is_grad_enabled() or self._micros[-1].losses is None:
                    found = self._reader.read(output, kwargs, exact=False)
                    self._micros[-1].losses = found or self._micros[-1].losses
            elif not module.training and not torch.is_grad_enabled() and self._options.evaluations:
                self._held_out.hold(output, kwargs)

    def _require_signals(self) -> None:
        """After the first step every signal must have fired; silence is never written as zeros."""
        if not self._micros:
            raise RuntimeError(f"step {self._step}: {no_ids_came()}")
        self._captures.require_fired(self._step, self._micros)

    # ------------------------------------------------------------------ completions

    def _follow(self, trainer: Any) -> None:
        """Hear of completions, rewards and losses, from the organizer's follower or from one of our own."""
        if self._channel.follower is None and trainer is None:
            raise InputError(trainer_needed())
        follower = self._channel.follower
        self._follower = follow_completions(trainer) if follower is None else follower.share()
        self._follower.subscribe(self)

    def note_loss(self, loss: torch.Tensor) -> None:
        """Take the loss of a micro-batch, as the trainer adds it up."""
        self._losses.append(loss.detach())

    def note_rewards(self, rewards: Rewards) -> None:
        """Write the reward of each completion, and that of each function where there are several."""
        if not self._options.evaluations:
            return
        with self._clock():
            columns = [("reward", rewards.total)]
            if len(rewards.names) > 1:
                columns += [(f"reward/{name}", rewards.parts[:, n]) for n, name in enumerate(rewards.names)]
            ids = np.array(rewards.sample_ids, np.int64)
            for name, values in columns:
                self.log.add_evaluation(rewards.step, name, ids, values.double().numpy())

    # ------------------------------------------------------------------ evaluations

    def end_evaluation(self, step: int, name: str, loader: Any) -> None:
        """Write the held-out scores that were read off an evaluation's forward passes.

        Parameters
        ----------
        step
            Number of updates the model had had.
        name
            The trainer's name of the loss, such as ``eval_loss``.
        loader
            The evaluation's data loader.
        """
        if not self._options.evaluations:
            return
        with self._clock():
            scores = self._held_out.end(loader)
            if self._kind.loss_from == "forward":
                self._describe_numbers()
            if scores:
                ids, values = np.array(list(scores), np.int64), np.array(list(scores.values()), np.float64)
                self.log.add_evaluation(step, name.removesuffix("loss") + self._kind.score_name, ids, values)

    def forget_evaluation(self) -> None:
        """Drop what was read off forward passes since the last evaluation, a prediction's for instance."""
        self._held_out.forget()

    # ------------------------------------------------------------------ folder

    def flush(self) -> None:
        """Write everything that is complete."""
        with self._clock():
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
        if self._plan is not None and global_step > 0:
            epoch, stop = self._epoch_of(self._plan, global_step - 1)
            if global_step < stop:
                self._write_exposure(epoch.organizer_epoch)
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

    def _write_exposure(self, organizer_epoch: int) -> None:
        if self._plan is None or self._channel.trained is None:
            return
        epoch, ids = self._plan.epoch(organizer_epoch), self._plan.ids
        trained = self._channel.trained.copy()
        self.log.add_exposure(organizer_epoch, ids, epoch.exposure, trained, np.isin(ids, epoch.pool))

    def _write_checks(self) -> None:
        """Write how far sketched cosines were from exact ones."""
        checks = self._captures.take_checks()
        if checks:
            self.log.update_info(sketch_check={**self.log.info.get("sketch_check", {}), **checks})

    # ------------------------------------------------------------------ helpers

    def _create_log(self, info: dict[str, Any], state: Any) -> None:
        self.log = RunLog.create(self._options.out, info, rank=self._processes.rank)

    def _resume_log(self, info: dict[str, Any], state: Any) -> None:
        """Continue the run that the checkpoint belongs to."""
        out, step = self._options.out, self._first_step
        require_same_run(out, state, self._options, info["organizer"])
        self.log = RunLog.resume(out, step, info, rank=self._processes.rank)
        self._captures.forget_checks(self.log.info.get("sketch_check", {}))  # the first steps were checked before

    def _wait_for_device(self) -> None:
        """Until the step's own work is done: what is read next would wait for it and count it as the recorder's."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        """Count the recorder's own time."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - started
