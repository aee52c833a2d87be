"""What recording a trainer's run would give and cost, found out without training."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diagnostics.examination.diagnosis import Diagnosis, SignalFinding
from diagnostics.examination.disk_usage import Shape, forecast
from diagnostics.examination.micro_step import MicroStep, refused_as_training_would, run_micro_step, untouched
from diagnostics.recording.recorder import GradientRecorder
from diagnostics.run_folder.writer import check_free
from diagnostics.signals.base import Capture, SignalContext
from diagnostics.signals.micro_batch import MicroBatch
from diagnostics.signals.objectives import shifts_labels
from sdo.checks import whole_number
from sdo.errors import InputError
from sdo.organizers.epoch_figures import epoch_figures
from sdo.organizers.plan import Plan
from sdo.trainers.completions import trainer_needed, unfollowed
from sdo.trainers.dropped import why_dropped
from sdo.trainers.ids import IdChannel
from sdo.trainers.requirements import check_launch, no_ids_came, require_positions, require_trained_tokens
from sdo.trainers.trainer_types import PLAIN, TrainerKind


def doctor(trainer: Any, *, rows: int = 2, resume: bool = False) -> Diagnosis:
    """Say what recording this trainer's run would give and cost; one real micro-step proves it.

    Parameters
    ----------
    trainer
        A transformers or TRL trainer as it would be trained: with its organizer attached and its
        :class:`~diagnostics.GradientRecorder` added, or without either. Without a recorder its default options are
        looked at.
    rows
        Rows of the micro-step, from 1: the first of the first batch.
    resume
        Whether the run will be resumed from a checkpoint, so that its run folder may exist.

    Returns
    -------
    Diagnosis
        Prints as a report; ``diagnosis.ok`` is whether the run would be recorded.

    Raises
    ------
    InputError
        If ``trainer`` is no trainer, another one's organizer has its model or ``rows`` is out of range. What a run
        would refuse is in ``diagnosis.refused``.

    Notes
    -----
    Nothing is trained and no folder written. The trainer is left as it was, random states included: training after it
    gives the same weights as without it.
    """
    model = getattr(trainer, "model", None)
    if model is None or not hasattr(trainer, "compute_loss"):
        raise InputError(f"doctor got a {type(trainer).__name__}; expected a transformers or TRL trainer")
    rows = whole_number("rows", rows, 1)
    recorders = [c for c in trainer.callback_handler.callbacks if isinstance(c, GradientRecorder)]
    recorder = recorders[0] if recorders else GradientRecorder("run")
    channel = IdChannel.peek(model)
    if channel is not None and channel.is_of_another(trainer.state):
        raise InputError(
            "another trainer's organizer has this trainer's model; expected one at a time; fix: detach that one, or "
            "attach an organizer to this trainer"
        )
    examination = _Examination(trainer, recorder, None if channel is None else channel.plan)
    if recorders and not resume:
        examination.attempt(lambda: check_free(recorder.out))
    examination.micro_step(rows, recorded=bool(recorders))
    return examination.diagnosis(
        recorded=bool(recorders), ids="position in the prepared dataset" if channel is None else channel.source
    )


@dataclass(frozen=True)
class _Schedule:
    step_samples: int
    micro_batches: int
    steps_per_epoch: int
    steps: int


class _Examination:
    """Collects what is found about one trainer."""

    def __init__(self, trainer: Any, recorder: GradientRecorder, plan: Plan | None) -> None:
        self._trainer = trainer
        self._recorder = recorder
        self._plan = plan
        channel = IdChannel.peek(trainer.model)
        self._steps_per_batch = 1 if channel is None else channel.steps_per_batch
        self._refused: list[str] = []
        self._micros: list[MicroBatch] = []
        self._captures: dict[str, Capture] = {}
        self._step: MicroStep | None = None
        self._schedule: _Schedule | None = None
        args = trainer.args
        self._kind: TrainerKind | None = self.attempt(lambda: check_launch(type(args), args))
        self._capture(PLAIN if self._kind is None else self._kind)

    def _capture(self, kind: TrainerKind) -> None:
        """Find the recorder's signals, as far as they exist."""
        model, recorder = self._trainer.model, self._recorder
        self.attempt(lambda: kind.require([signal.word for signal in recorder.signals]))
        context = SignalContext(
            model,
            current=lambda: (0, self._micros),
            clock=contextlib.nullcontext,
            k=recorder.sketch_size,
            sample_every=recorder.sample_every,
            **kind.logits(self._trainer.args),
        )
        for signal in recorder.signals:
            capture = None if signal.word in kind.lacks else self.attempt(functools.partial(signal.of, context))
            self._captures.update({signal.name: capture} if capture is not None else {})

    def attempt(self, action: Any) -> Any:
        """Run what may refuse; the refusal is written down."""
        try:
            return action()
        except InputError as error:
            self._refused.append(str(error))
            return None

    def micro_step(self, rows: int, *, recorded: bool) -> None:
        """Run forward and backward on the first rows of the first batch."""
        before = len(self._refused)
        self.attempt(lambda: require_positions(self._trainer.train_dataset))
        shifts = shifts_labels(self._trainer.model)
        self.attempt(lambda: require_trained_tokens(self._trainer.train_dataset, shifts=shifts))
        if self._kind is not None and self._kind.generates:
            self._refused += unfollowed(self._trainer)
            channel = IdChannel.peek(self._trainer.model)
            if recorded and self._recorder.trainer is None and (channel is None or channel.follower is None):
                self._refused.append(trainer_needed())
        if self._kind is None or len(self._refused) > before:
            return
        try:
            with refused_as_training_would("the first micro-step fails"), untouched(self._trainer):
                loader = self._trainer.get_train_dataloader()
                self._schedule = _schedule(self._trainer, loader)
                captures = list(self._captures.values())
                self._step = run_micro_step(self._trainer, self._kind, loader, captures, self._micros, rows)
        except InputError as error:
            self._refused.append(str(error))

    def diagnosis(self, *, recorded: bool, ids: str) -> Diagnosis:
        """Put everything together."""
        findings = tuple(self._finding(capture) for capture in self._captures.values())
        if self._step is not None and not self._micros:
            self._refused.append(no_ids_came())
        elif self._step is not None:
            self._refused += _not_finite(self._step, findings)
            silent = [self._captures[f.name].signal for f in findings if not f.fires]
            self._refused += [f"signal {signal.name!r} does not fire: {signal.silent}" for signal in silent]
        model, schedule = self._trainer.model, self._schedule
        parameters = list(model.parameters())
        dataset = self._trainer.train_dataset
        return Diagnosis(
            model={
                "class": type(model).__name__,
                "parameters": sum(p.numel() for p in parameters),
                "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
                "dtype": str(parameters[0].dtype).removeprefix("torch."),
            },
            samples=len(dataset) if hasattr(dataset, "__len__") else None,
            ids=ids,
            schedule=None if schedule is None else dataclasses.asdict(schedule),
            organizer=self._organizer(),
            recorder={
                "out": str(self._recorder.out) if recorded else None,
                "sample_every": self._recorder.sample_every,
                "sketch_size": self._recorder.sketch_size,
            },
            signals=findings,
            disk=self._disk(),
            micro_step=self._step,
            refused=tuple(self._refused),
        )

    def _finding(self, capture: Capture) -> SignalFinding:
        measured = capture.micro_batch(self._micros[-1]) if self._micros else None
        norm = None
        if measured is not None:
            vector, exact = measured
            norm = float(vector.double().norm() if exact is None else exact)
        said = capture.describe()
        copies = 0 if capture.check is None else capture.check.copies(capture.gradient_bytes)
        return SignalFinding(
            name=capture.name,
            fires=None if self._step is None else measured is not None,
            parameter=said["parameter"],
            shape=tuple(said["shape"]),
            tied_with=tuple(said["tied_with"]),
            kind=capture.sketch.kind,
            stored=capture.sketch.stored,
            norm=None if norm is None or not math.isfinite(norm) else norm,
            table_bytes=capture.sketch.table_bytes,
            copies=copies,
            copy_bytes=copies * capture.gradient_bytes,
        )

    def _organizer(self) -> dict[str, Any] | None:
        if self._plan is None:
            return None
        figures = epoch_figures(self._plan, uniform_seed=int(self._plan.organizer.options.get("seed", 0)), epochs=1)
        notes, missing = list(self._plan.notes), self._plan.organizer.n_samples - len(self._plan.ids)
        if missing:
            notes.append(
                f"{missing:,} of {self._plan.organizer.n_samples:,} samples have no row in the training dataset; if "
                f"nobody left them out, TRL dropped {why_dropped(self._trainer)}"
            )
        found = {"name": self._plan.organizer.name, **figures[0], "notes": notes}
        return {**found, "steps": figures[0]["steps"] * self._steps_per_batch}

    def _disk(self) -> tuple[Any, ...]:
        if self._schedule is None:
            return ()
        shape = Shape(
            steps=self._schedule.steps,
            step_samples=self._schedule.step_samples,
            micro_batches=self._schedule.micro_batches,
            samples=len(self._trainer.train_dataset),
            sample_every=self._recorder.sample_every,
            signals={name: (one.sketch.stored, one.signal.kinds) for name, one in self._captures.items()},
            evaluations=self._scores(self._schedule) if self._recorder.evaluations else 0,
            steps_per_batch=self._steps_per_batch,
        )
        return tuple(forecast(shape, self._plan))

    def _scores(self, schedule: _Schedule) -> int:
        """Rows of evaluations over the whole run: scores of held-out samples, or rewards of completions."""
        if self._kind is None or not self._kind.generates:
            return _evaluated(self._trainer, schedule)
        args, functions = self._trainer.args, len(self._trainer.reward_funcs)
        micro_steps = schedule.steps * int(args.gradient_accumulation_steps)  # of each process
        generated: int = math.ceil(micro_steps / (args.steps_per_generation * args.num_iterations))
        return generated * int(args.generation_batch_size) * (1 + (functions if functions > 1 else 0))


def _not_finite(step: MicroStep, findings: Sequence[SignalFinding]) -> list[str]:
    """Say where the micro-step's loss, or else a gradient, is no number: such a model does not learn."""
    fix = "look for NaN in the model's weights, and at its dtype"
    if not math.isfinite(step.loss):
        return [f"the loss of the micro-step is {step.loss}; expected a finite one; fix: {fix}"]
    return [
        f"the gradient of {f.name!r} is not finite in the micro-step, though the loss is {step.loss:.4g}; expected a "
        f"finite one; fix: {fix}"
        for f in findings
        if f.fires and f.norm is None
    ]


def _schedule(trainer: Any, loader: Any) -> _Schedule:
    args = trainer.args
    accumulation, processes = int(args.gradient_accumulation_steps), int(args.world_size)
    per_epoch = max(1, math.ceil(len(loader) / accumulation))
    return _Schedule(
        step_samples=int(args.train_batch_size) * accumulation * processes,
        micro_batches=accumulation * processes,
        steps_per_epoch=per_epoch,
        steps=int(args.max_steps) if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch),
    )


def _evaluated(trainer: Any, schedule: _Schedule) -> int:
    """Samples that evaluations score over the whole run."""
    args, data = trainer.args, trainer.eval_dataset
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    if data is None:
        return 0
    sizes = [len(part) for part in (data.values() if isinstance(data, dict) else [data]) if hasattr(part, "__len__")]
    times = int(bool(getattr(args, "eval_on_start", False)))
    if strategy == "steps" and args.eval_steps:
        every = args.eval_steps if args.eval_steps >= 1 else math.ceil(schedule.steps * args.eval_steps)
        times += schedule.steps // int(every)
    elif strategy == "epoch":
        times += schedule.steps // schedule.steps_per_epoch
    return times * sum(sizes)
