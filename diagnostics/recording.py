"""One training run being recorded: its hooks on the model, the step that is under way, and its log."""

from __future__ import annotations

import json
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import SequentialSampler

from diagnostics.batch_ids import BatchIds, IdChannel
from diagnostics.completions import CompletionFollower, Rewards, follow_completions, trainer_needed
from diagnostics.head import HeadTap, Tap
from diagnostics.kinds import TrainerKind
from diagnostics.launch import check_launch, no_ids_came, require_positions
from diagnostics.losses import held_out_scores, sample_losses
from diagnostics.provenance import describe_run
from diagnostics.runlog import RunLog, StepRow, check_free
from diagnostics.scaling import loss_scale
from diagnostics.signals import SILENT, HiddenTap, MicroBatch, WeightTap
from diagnostics.sketch import exact_norm
from diagnostics.step_rows import head_rows, hidden_rows, sample_coherence, weight_rows
from sdo.errors import InputError
from sdo.plan import EpochPlan, Plan, describe_difference

if TYPE_CHECKING:
    from diagnostics.recorder import GradientRecorder

# A clipped gradient is shorter than the raw one by more than rounding can explain.
_CLIP_TOLERANCE = 1e-5


class Recording:
    """The live part of a :class:`~diagnostics.GradientRecorder`, from the start of training to its end.

    Build it with :meth:`start`.

    Attributes
    ----------
    log
        The run folder.
    """

    def __init__(
        self, options: GradientRecorder, kind: TrainerKind, args: Any, model: nn.Module, first_step: int
    ) -> None:
        self._options = options
        self._kind = kind
        self._max_grad_norm = float(args.max_grad_norm or 0)
        self._first_step = first_step
        self._micros: list[MicroBatch] = []
        self._step = first_step
        self._seconds = 0.0  # spent by the recorder itself
        self._seconds_at_start = 0.0
        self._seconds_in_rows = 0.0
        self._step_started = 0.0
        self._pending: dict[str, Any] | None = None  # the row of the step that the trainer has not logged yet
        self._clipped: bool | None = None
        self._loss_scale = 1.0
        self._learning_rate: float | None = None
        self._logged_until = first_step  # updates that the trainer's logs of the loss cover
        self._held_out: list[tuple[int, float]] = []
        self._held_out_seen = 0
        self._held_out_input: Any = None
        self._forward_hook: Any = None
        self.log: RunLog
        kind.require(options.signals)
        k, shared = options.sketch_size, (self._current, self._clock)
        wanted = options.signals
        self._weight = WeightTap.of(model, options.weight, k, *shared) if "weight" in wanted else None
        self._hidden = HiddenTap.of(model, k, *shared, sequences=kind.sequences) if "hidden" in wanted else None
        self._head: HeadTap | None = None
        if "head_only" in wanted:
            self._head = HeadTap.of(model, k, *shared, kind, args, options.sample_every)
        self._channel = IdChannel.of(model)
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
        kind = check_launch(type(args), args)
        require_positions(getattr(loader, "dataset", None))
        recording = cls(options, kind, args, model, state.global_step)
        taps = recording._taps()
        try:
            if kind.generates:
                recording._follow(options.trainer)
            info = describe_run(args, kind, state, model, loader, recording._channel, taps)
            recording._open_log(info, _run_of_checkpoint(state, options))
        except BaseException:
            recording.release()
            raise
        recording._channel.scalars.clear()
        recording._channel.subscribe(recording._begin_micro_batch)
        recording._channel.install(loader)
        for tap in taps.values():
            tap.register()
        recording._forward_hook = model.register_forward_hook(recording._after_forward, with_kwargs=True)
        return recording

    @property
    def steps_done(self) -> int:
        """Number of updates so far."""
        return self._step + 1 if self._pending is not None else self._step

    def release(self) -> None:
        """Let go of the model; what was not flushed is lost."""
        for tap in self._taps().values():
            tap.remove()
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None
        if self._follower is not None:
            self._follower.unsubscribe(self)
            self._follower.detach()
            self._follower = None
        self._channel.unsubscribe(self._begin_micro_batch)

    # ------------------------------------------------------------------ one step

    def begin_step(self, step: int) -> None:
        """Start collecting a step; the one before it is complete now."""
        with self._clock():
            self._write_pending()
            self.log.maybe_flush()
        self._step = step
        self._micros, self._losses = [], []
        self._seconds_at_start = self._seconds
        self._step_started = time.perf_counter()

    def before_update(self, optimizer: Any) -> None:
        """Compare the gradient that the optimizer is given with the raw one: clipping shows as a smaller norm."""
        with self._clock():
            self._loss_scale = loss_scale(optimizer)
            self._learning_rate = float(optimizer.param_groups[0]["lr"]) if optimizer is not None else None
            self._clipped = None
            if self._weight is not None and self._weight.step_norm:
                grad = self._weight.weight.parameter.grad
                if grad is not None:
                    # By now the gradient is unscaled; what remains of the difference is clipping.
                    raw = self._weight.step_norm / self._loss_scale
                    self._clipped = exact_norm(grad) < raw * (1 - _CLIP_TOLERANCE)

    def end_step(self, trainer_epoch: float) -> None:
        """Write the step's gradients and keep its row until the trainer has logged.

        Parameters
        ----------
        trainer_epoch
            The trainer's epoch after the update, a fraction.
        """
        seconds = time.perf_counter() - self._step_started - (self._seconds - self._seconds_at_start)
        with self._clock():
            if self._step == self._first_step:
                self._require_signals()
            tokens = sum(sum(micro.tokens) for micro in self._micros)
            ids = [i for micro in self._micros for i in micro.sample_ids]
            self._pending = {
                "step": self._step,
                "organizer_epoch": None
                if self._plan is None
                else self._epoch_of(self._plan, self._step)[0].organizer_epoch,
                "trainer_epoch": trainer_epoch,
                "loss": self._step_loss(tokens),
                "learning_rate": self._learning_rate,
                "grad_norm": None,
                "clipped": self._clipped,
                "loss_scale": self._loss_scale,
                "tokens": tokens,
                "seconds": seconds,
                "sample_ids": ids,
            }
            self._write_gradients()
            self._micros = []
        # All of the recorder's time since the last row, so that flushes and evaluations are in a row too.
        self._pending["recorder_seconds"] = self._seconds - self._seconds_in_rows
        self._seconds_in_rows = self._seconds

    def _step_loss(self, tokens: int) -> float | None:
        """The step's loss, as run.json words it for this kind of trainer."""
        if self._follower is not None:
            return sum(loss.double().item() for loss in self._losses)
        losses = [micro.losses for micro in self._micros]
        totals = [float(part.total) for part in losses if part is not None and part.total is not None]
        return sum(totals) / tokens if tokens and len(totals) == len(losses) else None

    def note_log(self, updates: int, logs: dict[str, Any]) -> None:
        """Put what the trainer logs of one step into the step's row.

        Parameters
        ----------
        updates
            Number of updates so far.
        logs
            Of them ``grad_norm``, the total before clipping, and ``loss``, which is a mean over the updates since the
            last log: that of one step where there was one.
        """
        last = self._pending is not None and self._pending["step"] == updates - 1
        if self._pending is not None and last and "grad_norm" in logs:
            norm = self._pending["grad_norm"] = float(logs["grad_norm"])
            if self._pending["clipped"] is None:
                self._pending["clipped"] = 0 < self._max_grad_norm < norm
        if "loss" in logs:
            single = updates - self._logged_until == 1
            if self._pending is not None and last and single and self._kind.loss_from == "log":
                self._pending["loss"] = float(logs["loss"])
            self._logged_until = updates

    def _write_gradients(self) -> None:
        norm_state = "raw" if self._loss_scale == 1.0 else "raw, scaled"
        if self._weight is not None:
            for row, sketch in weight_rows(self._step, self._micros, self._weight.step_norm, norm_state):
                self.log.add_gradient("weight", row, sketch)
            self._weight.step_norm = None
        if self._hidden is not None:
            every = self._options.sample_every
            with_samples = every > 0 and self._step % every == 0
            rows = hidden_rows(self._step, self._micros, self._hidden.sketch, norm_state, with_samples)
            for row, sketch in rows:
                self.log.add_gradient("hidden", row, sketch)
            coherence = sample_coherence(self._micros) if with_samples else None
            if coherence is not None:
                self._channel.scalars.add("batch_coherence", coherence)
            if self._hidden.check is not None:
                self._hidden.check_step(self._step, self._micros)
        if self._head is not None:
            every = self._head.with_samples(self._step)
            for row, sketch in head_rows(self._step, self._micros, self._head.sketch, norm_state, every):
                self.log.add_gradient("head_only", row, sketch)
            self._head.check_step(self._step, self._micros)
        checks = [tap.check for tap in self._taps().values() if tap.check is not None]
        if checks and all(check.done for check in checks):
            self._write_checks()

    def _write_pending(self) -> None:
        if self._pending is None:
            return
        row, self._pending = StepRow(**self._pending), None
        self.log.add_step(row)
        if self._plan is not None:
            epoch, stop = self._epoch_of(self._plan, row.step)
            if row.step == stop - 1:
                self._write_exposure(epoch.organizer_epoch)

    def _epoch_of(self, plan: Plan, step: int) -> tuple[EpochPlan, int]:
        """The organizer epoch that holds an optimizer step, and the first optimizer step after it."""
        each = self._channel.steps_per_batch
        epoch = plan.epoch_of(step // each)
        return epoch, (epoch.first_step + epoch.steps) * each

    # ------------------------------------------------------------------ hooks

    def _begin_micro_batch(self, ids: BatchIds) -> None:
        self._micros.append(MicroBatch.of(ids, self._kind))

    def _after_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        with self._clock():
            if self._follower is not None:
                return  # its tokens came with the ids, and an evaluation's completions are not rows of its dataset
            if module.training and self._micros and self._kind.loss_from == "forward":
                # A loss of the user's own trains on logits without labels; TRL then reads its metrics off a second
                # forward pass without gradients, which has them.
                if torch.is_grad_enabled() or self._micros[-1].losses is None:
                    self._micros[-1].losses = sample_losses(output, kwargs, exact=False)
            elif not module.training and not torch.is_grad_enabled() and self._options.evaluations:
                self._hold_evaluation(output, kwargs)

    def _require_signals(self) -> None:
        """After the first step every signal must have fired; silence is never written as zeros."""
        if not self._micros:
            self.release()
            raise RuntimeError(f"step {self._step}: {no_ids_came()}")
        for signal in self._options.signals:
            if all(getattr(micro, signal) is None for micro in self._micros):
                self.release()
                raise RuntimeError(f"signal {signal!r} did not fire in the first step: {SILENT[signal]}")

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

    def _hold_evaluation(self, output: Any, kwargs: dict[str, Any]) -> None:
        """Evaluation goes through its dataset in order, so that the count of samples so far is the position."""
        # A second pass over the same batch is the reference's: the model with its adapters off.
        batch = kwargs.get("input_ids")
        if batch is not None and batch is self._held_out_input:
            return
        self._held_out_input = batch
        for score in held_out_scores(output, kwargs, self._kind) or []:
            if score is not None:
                self._held_out.append((self._held_out_seen, score))
            self._held_out_seen += 1

    def end_evaluation(self, step: int, name: str, loader: Any) -> None:
        """Write the held-out losses that were read off an evaluation's forward passes.

        Parameters
        ----------
        step
            Number of updates the model had had.
        name
            The trainer's name of the loss, such as ``eval_loss``.
        loader
            The evaluation's data loader. Where it does not go through its dataset in order, nothing is written, since
            nobody could tell whose losses they are.
        """
        with self._clock():
            if self._held_out and not _goes_in_order(loader, self._held_out_seen):
                warnings.warn(
                    "the evaluation did not go through its rows once and in order, so its losses per sample are not "
                    "recorded; mend: train_sampling_strategy='random', and no other forward passes while it runs",
                    stacklevel=2,
                )
            elif self._held_out:
                ids, scores = zip(*self._held_out, strict=True)
                name = name.removesuffix("loss") + self._kind.score_name
                self.log.add_evaluation(step, name, np.array(ids, np.int64), np.array(scores, np.float64))
        self.forget_evaluation()

    def forget_evaluation(self) -> None:
        """Drop what was read off forward passes since the last evaluation, a prediction's for instance."""
        self._held_out, self._held_out_seen, self._held_out_input = [], 0, None

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
        if self._plan is not None and global_step > 0:
            epoch, stop = self._epoch_of(self._plan, global_step - 1)
            if global_step < stop:
                self._write_exposure(epoch.organizer_epoch)
        self.log.close(status)
        self.release()

    def _write_exposure(self, organizer_epoch: int) -> None:
        if self._plan is None or self._channel.trained is None:
            return
        epoch, ids = self._plan.epoch(organizer_epoch), self._plan.ids
        trained = self._channel.trained.copy()
        self.log.add_exposure(organizer_epoch, ids, epoch.exposure, trained, np.isin(ids, epoch.pool))

    def _write_checks(self) -> None:
        """Write how far sketched cosines were from exact ones, and let go of the gradients that were kept for it."""
        checks = {}
        for name, tap in self._taps().items():
            if tap.check is not None:
                checks[name] = tap.check.result()
                tap.check = None
        if checks:
            self.log.update_info(sketch_check={**self.log.info.get("sketch_check", {}), **checks})

    # ------------------------------------------------------------------ helpers

    def _open_log(self, info: dict[str, Any], resumed: str | None) -> None:
        """Begin a run folder, or continue the one that the checkpoint belongs to."""
        out, step = self._options.out, self._first_step
        if step == 0 or not (out / "run.json").exists():
            check_free(out)
            self.log = RunLog.create(out, {"run_id": uuid.uuid4().hex, **info})
            return
        try:
            stored = json.loads((out / "run.json").read_text())
            run_id, before = stored.get("run_id"), stored.get("organizer")
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"{out}/run.json cannot be read: {error}; expected the run that is resumed") from error
        difference = describe_difference(before, info["organizer"])
        if difference is not None:
            raise InputError(
                f"{out} holds a run under another plan: {difference}; expected the run that is resumed; "
                "mend: choose another folder"
            )
        if resumed is None or run_id != resumed:
            raise InputError(
                f"{out} holds another run ({run_id}) than the checkpoint at step {step} ({resumed}); expected the run "
                "that is resumed; mend: choose another folder"
            )
        self.log = RunLog.resume(out, step, info)
        for name, tap in self._taps().items():
            if name in self.log.info.get("sketch_check", {}):
                tap.check = None  # the first steps were checked before

    def _taps(self) -> dict[str, Tap]:
        """The taps of the signals that are recorded, by name."""
        taps = {"weight": self._weight, "hidden": self._hidden, "head_only": self._head}
        return {name: tap for name, tap in taps.items() if tap is not None}

    def _current(self) -> tuple[int, list[MicroBatch]]:
        return self._step, self._micros

    @contextmanager
    def _clock(self) -> Iterator[None]:
        """Count the recorder's own time."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - started


def _goes_in_order(loader: Any, seen: int) -> bool:
    inner = getattr(loader, "base_dataloader", loader)
    sampler: Any = getattr(inner, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return isinstance(getattr(sampler, "sampler", None), SequentialSampler) and seen == len(inner.dataset)


def _run_of_checkpoint(state: Any, recorder: GradientRecorder) -> str | None:
    """The run that a checkpoint belongs to, as the recorder stored it there, under its class's name."""
    entry = state.stateful_callbacks.get(type(recorder).__name__)
    attributes = entry.get("attributes", {}) if isinstance(entry, dict) else {}
    return attributes.get("run_id") if state.global_step > 0 else None
