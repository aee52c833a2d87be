"""Recorded gradients against plain autograd, one sample at a time; which parameter and which module are meant."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from diagnostics.signals.hidden import find_decoder
from diagnostics.signals.weight import find_weight
from diagnostics.sketches.count_sketch import GradientSketch
from sdo.errors import InputError


def expected_rows(recorded, signal):
    """Return step, kind, micro-batch, sample ids and samples of all rows that a run must have."""
    rows = []
    for step in range(len(recorded.steps)):
        micros, ids = recorded.truth.step(step), recorded.micro_ids(step)
        rows.append((step, "step", None, recorded.step_ids(step), recorded.truth.samples(step)))
        if len(micros) > 1:
            rows += [(step, "micro_batch", n, ids[n], micros[n]) for n in range(len(micros))]
        if signal == "hidden" and step % recorded.case.sample_every == 0:
            for n, samples in enumerate(micros):
                rows += [(step, "sample", n, [i], [sample]) for i, sample in zip(ids[n], samples, strict=True)]
    return rows


def by_key(rows):
    return sorted(rows, key=lambda row: (row["step"], row["kind"], row["micro_batch"] or 0, row["sample_ids"]))


@pytest.mark.parametrize("signal", ["weight", "hidden"])
def test_rows_are_the_gradients_of_plain_autograd(recorded, signal, kit):
    case = recorded.case
    name = case.followed if signal == "weight" else "hidden"
    expected = expected_rows(recorded, signal)
    found = recorded.rows(f"gradients/{signal}")
    assert len(found) == len(expected)
    keys = ("step", "kind", "micro_batch", "sample_ids")
    wanted = by_key([dict(zip((*keys, "samples"), row, strict=True)) for row in expected])
    for row, want in zip(by_key(found), wanted, strict=True):
        assert [row[key] for key in keys] == [want[key] for key in keys]
        if signal == "weight" and row["step"] == case.overflow:
            continue  # not finite; test_an_overflow_is_not_a_gradient
        gradient = kit.sum_of(want["samples"], name) * case.scale(row["step"])
        norm = float(gradient.double().norm())
        if norm == 0.0:
            assert row["norm"] == 0.0
            assert row["reason"].startswith("zero gradient")
            assert not any(row["sketch"])
            continue
        sketch = GradientSketch(gradient.shape, k=case.sketch_size).sketch(gradient)
        assert kit.relative_error(row["sketch"], sketch) < case.tolerance
        assert row["norm"] == pytest.approx(norm, rel=case.tolerance)
        assert row["norm_state"] == ("raw" if case.overflow is None else "raw, scaled")
        assert row["reason"] is None


def test_tokens_of_each_row_are_those_of_its_samples(recorded):
    for signal in ("weight", "hidden"):
        tokens = {
            (step, kind, micro, tuple(ids)): sum(s.tokens for s in samples)
            for step, kind, micro, ids, samples in expected_rows(recorded, signal)
        }
        for row in recorded.rows(f"gradients/{signal}"):
            key = (row["step"], row["kind"], row["micro_batch"], tuple(row["sample_ids"]))
            assert row["tokens"] == tokens[key]


def test_the_cases_cover_identity_and_real_sketches(runs):
    kinds = {
        (name, signal): runs(name).info["signals"][signal]["sketch"]["kind"]
        for name in ("fused", "tied", "smoothing")
        for signal in ("weight", "hidden")
    }
    assert kinds == {
        ("fused", "weight"): "identity",
        ("fused", "hidden"): "identity",
        ("tied", "weight"): "count",
        ("tied", "hidden"): "identity",
        ("smoothing", "weight"): "count",
        ("smoothing", "hidden"): "count",
    }


def test_a_tied_gradient_is_the_sum_over_both_uses(runs, kit):
    recorded = runs("tied")
    apart = kit.Truth(recorded, tied=False)
    row = recorded.rows("gradients/weight", step=2, kind="step")[0]
    parts = [kit.sum_of(apart.samples(2), name) for name in (kit.EMBEDDING, kit.HEAD)]
    sketcher = GradientSketch(parts[0].shape, k=recorded.case.sketch_size)
    assert kit.relative_error(row["sketch"], sketcher.sketch(parts[0] + parts[1])) < 1e-5
    for part in parts:  # neither use alone comes near it
        assert kit.relative_error(row["sketch"], sketcher.sketch(part)) > 0.1


@pytest.mark.parametrize(
    ("name", "parameter", "tied_with"),
    [
        ("fused", "model.layers.1.mlp.down_proj.weight", []),
        ("tied", "model.embed_tokens.weight", ["lm_head.weight"]),
        ("head", "lm_head.weight", []),
        ("reentrant", "model.layers.0.self_attn.q_proj.weight", []),
        ("qwen3", "lm_head.weight", []),
        ("gemma3", "model.embed_tokens.weight", ["lm_head.weight"]),
        ("gpt2", "transformer.h.1.mlp.c_proj.weight", []),
        ("lora_head", "base_model.model.lm_head.modules_to_save.default.weight", []),
        ("prompt_tuning", "prompt_encoder.default.embedding.weight", []),
    ],
)
def test_run_json_names_the_signals(runs, name, parameter, tied_with):
    recorded = runs(name)
    shape = list(dict(recorded.trainer.model.named_parameters())[parameter].shape)
    weight, hidden = (recorded.info["signals"][signal] for signal in ("weight", "hidden"))
    assert weight["parameter"] == parameter
    assert weight["shape"] == shape
    assert weight["tied"] is bool(tied_with)
    assert weight["tied_with"] == tied_with
    assert weight["stored"] == min(math.prod(shape), recorded.case.sketch_size)
    assert weight["sketch"] == GradientSketch(shape, k=recorded.case.sketch_size).describe()
    assert hidden["parameter"] is None
    assert hidden["shape"] == [recorded.trainer.model.config.hidden_size]


def test_a_masked_sample_is_zeros_with_a_reason(runs, kit):
    recorded = runs("masked")
    step = next(s for s in range(len(recorded.steps)) if [kit.MASKED_ROW] in recorded.steps[s])
    number = recorded.steps[step].index([kit.MASKED_ROW])
    rows = recorded.rows("gradients/weight", step=step, kind="micro_batch", micro_batch=number)
    rows += recorded.rows("gradients/hidden", step=step, micro_batch=number)
    assert sorted(row["kind"] for row in rows) == ["micro_batch", "micro_batch", "sample"]
    for row in rows:
        assert row["sample_ids"] == [kit.MASKED_ROW]
        assert row["reason"] == "zero gradient: no token carries a loss"
        assert row["tokens"] == 0
        assert row["norm"] == 0.0
        assert not any(row["sketch"])


def test_an_overflow_is_not_a_gradient(runs):
    rows = runs("scaled").rows("gradients/weight", step=runs("scaled").case.overflow)
    assert [row["reason"] for row in rows] == ["non-finite gradient"]
    assert rows[0]["norm"] is None
    assert not any(rows[0]["sketch"])


@pytest.mark.parametrize("name", ["tied", "head", "bf16"])
def test_sketch_check_is_the_error_of_the_cosines(runs, name):
    recorded = runs(name)
    steps = list(range(min(8, len(recorded.steps))))
    grads = [recorded.truth.weight(step) for step in steps]
    sketcher = GradientSketch(grads[0].shape, k=recorded.case.sketch_size)
    sketches = [sketcher.sketch(grad) for grad in grads]

    def cosines(vectors):
        matrix = np.stack([vector.double().reshape(-1).numpy() for vector in vectors])
        matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
        return (matrix @ matrix.T)[np.triu_indices(len(matrix), 1)]

    errors = cosines(sketches) - cosines(grads)
    check = recorded.info["sketch_check"]["weight"]
    assert check["steps"] == steps
    assert check["pairs"] == len(errors)
    assert check["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), abs=1e-6)
    assert check["max_abs_error"] == pytest.approx(np.abs(errors).max(), abs=1e-6)
    if name == "tied":  # a real sketch errs, or the comparison would be empty
        assert check["max_abs_error"] > 1e-3


def test_a_parameter_whose_gradient_comes_in_parts_is_summed(kit, tmp_path):
    # Two checkpointed blocks share a weight: their reentrant backward passes call its hooks once each.
    first, second = (f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1))
    kwargs = {kit.CHECKPOINTING: True, f"{kit.CHECKPOINTING}_kwargs": {"use_reentrant": True}}
    case = kit.Case(weight=first, batch=2, accumulation=2, max_steps=3, sketch_size=512, args=kwargs)
    model = kit.make_model()
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight
    recorded = kit.Recorded(tmp_path, case, model=model).train()
    assert recorded.info["signals"]["weight"]["tied_with"] == [second]
    for step in range(3):
        micros = [kit.sum_of(m, first) + kit.sum_of(m, second) for m in recorded.truth.step(step)]
        step_row, *micro_rows = recorded.rows("gradients/weight", step=step)
        sketcher = GradientSketch(micros[0].shape, k=case.sketch_size)
        assert kit.relative_error(step_row["sketch"], sketcher.sketch(micros[0] + micros[1])) < 1e-5
        assert step_row["norm"] == pytest.approx(float((micros[0] + micros[1]).norm()), rel=1e-5)
        assert step_row["norm_state"] == "raw"
        for row, gradient in zip(micro_rows, micros, strict=True):
            assert kit.relative_error(row["sketch"], sketcher.sketch(gradient)) < 1e-5
            assert row["norm"] == pytest.approx(np.linalg.norm(row["sketch"]))
            assert row["norm_state"] == "raw, estimated from the sketch"
    assert recorded.info["sketch_check"]["weight"]["steps"] == [0, 1, 2]


def test_lora_records_the_hidden_gradient_and_the_last_adapter(kit, tmp_path):
    rank, alpha = 2, 6
    config = kit.lora(r=rank, lora_alpha=alpha)
    case = kit.Case(batch=3, max_steps=1)
    lora = kit.Recorded(tmp_path / "lora", case, peft_config=config)
    first = dict(lora.trainer.model.named_parameters())[kit.ADAPTER.format("A")].detach().clone()
    lora.train()
    # Adapters start at zero: in its first step the model is the plain one, which another run trains on these rows.
    plain = kit.Recorded(tmp_path / "plain", case).train()
    assert plain.step_ids(0) == lora.step_ids(0)
    assert lora.info["signals"]["weight"]["parameter"] == kit.ADAPTER.format("B")
    weight = lora.rows("gradients/weight", kind="step")[0]
    gradient = alpha / rank * plain.truth.weight(0) @ first.T  # W = W0 + alpha / rank * B A
    assert kit.relative_error(weight["sketch"], gradient) < 1e-5
    samples = dict(zip(plain.step_ids(0), plain.truth.samples(0), strict=True))
    rows = lora.rows("gradients/hidden", kind="sample")
    assert {row["sample_ids"][0] for row in rows} == set(samples)
    for row in rows:
        assert kit.relative_error(row["sketch"], samples[row["sample_ids"][0]].hidden) < 1e-5


def test_an_adapter_that_starts_at_zero_makes_an_undefined_row(runs):
    rows = runs("lora_a").rows("gradients/weight", kind="step")
    assert [row["reason"] for row in rows] == ["zero gradient", None, None]
    assert [row["norm"] > 0 for row in rows] == [False, True, True]


@pytest.mark.parametrize("tied", [True, False])
def test_the_default_weight_is_the_last_matrix_with_a_name_of_its_own(kit, tied):
    found = find_weight(kit.make_model(tied=tied))
    assert (found.name, found.tied) == (kit.LAST_MATRIX if tied else kit.HEAD, ())


@pytest.mark.parametrize(("name", "other"), [("EMBEDDING", "HEAD"), ("HEAD", "EMBEDDING")])
def test_a_tied_weight_may_be_asked_for_by_either_name(kit, name, other):
    model = kit.make_model(tied=True)
    found = find_weight(model, getattr(kit, name))
    assert found.parameter is model.get_input_embeddings().weight
    assert found.tied == (getattr(kit, other),)


def test_frozen_matrices_are_passed_over(kit):
    model = kit.make_model(tied=False)
    model.lm_head.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(False)
    assert find_weight(model).name == "model.layers.1.self_attn.o_proj.weight"


def test_an_unknown_weight_is_refused_with_the_nearest_trainable_names(kit):
    model = kit.make_model(tied=False)
    model.model.layers[1].self_attn.q_proj.requires_grad_(False)
    with pytest.raises(InputError, match=r"no parameter 'layers\.1\.self_attn\.q_proj'") as error:
        find_weight(model, "layers.1.self_attn.q_proj")
    named = str(error.value).split("nearest trainable names: ")[1].split(", ")
    assert all(name.startswith("model.layers.1.self_attn.") for name in named)
    assert "model.layers.1.self_attn.q_proj.weight" not in named  # it is frozen


def test_a_frozen_weight_is_refused_with_the_nearest_trainable_names(kit):
    model = kit.make_model(tied=False)
    model.lm_head.requires_grad_(False)
    with pytest.raises(InputError, match=r"'lm_head\.weight' is frozen") as error:
        find_weight(model, "lm_head.weight")
    named = str(error.value).split("nearest trainable names: ")[1].split(", ")
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert named
    assert set(named) <= set(trainable)


def test_a_model_without_trainable_matrix_is_refused(kit):
    model = kit.make_model().requires_grad_(False)
    with pytest.raises(InputError, match="no trainable parameter"):
        find_weight(model)
    model.model.norm.requires_grad_(True)
    with pytest.raises(InputError, match=r"no trainable matrix.*signals=\['hidden'\]"):
        find_weight(model)


def test_the_decoder_ends_in_the_final_norm(kit):
    llama = kit.make_model()
    assert find_decoder(llama) == (llama.model, kit.HIDDEN)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=12, n_layer=1, n_head=2))
    assert find_decoder(gpt2) == (gpt2.transformer, 12)


@pytest.mark.parametrize("make", [lambda kit: torch.nn.Linear(2, 2), lambda kit: kit.make_model().model])
def test_a_model_without_decoder_is_refused(kit, make):
    with pytest.raises(InputError, match=r"no decoder apart from its head.*signals=\['weight'\]"):
        find_decoder(make(kit))
