"""Losses per sample, read off a forward pass that happened anyway."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from trl.trainer.utils import add_fused_lm_head

from diagnostics.signals.losses import LossReader
from sdo.trainers.trainer_types import PLAIN

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


def read(model, output, call, *, exact):
    return LossReader(model, PLAIN).read(output, call, exact=exact)


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
    return request.param, read(model, output, call, exact=request.param == "exact"), truth


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
    losses = read(model, model(**call), call, exact=False)
    assert float(losses.total) == pytest.approx(sum(nll for nll, _ in one_by_one(model, batch_of(model))), rel=1e-6)


@pytest.mark.parametrize("items", [None, 40], ids=["a mean over no token", "a sum over a step's tokens"])
def test_a_micro_batch_without_a_token_has_a_total_of_zero(kit, items):
    model = kit.make_model()
    empty = {**batch_of(model), **({} if items is None else {"num_items_in_batch": torch.tensor(items)})}
    empty["labels"] = torch.full_like(empty["labels"], -100)
    for before in (False, True):
        reader = LossReader(model, PLAIN)
        if before:
            reader.read(model(**batch_of(model)), batch_of(model), exact=False)
        losses = reader.read(model(**empty), empty, exact=False)
        assert (losses.tokens.tolist(), float(losses.total)) == ([0, 0, 0], 0.0)
        assert reader.read(model(**empty), empty, exact=True).nll.tolist() == [0.0, 0.0, 0.0]


def test_low_precision_logits_are_summed_in_high_precision(kit):
    model = kit.make_model()
    call = batch_of(model)
    logits = model(**call).logits.bfloat16()
    target = call["labels"][:, 1:]
    scores = functional.log_softmax(logits.double(), dim=-1)[:, :-1].gather(2, target.clamp(min=0)[..., None])[..., 0]
    truth = (-scores * (target != -100)).sum(dim=1)
    output = SimpleNamespace(logits=logits, loss=(truth.sum() / 10).bfloat16())
    assert read(model, output, call, exact=True).nll.tolist() == pytest.approx(truth.tolist(), rel=1e-6)


def test_without_a_loss_only_tokens_are_known(kit):
    model = kit.make_model()
    reader = LossReader(model, PLAIN)
    output = SimpleNamespace(logits=torch.zeros(3, 8, 5), loss=None)
    losses = reader.read(output, batch_of(model), exact=True)
    assert (losses.nll, losses.total, losses.tokens.tolist()) == (None, None, [5, 5, 0])
    assert "returned no loss" in reader.reason


LONG = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("output", "inputs", "why"),
    [
        (SimpleNamespace(logits=torch.zeros(2, 3, 5), loss=torch.tensor(1.0)), {}, "the model's call has no labels"),
        (SimpleNamespace(logits=None, loss=torch.tensor(1.0)), {"labels": LONG}, "of no kind that is known here"),
        (SimpleNamespace(logits=torch.zeros(2, 2, 5), loss=torch.tensor(1.0)), {"labels": LONG}, "of no kind that is"),
        (
            SimpleNamespace(logits=torch.zeros(2, 3, 5), loss=torch.tensor(2.5)),
            {"labels": LONG},
            r"own loss is 2\.5, and its outputs give 1\.60944 as mean .* token, nats, or 1\.60944 as .*not shifted",
        ),
    ],
    ids=["no labels", "no logits", "other shapes", "another loss"],
)
def test_a_call_of_another_kind_has_no_losses_and_says_why(kit, output, inputs, why):
    reader = LossReader(kit.make_model(), PLAIN)
    assert reader.read(output, inputs, exact=True) is None
    assert re.search(why, reader.reason)
    assert reader.meaning() == {
        "tokens": "tokens with a label, but for the first of each row",  # as the model's class lets expect
        **dict.fromkeys(("loss", "score")),
        **dict.fromkeys(("loss_reason", "score_reason"), reader.reason),
    }


def test_a_loss_that_is_no_number_neither_proves_nor_refutes(kit):
    model = kit.make_model()
    call, reader = batch_of(model), LossReader(model, PLAIN)
    output = model(**call)
    broken = SimpleNamespace(logits=output.logits, loss=torch.tensor(torch.nan))
    assert torch.isnan(reader.read(broken, call, exact=False).total)
    assert (reader.objective, reader.reason) == (None, None)
    losses = reader.read(output, call, exact=False)
    assert float(losses.total) == pytest.approx(sum(nll for nll, _ in one_by_one(model, call)), rel=1e-6)


def test_what_the_model_divides_by_is_found_out(kit):
    """Masked language models of transformers take num_items_in_batch and take their own mean all the same."""
    model, call = kit.make_model(), batch_of(kit.make_model())
    truth = sum(nll for nll, _ in one_by_one(model, call))
    logits, reader = model(**call).logits, LossReader(model, PLAIN)
    for items in (10, 10, 40):  # as many as this micro-batch has tell nothing
        given = {**call, "num_items_in_batch": torch.tensor(items)}
        losses = reader.read(SimpleNamespace(logits=logits, loss=torch.tensor(truth / 10)), given, exact=False)
        assert float(losses.total) == pytest.approx(truth, rel=1e-5)


def test_a_pass_without_labels_after_one_with_them_takes_nothing_back(kit):
    model = kit.make_model()
    call, reader = batch_of(model), LossReader(model, PLAIN)
    reader.read(model(**call), call, exact=False)
    assert reader.read(model(input_ids=call["input_ids"]), {"input_ids": call["input_ids"]}, exact=False) is None
    assert (reader.reason, reader.meaning()["loss"]) == (None, PLAIN.loss)
