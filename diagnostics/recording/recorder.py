"""GradientRecorder: the callback that writes a training run's gradients, batches and outcomes to a run folder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from diagnostics.recording.session import Recording
from diagnostics.run_folder.writer import RunLog, steps_recorded
from diagnostics.signals.base import Signal
from diagnostics.signals.registry import DEFAULT_SIGNALS, signals_of
from sdo.checks import integer_array, number_array, whole_number
from sdo.errors import InputError
from sdo.trainers.ended import end_before_the_first_step, stop_at_once


class GradientRecorder(TrainerCallback, ExportableState):
    """Records the gradients of a training run, with the samples that made them and what came of it.

    Parameters
    ----------
    out
        The run folder; it must be new or empty, or hold the run that is resumed.
    signals
        ``"weight"``: the gradient of one parameter; ``"hidden"``: the gradient at the final norm's output, summed
        over positions; and, where asked for, ``"head_only"``: the gradient of the language-model head alone, tied or
        frozen as it may be, for about three more forward passes of the head and the memory of its gradient (with
        accumulation twice that). ``"samples:PATTERN"``: each sample's own gradient of linear layers, such as
        ``"samples:model.layers.*.mlp.down_proj.weight"``. Several of one word take names:
        ``"late=weight:lm_head.weight"``, or :class:`~diagnostics.Weight` and :class:`~diagnostics.Samples` objects. One
        of your own: :func:`~diagnostics.register_signal`.
    weight
        Full name of the parameter; by default the last trainable matrix.
    sample_every
        Write the rows of single samples, of all signals but ``weight``, at every n-th step; 0 for never.
    sketch_size
        Length k of the sketches. A signal of at most k entries is stored as it is.
    evaluations
        Whether to write each sample's held-out loss at each evaluation, read off the evaluation's own forward passes;
        under GRPO and RLOO the reward of each completion that is trained on.
    trainer
        The trainer that the recorder is added to. Needed for GRPO and RLOO without an organizer: they shuffle their
        completions out of a callback's sight, so that some of this trainer object's methods are wrapped while it
        trains. Of no use otherwise.

    Raises
    ------
    InputError
        For options out of range, and at the start of training for an output folder that holds another run or for a
        parameter that does not exist or is frozen.

    Notes
    -----
    Add it with ``trainer.add_callback(GradientRecorder("runs/sdo"))``, with or without an organizer; with one, attach
    first or last. Gradients are raw: before clipping. Under a loss that divides by the tokens of the whole step,
    micro-batch and sample rows are parts of the step's gradient and not means of their own.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        signals: Sequence[str | Signal] = DEFAULT_SIGNALS,
        weight: str | None = None,
        sample_every: int = 10,
        sketch_size: int = 8192,
        evaluations: bool = True,
        trainer: Any = None,
    ) -> None:
        self.out = Path(out)
        self.signals = signals_of(signals, weight)
        self.weight = weight
        self.sample_every = whole_number("sample_every", sample_every, 0)
        self.sketch_size = whole_number("sketch_size", sketch_size, 1)
        self.evaluations = evaluations
        self.trainer = trainer
        self._recording: Recording | None = None
        self._ended = False
        self._log: RunLog | None = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must remember: which run it belongs to.

        transformers asks for it just before it writes a checkpoint's state, so everything is flushed here: a checkpoint
        that can be resumed never knows more steps than the run folder.
        """
        names = ("out", "signals", "weight", "sample_every", "sketch_size", "evaluations")
        options = {name: getattr(self, name) for name in names}
        if self._recording is not None:
            self._recording.flush()
        run_id = None if self._log is None else self._log.info.get("run_id")
        texts = {"out": str(self.out), "signals": [str(signal) for signal in self.signals]}
        return {"args": options | texts, "attributes": {"run_id": run_id}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Resolve the signals, open the run folder and hook the model; nothing is written if anything is wrong."""
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None
        self._ended = end_before_the_first_step(state, kwargs["train_dataloader"])
        if self._ended and steps_recorded(self.out) > state.global_step:
            return  # resumed from an earlier checkpoint than its last: nothing is trained, so nothing is cut off
        self._recording = Recording.start(self, args, state, kwargs["model"], kwargs["train_dataloader"])
        self._recording.end_when_taken(self._retire)
        self._log = self._recording.log
        # A checkpoint written without a recorder has no entry, and transformers fails on that at the next save.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop a run that had ended before it was resumed."""
        if self._ended:
            stop_at_once(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start collecting a step."""
        if self._recording is not None:
            self._recording.begin_step(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the gradient that the optimizer is given."""
        if self._recording is not None:
            self._recording.before_update(kwargs.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the step's gradients; its own row waits for what the trainer logs about it."""
        if self._recording is not None:
            self._recording.end_step(float(state.epoch), kwargs.get("optimizer"), saving=control.should_save)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let all processes' rows be on disk before the checkpoint that may be written now."""
        if self._ended:
            stop_at_once(control)
        if self._recording is not None:
            self._recording.flush_others(needed=control.should_save)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write this process's rows too where another callback asked for the checkpoint after this one was asked."""
        if self._recording is not None and not state.is_world_process_zero:
            self._recording.log.flush()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Take what the trainer logs of one step: the total gradient norm, and the loss that it alone knows."""
        if self._recording is not None and logs:
            self._recording.note_log(state.global_step, logs)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Write the held-out loss of each sample of the evaluation that just ended."""
        if self._recording is not None:
            name = next((key for key in (metrics or {}) if key.endswith("_loss")), "eval_loss")
            self._recording.end_evaluation(state.global_step, name, kwargs.get("eval_dataloader"))

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Forget a prediction's forward passes; they are no evaluation."""
        if self._recording is not None:
            self._recording.forget_evaluation()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what is left and let go of the model."""
        if self._recording is not None:
            self._recording.close(state.global_step)
            self._recording = None

    def log_evaluation(self, name: str, step: int, sample_ids: ArrayLike, scores: ArrayLike) -> None:
        """Write a score per sample, correctness for instance, beside the run.

        Parameters
        ----------
        name
            What was measured.
        step
            Number of updates the model had had, from 0.
        sample_ids
            Shape ``(n,)``, integers from 0, the evaluated samples. One that comes several times has several scores.
        scores
            Shape ``(n,)``, numbers or booleans; one that is None or not finite is written as null.

        Raises
        ------
        InputError
            For ids that are no integers, scores that are no numbers, masked entries, and lengths that differ.
        RuntimeError
            Before training, when there is no run folder yet.
        """
        step = whole_number("step", step, 0)
        ids, values = integer_array(sample_ids, "sample ids", low=0), number_array(scores, "scores")
        if len(ids) != len(values):
            raise InputError(f"there are {len(ids)} sample ids and {len(values)} scores; expected a score for each id")
        if self._log is None:
            raise RuntimeError("log_evaluation was called before training; there is no run folder yet")
        self._log.add_evaluation(step, name, ids, values)
        if self._recording is None:
            self._log.flush()

    def close(self) -> None:
        """Write what is left and let go of the model, after training that ended by an error or an interrupt.

        Training that ends well does so itself. A second call changes nothing.
        """
        if self._recording is not None:
            self._recording.close(self._recording.steps_done, "failed")
            self._recording = None

    def _retire(self) -> None:
        """End a recording whose training was interrupted, because another training of its model begins."""
        recording, self._recording = self._recording, None
        if recording is not None and recording.abandon():
            warnings.warn(
                f"the recording into {self.out} had not ended when another training of its model began: it is closed "
                "as failed; fix: recorder.close() after an interrupt",
                stacklevel=2,
            )
