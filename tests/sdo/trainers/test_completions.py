"""Recording GRPO and RLOO: true ids, gradients against plain autograd, rewards, ties, losses."""

import json

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("trl")

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer, RLOOTrainer

from analysis import Run, batch_coherence
from diagnostics import GradientRecorder, doctor
from sdo import SDO, InputError, Uniform, attach
from sdo.trainers.completions import follow_completions, tied_rewards, unfollowed
from sdo.trainers.session import TrainingSession, _sessions
from sdo.trainers.versions import OLDEST_TRL
from tests.generation import MATRIX, N, Watch, dataset, make, odd_length
from tests.llama import tiny_llama

pytestmark = [
    pytest.mark.usefixtures("quiet_datasets"),
    pytest.mark.filterwarnings("ignore:.*TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.*:UserWarning"),
]


def table(folder, name):
    return pd.read_parquet(folder / name)


class Passes(TrainerCallback):
    """What each trained micro-batch was, as the model saw it: tokens, attention and advantages."""

    def __init__(self, trainer):
        self.steps, self._now, self._trainer = [], [], trainer
        trainer.model.register_forward_pre_hook(self._look, with_kwargs=True)
        trainer.add_callback(self)

    def _look(self, module, args, kwargs):
        if torch.is_grad_enabled():
            slices = self._trainer._buffered_inputs
            current = slices[self._trainer._step % len(slices)]
            self._now.append(
                {
                    "ids": kwargs["input_ids"].clone(),
                    "attention": kwargs["attention_mask"].clone(),
                    "completion": current["completion_mask"].clone(),
                    "advantages": current["advantages"].clone(),
                }
            )

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(self._now)
        self._now = []


def slow_rows(model, passes):
    """Gradient at the final norm's output, one completion at a time and unpadded, of loss_type "grpo" at ratio 1."""
    rows, weight = [], torch.zeros_like(model.lm_head.weight)
    for micro in passes:
        for n, ids in enumerate(micro["ids"]):
            ids = ids[micro["attention"][n].bool()]
            length = int(micro["completion"][n].sum())
            hidden = model.model(ids[None]).last_hidden_state.detach().requires_grad_()
            logps = torch.log_softmax(model.lm_head(hidden)[0, :-1].float(), dim=-1)
            chosen = logps.gather(1, ids[1:, None])[-length:, 0]
            share = micro["advantages"][n] / (length * len(micro["ids"]) * len(passes))
            row, head = torch.autograd.grad(-share * chosen.sum(), [hidden, model.lm_head.weight])
            rows.append(row.sum(dim=(0, 1)))
            weight += head
    return torch.stack(rows), weight


@pytest.mark.parametrize("grid", [(4, 1, 2, 1, 1), (2, 2, 4, 4, 1)])
def test_rows_are_those_of_plain_autograd(tokenizer, tmp_path, grid):
    trainer = make(tokenizer, tmp_path, grid, steps=1, loss_type="grpo", max_grad_norm=0.0)
    attach(trainer, SDO(MATRIX, k=2, seed=1))
    passes, watch = Passes(trainer), Watch(trainer, tokenizer)
    signals = ("weight", "hidden", "head_only")
    trainer.add_callback(GradientRecorder(tmp_path / "run", signals=signals, sample_every=1, sketch_size=16384))
    trainer.train()
    rows, weight = slow_rows(tiny_llama(), passes.steps[0])
    found = table(tmp_path / "run", "gradients/hidden")
    samples = found[found.kind == "sample"]
    assert [ids[0] for ids in samples.sample_ids] == watch.steps[0][1]
    ours = np.stack(samples.sketch.to_list())
    scale = rows.norm(dim=1).max().item()
    assert scale > 0
    assert np.abs(ours - rows.numpy()).max() < 1e-5 * scale
    step = np.stack(found[found.kind == "step"].sketch.to_list())[0]
    assert np.abs(step - rows.sum(dim=0).numpy()).max() < 1e-5 * scale
    head = table(tmp_path / "run", "gradients/weight")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["signals"]["weight"]["parameter"] == "lm_head.weight"
    stored = np.stack(head[head.kind == "step"].sketch.to_list())[0]
    assert np.abs(stored - weight.flatten().numpy()).max() < 1e-5 * weight.norm().item()
    head = table(tmp_path / "run", "gradients/head_only")
    stored = np.stack(head[head.kind == "step"].sketch.to_list())[0]
    assert np.abs(stored - weight.flatten().numpy()).max() < 1e-5 * weight.norm().item()
    assert [ids[0] for ids in head[head.kind == "sample"].sample_ids] == watch.steps[0][1]
    tokens = torch.cat([micro["completion"].sum(dim=1) for micro in passes.steps[0]])
    assert samples.tokens.tolist() == tokens.tolist()
    assert table(tmp_path / "run", "steps").tokens.tolist() == [int(tokens.sum())]


@pytest.mark.parametrize(("cls", "grid"), [(GRPOTrainer, (2, 2, 2, 4, 2)), (RLOOTrainer, (4, 2, 2, 2, 2))])
def test_steps_name_their_completions_and_the_trainers_loss(tokenizer, tmp_path, cls, grid):
    trainer = make(tokenizer, tmp_path, grid, cls=cls, steps=7)
    handle = attach(trainer, SDO(MATRIX, k=2, seed=1))
    watch = Watch(trainer, tokenizer)
    trainer.add_callback(GradientRecorder(tmp_path / "run", sample_every=2))
    trainer.train()
    steps = table(tmp_path / "run", "steps")
    assert [ids.tolist() for ids in steps.sample_ids] == [ids for _, ids in watch.steps]
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    np.testing.assert_allclose(steps.loss, logged, rtol=0, atol=2e-6)
    assert steps.loss.abs().max() > 1e-3
    assert steps.grad_norm.notna().all()
    each = grid[3] * grid[4] // grid[1]
    assert steps.organizer_epoch.tolist() == [handle.plan.epoch_of(s // each).organizer_epoch for s in range(7)]
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["trainer"]["steps_per_batch"] == each
    assert info["trainer"]["num_generations"] == 2
    samples = table(tmp_path / "run", "gradients/hidden").query("kind == 'sample'")
    assert samples.step.unique().tolist() == [0, 2, 4, 6]
    exposure = table(tmp_path / "run", "exposure").query("organizer_epoch == 0")
    assert exposure.trained.tolist() == handle.plan.counts(-(-7 // each)).tolist()


def test_the_exposure_of_an_organizer_epoch_is_written_at_its_end(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 2, 1), steps=10)
    handle = attach(trainer, Uniform(N, seed=1))
    trainer.add_callback(GradientRecorder(tmp_path / "run", sample_every=0))
    trainer.train()
    first = handle.plan.epoch(0)
    exposure = table(tmp_path / "run", "exposure")
    assert exposure.query("organizer_epoch == 0").trained.tolist() == first.exposure.tolist()
    assert len(first.steps) * 2 < 10
    assert exposure.query("organizer_epoch == 1").trained.tolist() == handle.trained.tolist()


def test_rewards_are_written_for_each_completion_and_function(tokenizer, tmp_path):
    seen = []

    def first(prompts, completions, **kwargs):
        scores = [float(len(text) % 3) for text in completions]
        seen.append((kwargs["sample_id"], scores))
        return scores

    def second(completions, **kwargs):
        return [None if n == 2 else 0.5 for n in range(len(completions))]

    options = {"reward": [first, second], "reward_weights": [2.0, 1.0]}
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 2, 1), steps=4, **options)
    attach(trainer, SDO(MATRIX, k=2, seed=1))
    trainer.add_callback(GradientRecorder(tmp_path / "run"))
    trainer.train()
    rows = table(tmp_path / "run", "evaluations")
    assert sorted(set(rows.name)) == ["reward", "reward/first", "reward/second"]
    for (ids, scores), step in zip(seen, (0, 2), strict=True):
        now = rows[rows.step == step]
        assert now[now.name == "reward/first"].sample_id.tolist() == ids
        assert now[now.name == "reward/first"].score.tolist() == scores
        other = now[now.name == "reward/second"].score
        assert other.isna().tolist() == [n == 2 for n in range(8)]
        expected = [2 * score + (0 if n == 2 else 0.5) for n, score in enumerate(scores)]
        assert now[now.name == "reward"].score.tolist() == expected
    described = json.loads((tmp_path / "run" / "run.json").read_text())["evaluations"]["sample_id"]
    assert "a row for each completion" in described


def test_groups_whose_rewards_tie_have_no_direction(tokenizer, tmp_path):
    def ties(prompts, completions, **kwargs):
        # 0.1 three times is more than 0.3: TRL's mean of three equal rewards is rounded, its advantages are not zero
        odd = odd_length(completions)
        return [0.1 if i % 2 else value for i, value in zip(kwargs["sample_id"], odd, strict=True)]

    trainer = make(tokenizer, tmp_path, (6, 1, 3, 2, 1), steps=4, reward=ties)
    attach(trainer, Uniform(N, seed=1))
    trainer.add_callback(GradientRecorder(tmp_path / "run", sample_every=1))
    trainer.train()
    samples = table(tmp_path / "run", "gradients/hidden").query("kind == 'sample'")
    ids = np.array([ids[0] for ids in samples.sample_ids])
    tied = samples[ids % 2 == 1]
    assert len(tied) > 0
    assert set(tied.reason) == {"zero gradient: all rewards of the group tie"}
    assert not np.stack(tied.sketch.to_list()).any()
    assert (tied.norm < 1e-2 * samples.norm.max()).all()
    assert samples[ids % 2 == 0].reason.isna().any()
    untied = set(samples[samples.reason.isna()].index)
    run = Run.open(tmp_path / "run")
    found = batch_coherence(run.iter_steps("hidden", "sample"))
    assert found.spread() is not None
    assert len(untied) == int(samples.reason.isna().sum())


def test_a_run_whose_rewards_all_tie_says_so(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 1, 1), steps=2, reward=lambda completions, **_: [1.0] * 4)
    attach(trainer, Uniform(N, seed=1))
    trainer.add_callback(GradientRecorder(tmp_path / "run", sample_every=1))
    trainer.train()
    for signal in ("weight", "hidden"):
        rows = table(tmp_path / "run", f"gradients/{signal}")
        assert set(rows.reason) == {"zero gradient: all rewards of the group tie"}
    assert not any("sdo/batch_coherence" in entry for entry in trainer.state.log_history)


def test_an_entropy_bonus_has_a_direction_where_rewards_tie(tokenizer, tmp_path):
    options = {"reward": lambda completions, **_: [1.0] * 4, "entropy_coef": 0.1}
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 1, 1), steps=1, **options)
    attach(trainer, Uniform(N, seed=1))
    trainer.add_callback(GradientRecorder(tmp_path / "run", sample_every=1))
    trainer.train()
    rows = table(tmp_path / "run", "gradients/hidden")
    assert rows.reason.isna().all()
    assert (rows.norm > 0).all()


def test_ties_are_found_with_missing_rewards_and_rounding():
    nan = float("nan")
    column = torch.tensor([[1.0], [1.0], [nan], [nan], [nan], [nan], [0.3], [0.1 + 0.2], [0.3], [0.0], [0.0], [1e-4]])
    assert tied_rewards(column, 3).tolist() == [True] * 9 + [False] * 3
    crossed = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # the same sum, but each function tells them apart
    assert tied_rewards(crossed, 2).tolist() == [False, False]
    assert tied_rewards(crossed.sum(dim=1, keepdim=True), 2).tolist() == [True, True]


# ---------------------------------------------------------------------- without an organizer


def test_without_an_organizer_the_recorder_asks_for_the_trainer(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 1, 1), steps=1)
    trainer.add_callback(GradientRecorder(tmp_path / "run"))
    with pytest.raises(InputError, match=r"fix: GradientRecorder\(\.\.\., trainer=trainer\)"):
        trainer.train()
    assert not (tmp_path / "run").exists()
    assert TrainingSession.peek(trainer.model) is None


@pytest.mark.parametrize("grid", [(4, 2, 2, None, 1), (4, 1, 2, 2, 2), (4, 3, 2, 2, 1)])
def test_without_an_organizer_ids_follow_trls_own_order(tokenizer, tmp_path, grid):
    """The last grid trains one and a half generation batches a step, which an organizer refuses."""
    trainer = make(tokenizer, tmp_path, grid, steps=5, rows=dataset().remove_columns("sample_id"))
    watch = Watch(trainer, tokenizer)
    before = set(vars(trainer))
    trainer.add_callback(GradientRecorder(tmp_path / "run", sample_every=1, trainer=trainer))
    trainer.train()
    steps = table(tmp_path / "run", "steps")
    assert [ids.tolist() for ids in steps.sample_ids] == [ids for _, ids in watch.steps]
    assert not {"compute_loss", "training_step"} & (set(vars(trainer)) - before)
    assert trainer.model not in _sessions
    assert set(table(tmp_path / "run", "evaluations").name) == {"reward"}


def test_a_recorder_may_come_first_and_share_the_organizers_follower(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 1, 1), steps=2)
    trainer.add_callback(GradientRecorder(tmp_path / "run", trainer=trainer))
    watch = Watch(trainer, tokenizer)
    handle = attach(trainer, SDO(MATRIX, k=2, seed=1))
    trainer.train()
    assert [ids.tolist() for ids in table(tmp_path / "run", "steps").sample_ids] == [ids for _, ids in watch.steps]
    assert "compute_loss" in vars(trainer)  # the organizer still needs it
    handle.detach()
    assert "compute_loss" not in vars(trainer)


def test_following_leaves_a_method_of_the_users_own(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 1, 1), steps=1)
    inner = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: 2 * inner(*args, **kwargs)
    own = trainer.compute_loss
    follower = follow_completions(trainer)
    assert follow_completions(trainer) is follower
    follower.detach()
    assert trainer.compute_loss != own
    follower.detach()
    assert trainer.compute_loss is own


def test_an_evaluation_is_not_taken_for_training(tokenizer, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 1, 1), steps=2, eval_rows=dataset(range(4)), **options)
    attach(trainer, SDO(MATRIX, k=2, seed=1))
    watch = Watch(trainer, tokenizer)
    trainer.add_callback(GradientRecorder(tmp_path / "run"))
    trainer.train()
    assert [ids.tolist() for ids in table(tmp_path / "run", "steps").sample_ids] == [ids for _, ids in watch.steps]
    rows = table(tmp_path / "run", "evaluations")
    assert rows.groupby("step").size().tolist() == [4, 4]  # the completions that were trained on, and no others


def test_a_resumed_run_folder_is_that_of_an_uninterrupted_run(tokenizer, tmp_path):
    grid, shared = (4, 1, 2, 2, 1), {"save_strategy": "steps", "save_steps": 2}

    def run(folder, steps, resume=None):
        trainer = make(tokenizer, folder, grid, steps=steps, **shared)
        attach(trainer, SDO(MATRIX, k=2, seed=1))
        trainer.add_callback(GradientRecorder(folder / "run", sample_every=1))
        trainer.train(resume_from_checkpoint=resume)
        return folder / "run"

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "parts", 3)  # ends inside a generation batch; its last checkpoint is at the beginning of it
    parts = run(tmp_path / "parts", 6, str(tmp_path / "parts" / "out" / "checkpoint-2"))
    for name, ignored in (
        ("steps", ["seconds", "recorder_seconds", "trainer_epoch"]),
        ("gradients/hidden", []),
        ("gradients/weight", []),
        ("evaluations", []),
        ("exposure", []),
    ):
        expected, found = (table(folder, name).drop(columns=ignored) for folder in (whole, parts))
        pd.testing.assert_frame_equal(found, expected)


# ---------------------------------------------------------------------- the doctor


def test_the_doctor_leaves_training_as_it_was(tokenizer, tmp_path):
    def train(look):
        trainer = make(tokenizer, tmp_path, (4, 1, 2, 2, 1), steps=2)
        attach(trainer, SDO(MATRIX, k=2, seed=1))
        if look:
            before = dict(vars(trainer))
            diagnosis = doctor(trainer)
            assert diagnosis.ok, str(diagnosis)
            assert diagnosis.micro_step.sample_ids[0] == diagnosis.micro_step.sample_ids[1]  # of one prompt
            assert diagnosis.micro_step.generated == 3
            assert set(vars(trainer)) == set(before)
        trainer.train()
        logged = [{k: v for k, v in entry.items() if "time" not in k} for entry in trainer.state.log_history[:2]]
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), logged

    (looked, first), (plain, second) = train(True), train(False)
    assert torch.equal(looked, plain)
    assert first == second


def test_the_doctor_says_what_a_recorder_lacks(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 1, 1), steps=2)
    assert doctor(trainer).ok  # what a recorder with its default options, and the trainer, would give
    assert "compute_loss" not in vars(trainer)
    trainer.add_callback(GradientRecorder(tmp_path / "run"))
    assert any("fix: GradientRecorder(..., trainer=trainer)" in reason for reason in doctor(trainer).refused)


def test_the_doctor_forecasts_what_is_written(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 2, 1), steps=5)
    attach(trainer, Uniform(N, seed=1))
    trainer.add_callback(GradientRecorder(tmp_path / "run", sample_every=2))
    forecast = {stream.name: stream.rows for stream in doctor(trainer).disk}
    trainer.train()
    assert forecast["evaluations"] == len(table(tmp_path / "run", "evaluations"))
    assert forecast["exposure"] == len(table(tmp_path / "run", "exposure"))
    kinds = table(tmp_path / "run", "gradients/hidden").kind.value_counts()
    assert forecast["gradients/hidden, sample"] == kinds["sample"]
    assert forecast["gradients/hidden, step"] == kinds["step"]


def test_another_trl_is_refused_with_the_one_that_is_supported():
    """The trainer of a release whose methods have other names."""
    (refusal,) = unfollowed(object())
    assert refusal.endswith(f"of a TRL release from {OLDEST_TRL}; fix: pip install 'trl>={OLDEST_TRL}'")
