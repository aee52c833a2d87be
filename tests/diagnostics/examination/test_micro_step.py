"""A micro-step is real, and afterwards the trainer is what it was: its state, and every weight it then trains."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from diagnostics import doctor
from diagnostics.examination.micro_step import refused_as_training_would
from diagnostics.sample_gradients import sample_gradients
from sdo.errors import InputError
from sdo.trainers.session import _sessions


def fresh(kit, runs, name, folder):
    """A trainer of a case that was not trained, with organizer and recorder."""
    return kit.Recorded(folder, runs(name).case)


def state_of(recorded):
    trainer, model = recorded.trainer, recorded.trainer.model
    return {
        "attributes": sorted(vars(trainer)),
        "metrics": {mode: dict(values) for mode, values in trainer._metrics.items()},
        "tokens": trainer._total_train_tokens,
        "hooks": recorded.hooks(),
        "open": model in _sessions,
        "modes": [module.training for module in model.modules()],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "loaders": len(trainer.accelerator._dataloaders),
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
        "random": (random.random(), np.random.rand(), torch.rand(1).item()),  # noqa: NPY002
        "optimizer": trainer.optimizer,
        "history": list(trainer.state.log_history),
    }


@pytest.mark.parametrize("name", ["fused", "tied", "reentrant", "lora_not_reentrant"])
def test_the_trainer_is_left_as_it_was(kit, runs, name, tmp_path):
    recorded = fresh(kit, runs, name, tmp_path)
    files = sorted(tmp_path.rglob("*"))
    states = []
    for examined in (False, True):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        if examined:
            assert doctor(recorded.trainer).ok
        states.append(state_of(recorded))
    assert states[0] == states[1]
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("name", ["fused", "tied", "reentrant", "lora_reentrant"])
def test_taking_gradients_of_samples_leaves_it_as_it_was_too(kit, runs, name, tmp_path):
    recorded = fresh(kit, runs, name, tmp_path)
    states, required = [], []
    for taken in (False, True):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        if taken:
            sample_gradients(recorded.trainer, np.array(recorded.ids[:2]), weight=recorded.case.weight)
        states.append(state_of(recorded))
        required.append([parameter.requires_grad for parameter in recorded.trainer.model.parameters()])
    assert states[0] == states[1]
    assert required[0] == required[1]


@pytest.mark.parametrize("name", ["fused", "lora_not_reentrant", "right"])
def test_training_after_it_is_training_without_it(kit, runs, name, tmp_path):
    recorded = fresh(kit, runs, name, tmp_path)
    doctor(recorded.trainer)
    recorded.train()
    assert recorded.steps == runs(name).steps
    for found, expected in zip(recorded.weights, runs(name).weights, strict=True):
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    timed = ("runtime", "per_second")
    logs = [
        [(step, {k: v for k, v in entry.items() if not k.endswith(timed)}) for step, entry in run.logs]
        for run in (recorded, runs(name))
    ]
    assert logs[0] == logs[1]


def test_gradients_that_were_there_stay(kit, runs, tmp_path):
    recorded = fresh(kit, runs, "fused", tmp_path)
    for parameter in recorded.trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    assert doctor(recorded.trainer).ok
    assert all(bool((p.grad == 2.0).all()) for p in recorded.trainer.model.parameters())


def test_a_model_with_dropout_and_buffers_trains_as_without_it(kit, tmp_path):
    ends = []
    for examined in (False, True):
        model = kit.make_model(arch="gpt2")
        model.register_buffer("calls", torch.zeros(1))
        model.register_forward_pre_hook(lambda module, args: module.calls.add_(1) and None)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        case = kit.Case(arch="gpt2", batch=3, max_steps=2)
        recorded = kit.Recorded(tmp_path / str(examined), case, model=model)
        if examined:
            assert doctor(recorded.trainer).ok
        ends.append(recorded.train().weights[-1])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert float(ends[0]["calls"]) > 0


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("rows differ\nin length"), "the step fails, and so would training: ValueError: rows differ"),
        (KeyError("labels"), "the step fails, and so would training: KeyError: 'labels'"),
        (AssertionError(), None),  # nothing that a model or a loss is known to raise: a fault, with its traceback
        (RuntimeError(), "the step fails, and so would training: RuntimeError"),
        (InputError("a refusal of ours"), "a refusal of ours"),
    ],
)
def test_what_training_would_end_with_is_one_line(error, line):
    with (
        pytest.raises(type(error) if line is None else InputError) as raised,
        refused_as_training_would("the step fails"),
    ):
        raise error
    assert str(raised.value) == (line or "")
