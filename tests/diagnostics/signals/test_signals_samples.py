"""`samples`: each sample's gradient of chosen linear layers against plain autograd, one sample at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from diagnostics import GradientRecorder, Samples, Weight, register_signal
from diagnostics.signals.samples import find_layers
from diagnostics.sketches.count_sketch import GradientSketch
from sdo.errors import InputError
from sdo.run_format import gaps_are_faults

DOWN = "model.layers.*.mlp.down_proj.weight"
BOTH = [f"model.layers.{n}.mlp.down_proj.weight" for n in (0, 1)]


def record(kit, folder, name, *signals, **changes):
    case = replace(kit.CASES[name], **changes)
    recorder = GradientRecorder(
        folder / "run", signals=signals, sample_every=case.sample_every, sketch_size=case.sketch_size
    )
    return kit.Recorded(folder, case, recorder=recorder).train()


def assert_rows_are_right(kit, recorded, signal, names, steps=None):
    """Hold each row against the gradients of plain autograd, the layers end to end."""
    case, seen = recorded.case, 0
    for step in range(len(recorded.steps)) if steps is None else steps:
        for micro, (ids, truths) in enumerate(zip(recorded.micro_ids(step), recorded.truth.step(step), strict=True)):
            for sample, truth in zip(ids, truths, strict=True):
                rows = recorded.rows(f"gradients/{signal}", step=step, micro_batch=micro, sample_ids=[sample])
                assert [row["kind"] for row in rows] == ["sample"]
                gradient = torch.cat([truth.grads[name] for name in names]) * case.scale(step)
                norm = float(gradient.double().norm())
                seen += 1
                assert rows[0]["tokens"] == truth.tokens
                if norm == 0:
                    assert rows[0]["norm"] == 0
                    assert rows[0]["reason"].startswith("zero gradient")
                    continue
                sketch = GradientSketch(gradient.shape, k=case.sketch_size).sketch(gradient)
                assert rows[0]["norm"] == pytest.approx(norm, rel=case.tolerance)
                assert kit.relative_error(rows[0]["sketch"], sketch) < case.tolerance
                assert rows[0]["reason"] is None
    assert seen > 0
    assert {row["kind"] for row in recorded.rows(f"gradients/{signal}")} == {"sample"}
    return seen


@pytest.mark.parametrize(
    ("name", "pattern", "layers"),
    [
        ("fused", DOWN, BOTH),
        ("tied", DOWN, BOTH),  # clipped, organized, two micro-batches, ids that are no positions
        ("bf16", DOWN, BOTH),
        ("reentrant", "model.layers.0.self_attn.q_proj.weight", ["model.layers.0.self_attn.q_proj.weight"]),
        ("not_reentrant", DOWN, BOTH),
        ("right", "*.o_proj.weight", [f"model.layers.{n}.self_attn.o_proj.weight" for n in (0, 1)]),
        ("left", DOWN, BOTH),
        ("masked", DOWN, BOTH),
        ("smoothing", DOWN, BOTH),  # a sketch of 16 numbers
        ("gemma2", DOWN, BOTH),
        ("lora", "*.down_proj.lora_B.weight", [f"base_model.{n[:-7]}.lora_B.default.weight" for n in BOTH]),
        ("lora_reentrant", "*.down_proj.lora_A.weight", [f"base_model.{n[:-7]}.lora_A.default.weight" for n in BOTH]),
        ("scaled", DOWN, BOTH),
    ],
)
def test_rows_are_the_gradients_of_single_samples(kit, tmp_path, name, pattern, layers):
    recorded = record(kit, tmp_path, name, "weight", Samples(pattern, name="down"))
    if name.startswith("lora"):
        layers = [layer.replace("base_model.model.", "base_model.model.model.", 1) for layer in layers]
    due = range(0, len(recorded.steps), recorded.case.sample_every)
    steps = [step for step in due if step != recorded.case.overflow]
    assert_rows_are_right(kit, recorded, "down", layers, steps)
    told = recorded.info["signals"]["down"]
    assert told["layers"] == layers
    assert told["stored"] == min(recorded.case.sketch_size, math.prod(told["shape"]))
    assert not [name for name in recorded.hooks() if "proj" in name]


def test_rows_of_all_samples_add_up_to_the_step(kit, tmp_path):
    recorded = record(kit, tmp_path, "right", "weight", f"samples:{kit.LAST_MATRIX}")
    for step in range(len(recorded.steps)):
        whole = recorded.rows("gradients/weight", step=step, kind="step")[0]
        parts = torch.tensor([row["sketch"] for row in recorded.rows("gradients/samples", step=step)])
        assert kit.relative_error(parts.sum(dim=0), torch.tensor(whole["sketch"])) < 1e-5


def test_sketches_are_checked_against_exact_gradients(kit, tmp_path):
    recorded = record(kit, tmp_path, "fused", Samples(DOWN), sketch_size=64, max_steps=12)
    found = recorded.info["sketch_check"]["samples"]
    steps = range(8)
    first = [torch.cat([recorded.truth.samples(step)[0].grads[name] for name in BOTH]) for step in steps]
    exact = nn.functional.normalize(torch.stack([g.double().flatten() for g in first]))
    rows = [recorded.rows("gradients/samples", step=step)[0] for step in steps]
    sketched = nn.functional.normalize(torch.tensor([row["sketch"] for row in rows]).double())
    pairs = np.triu_indices(len(steps), 1)
    error = (sketched @ sketched.T - exact @ exact.T).numpy()[pairs]
    assert found["pairs"] == len(error)
    assert found["rmse"] == pytest.approx(float(np.sqrt(np.mean(error**2))), rel=1e-3)


def test_frozen_layers_have_gradients_too(kit, tmp_path):
    """The base matrix under an adapter: what full training would have given it at this point."""
    recorded = record(kit, tmp_path, "lora", "samples:*.down_proj.base_layer.weight", max_steps=1)
    model = recorded.truth._model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down_proj.base_layer" in name)
    layers = [f"base_model.model.{name[:-7]}.base_layer.weight" for name in BOTH]
    assert recorded.info["signals"]["samples"]["layers"] == layers
    assert assert_rows_are_right(kit, recorded, "samples", layers) == 4


def test_two_weights_and_two_groups_of_layers_at_once(kit, tmp_path):
    query = "model.layers.0.self_attn.q_proj.weight"
    late = Samples("model.layers.1.mlp.down_proj.weight", name="late")
    signals = (Weight(), Weight(query, name="query"), f"early=samples:{BOTH[0]}", late)
    recorded = record(kit, tmp_path, "tied", *signals)
    for name, parameter in (("weight", kit.LAST_MATRIX), ("query", query)):
        assert recorded.info["signals"][name]["parameter"] == parameter
        rows = recorded.rows(f"gradients/{name}", kind="step")
        assert len(rows) == len(recorded.steps)
        for row in rows:
            gradient = kit.sum_of(recorded.truth.samples(row["step"]), parameter)
            assert row["norm"] == pytest.approx(float(gradient.double().norm()), rel=1e-5)
            sketch = GradientSketch(gradient.shape, k=recorded.case.sketch_size).sketch(gradient)
            assert kit.relative_error(row["sketch"], sketch) < 1e-5
    steps = range(0, len(recorded.steps), recorded.case.sample_every)
    assert_rows_are_right(kit, recorded, "early", [BOTH[0]], steps)
    assert_rows_are_right(kit, recorded, "late", [BOTH[1]], steps)
    assert [folder.name for folder in sorted((recorded.folder / "gradients").iterdir())] == [
        "early",
        "late",
        "query",
        "weight",
    ]


def test_a_layer_that_is_used_twice_has_no_exact_norm(tmp_path):
    """Its gradient is the sum of both uses, whose sketches add up; their norms do not."""
    from diagnostics.signals.base import SignalContext
    from diagnostics.signals.micro_batch import MicroBatch
    from sdo.trainers.ids import BatchIds

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3, bias=False)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    torch.manual_seed(0)
    model, micro = Twice(), MicroBatch(BatchIds((4, 7), (2, 2)))
    context = SignalContext(model, lambda: (0, [micro]), torch.no_grad, k=64, sample_every=1)
    capture = Samples("layer.weight").of(context)
    capture.register()
    x = torch.randn(2, 5, 3)
    functional.mse_loss(model(x), torch.zeros_like(x), reduction="sum").backward()
    measured = list(capture.samples(micro))
    capture.remove()
    for n, (sketch, norm) in enumerate(measured):
        model.zero_grad()
        functional.mse_loss(model(x[n : n + 1]), torch.zeros(1, 5, 3), reduction="sum").backward()
        torch.testing.assert_close(sketch.reshape(3, 3), model.layer.weight.grad)
        assert norm is None
    assert not model.layer._forward_hooks


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("model.layers.*.mlp.dwn_proj.weight", "no parameter matches .*; expected weights of linear layers, such as"),
        ("model.norm.weight", "model.norm.weight belongs to a LlamaRMSNorm; expected weights of torch.nn.Linear"),
        ("model.layers.0.*_proj.weight", "matches layers of several shapes .*; expected one shape; fix: a signal each"),
    ],
)
def test_layers_that_cannot_be_meant_are_refused(kit, pattern, message):
    with pytest.raises(InputError, match=message):
        find_layers(kit.make_model(), pattern)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signals": ["samples"]}, "samples got no pattern; expected the weights of linear layers; fix: "),
        ({"signals": ["samples:"]}, "with a target behind a colon"),
        ({"signals": ["sampels:x"]}, "did you mean 'samples'"),
        ({"signals": ["weight", "weight:lm_head.weight"]}, "two signals are called 'weight'; expected a name each"),
        ({"signals": ["../up=weight"]}, "has name '../up'; expected letters, digits"),
        ({"signals": [3]}, "expected some of weight, hidden, head_only, samples"),
        ({"signals": "weight"}, "expected some of weight, hidden, head_only, samples"),
    ],
)
def test_wrong_signals_are_refused_in_one_line(tmp_path, options, message):
    with pytest.raises(InputError, match=message) as caught:
        GradientRecorder(tmp_path / "run", **options)
    assert "\n" not in str(caught.value)


def test_samples_without_rows_of_samples_are_refused(kit, tmp_path):
    with pytest.raises(InputError, match="sample_every is 0; fix: sample_every=1"):
        record(kit, tmp_path, "fused", Samples(DOWN), sample_every=0)


def test_packed_rows_are_refused(kit, tmp_path):
    """Without padding all samples of a batch are one row, and a layer does not see where one ends."""
    case = replace(kit.CASES["fused"], args={"padding_free": True, "max_length": None})
    trainer = kit.make_trainer(tmp_path / "trainer", case)
    trainer.add_callback(GradientRecorder(tmp_path / "run", signals=["samples:" + DOWN], sample_every=1))
    with pytest.raises(InputError, match=r"padding_free|packing"):
        trainer.train()


@pytest.mark.parametrize("bad", [3, type("Plain", (), {}), type("Silent", (Weight,), {"word": "", "silent": None})])
def test_what_is_no_signal_is_not_registered(bad):
    with pytest.raises(InputError, match=r"register_signal got|has word ="):
        register_signal(bad)


def test_a_word_is_given_once():
    taken = type("Other", (Weight,), {})
    with pytest.raises(InputError, match="signal 'weight' is known already; expected another word"):
        register_signal(taken)


def test_steps_without_its_rows_are_no_loss(kit, tmp_path):
    """Killed before the first count of rows, a run knows its parts' names alone."""
    recorded = record(kit, tmp_path, "fused", "hidden", Samples(DOWN), sample_every=2)
    info = {**recorded.info, "rows": {}}
    assert info["signals"]["samples"]["kinds"] == ["sample"]
    assert not gaps_are_faults(info, "gradients/samples")
    assert gaps_are_faults(info, "gradients/hidden")
    assert gaps_are_faults(info, "steps")
