import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdo import SDO, Embeddings, InputError, Uniform
from tests import slow_sdo

options = st.fixed_dictionaries(
    {
        "k": st.integers(1, 5),
        "delta_tau": st.sampled_from([1, 2, 3]),
        "retain": st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]),
        "visit": st.sampled_from(["cover", "anchor"]),
        "graph": st.sampled_from(["dynamic", "static"]),
        "locality": st.sampled_from(["knn", "random", "shuffle"]),
        "exposure": st.booleans(),
        "seed": st.integers(0, 2**64 - 1),
    }
)


def embeddings(seed, n, duplicates=False, invalid=False):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((n, 5))
    if duplicates:
        matrix = matrix[rng.integers(max(1, n // 3), size=n)]
    if invalid:
        matrix[rng.random(n) < 0.15] = 0
        matrix[rng.random(n) < 0.1, 2] = np.nan
    return Embeddings.from_array(matrix)


def quiet_plan(organizer, size):
    plan = organizer.plan(size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="k = ")
        epochs = [plan.epoch(e) for e in range(5)]
    return plan, epochs


@settings(max_examples=120)
@given(st.integers(0, 2**32), st.integers(2, 26), st.integers(1, 8), options, st.booleans(), st.booleans())
def test_plan_equals_the_slow_method(seed, n, size, chosen, duplicates, invalid):
    size = min(size, n)
    matrix = embeddings(seed, n, duplicates, invalid)
    _, epochs = quiet_plan(SDO(matrix, on_invalid="isolate", **chosen), size)
    slow = slow_sdo.sdo_epochs(matrix.unit, matrix.valid, size, 5, **{**chosen, "retain": str(chosen["retain"])})
    for epoch, (batches, pool, u, cold, hot) in zip(epochs, slow, strict=True):
        assert epoch.batches.tolist() == batches
        assert epoch.pool.tolist() == pool
        assert epoch.exposure.tolist() == u
        if chosen["exposure"]:
            assert epoch.figures == {"cold": len(cold), "hot": len(hot)}


@given(st.integers(0, 2**32), st.integers(2, 80), st.integers(1, 9), options)
def test_always_true(seed, n, size, chosen):
    size = min(size, n)
    plan, epochs = quiet_plan(SDO(embeddings(seed, n), **chosen), size)
    counts = np.zeros(n, dtype=np.int64)
    for epoch, following in zip(epochs, [*epochs[1:], None], strict=True):
        members = set(epoch.pool.tolist())
        assert len(members) >= size
        # Every pool member appears in its epoch; batches hold B distinct ids of the pool.
        assert set(epoch.batches.ravel().tolist()) == members
        assert epoch.batches.shape[1] == size
        assert all(len(set(batch)) == size for batch in epoch.batches.tolist())
        # u equals the counts.
        counts += np.bincount(epoch.batches.ravel(), minlength=n)
        assert (epoch.exposure == counts).all()
        if following is not None:
            threshold = (epoch.organizer_epoch + 1) * chosen["delta_tau"]
            back = set(np.flatnonzero(counts < threshold).tolist())
            assert back <= set(following.pool.tolist())
            assert following.first_step == epoch.stop
    if not chosen["exposure"]:
        assert all(len(epoch.pool) == n for epoch in epochs)
    # Any step is found again, alone and in slices.
    total = epochs[-1].stop
    flat = np.concatenate([epoch.batches for epoch in epochs])
    assert (plan.batches(0, total) == flat).all()
    assert (plan.batch(total - 1) == flat[-1]).all()
    assert (plan.batches(total // 3, total) == flat[total // 3 :]).all()


@given(st.integers(0, 2**32), st.integers(4, 40), options)
def test_no_sample_is_lost_for_good(seed, n, chosen):
    """A sample that is left out comes back before the threshold has passed its exposure by two epochs."""
    plan = SDO(embeddings(seed, n), **chosen).plan(3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="k = ")
        last_seen = np.zeros(n, dtype=np.int64)
        for e in range(12):
            epoch = plan.epoch(e)
            out = np.setdiff1d(np.arange(n), epoch.pool)
            before = plan.epoch(e - 1).exposure if e else np.zeros(n, dtype=np.int64)
            assert (before[out] >= e * chosen["delta_tau"]).all()
            last_seen[epoch.pool] = e
    assert (plan.epoch(11).exposure > 0).all()


@given(st.integers(0, 2**32), st.integers(1, 50), st.integers(1, 9), st.integers(0, 2**64 - 1))
def test_uniform_is_permutations_end_to_end(seed, n, size, plan_seed):
    size = min(size, n)
    plan = Uniform(n, seed=plan_seed).plan(size)
    flat = []
    for e in range(6):
        epoch = plan.epoch(e)
        assert all(len(set(batch)) == size for batch in epoch.batches.tolist())
        flat += epoch.batches.ravel().tolist()
        assert (epoch.exposure == np.bincount(flat, minlength=n)).all()
        # Nobody is ever more than two appearances ahead: one from the carried tail, one from the permutation.
        assert epoch.exposure.max() - epoch.exposure.min() <= 2
        assert len(flat) == (e + 1) * n - ((e + 1) * n) % size


def test_uniform_permutations_are_complete_where_batches_fit():
    plan = Uniform(12, seed=5).plan(4)
    for e in range(3):
        assert sorted(plan.epoch(e).batches.ravel().tolist()) == list(range(12))
    assert plan.epoch(0).batches.tolist() != plan.epoch(1).batches.tolist()


def test_seed_and_only_seed_changes_the_order():
    matrix = embeddings(0, 60)
    first, again, other = (SDO(matrix, seed=s).plan(4) for s in (3, 3, 4))
    assert (first.batches(0, 60) == again.batches(0, 60)).all()
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert (first.batches(0, 20) != other.batches(0, 20)).any()


def test_fingerprint_names_everything_that_shapes_the_plan():
    matrix = embeddings(0, 30)
    base = SDO(matrix).plan(4).fingerprint
    others = [
        SDO(matrix, k=3).plan(4),
        SDO(matrix, delta_tau=3).plan(4),
        SDO(matrix, retain=0.3).plan(4),
        SDO(matrix, visit="anchor").plan(4),
        SDO(matrix, graph="static").plan(4),
        SDO(matrix, locality="random").plan(4),
        SDO(matrix, exposure=False).plan(4),
        SDO(matrix).plan(5),
        SDO(matrix).plan(4, rows=np.arange(29)),
        SDO(embeddings(1, 30)).plan(4),
        Uniform(matrix).plan(4),
    ]
    assert len({base, *(plan.fingerprint for plan in others)}) == len(others) + 1


def test_rows_that_do_not_exist_are_left_out():
    matrix = embeddings(2, 40)
    rows = np.array([1, 2, 3, 5, 8, 13, 21, 34, 39, 0])
    plan = SDO(matrix, k=2, seed=9).plan(3, rows=rows)
    assert plan.ids.tolist() == sorted(rows.tolist())
    assert set(plan.epoch(0).batches.ravel().tolist()) == set(rows.tolist())
    shuffled = SDO(matrix, k=2, seed=9).plan(3, rows=rows[::-1])
    assert (plan.batches(0, 30) == shuffled.batches(0, 30)).all()
    with pytest.raises(InputError, match="0 to 39"):
        SDO(matrix).plan(3, rows=np.array([1, 2, 40]))


def test_k_is_lowered_with_a_warning():
    with pytest.warns(UserWarning, match="k = 9, but a sample has only 5 other usable pool members; using k = 5"):
        epoch = SDO(embeddings(1, 6), k=9).plan(2).epoch(0)
    assert set(epoch.batches.ravel().tolist()) == set(range(6))


def test_a_pool_below_the_batch_is_filled_with_the_least_exposed():
    # Everybody is hot after epoch 0 and nobody is retained: the next pool would be empty.
    plan = SDO(embeddings(4, 9), k=3, delta_tau=0.5, retain=0.0).plan(4)
    first, second = plan.epoch(0), plan.epoch(1)
    assert first.figures["cold"] == 0
    expected = sorted(np.lexsort((np.arange(9), first.exposure))[:4].tolist())
    assert second.pool.tolist() == expected


def test_invalid_rows_are_refused_or_anchor_alone():
    matrix = np.random.default_rng(0).standard_normal((20, 4))
    matrix[3] = 0
    matrix[11, 0] = np.inf
    with pytest.raises(InputError, match=r"2 of 20 embedding rows .* 3, 11"):
        SDO(matrix)
    plan = SDO(matrix, on_invalid="isolate", k=2).plan(4)
    lists = plan._graph(0, np.arange(20))
    assert (lists[[3, 11]] == -1).all()
    assert not np.isin(lists[[i for i in range(20) if i not in (3, 11)]], [3, 11, -1]).any()
    assert {3, 11} <= set(plan.epoch(0).batches.ravel().tolist())
    all_bad = SDO(np.zeros((6, 3)), on_invalid="isolate").plan(2)
    with pytest.warns(UserWarning, match="k = 4"):
        assert set(all_bad.epoch(0).batches.ravel().tolist()) == set(range(6))


def test_duplicated_rows_are_no_special_case():
    plan = SDO(np.ones((30, 4)), k=3, seed=1).plan(5)
    assert set(plan.epoch(0).batches.ravel().tolist()) == set(range(30))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k is 0; expected a whole number from 1"),
        ({"k": 2.5}, "k is 2.5"),
        ({"k": True}, "k is True"),
        ({"k": np.array([4, 5])}, r"k is array\(\[4, 5\]\)"),
        ({"delta_tau": True}, "delta_tau is True"),
        ({"visit": np.array(["cover"])}, "visit is array"),
        ({"delta_tau": 0}, "delta_tau is 0; expected a number above 0"),
        ({"delta_tau": float("nan")}, "delta_tau is nan"),
        ({"retain": 1.2}, "retain is 1.2; expected a number from 0 to 1"),
        ({"retain": "0.2"}, "retain is '0.2'"),
        ({"visit": "all"}, "visit is 'all'; expected one of cover, anchor"),
        ({"graph": "frozen"}, "expected one of dynamic, static"),
        ({"locality": "near"}, "expected one of knn, random, shuffle"),
        ({"on_invalid": "skip"}, "expected one of raise, isolate"),
        ({"exposure": 1}, "exposure is 1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is"),
    ],
)
def test_options_out_of_range_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        SDO(np.eye(4), **arguments)


@pytest.mark.parametrize(
    ("size", "message"), [(0, "batch size is 0"), (9, "batch size 9 is larger than the 4"), (2.0, "2.0")]
)
def test_batch_sizes_out_of_range_are_refused(size, message):
    with pytest.raises(InputError, match=message):
        SDO(np.eye(4)).plan(size)
    with pytest.raises(InputError, match=message):
        Uniform(4).plan(size)


@pytest.mark.parametrize("samples", [0, 4.0, True, None, np.array(4.0)])
def test_a_number_of_samples_that_is_none_is_refused(samples):
    with pytest.raises(InputError, match=r"number of samples is .*; expected a whole number from 1"):
        Uniform(samples)
    assert Uniform(np.array(4)).n_samples == 4


def test_batch_of_all_samples():
    plan = SDO(np.eye(4), k=2).plan(4)
    assert [sorted(b) for b in plan.batches(0, 3).tolist()] == [[0, 1, 2, 3]] * 3


def test_gsm8k_epochs_have_the_reference_lengths(gsm8k):
    """The design's reference walk gave 1901, 1081, 1356 steps under another random stream."""
    plan = SDO(np.load(gsm8k / "train_minilm.npy")[:6796], seed=617).plan(8)
    steps = [len(plan.epoch(e).steps) for e in range(3)]
    np.testing.assert_allclose(steps, [1901, 1081, 1356], rtol=0.02)
    assert plan.epoch(0).exposure.mean() == pytest.approx(2.24, abs=0.02)
    assert plan.batch(0).tolist() == plan.epoch(0).batches[0].tolist()


@given(st.integers(0, 2**32), options, st.integers(0, 2**64 - 1), st.booleans())
def test_a_plan_drawn_anew_is_that_of_the_other_seed(seed, chosen, other, uniform):
    matrix = embeddings(seed, 23, duplicates=True)
    rows = np.arange(1, 22)

    def organizer(seed):
        return Uniform(matrix, seed=seed) if uniform else SDO(matrix, **{**chosen, "seed": seed})

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="k = ")
        plan = organizer(chosen["seed"]).plan(4, rows=rows)
        before = plan.batches(0, 5)
        redrawn = plan.redraw(other)
        expected = organizer(other).plan(4, rows=rows)
        assert redrawn.batches(0, 30).tolist() == expected.batches(0, 30).tolist()
        assert redrawn.fingerprint == expected.fingerprint
        assert plan.organizer.seed == chosen["seed"]
        assert plan.batches(0, 30)[:5].tolist() == before.tolist()
        assert plan.batches(0, 30).tolist() == organizer(chosen["seed"]).plan(4, rows=rows).batches(0, 30).tolist()


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True])
@pytest.mark.parametrize("maker", [SDO, Uniform])
def test_a_wrong_seed_to_draw_anew_is_refused(maker, seed):
    with pytest.raises(InputError, match="seed is"):
        maker(embeddings(0, 8)).plan(2).redraw(seed)
