"""What a run recorded of its batches and scores, also where it trained on completions of its prompts."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import Run, compare_seeds, pair_runs, run_exposure, run_locality
from analysis.locality.association import SeriesDesign, SeriesTest
from analysis.locality.redraw import PlanDraw, recorded_plan
from analysis.run_folder.curves import evaluations, rewards, training
from analysis.run_folder.overview import mean_within_batch_cosine
from analysis.run_folder.recorded import (
    exposed_batches,
    flat_batches,
    recorded_batches,
    sample_scores,
    score_meaning,
    steps_per_batch,
)
from sdo import SDO, Embeddings, InputError

LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 2)]  # optimizer steps of a generation batch, times that it is gone through


@pytest.fixture
def plan(tmp_path):
    np.save(tmp_path / "E.npy", np.random.default_rng(3).normal(size=(60, 6)).astype(np.float32))
    return SDO(Embeddings.read(tmp_path / "E.npy"), seed=5).plan(4)


@pytest.mark.parametrize(("each", "iterations"), LAYOUTS)
def test_a_step_names_each_prompt_once(make_generated, plan, each, iterations):
    run = Run.open(make_generated("run", plan, steps=8, each=each, iterations=iterations).path)
    written = run.steps().column("sample_ids").to_pylist()
    assert any(len(set(ids)) < len(ids) for ids in written)
    steps, batches, epochs = recorded_batches(run)
    assert [ids.tolist() for ids in batches] == [sorted(set(ids)) for ids in written]
    assert steps.tolist() == list(range(8))
    assert epochs.tolist() == [0] * 8
    assert steps_per_batch(run) == each


@pytest.mark.parametrize(("each", "iterations"), LAYOUTS)
def test_exposure_counts_a_prompt_once_a_generation_batch_as_the_ledger_does(make_generated, plan, each, iterations):
    run = Run.open(make_generated("run", plan, steps=24, each=each, iterations=iterations).path)
    found = run_exposure(run)
    assert found.notes == ()
    assert found.times.tolist() == plan.counts(24 // each).tolist()
    assert found.times.sum() == 24 // each * 4
    seen, slow = [], []
    for step, ids in enumerate(run.steps().column("sample_ids").to_pylist()):
        seen += [(step // each, i) for i in ids]
        slow.append(len(set(seen)))
    went = training(run)
    assert went.samples.tolist() == slow
    assert went.samples[-1] == 24 // each * 4
    assert went.distinct.tolist() == found.distinct.tolist()


def test_a_generation_batch_that_was_cut_short_is_said(make_generated, plan):
    found = run_exposure(Run.open(make_generated("run", plan, steps=5, each=4, generations=1).path))
    (note,) = found.notes
    assert "3 exposures more than the steps hold" in note
    assert "a generation batch that was not finished" in note


def test_without_an_organizer_the_trainers_arguments_say_how_long_a_batch_serves(make_generated, plan):
    writer = make_generated("run", plan, steps=24, each=4, iterations=2)
    info = json.loads((writer.path / "run.json").read_text())
    noted = {**info["trainer"], "steps_per_batch": 1}

    def of(**changes):
        writer.info(trainer={**noted, **changes})
        return steps_per_batch(Run.open(writer.path))

    assert of() == 4
    assert of(gradient_accumulation_steps=2) == 2
    assert of(gradient_accumulation_steps=3) == 1  # batches that steps mix are not told apart
    assert of(num_iterations=None) == 1
    writer.info(trainer=None)
    assert steps_per_batch(Run.open(writer.path)) == 1
    for wrong in (0, "two", True, 1.5):
        writer.info(trainer={"steps_per_batch": wrong})
        with pytest.raises(InputError, match="steps_per_batch"):
            steps_per_batch(Run.open(writer.path))


def test_samples_of_other_trainers_stay_as_they_are(make_run):
    writer = make_run().info(trainer={"steps_per_batch": 1})
    writer.steps(0, 1, [[2, 2], [1, 2]])
    run = Run.open(writer.path)
    for read in (recorded_batches, exposed_batches):
        assert [ids.tolist() for ids in read(run)[1]] == [[2, 2], [1, 2]]


@pytest.mark.parametrize(("each", "iterations"), LAYOUTS)
def test_the_embedding_cosine_is_of_prompts(make_generated, plan, each, iterations):
    run = Run.open(make_generated("run", plan, steps=8, each=each, iterations=iterations).path)
    unit = plan.organizer.embeddings.unit.astype(float)
    slow = []
    for ids in run.steps().column("sample_ids").to_pylist():
        names = sorted(set(ids))
        pairs = [unit[i] @ unit[j] for i in names for j in names if i < j]
        slow += [np.mean(pairs)] if pairs else []
    found = mean_within_batch_cosine(run)
    assert found.value == pytest.approx(np.mean(slow), abs=1e-6)
    assert found.count == len(slow)
    located = run_locality(run, redraws=0)
    assert np.nanmean(located.cosine) == pytest.approx(np.mean(slow), abs=1e-6)


@pytest.mark.parametrize(("each", "iterations"), LAYOUTS)
def test_the_plan_is_made_again_and_compared_batch_by_batch(make_generated, plan, each, iterations):
    writer = make_generated("run", plan, steps=12, each=each, iterations=iterations)
    run = Run.open(writer.path)
    assert recorded_plan(run, plan.organizer.embeddings).fingerprint == plan.fingerprint
    ids = run.steps().column("sample_ids").to_pylist()
    outside = sorted(set(range(60)) - set(plan.batch((each + 1) // each).tolist()))
    ids[each + 1] = [*ids[each + 1][1:], outside[0]]
    writer.steps(0, 11, ids)
    with pytest.raises(InputError, match=f"step {each + 1} did not train the batch that its plan gives"):
        recorded_plan(Run.open(writer.path), plan.organizer.embeddings)


def test_one_step_a_generation_batch_is_tested_like_any_run(make_generated, plan):
    run = Run.open(make_generated("run", plan, steps=110, each=1, generations=2, effect=3.0).path)
    found = run_locality(run, redraws=39)
    assert found.reason is None
    assert found.redraws == 39
    assert found.signals["hidden"].matrix.p == found.signals["hidden"].series.p == 1 / 40


@pytest.mark.parametrize(("each", "iterations"), LAYOUTS[1:])
def test_several_steps_a_generation_batch_have_numbers_and_no_p(make_generated, plan, each, iterations):
    run = Run.open(make_generated("run", plan, steps=112, each=each, iterations=iterations, effect=3.0).path)
    found = run_locality(run, redraws=39)
    assert f"{each} optimizer steps train from each batch of the plan" in found.reason
    assert found.redraws == 0
    one = found.signals["hidden"]
    assert one.matrix.value > 0.1
    assert one.slope.value > 0
    for part in (one.series, one.matrix):
        assert part.p is None
        assert part.reason
    assert one.matrix.reason == found.reason


def test_the_number_of_a_series_is_of_steps_with_two_prompts(make_generated, plan):
    embeddings = plan.organizer.embeddings
    two = SDO(embeddings, seed=5).plan(2)
    run = Run.open(make_generated("run", two, steps=112, each=4, generations=4, effect=3.0).path)
    _, batches, epochs = recorded_batches(run)
    usable = np.array([step for step, ids in enumerate(batches) if len(ids) == 2])
    assert 3 < len(usable) < 112
    found = run_locality(run, redraws=39).signals["hidden"]
    coherence = found.coherence[np.isin(found.step, usable)]
    values = [
        SeriesTest(usable, coherence).of(
            SeriesDesign(PlanDraw.of(*flat_batches(batches), epochs, usable, embeddings, steps_per_batch=n)), -1
        )[0]
        for n in (4, 1)
    ]
    assert found.series.value == pytest.approx(values[0])
    assert values[0] != pytest.approx(values[1])
    assert found.series.steps == len(usable)
    assert "4 optimizer steps train from each batch" in found.series.reason
    single = SDO(embeddings, seed=5).plan(1)
    run = Run.open(make_generated("single", single, steps=40, each=2).path)
    series = run_locality(run, redraws=39).signals["hidden"].series
    assert (series.value, series.p) == (None, None)
    assert "0 steps with two different samples" in series.reason


def test_a_draw_of_uneven_batches_counts_generation_batches():
    matrix = np.random.default_rng(0).normal(size=(8, 5))
    embeddings = Embeddings.from_array(matrix)
    batches = [np.array(ids) for ids in ([0, 1], [1, 2, 3], [0, 4], [4, 5, 6], [7, 0])]
    steps = np.array([1, 2, 3, 4])
    draw = PlanDraw.of(*flat_batches(batches), np.zeros(5, dtype=int), steps, embeddings, steps_per_batch=2)
    unit = embeddings.unit.astype(float)
    for row, step in enumerate(steps):
        ids = batches[step]
        total = unit[ids].sum(axis=0)
        assert draw.centroid[row] == pytest.approx(total / np.linalg.norm(total), abs=1e-6)
        pairs = [unit[i] @ unit[j] for i in ids for j in ids if i != j]
        assert draw.cosine[row] == pytest.approx(np.mean(pairs), abs=1e-6)
        seen = [len({s // 2 for s in range(step // 2 * 2) if i in batches[s]}) for i in ids]
        assert draw.exposure[row] == pytest.approx([np.mean(seen), np.mean(np.log1p(seen))])
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4) if set(batches[steps[a]]) & set(batches[steps[b]])]
    assert list(zip(*(one.tolist() for one in draw.sharing), strict=True)) == pairs


def write_rewards(writer, rows):
    types = {"step": pa.int64(), "name": pa.string(), "sample_id": pa.int64(), "score": pa.float64()}
    columns = [dict(zip(types, row, strict=True)) for row in rows]
    folder = writer.path / "evaluations"
    folder.mkdir()
    table = pa.Table.from_pylist(columns, schema=pa.schema(list(types.items())))
    pq.write_table(table, folder / "part-00000000-00000000.parquet")
    return Run.open(writer.path)


def test_scores_of_several_completions_are_averaged_by_prompt(make_run):
    rows = [
        (0, "reward", 7, 1.0),
        (0, "reward", 7, 0.0),
        (0, "reward", 7, None),
        (0, "reward", 9, 0.25),
        (2, "reward", 7, float("nan")),
        (2, "other", 7, 1.0),
    ]
    run = write_rewards(make_run(), rows)
    assert sample_scores(run) == {"reward": {0: {7: 0.5, 9: 0.25}, 2: {}}, "other": {2: {7: 1.0}}}
    found = evaluations(run)["reward"]  # a score of the user's own: this run has no completions
    assert rewards(run) == {}
    assert found.step.tolist() == [0, 2]
    assert found.mean[0] == 0.375  # over prompts, not over completions
    assert np.isnan(found.mean[1])
    assert found.count.tolist() == [2, 0]


def test_seeds_are_compared_by_the_mean_of_each_prompts_scores(make_run):
    runs = []
    for i, (first, last) in enumerate([(1.0, 0.0), (1.0, 0.5), (0.0, 1.0), (1.0, 1.0)]):
        writer = make_run(f"r{i}").info(seeds={"seed": i % 2})
        runs.append(write_rewards(writer, [(0, "reward", 3, first), (0, "reward", 3, last)]))
    (found,) = compare_seeds(pair_runs(runs[:2], runs[2:]))
    assert found.baseline.tolist() == [[0.5, 0.75]]
    assert found.against.tolist() == [[0.5, 1.0]]


GENERATES = {"num_generations": 2}


def test_rewards_of_completions_that_were_trained_on_are_no_evaluations(make_run):
    rows = [(0, "reward", 7, 1.0), (0, "reward", 7, 0.0), (0, "reward/form", 7, 1.0), (1, "reward", 9, None)]
    run = write_rewards(make_run().info(trainer=GENERATES), [*rows, (1, "own", 3, 0.5)])
    assert list(evaluations(run)) == ["own"]
    found = rewards(run)
    assert list(found) == ["reward", "reward/form"]
    assert found["reward"].step.tolist() == [0, 1]
    assert found["reward"].count.tolist() == [1, 0]
    assert found["reward"].mean[0] == 0.5


def test_rewards_of_several_seeds_are_compared_over_windows(make_run):
    """Each run has its own prompts at every step; what is compared is how well they went on the whole."""
    rng = np.random.default_rng(1)
    runs, means = [], []
    for i in range(4):
        scores = rng.random((12, 3))
        rows = [(step, "reward", 100 * i + 3 * step + at, score) for (step, at), score in np.ndenumerate(scores)]
        runs.append(write_rewards(make_run(f"r{i}").info(seeds={"seed": i % 2}, trainer=GENERATES), rows))
        means.append([scores[first:stop].mean() for first, stop in [(0, 3), (3, 6), (6, 8), (8, 10), (10, 12)]])
    (found,) = compare_seeds(pair_runs(runs[:2], runs[2:]))
    assert (found.measure, found.steps) == ("reward in training", (3, 6, 8, 10, 12))
    np.testing.assert_allclose(np.hstack([found.baseline, found.against]), np.transpose(means), rtol=1e-12)
    np.testing.assert_allclose(
        [one.mean for one in found.comparisons], np.subtract(means[2:], means[:2]).mean(axis=0), rtol=1e-12
    )
    assert "5 windows of the 12 steps" in found.notes[0]


def test_a_run_of_completions_without_rewards_is_not_sent_to_an_eval_dataset(make_run):
    """TRL evaluates GRPO out of the recorder's sight."""
    runs = [Run.open(make_run(f"r{i}").info(seeds={"seed": i % 2}, trainer=GENERATES).path) for i in range(4)]
    with pytest.raises(InputError, match=r"no evaluation in common.*none, …\); fix: log scores by recorder"):
        compare_seeds(pair_runs(runs[:2], runs[2:]))


def test_the_recorders_own_scores_have_the_words_of_run_json(make_run):
    pytest.importorskip("torch", reason="needs the extra train")
    kinds = pytest.importorskip("sdo.trainers.trainer_types", reason="needs the extra train")
    for kind in (kinds.PLAIN, *kinds.SUPPORTED):
        run = Run.open(make_run(kind.trainer).info(meaning=kind.describe()).path)
        expected = None if kind.score_from is None else kind.score
        for name in (f"eval_{kind.score_name}", f"eval_hard_{kind.score_name}"):
            assert score_meaning(run, name) == expected
        for name in ("eval_correct", f"my_{kind.score_name}", "eval_rewards/margins"):
            assert score_meaning(run, name) is None
    assert score_meaning(Run.open(make_run("old").path), "eval_loss") is None
