"""A selector in a trainer's step: what is offered, what is kept, what the loss divides by, what is counted."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("trl", reason="needs the extra train")

import torch

from analysis import Run, run_exposure
from diagnostics import GradientRecorder
from sdo import attach
from sdo.errors import InputError
from sdo.run_format import SELECTION
from sdo.selectors import RandomSelect, Scores
from sdo.trainers.ids import BATCH_KEY, BatchIds, ids_of_batch, with_ids
from sdo.trainers.selection import cut_batches
from tests import trainings

CASE = trainings.Case(
    trainer="right", batch=4, accumulation=2, max_steps=6, organizer=False, args={"optim": "sgd", "logging_steps": 1}
)
pytestmark = pytest.mark.filterwarnings("ignore:.*TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.*:UserWarning")


class Longest:
    """A selector of others: the longest samples, and how often it was told of each."""

    name, needs, scope = "longest", frozenset(), "step"

    def __init__(self, keep=0.25):
        self.keep, self.options, self.seen = keep, {"keep": keep}, {}

    def score(self, candidates):
        return Scores(candidates.tokens.astype(np.float64), {"tokens": candidates.tokens.astype(np.float64)})

    def chosen(self, candidates, kept):
        for sample in candidates.sample_ids[kept].tolist():
            self.seen[sample] = self.seen.get(sample, 0) + 1

    def state(self):
        return {"seen": {str(sample): count for sample, count in self.seen.items()}}

    def load(self, state):
        self.seen = {int(sample): count for sample, count in state["seen"].items()}


def make(folder, selector, case=CASE, *, record=True, **args):
    """A trainer under a selector, and what its model saw: the content of each micro-batch."""
    trainer = trainings.make_trainer(folder / "trainer", replace(case, args={**case.args, **args}))
    handle = attach(trainer, trainings.make_organizer(case), selector=selector)
    if record:
        trainer.add_callback(GradientRecorder(folder / "run", signals=["weight", "hidden"], sample_every=1))
    rows = {tuple(row["input_ids"]): n for n, row in enumerate(trainer.train_dataset)}
    seen, training_step = [], trainer.training_step

    def watch(model, inputs, *rest, **more):
        pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        seen.append((trainer.state.global_step, [rows[tuple(i[m.bool()].tolist())] for i, m in pairs], inputs))
        return training_step(model, inputs, *rest, **more)

    trainer.training_step = watch
    return trainer, handle, seen


@pytest.mark.parametrize("case", [CASE, replace(CASE, trainer="left"), replace(CASE, trainer="sft")])
@pytest.mark.parametrize(
    "selector", [RandomSelect(0.5, seed=4), RandomSelect(0.3, scope="step"), Longest()], ids=["micro", "step", "own"]
)
def test_what_is_trained_was_offered_and_kept(tmp_path, selector, case):
    trainer, handle, seen = make(tmp_path, selector, case)
    trainer.train()
    rows = Run.open(tmp_path / "run")
    table = rows.table(SELECTION).to_pydict()
    trained = np.zeros(trainings.ROWS, dtype=int)
    for step in range(case.max_steps):
        at = [n for n, s in enumerate(table["step"]) if s == step]
        offered = [table["sample_id"][n] for n in at]
        kept = sorted(table["sample_id"][n] for n in at if table["kept"][n])
        assert sorted(offered) == sorted(handle.plan.batch(step).tolist())
        micros = [ids for s, ids, _ in seen if s == step]
        assert len(micros) == 2  # fewer would never reach the optimizer
        assert min(map(len, micros)) >= 1
        assert sorted(i for ids in micros for i in ids) == kept
        assert len(kept) == {"random": 4 if selector.scope == "micro_batch" else 2, "longest": 2}[selector.name]
        trained[kept] += 1
    assert handle.trained.tolist() == trained.tolist()
    assert rows.info["selector"] == {"name": selector.name, "options": selector.options}
    exposure = run_exposure(rows)
    assert exposure.times.tolist() == trained.tolist()
    ledger = rows.exposure().to_pydict()
    assert all(t <= p for t, p in zip(ledger["trained"], ledger["planned"], strict=True))


def test_rows_are_gradients_of_what_was_kept(tmp_path):
    """The loss divides by the tokens of what is left, so that the step's gradient is a mean over them."""
    trainer, _, seen = make(tmp_path, RandomSelect(0.25, seed=1), max_grad_norm=0.0)
    model = trainings.make_model()
    trainer.train()
    rows = Run.open(tmp_path / "run")
    ids = [i for step, micro, _ in seen if step == 0 for i in micro]
    total, tokens = 0.0, 0
    for i in ids:
        row = trainer.train_dataset[i]
        logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        tokens += int((labels != -100).sum())
    (total / tokens).backward()
    exact = dict(model.named_parameters())[rows.info["signals"]["weight"]["parameter"]].grad
    found = rows.gradients("weight", "step")
    assert found.norm[0] == pytest.approx(float(exact.norm()), rel=1e-5)
    assert rows.steps().to_pydict()["tokens"][0] == tokens
    assert rows.steps().to_pydict()["loss"][0] == pytest.approx(total.item() / tokens, rel=1e-5)


def test_keeping_all_is_training_without_a_selector(tmp_path):
    weights = []
    for name, selector in (("with", RandomSelect(1.0)), ("without", None)):
        trainer, handle, _ = make(tmp_path / name, selector)
        trainer.train()
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
        assert handle.trained.tolist() == handle.plan.counts(CASE.max_steps).tolist()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("selector", [lambda: RandomSelect(0.5, seed=4), Longest], ids=["random", "own"])
def test_a_resumed_run_keeps_what_an_uninterrupted_one_keeps(tmp_path, selector):
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole, _, seen = make(tmp_path / "whole", selector(), record=False, **saving)
    whole.train()
    used = selector()
    again, handle, rest = make(tmp_path / "again", used, record=False, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "trainer" / "checkpoint-4"))
    assert [(s, ids) for s, ids, _ in rest] == [(s, ids) for s, ids, _ in seen if s >= 4]
    counts = np.bincount([i for _, ids, _ in seen for i in ids], minlength=trainings.ROWS)
    assert handle.trained.tolist() == counts.tolist()
    if isinstance(used, Longest):
        assert [used.seen.get(i, 0) for i in range(trainings.ROWS)] == counts.tolist()
    for other, words in ((RandomSelect(0.75), "random"), (None, "None")):
        third, _, _ = make(tmp_path / "third", other, record=False)
        with pytest.raises(InputError, match=f"was trained with selector .*, now it is .*{words}"):
            third.train(resume_from_checkpoint=str(tmp_path / "whole" / "trainer" / "checkpoint-4"))


def test_checkpoints_without_a_selector_hold_nothing_of_it(tmp_path):
    trainer, _, _ = make(tmp_path, None, record=False, save_strategy="steps", save_steps=6)
    trainer.train()
    state = json.loads((tmp_path / "trainer" / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["OrganizerCallback"]["attributes"].keys() == {"plan", "dataset", "skipped_steps"}


def test_detach_gives_the_trainer_its_batches_back(tmp_path):
    trainer, handle, _ = make(tmp_path, RandomSelect(0.5), record=False)
    assert "get_batch_samples" in vars(trainer)
    handle.detach()
    assert "get_batch_samples" not in vars(trainer)


def test_a_step_that_passed_the_selector_by_stops_the_run(tmp_path):
    trainer, _, _ = make(tmp_path, RandomSelect(0.5), record=False)
    del trainer.get_batch_samples
    trainer.get_batch_samples = type(trainer).get_batch_samples.__get__(trainer)
    with pytest.raises(RuntimeError, match="step 0 was trained on batches that the selector has not seen"):
        trainer.train()


class Half(RandomSelect):
    needs = frozenset({"hidden"})


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (0.5, "selector is a float without name, options, needs, .*; expected a selector, such as RandomSelect"),
        (Half(0.5), "selector 'random' needs hidden; expected one that needs ids and lengths alone"),
    ],
)
def test_wrong_selectors_are_refused_and_change_nothing(tmp_path, selector, message):
    trainer = trainings.make_trainer(tmp_path, CASE)
    before = sorted(vars(trainer))
    with pytest.raises(InputError, match=message):
        attach(trainer, trainings.make_organizer(CASE), selector=selector)
    assert sorted(vars(trainer)) == before


def test_batches_without_padding_are_refused(tmp_path):
    case = replace(CASE, trainer="sft", args={**CASE.args, "padding_free": True, "max_length": None})
    trainer = trainings.make_trainer(tmp_path, case)
    with pytest.raises(InputError, match="cuts batches by rows, and padding_free=True makes one row of them"):
        attach(trainer, trainings.make_organizer(case), selector=RandomSelect(0.5))


def test_trainers_of_pairs_are_refused():
    from types import SimpleNamespace

    from trl import DPOTrainer

    from sdo.trainers.selection import selection_refusals

    trainer = DPOTrainer.__new__(DPOTrainer)  # the class decides before anything is looked at
    trainer.args = SimpleNamespace()
    (said,) = selection_refusals(trainer, RandomSelect(0.5))
    assert said.startswith("selector 'random' came with a DPOTrainer, whose batches hold more than a row a sample")


def batch_of(lengths, ids, side, extra=True):
    items = [{"input_ids": list(range(1, n + 1)), "labels": [-100, *range(2, n + 1)]} for n in lengths]
    batch = trainings.pad(items, side=side)
    if extra:
        batch |= {"score": torch.tensor([float(i) for i in ids]), "names": [f"s{i}" for i in ids], "scale": 3.0}
    return with_ids(batch, BatchIds(tuple(ids), tuple(n - 1 for n in lengths), labels=tuple(n - 1 for n in lengths)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_cut_batches_are_those_of_a_collator(side):
    batches = [batch_of([5, 3, 7], [0, 1, 2], side), batch_of([4, 9], [3, 4], side)]
    cut = cut_batches(batches, np.array([True, False, True, True, True]))
    expected = [batch_of([4, 5], [3, 0], side), batch_of([7, 9], [2, 4], side)]
    for found, wanted in zip(cut, expected, strict=True):
        assert ids_of_batch(found) == ids_of_batch(wanted)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name
    assert BATCH_KEY not in cut[0]
