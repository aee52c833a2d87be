"""What several processes tell each other, as threads that share a fake of torch.distributed."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sdo import InputError
from sdo.trainers import processes
from sdo.trainers.processes import Processes


class Group:
    """The two collectives that are used, between threads; every thread must make the same calls."""

    def __init__(self, count):
        self._count, self._parts, self._barrier = count, {}, threading.Barrier(count, timeout=20)
        self._local = threading.local()

    def join(self, rank):
        self._local.rank = rank

    def _exchange(self, tensor):
        self._parts[self._local.rank] = tensor.clone()
        self._barrier.wait()
        parts = [self._parts[rank] for rank in range(self._count)]
        self._barrier.wait()
        assert len({(part.shape, part.dtype) for part in parts}) == 1  # as gloo and NCCL demand
        return parts

    def all_gather(self, out, tensor):
        for target, part in zip(out, self._exchange(tensor), strict=True):
            target.copy_(part)

    def all_reduce(self, tensor):
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(dim=0))

    def get_backend(self):
        return "gloo"


@pytest.fixture
def everywhere(monkeypatch):
    """Run an action in as many threads as asked for; its result or its error in each."""

    def everywhere(action, count=3):
        group = Group(count)
        monkeypatch.setattr(processes.torch, "distributed", group)
        results = [None] * count

        def run(rank):
            group.join(rank)
            try:
                results[rank] = action(Processes(rank, count))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        return results

    return everywhere


def test_lists_of_any_length(everywhere):
    values = [[5, -(2**60)], [], [7]]
    assert everywhere(lambda p: p.lists(values[p.rank])) == [values] * 3
    assert everywhere(lambda p: p.lists([])) == [[[]] * 3] * 3


def test_texts_of_any_language(everywhere):
    texts = ["", "größer 大", "x" * 1000]
    assert everywhere(lambda p: p.texts(texts[p.rank])) == [texts] * 3


def test_numbers_keep_every_bit(everywhere):
    values = [np.array([0.1, np.nan, -0.0]), np.array([]), np.array([np.inf])]
    for found in everywhere(lambda p: p.numbers(values[p.rank])):
        for mine, other in zip(found, values, strict=True):
            assert mine.tobytes() == other.tobytes()


def test_sums_are_float64(everywhere):
    for total in everywhere(lambda p: p.sum(torch.tensor([1.0, 1e-12]) * (p.rank + 1))):
        assert total.dtype == torch.float64
        assert total.tolist() == pytest.approx([6, 6e-12])


def test_one_failure_is_everybodys(everywhere):
    def action(p):
        return p.together(lambda: 1 / (p.rank - 1))

    first, second, third = everywhere(action)
    assert isinstance(second, ZeroDivisionError)
    for other in (first, third):
        assert isinstance(other, InputError)
        assert str(other) == "process 1: division by zero"
    assert everywhere(lambda p: p.together(lambda: p.rank)) == [0, 1, 2]


def test_process_0_acts_before_the_others(everywhere):
    order = []
    assert everywhere(lambda p: p.leader_first(lambda: order.append(p.rank))) == [None] * 3
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]

    def fail(p):
        if p.leads:
            raise InputError("the folder is taken")
        order.append("went on")

    errors = everywhere(lambda p: p.leader_first(lambda: fail(p)))
    assert [str(e) for e in errors] == ["the folder is taken", *["process 0: the folder is taken"] * 2]
    assert "went on" not in order


def test_what_differs_is_named_everywhere(everywhere):
    assert everywhere(lambda p: p.same("a", "the plan")) == [None] * 3
    errors = everywhere(lambda p: p.same("ab" if p.rank == 2 else "a", "the plan"))
    assert {type(e) for e in errors} == {InputError}
    assert {str(e).split(";")[0] for e in errors} == {"the plan of process 2 is not that of process 0 (ab and a)"}


def test_alone_nothing_is_asked_of_torch(monkeypatch):
    monkeypatch.setattr(processes.torch, "distributed", None)
    alone = Processes.of(SimpleNamespace(world_size=1))
    assert alone.lists([3]) == [[3]]
    assert alone.texts("a") == ["a"]
    assert alone.sum(torch.ones(2)).tolist() == [1, 1]
    assert alone.leader_first(lambda: 5) == 5
    alone.wait()
    alone.same("a", "the plan")
    with pytest.raises(ZeroDivisionError):
        alone.together(lambda: 1 / 0)


def test_processes_that_nothing_joins_are_refused():
    with pytest.raises(InputError, match=r"2 processes that torch\.distributed does not join; expected torchrun"):
        Processes.of(SimpleNamespace(world_size=2, process_index=0))
