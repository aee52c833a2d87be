"""Sample ids travel with their batch and are taken out before the model sees it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from sdo.trainers.ids import BATCH_KEY, BatchIds, IdChannel
from sdo.trainers.session import TrainingSession

# What a trainer of TRL or of transformers passes to a causal language model.
KNOWN_ARGUMENTS = {
    "input_ids",
    "attention_mask",
    "labels",
    "fused_lm_head",
    "use_cache",
    "num_items_in_batch",
}


class Echo(torch.nn.Module):
    """Remembers the arguments of each call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, **kwargs):
        self.calls.append(kwargs)
        return torch.zeros(1, requires_grad=True)


class Plain:
    """A map-style dataset that can fetch single items only; item p is {"x": 10 p}."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, position):
        return {"x": torch.tensor(10 * position)}


class Bulk(Plain):
    """One that fetches a batch at once."""

    def __getitems__(self, positions):
        return [{"x": torch.tensor(10 * position)} for position in positions]


def stack(items):
    return {"x": torch.stack([item["x"] for item in items])}


def loader_of(dataset, **options):
    return DataLoader(dataset, batch_size=2, collate_fn=stack, **options)


def listen(channel):
    """Subscribe a list to a channel; the listener keeps it open."""
    heard = []
    channel.subscribe(heard.append)
    return heard


def test_no_argument_of_ours_reaches_the_model(recorded):
    assert "input_ids" in recorded.arguments
    assert recorded.arguments <= KNOWN_ARGUMENTS


def test_trainer_keeps_its_collator_and_its_dataset(runs):
    trainer = runs("head").trainer
    assert BATCH_KEY not in next(iter(trainer.get_train_dataloader()))
    assert "sdo" not in type(trainer.data_collator).__module__
    assert not any("sdo" in column for column in trainer.train_dataset.column_names)


@pytest.mark.parametrize("dataset", [Plain(5), Bulk(5)], ids=["one by one", "in bulk"])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_carries_the_positions_of_its_items(dataset, workers):
    channel = IdChannel()
    loader = loader_of(dataset, sampler=[4, 0, 3, 1], num_workers=workers)
    channel.install(loader)
    batches = list(loader)
    assert [batch[BATCH_KEY].sample_ids for batch in batches] == [(4, 0), (3, 1)]
    assert [batch["x"].tolist() for batch in batches] == [[40, 0], [30, 10]]


def test_names_of_positions_travel_in_their_place():
    channel = IdChannel()
    channel.name_positions(np.array([7, 5, 3]), "a column")
    loader = loader_of(Plain(3), sampler=[2, 0])
    channel.install(loader)
    assert [batch[BATCH_KEY].sample_ids for batch in loader] == [(3, 7)]
    assert channel.source == "a column"


def test_installing_twice_changes_nothing():
    channel = IdChannel()
    channel.name_positions(np.array([7, 5, 3]), "a column")
    loader = loader_of(Plain(3))
    channel.install(loader)
    channel.install(loader)
    batches = list(loader)
    assert [batch[BATCH_KEY].sample_ids for batch in batches] == [(7, 5), (3,)]
    assert [batch["x"].tolist() for batch in batches] == [[0, 10], [20]]


def test_a_collator_that_returns_no_dict_is_named():
    loader = DataLoader(Plain(2), collate_fn=lambda items: torch.zeros(2))
    IdChannel().install(loader)
    with pytest.raises(TypeError, match="collator returned Tensor; expected a dict"):
        next(iter(loader))


def test_listeners_hear_training_batches_only():
    model = Echo()
    heard = listen(TrainingSession.of(model))
    model(x=1, **{BATCH_KEY: BatchIds((4, 0), None)})
    model.eval()
    model(x=2, **{BATCH_KEY: BatchIds((3, 1), None)})
    model.train()
    with torch.no_grad():
        model(x=3, **{BATCH_KEY: BatchIds((2,), None)})
    model(x=4)
    assert [ids.sample_ids for ids in heard] == [(4, 0)]
    assert model.calls == [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}]


def test_the_callers_arguments_stay_as_they_are():
    model = Echo()
    listen(TrainingSession.of(model))
    batch = {"x": 1, BATCH_KEY: BatchIds((4, 0), None)}
    model(**batch)
    assert batch == {"x": 1, BATCH_KEY: BatchIds((4, 0), None)}


def test_a_model_has_one_channel_while_somebody_listens():
    model, other = Echo(), Echo()
    channel = TrainingSession.of(model)
    assert TrainingSession.of(model) is channel
    assert TrainingSession.of(other) is not channel
    first, second = [], []
    channel.subscribe(first.append)
    channel.subscribe(second.append)
    listener = first.append
    channel.unsubscribe(listener)  # bound methods are equal, not identical
    model(**{BATCH_KEY: BatchIds((1,), None)})
    assert (first, second) == ([], [BatchIds((1,), None)])
    assert len(model._forward_pre_hooks) == 1
    channel.unsubscribe(second.append)
    assert len(model._forward_pre_hooks) == 0
    assert TrainingSession.of(model) is not channel


def test_subscribing_twice_hears_once():
    model, heard = Echo(), []
    channel = TrainingSession.of(model)
    listener = heard.append
    channel.subscribe(listener)
    channel.subscribe(listener)
    model(**{BATCH_KEY: BatchIds((1,), None)})
    assert heard == [BatchIds((1,), None)]


def test_a_second_forward_of_the_same_batch_is_no_new_micro_batch():
    model = Echo()
    heard = listen(TrainingSession.of(model))
    first, equal = BatchIds((1, 2), None), BatchIds((1, 2), None)
    for ids in (first, first, equal):
        model(**{BATCH_KEY: ids})
    assert heard == [first, equal]


LABELS = torch.tensor([[5, -100, 7, 8], [-100, -100, -100, 9]])


@pytest.mark.parametrize(
    ("fields", "tokens", "labels"),
    [
        ({"labels": LABELS}, (2, 1), (3, 1)),  # for a causal language model the first position predicts nothing
        ({"labels": LABELS, "shift_labels": LABELS.roll(-1, dims=1)}, (3, 1), (3, 1)),
        ({"labels": torch.tensor([2, -100])}, (1, 0), (1, 0)),
        ({"labels": torch.tensor([0.5, 1.5])}, (1, 1), (1, 1)),
        ({"completion_mask": torch.tensor([[0, 1, 1], [1, 1, 0], [0, 0, 1], [0, 0, 0]])}, (3, 1), (3, 2)),
        ({}, None, None),
    ],
    ids=["positions", "shifted before", "one each", "a value each", "two sequences each", "nothing"],
)
def test_tokens_that_carry_a_loss_are_counted(fields, tokens, labels):
    loader = DataLoader(Plain(2), batch_size=2, collate_fn=lambda items: dict(fields))
    IdChannel().install(loader)
    (batch,) = loader
    assert batch[BATCH_KEY] == BatchIds((0, 1), tokens, labels=labels)


def test_two_models_hear_their_own_batches():
    one, two = Echo(), Echo()
    heard_one, heard_two = listen(TrainingSession.of(one)), listen(TrainingSession.of(two))
    one(**{BATCH_KEY: BatchIds((1,), None)})
    two(**{BATCH_KEY: BatchIds((2,), None)})
    assert (heard_one, heard_two) == ([BatchIds((1,), None)], [BatchIds((2,), None)])


def test_a_channel_does_not_keep_its_model_alive():
    model = Echo()
    listen(TrainingSession.of(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
