"""Gradients of single samples at the parameters as they are: nothing is trained.

Each sample goes through the trainer's own loss alone, forward and backward, so that its gradient is exact for every
signal and no padding is computed. All parameters but those that a signal needs are frozen meanwhile: backward ends at
them, and activations of the layers below are not kept.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from diagnostics.examination.micro_step import fetch, forward_backward, listening, refused_as_training_would, untouched
from diagnostics.recording.gradient_rows import make_row
from diagnostics.signals.base import Capture, Signal, SignalContext
from diagnostics.signals.captures import Captures
from diagnostics.signals.losses import LossReader
from diagnostics.signals.micro_batch import MicroBatch
from diagnostics.signals.objectives import shifts_labels
from diagnostics.signals.registry import DEFAULT_SIGNALS, signals_of
from sdo.errors import InputError
from sdo.trainers.ids import IdChannel
from sdo.trainers.requirements import check_launch, no_ids_came, require_positions, require_trained_tokens
from sdo.trainers.trainer_types import TrainerKind

NORM_STATE = "raw, unscaled, of the loss summed over the sample's tokens"
NORM_STATE_OF_MEAN = "raw, unscaled, of the sample's own loss"


@dataclass(frozen=True, eq=False)
class SampleGradients:
    """One signal's gradients of n samples.

    Attributes
    ----------
    signal
        Its name, such as ``"weight"`` or ``"hidden"``.
    parameter
        Name of its parameter; None where it has none, as ``hidden``.
    stored
        How a sketch was made, as its ``describe()`` says.
    check
        Error of the sketched cosines among the first samples, as ``SketchCheck`` finds it; None where
        gradients are stored as they are.
    sample_ids
        Shape ``(n,)``, int64.
    sketch
        Shape ``(n, k)``, float32; zeros where the gradient has no direction.
    norm
        Shape ``(n,)``, float64, exact, as the samples of one step weigh in it; NaN where not finite.
    norm_state
        What the norms are, in words.
    tokens
        Shape ``(n,)``, int64, tokens that carry a loss.
    reason
        n texts, why a gradient has no direction; None where it has.
    """

    signal: str
    parameter: str | None
    stored: dict[str, Any]
    check: dict[str, Any] | None
    sample_ids: NDArray[np.int64]
    sketch: NDArray[np.float32]
    norm: NDArray[np.float64]
    norm_state: str
    tokens: NDArray[np.int64]
    reason: tuple[str | None, ...]

    @property
    def defined(self) -> NDArray[np.bool_]:
        """Shape ``(n,)``: rows that have a direction."""
        return np.array([one is None for one in self.reason], dtype=np.bool_)


@dataclass(frozen=True, eq=False)
class Sampled:
    """What :func:`sample_gradients` found and took.

    Attributes
    ----------
    signals
        By name.
    seconds
        Forward and backward of all samples.
    device
        Where it ran.
    """

    signals: dict[str, SampleGradients]
    seconds: float
    device: str


def sample_gradients(
    trainer: Any,
    sample_ids: NDArray[np.int64],
    *,
    signals: Sequence[str | Signal] = DEFAULT_SIGNALS,
    weight: str | None = None,
    sketch_size: int = 8192,
    progress: Callable[[int], None] | None = None,
) -> Sampled:
    """Take the gradients of single samples, one forward and backward pass each.

    Parameters
    ----------
    trainer
        A transformers or TRL trainer in one process, with its organizer attached or without one; SFT and DPO.
    sample_ids
        Shape ``(n,)``, each once.
    signals
        As :class:`~diagnostics.GradientRecorder` takes them; those that have a gradient of a micro-batch.
    weight
        The parameter of a ``weight`` that names none; by default the last trainable matrix.
    sketch_size
        Length k of the sketches.
    progress
        Called with the number of samples done.

    Returns
    -------
    Sampled
        Rows in the order of `sample_ids`. The trainer, its model and all random states are left as they were.

    Raises
    ------
    InputError
        If trainer, signals or parameter cannot be followed, a signal does not fire, or the user's model or loss fails.

    Notes
    -----
    A step's loss is the mean over its trained tokens (transformers since 4.46, ``num_items_in_batch``), so that a
    sample weighs by its tokens: norms are those of the loss summed over the tokens. Where a trainer takes the mean over
    samples, as DPO does, or the model's loss is of no kind that is known, they are those of the sample's own loss.
    """
    kind = check_launch(type(trainer.args), trainer.args)
    wanted = signals_of(signals, weight)
    _refuse(trainer, kind, wanted)
    require_positions(trainer.train_dataset)
    require_trained_tokens(trainer.train_dataset, shifts=shifts_labels(trainer.model))
    micros: list[MicroBatch] = []
    model = trainer.model
    context = SignalContext(
        model,
        current=lambda: (0, micros),
        clock=contextlib.nullcontext,
        k=sketch_size,
        **kind.logits(trainer.args),
    )
    captures = Captures(wanted, context).named
    frozen = only_trainable(model, captures.values())
    with untouched(trainer, checkpointing=False), frozen, listening(model, kind, micros) as reader:
        loader = trainer.get_train_dataloader()
        channel = IdChannel.of(model)
        channel.install(loader)
        model.train()
        collector = _Collector(trainer, loader, kind, captures, micros, reader)
        started = time.perf_counter()
        for done, (sample, position) in enumerate(zip(sample_ids, channel.positions(sample_ids), strict=True), 1):
            collector.take(int(sample), int(position))
            if progress is not None:
                progress(done)
        return Sampled(collector.result(), time.perf_counter() - started, str(trainer.args.device))


@contextlib.contextmanager
def only_trainable(model: nn.Module, captures: Iterable[Capture]) -> Iterator[None]:
    """Freeze all parameters but those that the captures need; as before when the body ends."""
    needed: list[nn.Parameter] = []
    for capture in captures:
        own = capture.needed_parameters()
        # What one signal needs may serve another: `hidden` takes any parameter of the decoder.
        if not any(one is parameter for one in needed for parameter in own):
            needed.append(own[0])
    before = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(any(parameter is one for one in needed))
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


class _Collector:
    """Runs sample after sample and keeps their rows."""

    def __init__(
        self,
        trainer: Any,
        loader: Any,
        kind: TrainerKind,
        captures: dict[str, Capture],
        micros: list[MicroBatch],
        reader: LossReader,
    ) -> None:
        self._trainer, self._loader, self._kind, self._captures, self._micros = trainer, loader, kind, captures, micros
        self._reader = reader
        self._ids: list[int] = []
        self._tokens: list[int] = []
        self._rows: dict[str, list[Any]] = {name: [] for name in captures}

    @property
    def _by_tokens(self) -> bool:
        """Whether the loss is a mean over tokens, so that a sample weighs by its own: the first sample tells."""
        return self._kind.loss_from == "forward" and not self._reader.disagrees

    @property
    def _state(self) -> str:
        return NORM_STATE if self._by_tokens else NORM_STATE_OF_MEAN

    def take(self, sample: int, position: int) -> None:
        """Add one sample."""
        self._micros.clear()
        with refused_as_training_would(f"forward and backward of sample {sample} fail"):
            inputs = fetch(self._trainer, self._loader, [position])
            forward_backward(self._trainer, inputs, list(self._captures.values()))
        if not self._micros or self._micros[-1].sample_ids != [sample]:
            raise InputError(no_ids_came())
        micro = self._micros[-1]
        tokens = sum(micro.tokens)
        self._ids.append(sample)
        self._tokens.append(tokens)
        for name, capture in self._captures.items():
            self._rows[name].append(self._row(capture, micro, tokens))
        for parameter in self._trainer.model.parameters():
            parameter.grad = None

    def _row(self, capture: Capture, micro: MicroBatch, tokens: int) -> Any:
        """One signal's row, as the sample weighs in a step."""
        measured = capture.micro_batch(micro)
        exact: float | torch.Tensor | None
        if measured is None and tokens:
            raise InputError(f"signal {capture.name!r} does not fire: {capture.signal.silent}")
        if measured is None:
            vector, exact = torch.zeros(capture.sketch.stored), 0.0
        else:
            vector, exact = measured
            capture.check_pass(len(self._ids), micro)
        scale = tokens if self._by_tokens and tokens else 1
        norm = None if exact is None else torch.as_tensor(exact).double() * scale
        return make_row(0, "sample", 0, micro.sample_ids, tokens, norm, self._state, vector * scale)

    def result(self) -> dict[str, SampleGradients]:
        """Put the rows together."""
        found = {}
        for name, capture in self._captures.items():
            rows = [row for row, _ in self._rows[name]]
            check = None if capture.check is None or capture.sketch.kind == "identity" else capture.check.result()
            found[name] = SampleGradients(
                signal=name,
                parameter=capture.describe()["parameter"],
                stored=capture.sketch.describe(),
                check=check,
                sample_ids=np.array(self._ids, dtype=np.int64),
                sketch=np.stack([sketch for _, sketch in self._rows[name]]),
                norm=np.array([np.nan if row.norm is None else row.norm for row in rows], dtype=np.float64),
                norm_state=self._state,
                tokens=np.array(self._tokens, dtype=np.int64),
                reason=tuple(row.reason for row in rows),
            )
        return found


def _refuse(trainer: Any, kind: TrainerKind, signals: Sequence[Signal]) -> None:
    for signal in signals:
        if "micro_batch" not in signal.kinds:
            raise InputError(
                f"signal {signal.name!r} has no gradient of a micro-batch; gradients of single samples are taken one "
                f"micro-batch a sample; fix: signals={list(DEFAULT_SIGNALS)}"
            )
    kind.require([signal.word for signal in signals])
    if kind.generates:
        raise InputError(
            f"a {kind.trainer} generates its samples itself; expected a trainer whose samples are rows of its dataset"
        )
    if int(trainer.args.world_size) > 1:
        raise InputError(f"got {trainer.args.world_size} processes; expected one; fix: start without torchrun")
