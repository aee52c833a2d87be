from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from diagnostics import evaluations
from diagnostics.evaluations import HeldOut
from diagnostics.kinds import PLAIN
from diagnostics.processes import Processes


@pytest.fixture
def held(monkeypatch):
    """An output is the list of its batch's scores."""
    monkeypatch.setattr(evaluations, "held_out_scores", lambda output, kwargs, kind: output)
    return HeldOut(PLAIN, Processes())


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
