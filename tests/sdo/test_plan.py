import itertools
import json
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdo import SDO, Embeddings, InputError, Uniform

MATRIX = np.random.default_rng(0).standard_normal((23, 5))


def plans():
    return SDO(MATRIX, k=2, seed=5).plan(4), Uniform(23, seed=5).plan(4)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=6), st.booleans())
def test_any_slice_in_any_order_is_of_one_stream(asked, uniform):
    """Resuming asks for late steps first; the answers must not depend on what was asked before."""
    stream = plans()[uniform].batches(0, 80)
    plan = plans()[uniform]
    for start, length in asked:
        found = plan.batches(start, start + length)
        assert found.shape == (length, 4)
        assert found.dtype == np.int64
        assert (found == stream[start : start + length]).all()
        assert (plan.batch(start) == stream[start]).all()


@given(st.integers(0, 90), st.booleans())
def test_epoch_of_a_step(step, uniform):
    epoch = plans()[uniform].epoch_of(step)
    assert epoch.first_step <= step < epoch.first_step + epoch.steps
    assert epoch.batches.shape == (epoch.steps, 4)


def test_epochs_follow_each_other():
    for plan in plans():
        epochs = [plan.epoch(e) for e in range(4)]
        assert [e.organizer_epoch for e in epochs] == [0, 1, 2, 3]
        assert epochs[0].first_step == 0
        for before, after in itertools.pairwise(epochs):
            assert after.first_step == before.first_step + before.steps
            counted = np.bincount(after.batches.ravel(), minlength=23)
            assert (after.exposure - before.exposure == counted).all()
        assert plan.epoch(1) is epochs[1]


def test_an_empty_slice_has_the_shape_of_batches():
    for plan in plans():
        assert plan.batches(3, 3).shape == (0, 4)
        assert plan.batches(0, 0).dtype == np.int64


def test_steps_count_from_zero():
    for plan in plans():
        with pytest.raises(IndexError, match="step is -1; steps count from 0"):
            plan.batch(-1)
        with pytest.raises(IndexError, match="step is -2"):
            plan.batches(-2, 1)


def test_epochs_count_from_zero():
    for plan in plans():
        for _ in range(2):
            with pytest.raises(IndexError, match="epoch is -1; epochs count from 0"):
                plan.epoch(-1)
            plan.epoch(1)  # now there are epochs at the end of a list


@pytest.mark.parametrize("rows", [[3, 1, 17, 9, 22], np.array([22, 9, 17, 1, 3]), np.array([1, 1, 3, 9, 17, 22])])
def test_a_plan_over_some_rows_is_over_their_set(rows):
    """Neither order nor repetition matter: the ids are a set, ascending."""
    for organizer in (SDO(MATRIX, k=2), Uniform(23)):
        plan = organizer.plan(2, rows=np.asarray(rows))
        assert plan.ids.tolist() == [1, 3, 9, 17, 22]
        assert set(plan.batches(0, 9).ravel().tolist()) == {1, 3, 9, 17, 22}
        assert plan.epoch(0).exposure.shape == (5,)


def test_all_rows_named_is_all_rows():
    for organizer in (SDO(MATRIX, k=2), Uniform(23)):
        named, unnamed = organizer.plan(4, rows=np.arange(23)), organizer.plan(4)
        assert named.fingerprint == unnamed.fingerprint
        assert (named.batches(0, 30) == unnamed.batches(0, 30)).all()


@pytest.mark.parametrize(
    ("rows", "message"),
    [([-1, 3], "reach from -1 to 3; expected 0 to 22"), ([3, 23], "reach from 3 to 23; expected 0 to 22")],
)
def test_rows_outside_the_embeddings_are_refused(rows, message):
    with pytest.raises(InputError, match=message):
        SDO(MATRIX).plan(2, rows=np.array(rows))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.arange(23) % 2 == 0, "rows hold True and False; .*; mend: numpy.flatnonzero"),
        ([0.5, 1.7], "rows hold float64"),
        ([[0, 1], [2, 3]], r"rows have shape \(2, 2\)"),
        (np.ma.masked_array([0, 1, 2], mask=[0, 1, 0]), "rows hold masked entries"),
        (["0", "1"], "rows hold <U1"),
    ],
)
def test_rows_that_would_be_read_as_others_are_refused(rows, message):
    for organizer in (SDO(MATRIX, k=2), Uniform(23)):
        with pytest.raises(InputError, match=message):
            organizer.plan(1, rows=rows)


@pytest.mark.parametrize("number", [1.0, True, "1", None, np.array([1])])
def test_steps_epochs_and_seeds_are_whole_numbers(number):
    for plan in plans():
        for ask in (plan.epoch, plan.epoch_of, plan.batch, plan.counts, plan.redraw):
            with pytest.raises(InputError, match="expected a whole number"):
                ask(number)
        with pytest.raises(InputError, match=r"stop is .*; expected a whole number"):
            plan.batches(0, number)
        assert (plan.batch(np.array(1)) == plan.batch(1)).all()


def test_positions_are_those_of_the_plans_own_ids():
    plan = Uniform(23).plan(2, rows=np.array([3, 9, 17]))
    assert plan.positions([17, 3]).tolist() == [2, 0]
    for odd in (4, 18, -1):
        with pytest.raises(InputError, match=f"sample id {odd} is none of the 3 that the plan serves"):
            plan.positions([3, odd])
    with pytest.raises(InputError, match="sample ids hold float64"):
        plan.positions([3.0])


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", None, True, np.nan])
def test_a_batch_size_that_is_none_is_refused(size):
    with pytest.raises(InputError, match=r"batch size is .*; expected a whole number from 1"):
        SDO(MATRIX).plan(size)


def test_a_batch_holds_at_most_all_samples():
    assert SDO(MATRIX).plan(np.int32(23)).epoch(0).batches.shape[1] == 23
    with pytest.raises(InputError, match="batch size 24 is larger than the 23 samples"):
        SDO(MATRIX).plan(24)
    with pytest.raises(InputError, match="batch size 3 is larger than the 2 samples"):
        Uniform(23).plan(3, rows=np.array([5, 6]))


def test_what_a_checkpoint_holds_survives_json():
    for plan in plans():
        described = plan.describe()
        assert json.loads(json.dumps(described)) == described
        assert set(described) == {
            *("name", "options", "batch_size", "n_samples", "samples", "embeddings", "plan_version"),
        }
    assert plans()[0].describe()["embeddings"] == Embeddings.from_array(MATRIX).fingerprint


@pytest.mark.parametrize(
    "options",
    [
        {"delta_tau": np.int64(2)},
        {"delta_tau": np.float32(1.5)},
        {"retain": np.float32(0.25)},
        {"retain": np.float64(0.25)},
        {"k": np.int64(3), "seed": np.uint64(7)},
        {"exposure": np.bool_(False)},
    ],
)
def test_numpy_numbers_are_numbers(options):
    """As they come out of a sweep over np.arange or np.linspace; they must not fail at the first checkpoint."""
    plain = {name: value.item() for name, value in options.items()}
    plan, same = SDO(MATRIX, **options).plan(4), SDO(MATRIX, **plain).plan(4)
    assert json.loads(json.dumps(plan.describe())) == same.describe()
    assert plan.fingerprint == same.fingerprint


def test_whole_thresholds_have_one_fingerprint():
    """A threshold of 2.0 plans what 2 plans, and a run file may hold either."""
    one, other = SDO(MATRIX, delta_tau=2).plan(4), SDO(MATRIX, delta_tau=2.0).plan(4)
    assert (one.batches(0, 30) == other.batches(0, 30)).all()
    assert one.fingerprint == other.fingerprint


def test_a_lowered_k_is_said_once_and_does_not_change_the_fingerprint():
    high = SDO(MATRIX, k=40).plan(4)
    with pytest.warns(UserWarning, match="k = 40, but a sample has only 22 other usable pool members; using k = 22"):
        high.epoch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low = SDO(MATRIX, k=22).plan(4)
        low.epoch(0)
        high.epoch(0)  # made already
    assert (high.epoch(0).batches == low.epoch(0).batches).all()
    assert high.fingerprint != low.fingerprint
