"""GRPO under DDP, two gloo processes: the plan, the gradient that the optimizer was given, rewards and ties.

Completions are drawn at random in each process, so that no other run is alike; what is compared is what the embedding
layer saw and the reduced gradient itself.
"""

import json
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("trl")

from completions import GRIDS, STEPS, organizer

from analysis import Run
from tests.generation import N

NAMES = [*GRIDS, "divided alone"]
TIED = "zero gradient: all rewards of the group tie"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, torchrun):
    folder = tmp_path_factory.mktemp("grpo")
    torchrun("completions.py", folder)
    return folder


@pytest.fixture
def seen(folder):
    return lambda name: [json.loads((folder / f"{name}-r{rank}.json").read_text()) for rank in range(2)]


def grid(name):
    """Completions of a generation batch over both processes, its optimizer steps, and how often each is trained."""
    per_device, accumulation, generations, per_generation, iterations = GRIDS[name]
    return 2 * per_device * per_generation, per_generation * iterations // accumulation, generations * iterations


@pytest.mark.parametrize("name", GRIDS)
def test_one_generation_batch_over_all_processes_is_one_planned_batch(seen, name):
    completions, each, times = grid(name)
    plan = organizer().plan(completions // GRIDS[name][2])
    first, second = seen(name)
    both = [a + b for a, b in zip(first["steps"], second["steps"], strict=True)]
    for batch in range(STEPS // each):
        counted = Counter(i for step in both[batch * each : (batch + 1) * each] for i in step)
        assert counted == dict.fromkeys(plan.batch(batch).tolist(), times)
    expected = np.bincount(plan.batches(0, STEPS // each).ravel(), minlength=N).tolist()
    assert first["trained"] == second["trained"] == expected


@pytest.mark.parametrize("name", NAMES)
def test_steps_name_the_completions_of_both(seen, folder, name):
    first, second = seen(name)
    steps = Run.open(folder / name / "run").steps().to_pydict()
    for ids, *parts in zip(steps["sample_ids"], first["steps"], second["steps"], strict=True):
        assert sorted(ids) == sorted(parts[0] + parts[1])
    assert steps["loss"] == pytest.approx(first["losses"], abs=1e-6)
    assert any(abs(loss) > 1e-4 for loss in first["losses"])


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_gradient_that_the_optimizer_was_given(folder, name):
    """The head is not tied, so that its gradient is that of `weight` and of `head_only`."""
    run, given = Run.open(folder / name / "run"), np.load(folder / f"{name}-r0.npy")
    assert np.array_equal(given, np.load(folder / f"{name}-r1.npy"))
    largest = np.linalg.norm(given, axis=1).max()
    assert largest > 0
    for signal in ("weight", "head_only"):
        rows = run.gradients(signal, "step")
        defined = np.array([reason is None for reason in rows.reason])
        assert defined.any()
        assert np.abs(rows.sketch[defined] - given[rows.step[defined]]).max() < 1e-5 * largest
        assert np.linalg.norm(given[rows.step[~defined]]) < 1e-5 * largest
    samples, steps = run.gradients("hidden", "sample"), run.gradients("hidden", "step")
    for at, step in enumerate(steps.step):
        total = samples.sketch[samples.step == step].sum(axis=0, dtype=np.float64)
        assert np.linalg.norm(total - steps.sketch[at]) < 1e-5 * np.linalg.norm(steps.sketch, axis=1).max()


@pytest.mark.parametrize("name", NAMES)
def test_ties_are_those_of_the_whole_group(folder, name):
    """Prompts of odd letters get one reward for all of their completions, wherever these are trained."""
    run = Run.open(folder / name / "run")
    samples = run.gradients("hidden", "sample")
    even = {"tied": 0, "not": 0}
    for ids, reason in zip(samples.sample_ids, samples.reason, strict=True):
        if ids[0] % 2 == 0:  # "A" is 65
            assert reason == TIED
        else:
            even["tied" if reason == TIED else "not"] += 1
    assert even["not"] > 0
    by_step = {}
    for step, reason in zip(samples.step, samples.reason, strict=True):
        by_step.setdefault(int(step), []).append(reason == TIED)
    reasons = run.gradients("weight", "step").reason
    assert [reason == TIED for reason in reasons] == [all(by_step[step]) for step in range(STEPS)]


@pytest.mark.parametrize("name", NAMES)
def test_each_reward_is_written_once(folder, name):
    completions, each, _ = grid(name.removesuffix(" alone"))
    rewards = Run.open(folder / name / "run").evaluations().to_pydict()
    assert Counter(rewards["step"]) == dict.fromkeys(range(0, STEPS, each), completions)
    assert {score for i, score in zip(rewards["sample_id"], rewards["score"], strict=True) if i % 2 == 0} == {1.0}
