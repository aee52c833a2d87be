"""Gradients of single samples are those of plain autograd, and the trainer is left as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diagnostics import sample_gradients as module
from diagnostics.sample_gradients import sample_gradients
from sdo.errors import InputError
from sdo.trainers.ids import IdChannel

# Every family, adapter, padding and loss that the recorder is tested on; batches and accumulation play no part.
NAMES = (
    *("fused", "tied", "head", "bf16", "reentrant", "right", "left", "masked", "smoothing", "smoothing_plain", "qwen3"),
    *("gemma2", "gemma3", "gpt2", "lora", "lora_a", "lora_head", "lora_reentrant", "prompt_tuning"),
)


def taken(recorded, ids, **options):
    case = recorded.case
    return sample_gradients(
        recorded.trainer, np.asarray(ids), weight=case.weight, sketch_size=case.sketch_size, **options
    )


@pytest.fixture
def untrained(kit, tmp_path):
    """``untrained(name)``: a trainer of a case, and plain autograd at its weights."""

    def make(name):
        recorded = kit.Recorded(tmp_path / name, kit.CASES[name])
        truth = kit.Truth(recorded)
        truth._model.load_state_dict(recorded.trainer.model.state_dict())
        return recorded, truth

    return make


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_plain_autograd(kit, untrained, name):
    recorded, truth = untrained(name)
    if name.startswith("lora") and name != "lora_head":  # else the gradient of A is zero, and that of B tells little
        with torch.no_grad():
            for key, parameter in recorded.trainer.model.named_parameters():
                if "lora_B" in key:
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        truth._model.load_state_dict(recorded.trainer.model.state_dict())
    positions = [3, 0, kit.MASKED_ROW, 12]
    found = taken(recorded, [recorded.ids[p] for p in positions])
    weight, hidden = found.signals["weight"], found.signals["hidden"]
    assert weight.parameter == recorded.case.followed
    assert found.seconds > 0
    for n, position in enumerate(positions):
        expected = truth._sample(position, 1)  # the gradient of the loss summed over the tokens
        for one, exact in ((weight, expected.grads.get(recorded.case.followed)), (hidden, expected.hidden)):
            assert one.sample_ids[n] == recorded.ids[position]
            assert one.tokens[n] == expected.tokens
            if expected.tokens == 0:
                assert one.reason[n] == "zero gradient: no token carries a loss"
                assert not one.sketch[n].any()
                assert one.norm[n] == 0
                continue
            assert one.reason[n] is None
            assert one.norm[n] == pytest.approx(float(exact.double().norm()), rel=recorded.case.tolerance)
            if one.stored["kind"] == "identity":
                assert kit.relative_error(one.sketch[n], exact) < recorded.case.tolerance
    assert weight.defined.tolist() == [one is None for one in weight.reason]


def test_sketches_and_their_error(kit, untrained):
    recorded, truth = untrained("smoothing")  # sketches of 16 numbers
    ids = list(range(6))
    found = taken(recorded, ids).signals
    truths = [truth._sample(i, 1) for i in ids]
    for name, one in found.items():
        exact = [t.hidden if name == "hidden" else t.grads[recorded.case.followed] for t in truths]
        unit = torch.stack([g.double().flatten() / g.double().norm() for g in exact])
        sketched = one.sketch.astype(float) / np.linalg.norm(one.sketch.astype(float), axis=1, keepdims=True)
        pairs = np.triu_indices(6, 1)
        error = (sketched @ sketched.T)[pairs] - (unit @ unit.T).numpy()[pairs]
        assert one.stored["kind"] == "count"
        assert one.check["pairs"] == 15
        assert one.check["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-3)
    assert taken(recorded, ids, signals=["hidden"]).signals.keys() == {"hidden"}


def test_ids_that_are_no_positions_are_found(kit, untrained):
    recorded, truth = untrained("tied")
    assert recorded.ids != list(range(kit.ROWS))
    ids = [recorded.ids[p] for p in (9, 2)]
    hidden = taken(recorded, ids).signals["hidden"]
    assert hidden.sample_ids.tolist() == ids
    for n, position in enumerate((9, 2)):
        assert kit.relative_error(hidden.sketch[n], truth._sample(position, 1).hidden) < 1e-5
    with pytest.raises(KeyError):
        IdChannel.of(recorded.trainer.model).positions(np.array([ids[0], 999]))


def test_a_sample_without_a_token_does_not_stop_the_others(untrained):
    recorded, _ = untrained("masked")
    found = taken(recorded, [5, 6]).signals
    assert {name: one.defined.tolist() for name, one in found.items()} == {name: [False, True] for name in found}


def test_the_first_gradient_of_lora_a_is_zero_and_said_so(untrained):
    recorded, _ = untrained("lora_a")
    found = taken(recorded, [0, 1]).signals
    assert found["weight"].reason == ("zero gradient", "zero gradient")
    assert found["hidden"].reason == (None, None)


def test_backward_ends_at_the_parameter_that_is_followed(untrained, monkeypatch):
    recorded, _ = untrained("fused")
    needed = []
    original = module.forward_backward

    def watch(trainer, inputs, captures):
        loss = original(trainer, inputs, captures)
        needed.append({n for n, p in trainer.model.named_parameters() if p.grad is not None})
        return loss

    monkeypatch.setattr(module, "forward_backward", watch)
    taken(recorded, [0])
    taken(recorded, [0], signals=["hidden"])
    assert needed == [{recorded.case.followed}, {"model.norm.weight"}]


def test_pairs_of_dpo(kit, tmp_path):
    """At the start policy and reference agree: the gradient is -beta / 2 that of log p(chosen) - log p(rejected)."""
    from datasets import Dataset
    from torch.nn import functional
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": r["prompt"], "chosen": r["completion"], "rejected": r["completion"][::-1][: 9 + n]}
        for n, r in enumerate(kit.make_rows(5, seed=1))
    ]
    kit.make_model().save_pretrained(tmp_path / "model")
    args = DPOConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, report_to=[], beta=0.3, save_strategy="no"
    )
    trainer = DPOTrainer(
        model=str(tmp_path / "model"), args=args, train_dataset=Dataset.from_list(rows),
        processing_class=kit.make_tokenizer(),
    )  # fmt: skip
    found = sample_gradients(trainer, np.array([1, 4]), sketch_size=2**15).signals["weight"]
    assert "own loss" in found.norm_state
    model = kit.make_model()
    for n, position in enumerate((1, 4)):
        row = trainer.train_dataset[position]
        scores = []
        for answer in ("chosen_ids", "rejected_ids"):
            ids = row["prompt_ids"] + row[answer]
            log_p = functional.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)
            scores.append(log_p[torch.arange(len(ids) - 1), torch.tensor(ids[1:])][len(row["prompt_ids"]) - 1 :].sum())
        model.zero_grad()
        (-0.15 * (scores[0] - scores[1])).backward()
        exact = dict(model.named_parameters())[found.parameter].grad
        assert found.norm[n] == pytest.approx(float(exact.norm()), rel=1e-5)
        assert kit.relative_error(found.sketch[n], exact) < 1e-5
        assert found.tokens[n] == len(row["chosen_ids"]) + len(row["rejected_ids"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signals": ["samples:*.down_proj.weight"]}, "has no gradient of a micro-batch"),
        ({"signals": []}, "expected some of weight, hidden, head_only, samples"),
        ({"weight": "model.layer.0.weight"}, "there is no parameter"),
    ],
)
def test_what_cannot_be_taken_is_refused(untrained, options, message):
    recorded, _ = untrained("fused")
    with pytest.raises(InputError, match=message):
        sample_gradients(recorded.trainer, np.array([0]), **options)


def test_a_frozen_parameter_is_refused(untrained):
    recorded, _ = untrained("fused")
    dict(recorded.trainer.model.named_parameters())[recorded.case.followed].requires_grad_(False)
    with pytest.raises(InputError, match=r"down_proj.weight.* frozen|frozen.*down_proj.weight"):
        sample_gradients(recorded.trainer, np.array([0]), weight=recorded.case.followed)


def test_a_signal_that_does_not_fire_is_named(untrained):
    recorded, _ = untrained("fused")
    model = recorded.trainer.model
    forward = model.forward

    def without_graph(*args, **kwargs):
        with torch.no_grad():
            output = forward(*args, **kwargs)
        output.log_probs = output.log_probs + 0 * next(iter(model.model.norm.parameters())).sum()
        return output

    model.forward = without_graph
    with pytest.raises(InputError, match="signal 'hidden' does not fire"):
        sample_gradients(recorded.trainer, np.array([0]), signals=["hidden"])


def test_an_error_of_the_loss_is_one_line(untrained, monkeypatch):
    recorded, _ = untrained("fused")

    def fail(*args, **kwargs):
        raise RuntimeError("shapes differ\nsecond line")

    monkeypatch.setattr(recorded.trainer, "compute_loss", fail)
    with pytest.raises(InputError, match=r"sample 3 fail, and so would training: RuntimeError: shapes differ$"):
        sample_gradients(recorded.trainer, np.array([3]))
    assert all(p.requires_grad for p in recorded.trainer.model.parameters())
