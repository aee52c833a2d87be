"""Losses per sample, read off a forward pass that happened anyway."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from trl.trainer.utils import add_fused_lm_head

from diagnostics.losses import sample_losses

# Trained tokens of three rows of eight: the first token of a row is never predicted.
LENGTHS, PROMPTS = (8, 6, 4), (3, 0, 4)


@functools.cache
def batch_of(model):
    """A right-padded batch; the third row carries no label at all."""
    ids = torch.randint(3, model.config.vocab_size, (3, 8), generator=torch.Generator().manual_seed(1))
    place = torch.arange(8)
    mask = place < torch.tensor(LENGTHS)[:, None]
    labels = ids.masked_fill(~mask | (place < torch.tensor(PROMPTS)[:, None]), -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def one_by_one(model, batch):
    """Summed NLL and tokens of each row, each alone and in float64."""
    found = []
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        length = int(mask.sum())
        with torch.no_grad():
            logits = model(input_ids=ids[None, :length]).logits[0]
        scores = functional.log_softmax(logits.double(), dim=-1)
        trained = [t for t in range(1, length) if labels[t] != -100]
        found.append((-sum(float(scores[t - 1, ids[t]]) for t in trained), len(trained)))
    return found


@pytest.fixture(params=["fused", "exact", "summed"])
def reading(request, kit):
    """A way to read losses, and the truth."""
    model = kit.make_model()
    batch = batch_of(model)
    truth = one_by_one(model, batch)
    call = dict(batch)
    if request.param == "fused":
        add_fused_lm_head(model)
        call["fused_lm_head"] = True
    output = model(**call)
    return request.param, sample_losses(output, call, exact=request.param == "exact"), truth


def test_losses_are_those_of_each_sample_alone(reading):
    kind, losses, truth = reading
    assert losses.tokens.tolist() == [tokens for _, tokens in truth] == [5, 5, 0]
    assert float(losses.total) == pytest.approx(sum(nll for nll, _ in truth), rel=1e-6)
    if kind == "summed":  # the model's own mean loss does not tell samples apart
        assert losses.nll is None
    else:
        assert losses.nll.tolist() == pytest.approx([nll for nll, _ in truth], rel=1e-6)
        assert losses.nll.dtype == torch.float64
        assert not losses.nll.requires_grad


def test_the_total_of_a_micro_batch_undoes_the_division_by_the_steps_tokens(kit):
    model = kit.make_model()
    call = {**batch_of(model), "num_items_in_batch": torch.tensor(40)}
    losses = sample_losses(model(**call), call, exact=False)
    assert float(losses.total) == pytest.approx(sum(nll for nll, _ in one_by_one(model, batch_of(model))), rel=1e-6)


def test_a_micro_batch_without_a_token_has_a_total_of_zero(kit):
    model = kit.make_model()
    call = {**batch_of(model), "num_items_in_batch": torch.tensor(40)}
    call["labels"] = torch.full_like(call["labels"], -100)
    losses = sample_losses(model(**call), call, exact=False)
    assert (losses.tokens.tolist(), float(losses.total)) == ([0, 0, 0], 0.0)
    assert sample_losses(model(**call), call, exact=True).nll.tolist() == [0.0, 0.0, 0.0]


def test_low_precision_logits_are_summed_in_high_precision(kit):
    model = kit.make_model()
    call = batch_of(model)
    logits = model(**call).logits.bfloat16()
    output = SimpleNamespace(logits=logits, loss=None)
    found = sample_losses(output, call, exact=True).nll
    target = call["labels"][:, 1:]
    scores = functional.log_softmax(logits.double(), dim=-1)[:, :-1].gather(2, target.clamp(min=0)[..., None])[..., 0]
    assert found.tolist() == pytest.approx((-scores * (target != -100)).sum(dim=1).tolist(), rel=1e-6)


def test_without_a_loss_only_tokens_are_known(kit):
    call = batch_of(kit.make_model())
    output = SimpleNamespace(logits=torch.zeros(3, 8, 5), loss=None)
    losses = sample_losses(output, call, exact=False)
    assert (losses.nll, losses.total, losses.tokens.tolist()) == (None, None, [5, 5, 0])


@pytest.mark.parametrize(
    ("output", "inputs"),
    [
        (SimpleNamespace(logits=torch.zeros(2, 3, 5)), {}),
        (SimpleNamespace(logits=None), {"labels": torch.zeros(2, 3, dtype=torch.long)}),
        (SimpleNamespace(logits=torch.zeros(2, 5)), {"labels": torch.zeros(2, dtype=torch.long)}),
        (SimpleNamespace(logits=torch.zeros(2, 4, 5)), {"labels": torch.zeros(2, 3, dtype=torch.long)}),
    ],
    ids=["no labels", "no logits", "a classifier", "other shapes"],
)
def test_a_call_of_another_kind_has_no_losses(output, inputs):
    assert sample_losses(output, inputs, exact=True) is None
