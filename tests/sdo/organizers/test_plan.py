import hashlib
import itertools
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdo import SDO, Embeddings, InputError, Uniform
from sdo.organizers.plan import Plan
from sdo.organizers.steps import EpochPlan, Layout, Steps
from tests.third_party import Growing, GrowingPlan

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
    assert epoch.first_step <= step < epoch.stop
    assert epoch.batches.shape == (len(epoch.steps), 4)


def test_epochs_follow_each_other():
    for plan in plans():
        epochs = [plan.epoch(e) for e in range(4)]
        assert [e.organizer_epoch for e in epochs] == [0, 1, 2, 3]
        assert epochs[0].first_step == 0
        for before, after in itertools.pairwise(epochs):
            assert after.first_step == before.stop
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
        (np.arange(23) % 2 == 0, "rows hold True and False; .*; fix: numpy.flatnonzero"),
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


STORED = Path(__file__).with_name("stored")
ORDINARY = np.random.default_rng(5).integers(-9, 10, (200, 12)).astype(np.float32)
# As the version before `Steps` made them: stored/plans.json holds their descriptions, fingerprints and digests.
CASES = {
    "sdo": lambda: SDO(ORDINARY, seed=617).plan(8),
    "sdo-static": lambda: SDO(ORDINARY, k=3, graph="static", seed=3).plan(7),
    "sdo-no-exposure": lambda: SDO(ORDINARY, exposure=False, seed=9).plan(8),
    "sdo-random": lambda: SDO(ORDINARY, locality="random", delta_tau=1, retain=0.5, seed=617).plan(8),
    "sdo-shuffle": lambda: SDO(ORDINARY, locality="shuffle", seed=617).plan(8),
    "sdo-anchor": lambda: SDO(ORDINARY, visit="anchor", delta_tau=1.5, seed=2**63).plan(6),
    "sdo-rows": lambda: SDO(ORDINARY, seed=1).plan(8, rows=np.arange(0, 200, 3)),
    "uniform": lambda: Uniform(ORDINARY, seed=617).plan(8),
    "uniform-count": lambda: Uniform(50, seed=1).plan(8),
    "uniform-rows": lambda: Uniform(200, seed=1).plan(8, rows=np.arange(5, 180)),
}


def digest(ids):
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


@pytest.mark.parametrize("name", CASES)
def test_plans_are_those_of_the_first_version_bit_for_bit(name):
    stored = json.loads((STORED / "plans.json").read_text())
    assert set(stored) == set(CASES)
    plan = CASES[name]()
    assert plan.describe() == stored[name]["describe"]
    assert plan.fingerprint == stored[name]["fingerprint"]
    assert digest(plan.batches(0, 400)) == stored[name]["steps_0_to_399"]
    assert [plan.epoch(e).first_step for e in range(5)] == stored[name]["first_step_of_epochs"]
    assert digest(plan.redraw(7).batches(0, 400)) == stored[name]["redrawn_from_7"]


def test_steps_that_differ_in_size_are_read_by_step_and_flat():
    plan = Growing().plan(2, layout=Layout(processes=2, accumulation=3))
    assert plan.layout.micro_batches == 6
    assert [plan.batch(t).tolist() for t in (0, 1, 3, 4, 6)] == [[0], [1, 2], [6, 7, 8, 9], [0], [3, 4, 5]]
    step = plan.step(2)
    assert (step.sample_ids.tolist(), step.weight.tolist()) == ([3, 3, 4, 5], [0, 1, 1, 1])
    assert (step.group.tolist(), step.micro_batch.tolist(), len(step)) == ([5, 6, 7, 8], [0, 0, 0, 0], 4)
    ids, offsets = plan.flat(2, 6)
    assert (ids.tolist(), offsets.tolist()) == ([3, 4, 5, 6, 7, 8, 9, 0, 1, 2], [0, 3, 7, 8, 10])
    assert plan.flat(3, 3)[1].tolist() == [0]
    assert plan.counts(5).tolist() == [2, 1, 1, 1, 1, 1, 1, 1, 1, 1]  # fillers are no exposure
    assert plan.steps_per_epoch == 4
    assert plan.redraw(1).batch(1).tolist() == [0, 1]
    assert plan.describe()["plan_version"] == 3
    with pytest.raises(InputError, match="these steps hold 3 to 4 samples; expected steps of one size"):
        plan.batches(2, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": np.array([0.0, 1, 2])}, r"ids of Steps are float64 of shape \(3,\); expected a one-dimensional array"),
        ({"offsets": [0, 3]}, "offsets of Steps are list"),
        ({"offsets": np.array([0, 1, 1, 3])}, "offsets of Steps do not cut 3 ids into steps"),
        ({"offsets": np.array([0, 2])}, "offsets of Steps do not cut 3 ids into steps"),
        ({"weight": np.ones(2)}, r"weight of Steps is float64 of shape \(2,\); expected float64 of shape \(3,\)"),
        ({"weight": np.array([1, -1, np.nan])}, "weight of Steps holds a value that is negative or not finite"),
        ({"micro_batch": np.array([0, 1, 0], dtype=np.int32)}, "micro_batch of Steps falls within a step"),
    ],
)
def test_steps_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        Steps(**{"ids": np.arange(3), "offsets": np.array([0, 3]), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"organizer_epoch": 1}, "epoch 0 of organizer 'broken' calls itself epoch 1"),
        ({"steps": Steps.of(np.empty((0, 2), dtype=np.int64))}, "holds no step"),
        (
            {"steps": Steps.of(np.array([[0, 1, 2]]))},
            "has a step of 3 samples; expected 2 in each; fix: ragged",
        ),
        ({"steps": Steps.of(np.array([[0, 5]]))}, "holds sample 5; expected the samples that the plan serves"),
        ({"steps": Steps.of(np.array([[0, 1], [2, 2]]))}, "holds sample 2 twice in step 1"),
        ({"exposure": np.array([1, 2, 0])}, "the exposure of epoch 0 of organizer 'broken' is not the ledger"),
    ],
)
def test_an_epoch_that_breaks_the_contract_is_refused(changes, message):
    class Broken(Growing):
        name, n_samples = "broken", 3

    class BrokenPlan(Plan):
        version = 1

        def make_epoch(self, epoch, first_step, exposure):
            good = {"organizer_epoch": epoch, "first_step": first_step, "steps": Steps.of(np.array([[0, 1]]))}
            return EpochPlan(**{**good, "pool": self.ids, "exposure": np.array([1, 1, 0]), **changes})

    with pytest.raises(InputError, match=message):
        BrokenPlan(Broken(), 2).epoch(0)


def test_a_plan_without_a_version_is_refused():
    class Unversioned(GrowingPlan):
        version = None

    with pytest.raises(TypeError, match="Unversioned has no version"):
        Unversioned(Growing(), 2)
