"""A loop of one's own, recorded: the same rows as a trainer's on the same batches, and every wrong way to call it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from analysis import Run, run_coherence, run_exposure, run_locality
from diagnostics import GradientRecorder, RunSettings, Samples, record
from diagnostics.recording.loop import LoopRecorder
from sdo import Layout, Uniform, attach
from sdo.errors import InputError
from sdo.trainers.session import TrainingSession
from tests import trainings

LIMIT, RATE, STEPS = 2.0, 0.1, 8
SIGNALS = ("weight", "hidden", Samples("model.layers.*.mlp.down_proj.weight"))
CASE = trainings.Case(
    trainer="right",
    organizer=True,
    batch=2,
    accumulation=2,
    max_steps=STEPS,
    args={
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": LIMIT,
        "logging_steps": 1,
    },
)


def plan_of(steps_of=4):
    return trainings.make_organizer(CASE).plan(steps_of, layout=Layout(accumulation=2))


def loader_of(plan):
    rows = trainings.tokenized(trainings.make_rows(trainings.ROWS, seed=1)).add_column(
        "sample_id", list(range(trainings.ROWS))
    )

    def collate(items):
        ids = [item.pop("sample_id") for item in items]
        return trainings.pad(items, side="right") | {"sample_id": torch.tensor(ids)}

    return DataLoader(rows, batch_sampler=plan.sampler(), collate_fn=collate)


def steps_of(loader, count, first=0):
    """Micro-batches, two a step, pass after pass."""
    every = itertools.chain.from_iterable(itertools.repeat(loader))
    for step in range(first, count):
        yield step, [next(every), next(every)]


def trained_tokens(batch):
    return int((batch["labels"][:, 1:] != -100).sum())


def train(folder, model, optimizer, plan, loader, *, stop=STEPS, given=False, **options):
    """The loop of a user, in ten lines and a clip; returns the recorder, its state and all losses."""
    losses = []
    with record(folder, model, optimizer, plan=plan, **options) as rec:
        first = rec.state_dict()["step"]
        for _, micros in steps_of(loader, stop, first):
            tokens, total = torch.tensor(sum(map(trained_tokens, micros))), 0.0
            for batch in micros:
                ids = batch.pop("sample_id")
                with rec.micro_batch(ids=ids):
                    loss = model(**batch, num_items_in_batch=tokens).loss
                    loss.backward()
                total += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            rec.step(loss=total, grad_norm=norm if given else None)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        state = rec.state_dict()
    return rec, state, losses


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A trainer's run and a loop's, of the same model on the same batches."""
    folder = tmp_path_factory.mktemp("both")
    recorder = GradientRecorder(folder / "trainer" / "run", signals=SIGNALS, sample_every=3)
    recorded = trainings.Recorded(folder / "trainer", CASE, recorder=recorder).train()
    model = trainings.make_model()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    plan = plan_of()
    settings = RunSettings(micro_batch=2, accumulation=2, max_steps=STEPS, max_grad_norm=LIMIT, learning_rate=RATE)
    options = {"signals": SIGNALS, "sample_every": 3, "settings": settings, "given": True}
    rec, _, _ = train(folder / "loop", model, optimizer, plan, loader_of(plan), **options)
    return recorded, rec, Run.open(folder / "trainer" / "run"), Run.open(folder / "loop")


def test_steps_are_the_trainers(both):
    recorded, rec, one, two = both
    first, second = one.steps().to_pydict(), two.steps().to_pydict()
    for column in ("step", "organizer_epoch", "clipped", "loss_scale", "skipped", "tokens", "sample_ids"):
        assert first[column] == second[column], column
    assert len(set(first["clipped"])) == 2
    for column in ("loss", "grad_norm", "learning_rate"):
        assert second[column] == pytest.approx(first[column], rel=1e-5), column
    assert second["trainer_epoch"] == [(step + 1) / rec.plan.steps_per_epoch for step in range(STEPS)]
    assert rec.trained.tolist() == recorded.handle.trained.tolist()
    assert one.exposure().equals(two.exposure())


@pytest.mark.parametrize("signal", ["weight", "hidden", "samples"])
def test_gradients_are_the_trainers(both, signal):
    _, _, one, two = both
    assert one.kinds(signal) == two.kinds(signal)
    for kind in one.kinds(signal):
        first, second = one.gradients(signal, kind), two.gradients(signal, kind)
        assert [ids.tolist() for ids in first.sample_ids] == [ids.tolist() for ids in second.sample_ids]
        assert first.tokens.tolist() == second.tokens.tolist()
        assert np.abs(first.sketch - second.sketch).max() < 1e-5 * np.abs(first.sketch).max()
        assert second.norm == pytest.approx(first.norm, rel=1e-5)
        assert first.norm_state == second.norm_state


def test_run_json_says_what_was_recorded(both):
    _, _rec, one, two = both
    for key in ("organizer", "signals", "embeddings"):
        assert one.info[key] == two.info[key]
    assert two.info["meaning"]["loss"] == one.info["meaning"]["loss"]
    assert two.info["status"] == "finished"
    assert two.info["trainer"]["train_batch_size"] == 2
    assert two.info["dataset"]["sample_id"] == "as the loop says"


def test_analysis_takes_it(both, tmp_path):
    _, _, one, two = both
    assert run_exposure(two).times.tolist() == run_exposure(one).times.tolist()
    found, expected = run_coherence(two)["hidden"], run_coherence(one)["hidden"]
    assert found.between_steps.summary.mean.value == pytest.approx(expected.between_steps.summary.mean.value, rel=1e-4)
    matrix = tmp_path / "E.npy"
    np.save(matrix, trainings.make_embeddings())
    assert (
        run_locality(two, embeddings=matrix, redraws=19).signals.keys()
        == run_locality(one, embeddings=matrix, redraws=19).signals.keys()
    )


def test_nothing_stays_on_the_model(tmp_path):
    model = trainings.make_model()
    before = trainings.count_hooks(model)
    plan = plan_of()
    train(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=RATE), plan, loader_of(plan), stop=2)
    assert trainings.count_hooks(model) == before
    assert TrainingSession.peek(model) is None


def test_norms_behind_clipping_are_known_where_nothing_was_clipped(tmp_path):
    model, plan = trainings.make_model(), plan_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    train(tmp_path / "run", model, optimizer, plan, loader_of(plan))
    rows = Run.open(tmp_path / "run").steps().to_pydict()
    assert len(set(rows["clipped"])) == 2
    for clipped, norm in zip(rows["clipped"], rows["grad_norm"], strict=True):
        assert (norm is None) is clipped
        assert clipped or 0 < norm < LIMIT


def test_a_resumed_loop_continues_the_folder(tmp_path):
    whole, parts = trainings.make_model(), trainings.make_model()
    plan = plan_of()
    train(tmp_path / "whole", whole, torch.optim.SGD(whole.parameters(), lr=RATE), plan, loader_of(plan))
    optimizer, loader = torch.optim.SGD(parts.parameters(), lr=RATE), loader_of(plan_of())
    _, state, _ = train(tmp_path / "parts", parts, optimizer, plan_of(), loader, stop=5)
    kept = json.loads(json.dumps({"recorder": state, "sampler": loader.batch_sampler.state_dict()}))
    loader = loader_of(plan)
    loader.batch_sampler.load_state_dict(kept["sampler"])
    rec, _, _ = train(tmp_path / "parts", parts, optimizer, plan, loader, resume=kept["recorder"])
    one, two = Run.open(tmp_path / "whole"), Run.open(tmp_path / "parts")
    first, second = one.steps().to_pydict(), two.steps().to_pydict()
    assert second["step"] == list(range(STEPS))
    assert first["sample_ids"] == second["sample_ids"]
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-6)
    assert one.exposure().equals(two.exposure())
    assert two.info["resumed_at"] == [5]
    with pytest.raises(InputError, match="holds another run"):
        train(tmp_path / "whole", parts, optimizer, plan, loader, resume=kept["recorder"])
    other = Uniform(trainings.ROWS, seed=1).plan(4, layout=Layout(accumulation=2))
    with pytest.raises(InputError, match="holds a run under another plan"):
        train(tmp_path / "parts", parts, optimizer, other, loader, resume=kept["recorder"])
    assert rec.trained.tolist() == plan.counts(STEPS).tolist()


def test_a_loop_without_a_plan_and_without_labels(tmp_path):
    """The loss is made outside of the model, of a batch that nobody planned."""
    model = trainings.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = []
    with record(tmp_path / "run", model, optimizer, sample_every=1) as rec:
        for step in range(3):
            ids = torch.randint(5, 200, (3, 6))
            with rec.micro_batch(ids=[step, 7, 9], tokens=[5, 5, 5]):
                logits = model(input_ids=ids).logits[:, :-1]
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
            rec.step(loss=loss, epoch=step / 3)
            optimizer.step()
            optimizer.zero_grad()
            given.append(loss.item())
        rec.log_evaluation("correct", [0, 4], [True, False])
        assert rec.figures().keys() == {"batch_coherence"}
    run = Run.open(tmp_path / "run")
    rows = run.steps().to_pydict()
    assert rows["loss"] == given
    assert rows["sample_ids"] == [[step, 7, 9] for step in range(3)]
    assert rows["tokens"] == [15] * 3
    assert rows["trainer_epoch"] == [0, 1 / 3, 2 / 3]
    assert rows["clipped"] == [False] * 3
    assert None not in rows["grad_norm"]
    assert run.info["meaning"]["loss"] == "as the loop gave it"
    assert run.info["organizer"] is None
    assert run.evaluations().to_pydict()["score"] == [1.0, 0.0]
    assert len(run.gradients("hidden", "sample")) == 9


def test_an_error_in_the_loop_closes_the_folder_as_failed(tmp_path):
    model, plan = trainings.make_model(), plan_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with (  # noqa: PT012 - the loop is what ends
        pytest.raises(KeyboardInterrupt),
        record(tmp_path / "run", model, optimizer, plan=plan) as rec,
    ):
        for step, micros in steps_of(loader_of(plan), STEPS):
            for batch in micros:
                with rec.micro_batch(ids=batch.pop("sample_id")):
                    model(**batch).loss.backward()
            rec.step()
            if step == 2:
                raise KeyboardInterrupt
    run = Run.open(tmp_path / "run")
    assert run.info["status"] == "failed"
    assert len(run.steps()) == 3
    assert TrainingSession.peek(model) is None


def test_a_second_recorder_of_the_model_ends_the_first(tmp_path):
    model, plan = trainings.make_model(), plan_of()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=RATE), loader_of(plan)
    first = record(tmp_path / "first", model, optimizer, plan=plan)
    with first as rec:
        micros = next(steps_of(loader, 1))[1]
        for batch in micros:
            with rec.micro_batch(ids=batch.pop("sample_id")):
                model(**batch).loss.backward()
        rec.step()
        with pytest.warns(UserWarning, match=r"had not ended when another training of its model began|was detached"):
            train(tmp_path / "second", model, optimizer, plan, loader_of(plan), stop=2)
        with pytest.raises(InputError, match="step came outside of the recorder's block"):
            rec.step()
    assert Run.open(tmp_path / "first").info["status"] == "failed"
    assert Run.open(tmp_path / "second").info["status"] == "finished"


def test_a_trainer_takes_the_model_of_a_loop(tmp_path):
    trainer = trainings.make_trainer(tmp_path / "trainer", CASE)
    model, plan = trainer.model, plan_of()
    with record(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=RATE), plan=plan):
        handle = attach(trainer, trainings.make_organizer(CASE))
    assert TrainingSession.peek(model).plan is handle.plan
    handle.detach()
    assert TrainingSession.peek(model) is None
    assert not list((tmp_path / "run").rglob("*"))  # it had no row


@pytest.fixture
def rec(tmp_path):
    model, plan = trainings.make_model(), plan_of()
    with record(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=RATE), plan=plan) as rec:
        yield rec


def nested(rec):
    with rec.micro_batch(ids=[1]), rec.micro_batch(ids=[2]):
        pass


def unclosed(rec):
    with rec.micro_batch(ids=[1]):
        rec.step()


def ids_of(ids, **more):
    def call(rec: LoopRecorder) -> None:
        with rec.micro_batch(ids=ids, **more):
            pass

    return call


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (nested, "micro_batch came inside of another; expected one after the other"),
        (unclosed, "step came inside of a micro-batch; expected: with rec.micro_batch"),
        (lambda rec: rec.step(), "step came without a micro-batch; expected: with rec.micro_batch"),
        (ids_of([]), "micro_batch got no sample id; expected one for each row"),
        (ids_of([0.5, 1.0]), "sample ids hold float64, such as 0.5; expected whole numbers"),
        (ids_of([-1]), "sample ids .*-1"),
        (ids_of([3, 99]), "sample id 99 is none of the plan's 14; expected ids as its sampler gives them"),
        (ids_of([3, 4], tokens=[1]), "there are 2 sample ids and 1 counts of tokens; expected as many"),
        (lambda rec: rec.__enter__(), "the recorder is in use already; expected one 'with' for each record"),
        (lambda rec: rec.log_evaluation("x", [1, 2], [0.5]), "there are 2 sample ids and 1 scores"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(rec, call, message):
    with pytest.raises(InputError, match=message) as caught:
        call(rec)
    assert "\n" not in str(caught.value)


def test_samples_that_were_not_planned_stop_the_loop(tmp_path):
    model, plan = trainings.make_model(), plan_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    planned = plan.batch(0).tolist()
    other = next(i for i in range(trainings.ROWS) if i not in planned)
    with (  # noqa: PT012 - the loop is what ends
        pytest.raises(RuntimeError, match=r"step 0 trained samples .*, but the plan holds"),
        record(tmp_path / "run", model, optimizer, plan=plan) as rec,
    ):
        batch = trainings.pad([dict(row) for row in trainings.tokenized(trainings.make_rows(4, seed=1))], side="right")
        with rec.micro_batch(ids=[other, *planned[1:]]):
            model(**batch).loss.backward()
        rec.step()


def test_a_batch_of_other_rows_than_ids_is_refused(tmp_path):
    model = trainings.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with (
        pytest.raises(InputError, match=r"the hidden states have shape .* for 2 samples; expected one row a sample"),
        record(tmp_path / "run", model, optimizer) as rec,
        rec.micro_batch(ids=[0, 1]),
    ):
        model(input_ids=torch.ones(3, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"signals": ["wieght"]}, "did you mean 'weight'"),
        ({"signals": ["weight:no.such"]}, "there is no parameter"),
        ({"sample_every": -1}, "sample_every is -1; expected a whole number from 0"),
        ({"resume": 4}, "resume is 4; expected what rec.state_dict"),
        ({"resume": {"run_id": "x", "step": 2.5}}, "step of resume is 2.5; expected a whole number from 0"),
        ({"dataset": iter([])}, "the training dataset is iterable; expected a map-style dataset"),
        (
            {"plan": Uniform(14, seed=0).plan(4, layout=Layout(processes=2))},
            "the plan is laid out for 2 process.*training runs in 1; fix: organizer.plan",
        ),
    ],
)
def test_wrong_options_are_refused_and_write_nothing(tmp_path, changes, message):
    model = trainings.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with pytest.raises(InputError, match=message), record(tmp_path / "run", model, optimizer, **changes):
        pass
    assert not (tmp_path / "run").exists()
    assert TrainingSession.peek(model) is None


def test_wrong_models_and_optimizers_are_refused(tmp_path):
    model = trainings.make_model()
    with pytest.raises(InputError, match=r"nn.DataParallel, whose copies' gradients cannot be told apart; fix: DDP"):
        record(tmp_path, torch.nn.DataParallel(model), torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(InputError, match="the optimizer is a dict without param_groups; expected torch's"):
        record(tmp_path, model, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    optimizer.scaler = object()
    with pytest.raises(InputError, match=r"the optimizer scales losses.*fix: bf16"):
        record(tmp_path, model, optimizer)


def test_a_full_folder_is_refused(tmp_path):
    model = trainings.make_model()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with pytest.raises(InputError, match=r"notes.txt|not empty|holds"), record(tmp_path / "run", model, optimizer):
        pass
    assert TrainingSession.peek(model) is None


BLOCKED = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"transformers", "accelerate", "trl", "datasets", "peft"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from diagnostics import record
from sdo import SDO, Layout, OrganizedSampler

assert len(list(OrganizedSampler(SDO(np.eye(8), k=2, seed=1).plan(4)))) == 8
torch.manual_seed(0)
E = np.random.default_rng(0).standard_normal((20, 5))
X, Y = torch.randn(20, 6), torch.randn(20, 1)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plan = SDO(E, k=2, seed=617).plan(4, layout=Layout(accumulation=2))
loader = DataLoader([{"sample_id": i, "x": X[i], "y": Y[i]} for i in range(20)], batch_sampler=plan.sampler())
with record(sys.argv[1], model, optimizer, plan=plan, signals=["weight", "samples:0.weight"], sample_every=1) as rec:
    turn = 0
    for batch in loader:
        with rec.micro_batch(ids=batch["sample_id"]):
            loss = (model(batch["x"]) - batch["y"]).square().mean() / 2
            loss.backward()
        turn += 1
        if turn % 2 == 0:
            rec.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
print(turn // 2, sorted(set(sys.modules) & {"transformers", "accelerate", "trl", "datasets", "peft"}))
"""


def test_torch_alone_is_enough(tmp_path):
    """A plain model in a process that can find neither transformers nor accelerate."""
    script = tmp_path / "loop.py"
    script.write_text(textwrap.dedent(BLOCKED))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[3],
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[3]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "5"
    assert done.stdout.strip().endswith("[]")
    run = Run.open(tmp_path / "run")
    assert len(run.steps()) == 5
    assert run.info["signals"]["weight"]["parameter"] == "2.weight"
    assert len(run.gradients("samples", "sample")) == 20
    assert run_exposure(run).times.sum() == 20
