import json
import warnings

import numpy as np
import pytest

from analysis import Run
from analysis.locality.redraw import PlanDraw, Redraws, find_embeddings, recorded_plan
from analysis.run_folder.recorded import flat_batches
from sdo import SDO, Embeddings, InputError, Uniform


@pytest.fixture
def saved(tmp_path):
    matrix = np.random.default_rng(3).normal(size=(40, 6)).astype(np.float32)
    np.save(tmp_path / "E.npy", matrix)
    return Embeddings.read(tmp_path / "E.npy")


def slow_draw(batches, steps, unit):
    """The same quantities by loops over samples."""
    unit = unit.astype(float)
    cosine, centroid, exposure = [], [], []
    for t in steps:
        z = unit[batches[t]]
        cosine.append(np.mean([z[i] @ z[j] for i in range(len(z)) for j in range(len(z)) if i != j]))
        mean = z.mean(axis=0)
        centroid.append(mean / np.linalg.norm(mean))
        seen = [sum(int(i in batches[s]) for s in range(t)) for i in batches[t]]
        exposure.append([np.mean(seen), np.mean(np.log1p(seen))])
    sharing = [
        (a, b)
        for a in range(len(steps))
        for b in range(a + 1, len(steps))
        if set(batches[steps[a]]) & set(batches[steps[b]])
    ]
    return np.array(cosine), np.array(centroid), np.array(exposure), sharing


@pytest.mark.parametrize("steps", [np.arange(14), np.array([0, 3, 4, 11, 13]), np.array([5])])
def test_a_draw_equals_the_slow_description(saved, steps):
    plan = SDO(saved, seed=5).plan(4)
    batches = plan.batches(0, 14)
    epoch = np.array([plan.epoch_of(step).organizer_epoch for step in range(14)])
    draw = PlanDraw.of(*flat_batches(batches), epoch, steps, saved)
    cosine, centroid, exposure, sharing = slow_draw(batches, steps, saved.unit)
    assert draw.cosine == pytest.approx(cosine, abs=1e-12)
    assert draw.centroid == pytest.approx(centroid, abs=1e-6)
    assert draw.exposure == pytest.approx(exposure, abs=1e-12)
    assert list(zip(*(one.tolist() for one in draw.sharing), strict=True)) == sharing
    assert draw.organizer_epoch.tolist() == epoch[steps].tolist()
    assert len(draw) == len(steps)


@pytest.mark.parametrize("positions", [np.arange(14), np.array([0, 3, 4, 11, 13]), np.array([5])])
def test_some_steps_of_a_draw_are_the_draw_of_these_steps(saved, positions):
    plan = SDO(saved, seed=5).plan(4)
    batches, epoch, steps = plan.batches(0, 30), np.zeros(30, dtype=int), np.arange(1, 29, 2)
    some = PlanDraw.of(*flat_batches(batches), epoch, steps, saved).take(positions)
    alone = PlanDraw.of(*flat_batches(batches), epoch, steps[positions], saved)
    for name in ("step", "organizer_epoch", "cosine", "centroid", "exposure", "sharing"):
        assert np.array_equal(getattr(some, name), getattr(alone, name)), name


def test_embeddings_without_direction_are_left_out_of_a_draw():
    matrix = np.array([[1.0, 0], [0, 1], [0, 0], [-1, 0], [1, 0]])
    embeddings = Embeddings.from_array(matrix)
    batches = np.array([[0, 1, 2], [0, 2, 3], [4, 2, 1]])
    draw = PlanDraw.of(*flat_batches(batches), np.zeros(3, dtype=int), np.arange(3), embeddings)
    assert draw.cosine.tolist() == [0.0, -1.0, 0.0]
    assert draw.centroid[1].tolist() == [0.0, 0.0]
    single = PlanDraw.of(*flat_batches(np.array([[2, 0]])), np.zeros(1, dtype=int), np.arange(1), embeddings)
    assert np.isnan(single.cosine[0])


@pytest.mark.parametrize("maker", [SDO, Uniform])
def test_redraws_are_other_draws_and_the_same_each_time(saved, maker):
    plan = maker(saved, seed=5).plan(4)
    steps = [np.arange(12), np.array([1, 8])]
    source = Redraws(plan, saved)
    own, other, third = (source.draws(number, steps) for number in (-1, 0, 1))
    assert own[0].cosine == pytest.approx(slow_draw(plan.batches(0, 12), steps[0], saved.unit)[0], abs=1e-12)
    assert own[1].cosine == pytest.approx(own[0].cosine[steps[1]])
    assert not np.array_equal(own[0].cosine, other[0].cosine)
    assert not np.array_equal(third[0].cosine, other[0].cosine)
    again = Redraws(maker(saved, seed=5).plan(4), saved).draws(0, steps)
    assert np.array_equal(again[0].cosine, other[0].cosine)
    assert np.array_equal(again[1].centroid, other[1].centroid)
    same = source.draws(0, [steps[0], np.arange(12)])
    assert same[0] is same[1]


def test_a_recorded_plan_is_made_again(saved, make_planned):
    for number, (organizer, rows) in enumerate(
        ((SDO(saved, seed=9, k=3), None), (Uniform(saved, seed=9), np.arange(30)), (SDO(saved), np.arange(3, 33)))
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = organizer.plan(4, rows=rows)
            writer = make_planned(str(number), plan, steps=15)
        if rows is not None and rows[0]:
            ids = plan.ids.tolist()
            folder = writer.path / "exposure"
            folder.mkdir()
            import pyarrow as pa
            import pyarrow.parquet as pq

            zeros = [0] * len(ids)
            columns = {"organizer_epoch": zeros, "sample_id": ids, "planned": zeros, "trained": zeros}
            pq.write_table(pa.table({**columns, "in_pool": [True] * len(ids)}), folder / "part-00000.parquet")
        run = Run.open(writer.path)
        made = recorded_plan(run, find_embeddings(run))
        assert made.fingerprint == plan.fingerprint
        assert made.batches(0, 15).tolist() == plan.batches(0, 15).tolist()


def test_a_run_under_a_selector_has_no_re_draws(saved, make_planned):
    writer = make_planned("run", SDO(saved, seed=9).plan(4), steps=10)
    noted = json.loads((writer.path / "run.json").read_text())["organizer"]
    writer.info(organizer=noted, selector={"name": "random", "options": {"keep": 0.5}})
    with pytest.raises(InputError, match="selector 'random' kept a part of each batch; re-draws of the plan keep all"):
        recorded_plan(Run.open(writer.path), saved)


def test_a_plan_that_is_not_the_runs_is_refused(saved, make_planned):
    plan = SDO(saved, seed=9).plan(4)
    writer = make_planned("run", plan, steps=10)
    noted = json.loads((writer.path / "run.json").read_text())["organizer"]

    def refused(**changes):
        writer.info(organizer={**noted, **changes})
        with pytest.raises(InputError) as error:
            recorded_plan(Run.open(writer.path), saved)
        return str(error.value)

    assert "step 0 did not train the batch" in refused(options={**noted["options"], "seed": 10}, fingerprint=None)
    assert "plan_version = 0 then" in refused(plan_version=0)
    assert "not known to this version" in refused(name="other")
    assert "not known to this version" in refused(options={"speed": 3})
    assert "k is -1" in refused(options={**noted["options"], "k": -1})
    writer.info(organizer=None)
    with pytest.raises(InputError, match="no organizer"):
        recorded_plan(Run.open(writer.path), saved)


def test_embeddings_are_found_and_verified(saved, tmp_path, make_planned):
    plan = SDO(saved).plan(4)
    writer = make_planned("run", plan, steps=3)
    run = Run.open(writer.path)
    assert find_embeddings(run).fingerprint == saved.fingerprint
    (tmp_path / "E.npy").rename(tmp_path / "moved.npy")
    with pytest.raises(InputError, match="is not there; fix: say where"):
        find_embeddings(run)
    assert find_embeddings(run, tmp_path / "moved.npy").fingerprint == saved.fingerprint
    np.save(tmp_path / "other.npy", np.eye(40, 6, dtype=np.float32) + 1)
    with pytest.raises(InputError, match="fingerprint differs"):
        find_embeddings(run, tmp_path / "other.npy")
    with pytest.raises(InputError, match="notes no embeddings"):
        find_embeddings(Run.open(writer.info().path))
