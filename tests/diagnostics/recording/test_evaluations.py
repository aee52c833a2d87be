from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from diagnostics.recording import evaluations
from diagnostics.recording.evaluations import HeldOut
from diagnostics.signals.losses import LossReader
from sdo.trainers.processes import Processes
from sdo.trainers.trainer_types import PLAIN


@pytest.fixture
def held(monkeypatch):
    """An output is the list of its batch's scores."""
    monkeypatch.setattr(evaluations, "held_out_scores", lambda output, kwargs, kind, reader: output)
    return HeldOut(PLAIN, Processes(), LossReader(torch.nn.Linear(1, 1), PLAIN))


def loader(sampler, size=2):
    return SimpleNamespace(batch_sampler=BatchSampler(sampler, size, drop_last=False))


def batch():
    return {"input_ids": torch.zeros(1)}


def test_scores_are_those_of_the_rows_in_order(held):
    held.hold([0.5, None], batch())  # a sample without a token has no score but keeps its place
    again = batch()
    held.hold([1.5], again)
    held.hold([9.0], again)  # the reference's pass over the same batch
    assert held.end(loader(SequentialSampler(range(3)))) == {0: 0.5, 2: 1.5}
    assert held.end(loader(SequentialSampler(range(3)))) == {}  # nothing is kept for the next evaluation


def test_what_was_forgotten_is_not_counted(held):
    held.hold([7.0], batch())
    held.forget()
    held.hold([0.5], batch())
    assert held.end(loader(SequentialSampler(range(1)))) == {0: 0.5}


@pytest.mark.parametrize("sampler", [RandomSampler(range(2)), SequentialSampler(range(3))])
def test_scores_of_rows_that_are_not_known_are_dropped_with_a_warning(held, sampler):
    held.hold([0.5, 1.5], batch())
    with pytest.warns(UserWarning, match="once and in order"):
        assert held.end(loader(sampler)) == {}


def test_a_pass_that_tells_nothing_is_not_the_batchs(held):
    """TRL's trainer first calls the model without labels where it smooths them."""
    one, two = batch(), batch()
    for output in (None, [0.5], [9.0]):
        held.hold(output, one)
    for output in (None, None, [1.5]):
        held.hold(output, two)
    assert held.end(loader(SequentialSampler(range(2)))) == {0: 0.5, 1: 1.5}


@pytest.mark.parametrize(
    ("output", "reason", "why"),
    [
        (None, "the model's call has no labels", "are not recorded: the model's call has no labels"),
        (None, None, "its forward passes do not tell them"),
        ([None, None], None, "none of its samples has a token that carries a loss"),
    ],
)
def test_an_evaluation_that_leaves_nothing_behind_says_so_once(held, output, reason, why):
    held.reader.reason = reason
    held.hold(output, batch())
    with pytest.warns(UserWarning, match=why):
        assert held.end(loader(SequentialSampler(range(2)))) == {}
    held.hold(output, batch())
    assert held.end(loader(SequentialSampler(range(2)))) == {}
