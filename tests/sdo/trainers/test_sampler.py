import doctest
import importlib
import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from torch.utils.data import RandomSampler, Sampler

from sdo import SDO, InputError, Layout, OrganizedSampler, Uniform
from sdo.trainers.sampler import OrganizedBatchSampler
from tests.third_party import Growing


def matrix(n, seed=0):
    return np.random.default_rng(seed).standard_normal((n, 4))


def slices(sampler, epochs):
    """The trainer epochs of a sampler end to end, asked for as a data loader asks."""
    taken = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        taken.append(list(sampler))
    return taken


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.booleans(), st.integers(0, 2**64 - 1))
def test_trainer_epochs_end_to_end_are_the_plans_stream(n, size, epochs, uniform, seed):
    size = min(size, n)
    organizer = Uniform(n, seed=seed) if uniform else SDO(matrix(n), k=2, seed=seed)
    sampler = OrganizedSampler(organizer.plan(size))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="k = ")  # small pools lower k
        taken = slices(sampler, epochs)
        # sentence-transformers#3348: a sampler must yield what its length says, in every epoch.
        assert len(sampler) == -(-n // size) * size
        assert [len(epoch) for epoch in taken] == [len(sampler)] * epochs
        # Another plan, so that nothing is read from the sampler's own cache.
        stream = organizer.plan(size).batches(0, epochs * sampler.steps_per_epoch)
    assert [i for epoch in taken for i in epoch] == stream.ravel().tolist()


@given(st.integers(2, 30), st.integers(1, 6), st.integers(0, 6), st.data())
def test_an_epoch_is_a_function_of_its_number_alone(n, size, epoch, data):
    """accelerate#2333: set_epoch(1) was not reproducible."""
    size = min(size, n)
    sampler = OrganizedSampler(Uniform(n, seed=1).plan(size))
    expected = slices(OrganizedSampler(Uniform(n, seed=1).plan(size)), epoch + 1)[-1]
    for other in data.draw(st.lists(st.integers(0, 8), max_size=4)):
        sampler.set_epoch(other)
        iterator = iter(sampler)
        next(iterator)  # left behind half read, as skip_first_batches and look-ahead do
    sampler.set_epoch(epoch)
    sampler.set_epoch(epoch)  # accelerate and transformers both call it
    assert list(sampler) == expected
    assert list(sampler) == expected


@given(st.permutations(range(12)), st.integers(1, 5))
def test_positions_turn_ids_into_dataset_rows(shuffled, size):
    """The dataset holds ids 100, 103, … in any order: the sampler names rows, the plan names samples."""
    ids = np.array([100 + 3 * i for i in shuffled])
    plan = Uniform(200, seed=4).plan(size, rows=ids)
    sampler = OrganizedSampler(plan, np.argsort(ids, kind="stable"))
    rows = np.array([row for epoch in slices(sampler, 3) for row in epoch])
    assert ids[rows].tolist() == plan.batches(0, 3 * sampler.steps_per_epoch).ravel().tolist()
    assert set(rows.tolist()) <= set(range(12))


def test_positions_and_epochs_that_would_be_read_as_others_are_refused():
    plan = Uniform(4, seed=0).plan(2)
    for positions, message in (
        (np.ones(4, dtype=bool), "positions hold True and False"),
        (np.arange(4) / 2, "positions hold float64"),
        (np.arange(3), "there are 3 positions; expected one for each of 4 ids"),
        ([0, 1, 2, -1], "positions hold -1"),
    ):
        with pytest.raises(InputError, match=message):
            OrganizedSampler(plan, positions)
    with pytest.raises(InputError, match=r"epoch is 0\.5; expected a whole number from 0"):
        OrganizedSampler(plan).set_epoch(0.5)


def test_without_positions_the_ids_are_handed_out():
    plan = Uniform(50, seed=0).plan(2, rows=np.array([7, 9, 31]))
    assert set(OrganizedSampler(plan)) == {7, 9, 31}


def test_a_given_position_wins_over_set_epoch():
    """On resume set_epoch does not always arrive: the trainer epoch then comes from elsewhere, at each iter()."""
    now = [3]
    sampler = OrganizedSampler(Uniform(10, seed=2).plan(4), trainer_epoch=lambda: now[0])
    reference = slices(OrganizedSampler(Uniform(10, seed=2).plan(4)), 6)
    sampler.set_epoch(0)
    assert list(sampler) == reference[3]
    now[0] = 5
    assert list(sampler) == reference[5]


def test_items_are_plain_ints_and_the_class_is_left_alone_by_accelerate():
    """accelerate#2057, #2117: a RandomSampler is silently replaced by a SeedableRandomSampler."""
    sampler = OrganizedSampler(SDO(matrix(9), k=2).plan(3), np.arange(9))
    assert all(type(position) is int for position in sampler)
    assert isinstance(sampler, Sampler)
    assert not isinstance(sampler, RandomSampler)


def test_seeds():
    """transformers#11389, #26218: the order neither depended on the seed nor could it be set."""
    first, again, other = (slices(OrganizedSampler(SDO(matrix(30), seed=s).plan(4)), 3) for s in (1, 1, 2))
    assert first == again != other
    assert len({tuple(epoch) for epoch in first}) == 3


@pytest.mark.parametrize(
    "name",
    ["sdo.organizers.sdo", "sdo.trainers.sampler", "sdo.organizers.steps", "sdo.checks", "sdo.cli.training.config"],
)
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, raise_on_error=False)
    assert result.failed == 0
    assert result.attempted > 0


# ---------------------------------------------------------------------- a loop of one's own


@given(st.integers(4, 30), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_micro_batches_of_all_processes_make_up_each_step(n, processes, accumulation, micro, seed):
    layout = Layout(processes=processes, accumulation=accumulation)
    size = layout.micro_batches * micro
    n = max(n, size)
    plan = Uniform(n, seed=seed).plan(size, layout=layout)
    samplers = [plan.sampler(rank=rank) for rank in range(processes)]
    for number in range(2):  # passes follow each other without set_epoch
        passes = [list(sampler) for sampler in samplers]
        assert [len(one) for one in passes] == [len(sampler) for sampler in samplers]
        for step in range(plan.steps_per_epoch):
            turns = [passes[r][step * accumulation + a] for a in range(accumulation) for r in range(processes)]
            assert [len(turn) for turn in turns] == [micro] * layout.micro_batches
            assert [i for turn in turns for i in turn] == plan.batch(number * plan.steps_per_epoch + step).tolist()


def test_a_plan_cuts_its_steps_itself_and_positions_name_rows():
    plan = Growing().plan(2, layout=Layout(accumulation=1))
    taken = list(OrganizedBatchSampler(plan, np.arange(10) + 100))
    assert taken == [[100, 100], [101, 101, 102], [103, 103, 104, 105], [106, 106, 107, 108, 109]]
    plan = Growing().plan(2, layout=Layout(accumulation=2))
    with pytest.raises(InputError, match="a step of 2 samples cannot fill 2 micro-batches"):
        list(plan.sampler())
    with pytest.raises(InputError, match=r"step 0 of organizer 'growing' has micro-batches or weights of its own"):
        list(OrganizedSampler(plan))


@pytest.mark.parametrize("taken", [0, 1, 5, 15, 16])
def test_a_saved_state_goes_on_where_it_stood(taken):
    def sampler(seed=3):
        return SDO(matrix(30), k=2, seed=seed).plan(4, layout=Layout(accumulation=2)).sampler()

    first = sampler()
    whole = list(first) + list(first)
    again = sampler()
    iterator = iter(again)
    before = [next(iterator) for _ in range(taken)]
    state = json.loads(json.dumps(again.state_dict()))
    resumed = sampler()
    resumed.load_state_dict(state)
    assert before + list(resumed) == whole[: 16 if taken < 16 else 32]
    assert list(again) == whole[:16]  # left half read, begun again
    with pytest.raises(InputError, match="the state of the sampler is that of another plan: seed = 3 then and 4 now"):
        sampler(seed=4).load_state_dict(state)


@pytest.mark.parametrize("taken", [0, 1, 7, 32])
def test_a_saved_state_of_positions_goes_on_where_it_stood(taken):
    def sampler():
        return OrganizedSampler(SDO(matrix(30), k=2, seed=3).plan(4))

    whole = slices(sampler(), 2)[1]
    first = sampler()
    first.set_epoch(1)
    iterator = iter(first)
    before = [next(iterator) for _ in range(taken)]
    resumed = sampler()
    resumed.load_state_dict(first.state_dict())
    resumed.set_epoch(1)  # as loops do at the start of each epoch
    assert before + list(resumed) == whole
    assert list(resumed) == whole


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 calls it, torch 2.13 minds
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [True, False])
def test_a_stateful_data_loader_resumes(workers, batches):
    """torchdata's loader asks for the state of what it gave, not of what its workers drew ahead."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        plan = SDO(matrix(30), k=2, seed=3).plan(4, layout=Layout(accumulation=2))
        drawn = {"batch_sampler": plan.sampler()} if batches else {"sampler": OrganizedSampler(plan), "batch_size": 2}
        return stateful.StatefulDataLoader(list(range(30)), num_workers=workers, **drawn)

    whole = [batch.tolist() for batch in loader()]
    first = loader()
    iterator = iter(first)
    before = [next(iterator).tolist() for _ in range(5)]
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    assert before + [batch.tolist() for batch in resumed] == whole


def test_ranks_beyond_the_layout_are_refused():
    plan = Uniform(8).plan(4, layout=Layout(processes=2))
    for rank in (-1, 2):
        with pytest.raises(InputError, match=f"rank is {rank}; expected a whole number from 0 to 1"):
            plan.sampler(rank=rank)


def test_samplers_need_torch_alone():
    code = (
        "import sys\n"
        "for name in ('transformers', 'trl', 'accelerate', 'datasets'): sys.modules[name] = None\n"
        "from sdo import OrganizedSampler, Uniform\n"
        "plan = Uniform(4, seed=1).plan(2)\n"
        "print(sorted(OrganizedSampler(plan)), sorted(i for batch in plan.sampler() for i in batch))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0, 1, 2, 3] [0, 1, 2, 3]"
