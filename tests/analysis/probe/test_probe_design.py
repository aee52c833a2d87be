import numpy as np
import pytest

from analysis.probe.design import CURVE_SAMPLES, design_probe
from analysis.run_folder.recorded import flat_batches
from sdo import SDO, Embeddings, InputError, Uniform
from sdo.embeddings.matrix import within_batch_cosine


def plan_of(n=120, batch=4, seed=3, matrix=None, **options):
    matrix = np.random.default_rng(0).normal(size=(n, 6)) if matrix is None else matrix
    return SDO(matrix, k=2, seed=seed, **options).plan(batch)


def test_half_of_the_batches_are_sdos_and_a_quarter_each_controls():
    plan = plan_of()
    design = design_probe(plan, samples=100, steps=40)
    assert {name: arm.batches.shape for name, arm in design.arms.items()} == {
        "uniform": (7, 4),
        "random": (6, 4),
        "sdo": (12, 4),
    }
    assert (design.batch_size, design.members, design.steps, design.asked) == (4, 4, 40, 100)
    everyone = {i for arm in design.arms.values() for i in arm.batches.ravel().tolist()}
    assert design.sample_ids.tolist() == sorted(everyone)
    assert everyone <= set(plan.ids.tolist())


def test_batches_are_those_of_the_plans_each_once():
    plan = plan_of()
    design = design_probe(plan, samples=128, steps=50)
    options = plan.organizer.options | {"locality": "random"}
    plans = {
        "uniform": Uniform(plan.organizer.embeddings, seed=3).plan(4),
        "random": SDO(plan.organizer.embeddings, **options).plan(4),
        "sdo": plan,
    }
    for name, arm in design.arms.items():
        planned = plans[name].batches(0, 50)
        places = [int(np.flatnonzero((planned == batch).all(axis=1))[0]) for batch in arm.batches]
        assert places == sorted(set(places))
        embeddings = plan.organizer.embeddings
        cosine = within_batch_cosine(embeddings.unit, embeddings.valid, *flat_batches(planned))
        assert arm.cosine == pytest.approx(cosine.mean())
        assert len(arm.pairs) == 50 * 6
        assert arm.pairs.mean() == pytest.approx(arm.cosine)


def test_it_depends_on_plan_and_arguments_alone_and_on_the_seed():
    designs = [design_probe(plan_of(seed=seed), samples=64) for seed in (3, 3, 4)]
    same, other = ([np.array_equal(designs[0].arms[a].batches, d.arms[a].batches) for a in d.arms] for d in designs[1:])
    assert all(same)
    assert not any(other)


def test_the_controls_do_not_see_the_embeddings():
    rng = np.random.default_rng(1)
    designs = [design_probe(plan_of(matrix=rng.normal(size=(120, 6))), samples=64, steps=30) for _ in range(2)]
    for name in ("uniform", "random"):
        assert np.array_equal(designs[0].arms[name].batches, designs[1].arms[name].batches)
    assert not np.array_equal(designs[0].arms["sdo"].batches, designs[1].arms["sdo"].batches)
    assert np.array_equal(designs[0].curve_ids, designs[1].curve_ids)


def test_the_curve_rests_on_the_controls_alone():
    design = design_probe(plan_of(), samples=64)
    blind = {i for name in ("uniform", "random") for i in design.arms[name].batches.ravel().tolist()}
    assert design.curve_ids.tolist() == sorted(blind)
    large = design_probe(plan_of(n=6000, batch=8), samples=9600, steps=1200)
    assert len(large.curve_ids) == CURVE_SAMPLES


def test_of_large_batches_some_members_are_taken_so_that_there_are_more_of_them():
    plan = plan_of(n=300, batch=30)
    design = design_probe(plan, samples=128, steps=20)
    assert design.arms["sdo"].batches.shape == (8, 8)
    planned = plan.batches(0, 20)
    for batch in design.arms["sdo"].batches:
        assert any(set(batch.tolist()) <= set(one.tolist()) for one in planned)
        assert len(set(batch.tolist())) == 8
    places = set()
    for batch in design.arms["uniform"].batches:
        uniform = Uniform(plan.organizer.embeddings, seed=3).plan(30).batches(0, 20)
        whole = next(one for one in uniform if set(batch.tolist()) <= set(one.tolist()))
        places |= {int(np.flatnonzero(whole == i)[0]) for i in batch}
    assert len(places) > 15  # from all over a batch, not its beginning


def test_by_default_the_steps_are_those_of_two_organizer_epochs():
    plan = plan_of()
    second = plan.epoch(1)
    assert design_probe(plan, samples=64).steps == second.stop


def test_few_samples_give_as_many_batches_as_there_are():
    design = design_probe(plan_of(n=10, batch=4), samples=256, steps=5)
    assert {name: len(arm.batches) for name, arm in design.arms.items()} == {"uniform": 5, "random": 5, "sdo": 5}
    assert len(design.sample_ids) <= 10


def test_repeated_texts_are_counted():
    matrix = np.repeat(np.random.default_rng(0).normal(size=(40, 6)), 3, axis=0)
    arms = design_probe(plan_of(matrix=matrix), samples=64).arms
    assert arms["sdo"].equal > 0.3 > 0.05 > arms["uniform"].equal


def test_rows_without_direction_have_no_cosine():
    matrix = np.random.default_rng(0).normal(size=(60, 6))
    matrix[:5] = 0
    arms = design_probe(plan_of(matrix=matrix, on_invalid="isolate"), samples=64).arms
    assert all(np.isfinite(arm.pairs).all() and len(arm.pairs) > 0 for arm in arms.values())
    matrix[:] = 0
    with pytest.warns(UserWarning, match="0 other usable"):
        nothing = design_probe(SDO(Embeddings.from_array(matrix), k=2, on_invalid="isolate").plan(4), samples=64).arms
    assert [arm.cosine for arm in nothing.values()] == [None] * 3


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (lambda: Uniform(20).plan(4), {}, "organizer is uniform"),
        (lambda: plan_of(locality="random"), {}, "locality 'random'"),
        (lambda: plan_of(batch=1), {}, "batch size is 1"),
        (plan_of, {"samples": 31}, "expected at least 32"),
        (plan_of, {"steps": 0}, "steps is 0"),
    ],
)
def test_what_cannot_be_probed_is_refused(plan, options, message):
    with pytest.raises(InputError, match=message):
        design_probe(plan(), **options)
