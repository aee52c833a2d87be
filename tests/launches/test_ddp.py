"""`attach` and the recorder under DDP: two gloo processes against one, and both against the plan.

All jobs of this file are trained in one launch, one after the other. What was trained is read off the embedding layer.
"""

import json

import numpy as np
import pytest

pytest.importorskip("trl")

from training import ORDER, RECORDED, N, organizer, train

from analysis import Run
from sdo.run_format import SELECTION

pytestmark = pytest.mark.filterwarnings("ignore:.*TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.*:UserWarning")

# Plain gradient descent, so that roundings stay roundings: Adam divides them by their own size.
SGD = {"optim": "sgd", "learning_rate": 0.1}
# One process and two sum in another order; float32 keeps 7 digits, and 8 steps carry their differences on.
TOLERANCE = 2e-5
STEPS = 18  # three trainer epochs of ceil(22 / 4)
WHOLE = {"num_train_epochs": 3, "max_steps": -1, "save_strategy": "steps", "save_steps": 1}
OTHER_PLAN = {"fails": True, "options": {"0": {"seed": 1}, "1": {"seed": 2}}}
STOPS = (3, 6, 10, 12)  # middle of epoch 0, its end, middle of epoch 1, its end


def jobs(folder):
    checkpoint = str(folder / "whole" / "trainer" / "checkpoint-{}")
    single = str(folder / "single" / "trainer" / "checkpoint-10")
    return [
        {"name": "plain", "per_device": 2, "accumulation": 1, "evaluate": 4, **SGD},
        {"name": "clipped", "per_device": 2, "accumulation": 2, "max_grad_norm": 0.05, **SGD},
        {"name": "unlimited", "per_device": 1, "accumulation": 2, "max_grad_norm": 0.0, **SGD},
        {"name": "workers", "per_device": 2, "accumulation": 2, "max_steps": 12, "dataloader_num_workers": 2},
        {"name": "drop last", "per_device": 2, "accumulation": 1, "max_steps": 12, "dataloader_drop_last": True},
        {
            "name": "alone",
            "per_device": 2,
            "accumulation": 1,
            "organize": False,
            "num_train_epochs": 2,
            "max_steps": -1,
        },
        {"name": "selected", "per_device": 4, "accumulation": 2, "keep": 0.5, **SGD},
        {"name": "skipped", "per_device": 2, "accumulation": 1, "skip": True},
        {"name": "own tokens", "per_device": 2, "accumulation": 1, "average_tokens_across_devices": False, **SGD},
        {
            "name": "other plan",
            "per_device": 2,
            "accumulation": 1,
            "fails": True,
            "options": {"0": {"seed": 1}, "1": {"seed": 2}},
        },
        {"name": "taken", "out": str(folder / "plain"), "per_device": 2, "accumulation": 1, "fails": True},
        {"name": "whole", "per_device": 2, "accumulation": 1, **WHOLE},
        *(
            {"name": f"from {n}", "per_device": 2, "accumulation": 1, "resume": checkpoint.format(n), **WHOLE}
            for n in STOPS
        ),
        {"name": "from single", "per_device": 2, "accumulation": 1, "resume": single, **WHOLE},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def single(folder):
    """One process that trains in two micro-batches what two processes train at once, every step a checkpoint."""
    return train(folder / "single", 2, 2, **WHOLE)


@pytest.fixture(scope="module")
def seen(folder, launch, single):
    return launch(folder, jobs(folder))


@pytest.fixture(scope="module")
def alike(folder, seen):
    """Runs of one process that train what the jobs of the same name trained in two."""

    def make(name, per_device, accumulation, **changes):
        out = folder / f"{name} in one"
        if not out.exists():
            train(out, per_device, accumulation, **SGD, **changes)
        return Run.open(out / "run"), Run.open(folder / name / "run")

    return {
        "plain": lambda: make("plain", 2, 2, evaluate=4),
        "clipped": lambda: make("clipped", 2, 4, max_grad_norm=0.05),
        "unlimited": lambda: make("unlimited", 1, 4, max_grad_norm=0.0),
    }


def batches(ranks):
    """Each step's samples, micro-batches in the order in which the loaders deal them out."""
    steps = zip(*(rank["steps"] for rank in ranks), strict=True)
    return [[i for micros in zip(*step, strict=True) for micro in micros for i in micro] for step in steps]


def counts(rows):
    return np.bincount(np.concatenate(rows), minlength=N).tolist()


@pytest.mark.parametrize(
    ("name", "size"), [("plain", 4), ("clipped", 8), ("unlimited", 4), ("workers", 8), ("drop last", 4)]
)
def test_one_step_over_all_processes_trains_one_planned_batch(seen, name, size):
    """transformers#47340, #11460; accelerate#961, #3940, #4122: nothing twice, nothing dropped, as many in each."""
    assert [rank["wrapped"] for rank in seen[name]] == ["DistributedDataParallel"] * 2
    trained = batches(seen[name])
    assert trained == organizer().plan(size).batches(0, len(trained)).tolist()
    assert all(len(set(batch)) == size for batch in trained)
    assert [rank["trained"] for rank in seen[name]] == [counts(trained)] * 2


def test_every_process_must_have_the_same_plan(seen):
    errors = [rank["error"] for rank in seen["other plan"]]
    assert errors[0] == errors[1]
    assert errors[0].startswith("InputError: the plan of process 1 is not that of process 0 (")
    assert "\n" not in errors[0]


def test_a_refusal_of_one_process_is_one_of_all(seen, folder):
    """Process 0 alone looks at the run folder; the other must not wait for it in the first step."""
    first, second = (rank["error"] for rank in seen["taken"])
    assert "holds another run" in first
    assert second == first.replace("InputError: ", "InputError: process 0: ")


def test_a_skipped_update_is_counted_in_no_process(seen, folder):
    trained = batches(seen["skipped"])
    kept = [batch for step, batch in enumerate(trained) if step != 2]
    assert [rank["trained"] for rank in seen["skipped"]] == [counts(kept)] * 2
    skipped = Run.open(folder / "skipped" / "run").steps()["skipped"].to_pylist()
    assert skipped == [step == 2 for step in range(8)]


def test_each_process_keeps_its_share_of_a_step(seen, folder):
    """Choices are local, and as many in each process, so that steps stay in step."""
    plan, run = organizer().plan(16), Run.open(folder / "selected" / "run")
    table = run.table(SELECTION).to_pydict()
    trained = batches(seen["selected"])
    for step, batch in enumerate(trained):
        at = [n for n, s in enumerate(table["step"]) if s == step]
        assert [table["sample_id"][n] for n in at] == plan.batch(step).tolist()
        assert [table["micro_batch"][n] for n in at] == [m for m in range(4) for _ in range(4)]
        assert sorted(table["sample_id"][n] for n in at if table["kept"][n]) == sorted(batch)
        assert [sum(len(micro) for micro in rank["steps"][step]) for rank in seen["selected"]] == [4, 4]
    assert run.steps()["sample_ids"].to_pylist() == trained
    assert [rank["trained"] for rank in seen["selected"]] == [counts(trained)] * 2


# ---------------------------------------------------------------------- the run folder


def rows(run, signal, kind):
    """Rows in the order of the batch, whichever process wrote them."""
    found = run.gradients(signal, kind)
    batches = run.steps()["sample_ids"].to_pylist()
    keys = [(step, batches[step].index(ids[0])) for step, ids in zip(found.step, found.sample_ids, strict=True)]
    return found.take(np.array(sorted(range(len(keys)), key=keys.__getitem__)))


@pytest.mark.parametrize("name", ["plain", "clipped", "unlimited"])
@pytest.mark.parametrize(
    ("signal", "kind"),
    [
        (signal, kind)
        for signal in (*RECORDED, "samples")
        for kind in ("step", "micro_batch", "sample")
        if (signal == "weight") <= (kind != "sample") and (signal == "samples") <= (kind == "sample")
    ],
)
def test_gradients_of_two_processes_are_those_of_one(alike, name, signal, kind):
    one, two = (rows(run, signal, kind) for run in alike[name]())
    assert len(one) == len(two) > 0
    for field in ("step", "tokens", "micro_batch"):
        assert getattr(one, field).tolist() == getattr(two, field).tolist(), field
    assert [ids.tolist() for ids in one.sample_ids] == [ids.tolist() for ids in two.sample_ids]
    estimated = signal == "head_only" and kind == "step"  # no process has the whole of the head's own gradient
    assert one.norm_state == ("raw",) * len(one)
    assert two.norm_state == ("raw, estimated from the sketch" if estimated else "raw",) * len(one)
    assert one.reason == two.reason == (None,) * len(one)
    error = np.linalg.norm(one.sketch - two.sketch, axis=1) / np.linalg.norm(one.sketch, axis=1)
    assert error.max() < TOLERANCE
    norm = np.linalg.norm(one.sketch.astype(np.float64), axis=1) if estimated else one.norm
    assert np.abs(two.norm / norm - 1).max() < TOLERANCE
    assert set(two.rank.tolist()) == ({0} if kind == "step" else {0, 1})


@pytest.mark.parametrize("signal", RECORDED)
def test_the_processes_shares_add_up_to_the_step(alike, signal):
    _, run = alike["clipped"]()
    step, micro = run.gradients(signal, "step"), run.gradients(signal, "micro_batch")
    for at in range(len(step)):
        total = micro.sketch[micro.step == step.step[at]].sum(axis=0, dtype=np.float64)
        assert np.linalg.norm(total - step.sketch[at]) < 1e-6 * np.linalg.norm(step.sketch[at])


@pytest.mark.parametrize("name", ["plain", "clipped", "unlimited"])
def test_steps_exposure_and_evaluations_of_two_processes_are_those_of_one(alike, name, seen):
    one, two = alike[name]()
    first, second = one.steps().to_pydict(), two.steps().to_pydict()
    assert second["sample_ids"] == batches(seen[name])
    exact = ("step", "organizer_epoch", "tokens", "sample_ids", "clipped", "loss_scale", "skipped", "learning_rate")
    for column in exact:
        assert first[column] == second[column], column
    limit = {"plain": 1.0, "clipped": 0.05, "unlimited": np.inf}[name]
    assert second["clipped"] == [norm > limit for norm in second["grad_norm"]]
    for column in ("loss", "grad_norm", "trainer_epoch"):
        assert first[column] == pytest.approx(second[column], rel=TOLERANCE), column
    assert one.exposure().equals(two.exposure())
    held_out = one.evaluations().to_pydict(), two.evaluations().to_pydict()
    assert held_out[0]["sample_id"] == held_out[1]["sample_id"] == (list(range(7)) * 2 if name == "plain" else [])
    assert held_out[0]["score"] == pytest.approx(held_out[1]["score"], rel=TOLERANCE)


def test_the_norm_of_a_clipped_gradient_is_that_of_the_raw_one(alike):
    """Under DDP no process ever holds the raw reduced gradient when it could be asked for it."""
    one, two = alike["clipped"]()
    assert all(two.steps()["clipped"].to_pylist())
    norms = two.gradients("weight", "step").norm
    assert norms == pytest.approx(one.gradients("weight", "step").norm, rel=TOLERANCE)
    assert (norms > 0.05).all()  # each of them alone is longer than all parameters' clipped gradient


def test_a_loss_per_process_gives_the_gradient_that_the_optimizer_was_given(seen, folder):
    """With average_tokens_across_devices=False DDP takes the mean of two means; rows are shares of that."""
    run = Run.open(folder / "own tokens" / "run")
    check = json.loads((folder / "own tokens" / "run" / "run.json").read_text())["sketch_check"]["weight"]
    assert check["pairs"] == 28
    rows = run.gradients("weight", "step")
    # The norm comes from the optimizer's gradient, the sketch from the shares; 512 buckets tell a norm to 1 / 32.
    assert np.linalg.norm(rows.sketch, axis=1) == pytest.approx(rows.norm, rel=0.15)


def test_sketches_are_checked_where_the_gradient_is(seen, folder):
    """Of the head each process has its own part of the gradient alone, and process 0 checks its sketches."""
    checks = json.loads((folder / "plain" / "run" / "run.json").read_text())["sketch_check"]
    assert sorted(checks) == sorted({*RECORDED, "samples"} - {"hidden"})  # hidden rows are stored as they are
    for name, check in checks.items():
        assert check["pairs"] == (6 if name == "samples" else 28)  # at every second of eight steps
        assert check["rmse"] < 3 / np.sqrt(512)


def test_the_recorder_alone_names_what_was_trained(seen, folder):
    """Without an organizer the loader fills its last batches up with rows from the beginning of the epoch."""
    run = Run.open(folder / "alone" / "run")
    positions = organizer_free(seen["alone"])
    assert run.steps()["sample_ids"].to_pylist() == positions
    assert [ids.tolist() for ids in run.gradients("hidden", "step").sample_ids] == positions
    assert len(positions) == 12
    assert run.info["trainer"]["processes"] == 2


def organizer_free(ranks):
    """Positions of the samples that the embedding layer saw."""
    return [[ORDER.index(i) for i in batch] for batch in batches(ranks)]


def test_a_run_of_two_processes_reads_as_one(alike):
    _, run = alike["plain"]()
    run.check()
    steps = list(run.iter_steps("hidden", "step"))
    assert [len(rows) for rows in steps] == [1] * 8
    assert [rows.sample_ids[0].tolist() for rows in steps] == run.steps()["sample_ids"].to_pylist()
    samples = list(run.iter_steps("hidden", "sample"))
    assert [sorted(int(ids[0]) for ids in rows.sample_ids) for rows in samples] == [
        sorted(run.steps()["sample_ids"].to_pylist()[step]) for step in (0, 2, 4, 6)
    ]


# ---------------------------------------------------------------------- resuming


@pytest.mark.parametrize("stop", STOPS)
def test_a_resumed_launch_equals_an_uninterrupted_one(seen, folder, stop):
    """accelerate#3938, ms-swift#9658, #10050: in a later epoch set_epoch reaches no sampler under skipped batches."""
    trained = batches(seen["whole"])
    assert trained == organizer().plan(4).batches(0, STEPS).tolist()
    assert batches(seen[f"from {stop}"]) == trained[stop:]
    assert [rank["trained"] for rank in seen[f"from {stop}"]] == [counts(trained)] * 2
    whole, resumed = (Run.open(folder / name / "run") for name in ("whole", f"from {stop}"))
    assert resumed.steps()["step"].to_pylist() == list(range(stop, STEPS))
    for signal in RECORDED:
        before, after = whole.gradients(signal), resumed.gradients(signal)
        assert np.array_equal(before.sketch[stop:], after.sketch)  # bit for bit
        assert np.array_equal(before.norm[stop:], after.norm)


def test_one_process_and_two_continue_each_others_checkpoints(seen, folder, single):
    trained = batches(seen["whole"])
    assert [[i for micro in step for i in micro] for step in single["steps"]] == trained
    assert batches(seen["from single"]) == trained[10:]
    back = train(folder / "back", 2, 2, resume=str(folder / "whole" / "trainer" / "checkpoint-10"), **WHOLE)
    assert [[i for micro in step for i in micro] for step in back["steps"]] == trained[10:]
    assert back["trained"] == seen["from single"][0]["trained"] == counts(trained)
