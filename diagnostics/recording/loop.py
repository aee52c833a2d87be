"""Record a training loop of one's own: plain PyTorch, or accelerate, in one process or several under DDP."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from diagnostics.recording.recording import Recording
from diagnostics.signals.base import Signal
from diagnostics.signals.registry import DEFAULT_SIGNALS, signals_of
from sdo.checks import integer_array, number_array, whole_number
from sdo.errors import InputError
from sdo.organizers.plan import Plan
from sdo.trainers.adapter import RunSettings
from sdo.trainers.ids import BatchIds
from sdo.trainers.ledger import TrainedLedger
from sdo.trainers.processes import Processes
from sdo.trainers.requirements import require_positions
from sdo.trainers.session import Schedule, TrainingSession
from sdo.trainers.trainer_types import PLAIN, TrainerKind

LOOP = replace(PLAIN, trainer="a loop", config="", score=None, score_from=None)


def record(
    out: str | Path,
    model: nn.Module,
    optimizer: Any,
    *,
    plan: Plan | None = None,
    settings: RunSettings | None = None,
    dataset: Any = None,
    signals: Sequence[str | Signal] = DEFAULT_SIGNALS,
    sample_every: int = 10,
    sketch_size: int = 8192,
    resume: Mapping[str, Any] | None = None,
) -> LoopRecorder:
    """Record a training loop of your own into a run folder, the same as a trainer's.

    Parameters
    ----------
    out
        The run folder; it must be new or empty, or hold the run that is resumed.
    model
        The model in training, as it is or in ``DistributedDataParallel``.
    optimizer
        Tells the learning rate.
    plan
        What each step is to train, where an organizer decides: steps are held against it, and both ledgers are kept.
    settings
        What run.json is to say of the training.
    dataset
        The training dataset, for its rows and digest in run.json.
    signals, sample_every, sketch_size
        As for :class:`~diagnostics.GradientRecorder`.
    resume
        What :meth:`LoopRecorder.state_dict` gave for the checkpoint that is resumed.

    Returns
    -------
    LoopRecorder
        For ``with``: the folder is opened there, and closed at its end.

    Raises
    ------
    InputError
        For wrong options, and, where the ``with`` block begins, for what the model or folder refuses.

    Examples
    --------
    ::

        with record("runs/x", model, optimizer, plan=plan) as rec:
            for batch in loader:
                with rec.micro_batch(ids=batch["sample_id"]):
                    loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
                    loss.backward()
                rec.step(loss=loss)  # behind clipping, before optimizer.step()
                optimizer.step()
                optimizer.zero_grad()

    Notes
    -----
    Losses and tokens are read off the model's own forward pass where it is given labels; else ``loss=`` and ``tokens=``
    tell them. Loss scaling of float16 is not followed: train in float32 or bfloat16.
    """
    options = _Options(
        Path(out),
        signals_of(signals),
        whole_number("sample_every", sample_every, 0),
        whole_number("sketch_size", sketch_size, 1),
    )
    if isinstance(model, nn.DataParallel):
        raise InputError("the model is in nn.DataParallel, whose copies' gradients cannot be told apart; fix: DDP")
    inner: Any = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if getattr(optimizer, "scaler", None) is not None:
        raise InputError(
            "the optimizer scales losses, as float16 needs it; a loop's recorder does not follow that; fix: bf16"
        )
    groups = getattr(optimizer, "param_groups", None)
    if not groups:
        raise InputError(f"the optimizer is a {type(optimizer).__name__} without param_groups; expected torch's")
    return LoopRecorder(options, inner, optimizer, plan, settings or RunSettings(), dataset, resume)


@dataclass(frozen=True)
class _Options:
    """As :class:`diagnostics.recording.recording.RecorderOptions` wants it."""

    out: Path
    signals: tuple[Signal, ...]
    sample_every: int
    sketch_size: int
    evaluations: bool = False
    trainer: Any = None


@dataclass(frozen=True, eq=False)
class LoopAdapter:
    """A loop that is about to begin; see :class:`sdo.trainers.adapter.TrainerAdapter`."""

    model: nn.Module
    dataset: Any
    settings: RunSettings
    first_step: int
    resumed_runs: tuple[str, ...]
    processes: Processes
    follow_plan: Callable[[TrainingSession], None]
    owner: object = field(default_factory=object)
    kind: TrainerKind = LOOP
    filters_losses: bool = False

    @property
    def logits(self) -> Mapping[str, Any]:
        """As a causal language model makes them."""
        return {"sequences": 1, "temperature": 1.0, "full_precision": False}

    def require(self) -> None:
        """Refuse an iterable dataset."""
        if self.dataset is not None:
            require_positions(self.dataset)

    def require_schedule(self, session: TrainingSession) -> None:
        """Follow the loop's own plan, once nothing else can refuse the recording."""
        self.follow_plan(session)

    def carry_ids(self, session: TrainingSession) -> None:
        """Nothing: the loop tells them with each micro-batch."""


class LoopRecorder:
    """Returned by :func:`record`: tells the recorder what the loop does.

    Attributes
    ----------
    plan
        What each step is to train, or None.
    """

    def __init__(
        self,
        options: _Options,
        model: nn.Module,
        optimizer: Any,
        plan: Plan | None,
        settings: RunSettings,
        dataset: Any,
        resume: Mapping[str, Any] | None,
    ) -> None:
        self.plan = plan
        self._options, self._optimizer = options, optimizer
        state = _state_of(resume)
        processes = Processes.joined()
        settings = replace(settings, processes=processes.count)
        runs = () if state["run_id"] is None else (str(state["run_id"]),)
        self._training = LoopAdapter(model, dataset, settings, state["step"], runs, processes, self._follow_plan)
        self._step: int = state["step"]
        self._inside = self._begun = False
        self._recording: Recording | None = None
        self._run_id: str | None = None
        self._ledger: TrainedLedger | None = None
        self._undo = ExitStack()

    # ------------------------------------------------------------------ life cycle

    def __enter__(self) -> LoopRecorder:
        """Open the run folder and hook the model."""
        if self._recording is not None:
            raise InputError("the recorder is in use already; expected one 'with' for each record()")
        try:
            self._recording = Recording.start(self._options, self._training)
        except BaseException:
            self._undo.close()
            raise
        self._recording.end_when_taken(self._retire)
        self._run_id = self._recording.log.info["run_id"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is left, and let go of the model."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close(self._step, "finished" if error is None else "failed")
        self._undo.close()

    @contextmanager
    def micro_batch(self, ids: ArrayLike, tokens: ArrayLike | None = None) -> Iterator[None]:
        """Stand round the forward and backward pass of one micro-batch.

        Parameters
        ----------
        ids
            Shape ``(b,)``, integers from 0: the samples in the order of the batch's rows. With a plan, its ids.
        tokens
            Shape ``(b,)``, how many tokens of each carry a loss, where the model is not given labels.

        Raises
        ------
        InputError
            For ids or tokens of another kind or number, and inside of another micro-batch.
        """
        recording = self._recorded("micro_batch")
        if self._inside:
            raise InputError("micro_batch came inside of another; expected one after the other")
        samples = integer_array(_array(ids), "sample ids", low=0)
        counts = None if tokens is None else integer_array(_array(tokens), "tokens", low=0)
        if counts is not None and len(counts) != len(samples):
            raise InputError(
                f"there are {len(samples)} sample ids and {len(counts)} counts of tokens; expected as many"
            )
        if not len(samples):
            raise InputError("micro_batch got no sample id; expected one for each row of the batch")
        if self.plan is not None:
            self._require_known(self.plan, samples)
        if not self._begun:
            recording.begin_step(self._step)
            if self._ledger is not None:
                self._ledger.begin_step()
            self._begun = True
        told = None if counts is None else tuple(counts.tolist())
        session = TrainingSession.of(self._training.model)
        self._inside = True
        try:
            session.ids.announce(BatchIds(tuple(samples.tolist()), told))
            yield
        finally:
            self._inside = False

    def step(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        grad_norm: float | torch.Tensor | None = None,
        epoch: float | None = None,
    ) -> None:
        """Write the step: behind its last micro-batch and clipping, before ``optimizer.step()``.

        Parameters
        ----------
        loss
            Of the step, where the model's forward pass does not tell it: written as it is, of several processes the
            mean.
        grad_norm
            What ``clip_grad_norm_`` returned. Without it the norm is taken of the gradients as they are, and is null
            where they were clipped.
        epoch
            Epochs so far, a fraction; by default as the plan counts them.

        Raises
        ------
        InputError
            If no micro-batch came since the last step.
        RuntimeError
            If the step is not the plan's, or a signal did not fire in the first step.
        """
        recording = self._recorded("step")
        if self._inside or not self._begun:
            raise InputError(
                "step came "
                + ("inside of a micro-batch" if self._inside else "without a micro-batch")
                + "; expected: with rec.micro_batch(ids=…) round forward and backward, then rec.step()"
            )
        processes, step = self._training.processes, self._step
        given = None if loss is None else _number(loss)
        if given is not None and processes.count > 1:
            given = float(np.mean([part[0] for part in processes.numbers(np.array([given]))]))
        recording.before_update(self._optimizer)
        if epoch is None and self.plan is not None:
            epoch = (step + 1) / self.plan.steps_per_epoch
        recording.end_step(epoch, None, saving=False, loss=given)
        if self._ledger is not None:
            self._hold_against_plan(self._ledger, step)
        self._step, self._begun = step + 1, False
        norm = _gradient_norm(self._training.model) if grad_norm is None else _number(grad_norm)
        recording.note_norm(norm, measured=grad_norm is None)

    def log_evaluation(self, name: str, sample_ids: ArrayLike, scores: ArrayLike) -> None:
        """Write a score a sample, after as many updates as there were steps.

        Parameters
        ----------
        name
            What was measured.
        sample_ids
            Shape ``(n,)``, integers from 0.
        scores
            Shape ``(n,)``, numbers or booleans; one that is not finite is written as null.
        """
        ids, values = integer_array(_array(sample_ids), "sample ids", low=0), number_array(_array(scores), "scores")
        if len(ids) != len(values):
            raise InputError(f"there are {len(ids)} sample ids and {len(values)} scores; expected a score for each id")
        self._recorded("log_evaluation").log.add_evaluation(self._step, name, ids, values)

    def figures(self) -> dict[str, float]:
        """Return the step figures since the last call, for a log of your own: coverage, batch coherence and others."""
        return TrainingSession.of(self._training.model).figures.take()

    @property
    def trained(self) -> NDArray[np.int64] | None:
        """The trained ledger, shape ``(n,)``, aligned with ``plan.ids``; None without a plan."""
        return None if self._ledger is None else self._ledger.trained

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep for ``record(resume=…)``; all that is recorded so far is on disk then.

        In several processes each must call it.
        """
        recording = self._recorded("state_dict")
        recording.flush()
        recording.flush_others()
        return {"run_id": self._run_id, "step": self._step, "plan": None if self.plan is None else self.plan.describe()}

    # ------------------------------------------------------------------ helpers

    def _recorded(self, what: str) -> Recording:
        if self._recording is None:
            raise InputError(f"{what} came outside of the recorder's block; expected: with record(…) as rec")
        return self._recording

    def _follow_plan(self, session: TrainingSession) -> None:
        """Keep the trained ledger of the plan, and let the session know of it."""
        session.ids.source = "as the loop says"
        plan, training = self.plan, self._training
        if plan is None:
            return
        processes = training.processes
        if plan.layout.processes != processes.count:
            raise InputError(
                f"the plan is laid out for {plan.layout.processes} process(es), training runs in {processes.count}; "
                f"fix: organizer.plan(…, layout=Layout(processes={processes.count}, accumulation=…))"
            )
        ledger = self._ledger = TrainedLedger(plan, session)
        self._undo.callback(ledger.detach)
        ledger.resume(training.first_step, [])
        session.schedule = Schedule(plan, ledger.trained, lambda: training.owner, check=_fits, release=self._undo.close)
        self._undo.callback(setattr, session, "schedule", None)

    @staticmethod
    def _require_known(plan: Plan, samples: NDArray[np.int64]) -> None:
        unknown = np.setdiff1d(samples, plan.ids)
        if len(unknown):
            raise InputError(
                f"sample id {unknown[0]} is none of the plan's {len(plan.ids)}; expected ids as its sampler gives them"
            )

    def _hold_against_plan(self, ledger: TrainedLedger, step: int) -> None:
        """Compare what all processes trained with what was planned, and count it."""
        ledger.ids = [i for part in self._training.processes.lists(ledger.ids) for i in part]
        ledger.require_share(step, ledger.planned(step))
        ledger.count(step, ledger.planned(step), skipped=False)

    def _retire(self) -> None:
        """End the recording because another training of the model begins."""
        recording, self._recording = self._recording, None
        if recording is not None and recording.abandon():
            warnings.warn(
                f"the recording into {self._options.out} had not ended when another training of its model began: it is "
                "closed as failed; fix: end its 'with' block first",
                stacklevel=2,
            )


def _fits(args: Any, state: Any, loader: Any) -> None:
    """A loop has no arguments of its own that could leave its plan: each step is held against it."""


def _state_of(resume: Mapping[str, Any] | None) -> dict[str, Any]:
    if resume is None:
        return {"run_id": None, "step": 0}
    if not isinstance(resume, Mapping) or not {"run_id", "step"} <= resume.keys():
        raise InputError(f"resume is {resume!r}; expected what rec.state_dict() gave for the checkpoint")
    return {"run_id": resume["run_id"], "step": whole_number("step of resume", resume["step"], 0)}


def _array(values: ArrayLike) -> ArrayLike:
    """A tensor as an array."""
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values


def _number(value: float | torch.Tensor) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _gradient_norm(model: nn.Module) -> float:
    """2-norm over all parameters' gradients, as they are."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads:
        return math.nan
    total: Any = torch.nn.utils.get_total_norm(grads)
    return float(total.full_tensor() if hasattr(total, "full_tensor") else total)
