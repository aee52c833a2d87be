"""One real micro-step of a trainer, forward and backward, that leaves the trainer as it was."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import nn

from diagnostics.signals.base import Capture
from diagnostics.signals.losses import LossReader
from diagnostics.signals.micro_batch import MicroBatch
from sdo.errors import InputError, error_line
from sdo.trainers.completions import follow_completions
from sdo.trainers.ids import BatchIds, IdChannel
from sdo.trainers.trainer_types import TrainerKind
from sdo.trainers.versions import enable_checkpointing

# Completions of the micro-step: long enough to prove everything, short enough not to wait for.
GENERATED_TOKENS = 16
_GATHERED = ("_metrics", "_logs", "_pending_extra_logs", "_pending_metrics")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MicroStep:
    """What a micro-step was and cost.

    Attributes
    ----------
    sample_ids
        The samples, the first of the first batch.
    tokens
        Tokens that carried a loss.
    loss
        As the trainer computes it.
    seconds
        Forward and backward.
    peak_bytes
        Most memory in use during it: allocated on a GPU, resident in the process otherwise; None where unknown.
    device
        Where it ran.
    generated
        Most tokens of a completion that was generated for it; None where the trainer generates none.
    loss_reason
        Why a recorder could not read off the samples' losses; None where it can, or where the trainer logs them.
    """

    sample_ids: tuple[int, ...]
    tokens: int
    loss: float
    seconds: float
    peak_bytes: int | None
    device: str
    generated: int | None = None
    loss_reason: str | None = None


def run_micro_step(
    trainer: Any, kind: TrainerKind, loader: Any, captures: Sequence[Capture], micros: list[MicroBatch], rows: int
) -> MicroStep:
    """Run the trainer's own loss on the first rows of its first batch, and backward; call it inside `untouched`.

    Parameters
    ----------
    trainer
        A transformers or TRL trainer.
    kind
        Its kind.
    loader
        ``trainer.get_train_dataloader()``, made inside :func:`untouched`.
    captures
        Signals to catch; hooked here and let go of at the end.
    micros
        Where the captures look for the micro-batch; it gets one.
    rows
        How many rows at most.
    """
    model = trainer.model
    channel = IdChannel.of(model)
    with listening(model, kind, micros) as reader:
        follower = follow_completions(trainer) if kind.generates else None
        try:
            channel.install(loader)
            inner = getattr(loader, "base_dataloader", loader)
            positions = list(next(iter(inner.batch_sampler)))
            if kind.generates:
                items = inner.collate_fn(inner.dataset.__getitems__(positions[: trainer.args.num_generations]))
                inputs = _generated(trainer, items, rows)
            else:
                inputs = fetch(trainer, loader, positions[:rows])
            model.train()
            on_gpu = trainer.args.device.type == "cuda"
            reset_peak(on_gpu)
            started = time.perf_counter()
            loss = forward_backward(trainer, inputs, captures)
            if on_gpu:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        finally:
            if follower is not None:
                follower.detach()
    ids = micros[0].sample_ids if micros else []
    return MicroStep(
        sample_ids=tuple(ids),
        tokens=sum(sum(micro.tokens) for micro in micros),
        loss=float(loss),
        seconds=seconds,
        peak_bytes=peak_bytes(on_gpu),
        device=str(loss.device),
        generated=min(GENERATED_TOKENS, int(trainer.args.max_completion_length)) if kind.generates else None,
        loss_reason=reader.reason if kind.loss_from == "forward" else None,
    )


@contextlib.contextmanager
def listening(model: nn.Module, kind: TrainerKind, micros: list[MicroBatch]) -> Iterator[LossReader]:
    """Begin a micro-batch in `micros` with each forward pass in training mode, and read its losses off the output.

    Parameters
    ----------
    model
        The model in training.
    kind
        Its trainer's kind.
    micros
        Gets the micro-batches.

    Yields
    ------
    LossReader
        What reads the losses.
    """
    channel = IdChannel.of(model)
    reader = LossReader(model, kind)

    def begin(ids: BatchIds) -> None:
        micros.append(MicroBatch.of(ids, kind, shifts=reader.shifts))

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        wanted = kind.loss_from == "forward" and bool(micros)
        if wanted and (torch.is_grad_enabled() or micros[-1].losses is None):
            micros[-1].losses = reader.read(output, kwargs, exact=False) or micros[-1].losses

    channel.subscribe(begin)
    hook = model.register_forward_hook(after, with_kwargs=True)
    try:
        yield reader
    finally:
        hook.remove()
        channel.unsubscribe(begin)


def fetch(trainer: Any, loader: Any, positions: list[int]) -> Any:
    """Return rows of the training dataset, collated and on the trainer's device as its own loader gives them.

    Parameters
    ----------
    trainer
        A transformers or TRL trainer.
    loader
        Its training loader.
    positions
        Positions in the dataset.
    """
    inner = getattr(loader, "base_dataloader", loader)
    batch = inner.collate_fn(inner.dataset.__getitems__(positions))
    return trainer._prepare_inputs(send_to_device(batch, trainer.args.device))


def forward_backward(trainer: Any, inputs: Any, captures: Sequence[Capture]) -> torch.Tensor:
    """Run the trainer's own loss, and backward while the captures listen; return the loss, shape ``()``.

    Parameters
    ----------
    trainer
        A transformers or TRL trainer.
    inputs
        What its loss takes.
    captures
        Hooked here and let go of at the end.
    """
    try:
        for capture in captures:
            capture.register()
        with trainer.accelerator.autocast(), trainer.compute_loss_context_manager():
            loss: Any = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        found: torch.Tensor = loss.detach()
        return found
    finally:
        for capture in captures:
            capture.remove()


def _generated(trainer: Any, items: list[Any], rows: int) -> dict[str, Any]:
    """Short completions of one prompt, its whole group generated and rewarded, and of them the first rows."""
    if hasattr(trainer, "generation_config"):  # not with vLLM
        short = {"max_new_tokens": min(GENERATED_TOKENS, int(trainer.args.max_completion_length))}
        trainer.generation_config = copy.deepcopy(trainer.generation_config)
        trainer.generation_config.update(**short)
        trainer.generation_kwargs = {**getattr(trainer, "generation_kwargs", {}), **short}
    trainer.current_gradient_accumulation_steps = int(trainer.args.gradient_accumulation_steps)  # as train() would
    trainer.model.train()
    group: dict[str, Any] = trainer._generate_and_score_completions(items)
    per_row = {key: value for key, value in group.items() if getattr(value, "ndim", 1) and value is not None}
    return {**group, **{key: value[:rows] for key, value in per_row.items()}}


@contextlib.contextmanager
def refused_as_training_would(what: str) -> Iterator[None]:
    """Say in one line what the user's model, collator or loss raises: training would end with it.

    Parameters
    ----------
    what
        What fails, with its verb, such as "the first micro-step fails".

    Raises
    ------
    InputError
        In place of what is raised; one that is raised passes through.
    """
    try:
        yield
    except InputError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(f"{what}, and so would training: {error_line(error, named=True)}") from error


@contextlib.contextmanager
def untouched(trainer: Any, *, checkpointing: bool = True) -> Iterator[None]:
    """Whatever building a loader, forward and backward change on a trainer is afterwards as before.

    Parameters
    ----------
    trainer
        Its attributes, the model's gradients, buffers and modes, and the random states are put back.
    checkpointing
        Whether activations are recomputed in backward where training would.
    """
    model: nn.Module = trainer.model
    attributes = dict(vars(trainer))
    # TRL gathers its training metrics and completions in lists, which would enter the first log.
    gathered = {name: copy.deepcopy(attributes[name]) for name in _GATHERED if name in attributes}
    seen = trainer.state.num_input_tokens_seen
    loaders = len(trainer.accelerator._dataloaders)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that others use
    try:
        gpus = [torch.cuda.current_device()] if trainer.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus), _modules_kept(model):
            if checkpointing:
                enable_checkpointing(trainer.args, model)
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        trainer.state.num_input_tokens_seen = seen
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        del trainer.accelerator._dataloaders[loaders:]
        vars(trainer).clear()
        vars(trainer).update(attributes | gathered)


@contextlib.contextmanager
def _modules_kept(model: nn.Module) -> Iterator[None]:
    """Put back the modes, hooks and attributes of all modules."""
    kept = []
    for module in model.modules():
        attributes = dict(vars(module))
        hooks = {name: copy.copy(value) for name, value in attributes.items() if "_hooks" in name and value is not None}
        kept.append((module, attributes, {n: h for n, h in hooks.items() if isinstance(h, dict)}))
    try:
        yield
    finally:
        for module, attributes, hooks in kept:
            vars(module).clear()
            vars(module).update(attributes)
            for name, registered in hooks.items():  # the handles of hooks know these very dicts
                attributes[name].clear()
                attributes[name].update(registered)


def reset_peak(on_gpu: bool) -> None:
    """Begin to measure the most memory in use anew, where the system allows it."""
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        return
    # Linux: 5 sets VmHWM, the most memory that was resident, to what is resident now.
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


def peak_bytes(on_gpu: bool) -> int | None:
    """Return the most memory in use since :func:`reset_peak`: allocated on a GPU, else resident in the process."""
    if on_gpu:
        return int(torch.cuda.max_memory_allocated())
    if _STATUS.exists():
        line = next((n for n in _STATUS.read_text().splitlines() if n.startswith("VmHWM:")), None)
        return None if line is None else int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # since the process began
    return int(peak if sys.platform == "darwin" else peak * 1024)
