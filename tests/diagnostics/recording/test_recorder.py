"""What a recorded run says about its steps, evaluations and exposure, and that recording leaves nothing behind."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from diagnostics import GradientRecorder, doctor
from diagnostics.run_folder.rows import StepRow
from diagnostics.run_folder.writer import RunLog
from diagnostics.sketches import count_sketch as sketch
from sdo.errors import InputError
from sdo.trainers import trainer_types as kinds
from sdo.trainers.requirements import check_launch


def read_all(folder):
    """Return the bytes of every file under a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class At(TrainerCallback):
    """Calls a function at the beginning of a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


class StopAfter(TrainerCallback):
    """Ends training after a number of steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.steps


class Interrupt(At):
    """Kills training at the beginning of a step."""

    def __init__(self, step):
        super().__init__(step, self.kill)

    def kill(self):
        raise KeyboardInterrupt


# ---------------------------------------------------------------------- steps


def test_steps_count_from_zero_and_name_what_was_trained(recorded):
    rows = recorded.rows("steps")
    assert [row["step"] for row in rows] == list(range(recorded.case.max_steps))
    for row in rows:
        assert row["sample_ids"] == recorded.step_ids(row["step"])


def test_steps_follow_the_plan(runs, kit):
    for name in ("tied", "left", "scaled"):
        recorded = runs(name)
        plan = kit.make_organizer(recorded.case).plan(
            recorded.case.batch * recorded.case.accumulation, rows=np.array(recorded.ids)
        )
        for row in recorded.rows("steps"):
            assert row["sample_ids"] == plan.batch(row["step"]).tolist()
            assert row["organizer_epoch"] == plan.epoch_of(row["step"]).organizer_epoch


def test_ids_come_from_the_column_where_an_organizer_reads_one(runs):
    recorded = runs("tied")
    assert recorded.info["dataset"]["sample_id"] == "column 'sample_id', row of the embeddings"
    assert recorded.ids != sorted(recorded.ids)
    assert max(recorded.ids) >= len(recorded.ids)  # so that positions could not pass for ids


def test_without_an_organizer_ids_are_positions_and_epochs_of_it_null(runs):
    recorded = runs("fused")
    assert recorded.info["organizer"] is None
    assert "position" in recorded.info["dataset"]["sample_id"]
    assert {row["organizer_epoch"] for row in recorded.rows("steps")} == {None}


def test_loss_and_tokens_are_those_of_the_samples(recorded):
    for row in recorded.rows("steps"):
        assert row["tokens"] == sum(sample.tokens for sample in recorded.truth.samples(row["step"]))
        if not recorded.case.tells_loss:
            assert row["loss"] is None
            continue
        # Weights before the step and a forward pass in bfloat16 where the case has one.
        assert row["loss"] == pytest.approx(recorded.truth.loss(row["step"]), rel=recorded.case.tolerance)


def test_a_loss_that_cannot_be_read_is_null(runs):
    assert {row["loss"] for row in runs("smoothing_plain").rows("steps")} == {None}


def test_tokens_are_counted_where_the_model_sees_no_labels(runs):
    recorded = runs("smoothing_plain")
    for row in recorded.rows("steps"):
        assert row["tokens"] == sum(sample.tokens for sample in recorded.truth.samples(row["step"]))


def test_learning_rate_is_the_one_the_step_was_taken_with(recorded, kit):
    case = recorded.case
    for row in recorded.rows("steps"):
        # Linear decay without warm-up; a skip that the trainer knows of does not move the schedule on.
        waited = case.args.get("optim") == "adamw_torch" and row["step"] > case.overflow
        expected = kit.LEARNING_RATE * (1 - (row["step"] - waited) / case.max_steps)
        assert row["learning_rate"] == pytest.approx(expected)


def test_trainer_epoch_is_the_fraction_after_the_step(runs):
    assert [row["trainer_epoch"] for row in runs("fused").rows("steps")] == pytest.approx([0.25, 0.5, 0.75, 1, 1.25])
    # 7 micro-batches an epoch, by 3.
    head = [row["trainer_epoch"] for row in runs("head").rows("steps")]
    assert head == pytest.approx([3 / 7, 6 / 7, 1, 1 + 3 / 7, 1 + 6 / 7])


@pytest.mark.parametrize("name", ["fused", "tied", "head", "right", "scaled", "workers"])
def test_grad_norm_is_the_total_before_clipping_where_the_trainer_logs_it(runs, name):
    recorded = runs(name)
    every = recorded.case.args.get("logging_steps", 100)
    logged = {updates - 1 for updates, logs in recorded.logs if "grad_norm" in logs}
    if recorded.case.args.get("max_grad_norm") != 0:  # without clipping transformers 5.0 computes no norm
        assert logged == {row["step"] for row in recorded.rows("steps") if (row["step"] + 1) % every == 0}
    for row in recorded.rows("steps"):
        if row["step"] not in logged or row["step"] == recorded.case.overflow:
            assert row["grad_norm"] is None
        else:
            assert row["grad_norm"] == pytest.approx(recorded.truth.total_norm(row["step"]), rel=1e-5)


def test_clipped_says_whether_the_total_norm_was_over_the_limit(recorded):
    limit = recorded.case.args.get("max_grad_norm", 1.0)
    for row in recorded.rows("steps"):
        if row["step"] == recorded.case.overflow:
            continue  # neither: the update is skipped
        if not recorded.truth.weight(row["step"]).any():
            assert row["clipped"] is None  # a zero gradient cannot tell
            continue
        assert row["clipped"] is (0 < limit < recorded.truth.total_norm(row["step"]))


def test_the_cases_hold_clipped_and_unclipped_steps(runs):
    assert {row["clipped"] for row in runs("right").rows("steps")} == {True, False}
    assert {row["clipped"] for row in runs("head").rows("steps")} == {False}
    assert {row["clipped"] for row in runs("tied").rows("steps")} == {True}


def test_loss_scale_is_the_one_of_the_step(recorded):
    for row in recorded.rows("steps"):
        assert row["loss_scale"] == recorded.case.scale(row["step"])


def test_a_skipped_update_is_labeled(recorded):
    for row in recorded.rows("steps"):
        assert row["skipped"] is (row["step"] == recorded.case.overflow)


def test_an_update_skipped_for_another_parameters_sake_is_labeled(kit, tmp_path):
    """The followed gradient is finite then, so that its row alone would not tell."""
    recorded = kit.Recorded(tmp_path, kit.Case(max_steps=3, organizer=True))

    class Skip(TrainerCallback):
        def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            optimizer._is_overflow = state.global_step == 1

    recorded.trainer.add_callback(Skip())
    recorded.train()
    assert [row["skipped"] for row in recorded.rows("steps")] == [False, True, False]
    assert [row["reason"] for row in recorded.rows("gradients/weight", kind="step")] == [None] * 3
    kept = recorded.step_ids(0) + recorded.step_ids(2)
    trained = {row["sample_id"]: row["trained"] for row in recorded.rows("exposure")}
    assert trained == {i: kept.count(i) for i in recorded.ids}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_step_without_a_token_is_undefined_and_says_so(kit, tmp_path):
    """All labels masked: transformers divides by no tokens, so the gradient is nan or zero, and never a direction."""
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", batch=1, max_steps=14, masked_row=True)).train()
    (empty,) = [row for row in recorded.rows("steps") if row["sample_ids"] == [kit.MASKED_ROW]]
    assert (empty["tokens"], empty["loss"]) == (0, None)
    for signal in ("weight", "hidden"):
        for row in recorded.rows(f"gradients/{signal}", step=empty["step"]):
            assert row["reason"] in ("non-finite gradient", "zero gradient: no token carries a loss")
            assert not np.any(row["sketch"])
            assert row["norm"] in (None, 0.0)
        before = [row for row in recorded.rows(f"gradients/{signal}", kind="step") if row["step"] < empty["step"]]
        assert [row["reason"] for row in before] == [None] * empty["step"]


def test_times_are_positive_and_add_up(runs):
    recorded = runs("head")
    rows = recorded.rows("steps")
    assert all(row["seconds"] > 0 and row["recorder_seconds"] > 0 for row in rows)
    # Steps do not overlap: all of them fit into the training's own time.
    assert sum(row["seconds"] + row["recorder_seconds"] for row in rows) < recorded.seconds


def test_run_json_says_that_the_run_is_over(recorded):
    assert recorded.info["status"] == "finished"
    assert recorded.info["trainer"]["gradient_accumulation_steps"] == recorded.case.accumulation
    assert recorded.info["dataset"]["rows"] == len(recorded.table)
    assert recorded.info["first_step"] == 0


# ---------------------------------------------------------------------- evaluations


@pytest.mark.parametrize("dataset", ["single", "several"])
@pytest.mark.parametrize("updates", [0, 3, 5])
def test_evaluations_are_held_out_losses_per_sample(runs, dataset, updates):
    recorded = runs("fused")
    name = f"eval_{dataset}_loss"
    if not any(step == updates and name in logs for step, logs in recorded.logs):
        assert updates == 5  # transformers 5.0 evaluates at every third step only, later ones after the last one too
        pytest.skip("this version of transformers does not evaluate after the last step")
    truth = [
        recorded.truth.held_out(updates, row["input_ids"], row["labels"])
        for row in recorded.trainer.eval_dataset[dataset]
    ]
    rows = recorded.rows("evaluations", step=updates, name=name)
    assert [row["sample_id"] for row in rows] == list(range(len(truth)))
    assert [row["score"] for row in rows] == pytest.approx([nll / tokens for nll, tokens in truth], rel=1e-5)
    logged = next(logs[name] for step, logs in recorded.logs if step == updates and name in logs)
    batches = [range(start, min(start + 3, len(rows))) for start in range(0, len(rows), 3)]
    # The trainer's loss is the mean of each batch's token-weighted mean, a batch counting by its samples.
    means = [sum(rows[i]["score"] * truth[i][1] for i in b) / sum(truth[i][1] for i in b) for b in batches]
    weighted = sum(mean * len(batch) for mean, batch in zip(means, batches, strict=True)) / len(rows)
    assert weighted == pytest.approx(logged, rel=1e-5)


def test_each_evaluation_of_each_dataset_is_there_once(runs):
    found = {(row["step"], row["name"]) for row in runs("fused").rows("evaluations")}
    names = [f"eval_{name}_loss" for name in ("single", "several")]
    logged = {(step, name) for step, logs in runs("fused").logs for name in names if name in logs}
    assert found == logged >= {(step, name) for step in (0, 3) for name in names}


LOSSES_OF_ONES_OWN = {
    "smoothed": ({"smoothing": 0.1, "args": {"label_smoothing_factor": 0.1}}, {}),
    "own": ({}, {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs.logits.square().mean()}),
}


@pytest.mark.filterwarnings("ignore:`compute_loss_func` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", list(LOSSES_OF_ONES_OWN))
def test_scores_of_sft_are_plain_likelihoods_whatever_is_trained(kit, tmp_path, name):
    """TRL then calls the model twice with each batch, and without labels first."""
    options, more = LOSSES_OF_ONES_OWN[name]
    args = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2, **options.get("args", {})}
    case = kit.Case(max_steps=2, **{**options, "args": args})
    recorded = kit.Recorded(tmp_path, case, **more).train()
    for dataset in ("single", "several"):
        held_out = recorded.trainer.eval_dataset[dataset]
        truth = [recorded.truth.held_out(2, row["input_ids"], row["labels"]) for row in held_out]
        rows = recorded.rows("evaluations", step=2, name=f"eval_{dataset}_loss")
        assert [row["sample_id"] for row in rows] == list(range(len(truth)))
        assert [row["score"] for row in rows] == pytest.approx([nll / tokens for nll, tokens in truth], rel=1e-5)
    assert recorded.info["meaning"] == kinds.kind_of(SFTTrainer).describe()


def test_a_first_step_that_trains_no_token_is_warned_of(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=1))
    rows = [{**row, "labels": [-100] * len(row["labels"])} for row in recorded.trainer.train_dataset]
    recorded.trainer.train_dataset = rows  # no column of labels that could be looked at before
    with pytest.warns(UserWarning, match=r"no token of the 4 sample\(s\) of the first step is trained on"):
        recorded.train()
    assert recorded.rows("steps")[0]["tokens"] == 0


def test_a_dataset_of_which_nothing_is_trained_is_refused(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=1))
    trainer = recorded.trainer
    trainer.train_dataset = trainer.train_dataset.map(lambda row: {"labels": [-100] * len(row["labels"])})
    assert_refused(recorded, InputError, r"no token of the training dataset's 14 row\(s\) is trained on")
    assert not recorded.folder.exists()
    assert "no token of the training dataset's 14 row(s)" in doctor(trainer).refused[0]


def test_evaluation_outside_training_records_nothing(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=1))
    recorded.trainer.eval_dataset = recorded.trainer.train_dataset.select(range(3))
    assert recorded.trainer.evaluate()["eval_loss"] > 0
    assert not recorded.folder.exists()
    recorded.train()
    before = read_all(recorded.folder)
    recorded.trainer.evaluate()
    assert read_all(recorded.folder) == before
    assert not (recorded.folder / "evaluations").exists()


def test_evaluations_can_be_turned_off(kit, tmp_path):
    recorder = GradientRecorder(tmp_path / "run", evaluations=False, signals=["weight"], sample_every=0)
    case = kit.Case(max_steps=1, args={"eval_strategy": "steps", "eval_steps": 1})
    recorded = kit.Recorded(tmp_path, case, recorder=recorder).train()
    assert any("eval_single_loss" in logs for _, logs in recorded.logs)
    assert not (recorded.folder / "evaluations").exists()
    assert not (recorded.folder / "gradients" / "hidden").exists()


def test_hidden_alone_and_without_samples(kit, tmp_path):
    recorder = GradientRecorder(tmp_path / "run", signals=["hidden"], sample_every=0)
    recorded = kit.Recorded(tmp_path, kit.Case(batch=2, accumulation=2, max_steps=2), recorder=recorder).train()
    kinds = [(row["step"], row["kind"]) for row in recorded.rows("gradients/hidden")]
    assert kinds == [(step, kind) for step in (0, 1) for kind in ("step", "micro_batch", "micro_batch")]
    assert list(recorded.info["signals"]) == ["hidden"]
    assert "sketch_check" not in recorded.info
    assert not (recorded.folder / "gradients" / "weight").exists()


def test_a_prediction_is_no_part_of_the_next_evaluation(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=2))
    trainer, rows = recorded.trainer, recorded.trainer.train_dataset

    def predict_then_evaluate():
        trainer.predict(rows.select([7, 8]))
        trainer.evaluate(rows.select([0, 1, 2]))

    trainer.add_callback(At(1, predict_then_evaluate))
    recorded.train()
    found = recorded.rows("evaluations")
    truth = [recorded.truth.held_out(1, rows[i]["input_ids"], rows[i]["labels"]) for i in range(3)]
    assert [row["sample_id"] for row in found] == [0, 1, 2]
    assert [row["score"] for row in found] == pytest.approx([nll / tokens for nll, tokens in truth], rel=1e-5)


def test_an_evaluation_in_another_order_is_not_recorded(kit, tmp_path):
    newer = hasattr(TrainingArguments, "train_sampling_strategy")
    grouped = {"train_sampling_strategy": "group_by_length"} if newer else {"group_by_length": True}
    case = kit.Case(trainer="right", max_steps=2, args=grouped)
    recorded = kit.Recorded(tmp_path, case)  # the strategy sorts the rows of an evaluation too
    recorded.trainer.add_callback(At(1, lambda: recorded.trainer.evaluate(recorded.trainer.train_dataset)))
    with pytest.warns(UserWarning, match="did not go through its rows once and in order"):
        recorded.train()
    assert not (recorded.folder / "evaluations").exists()


def test_a_held_out_sample_without_a_token_has_no_row_but_keeps_its_place(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=2, masked_row=True))
    positions = [0, kit.MASKED_ROW, 3]
    rows = recorded.trainer.train_dataset.select(positions)
    recorded.trainer.add_callback(At(1, lambda: recorded.trainer.evaluate(rows)))
    recorded.train()
    found = recorded.rows("evaluations")
    truth = [recorded.truth.held_out(1, *recorded.table[positions[row["sample_id"]]]) for row in found]
    assert [row["sample_id"] for row in found] == [0, 2]
    assert [row["score"] for row in found] == pytest.approx([nll / tokens for nll, tokens in truth], rel=1e-5)


def test_log_evaluation_writes_scores_of_the_users_own(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=2))
    recorder = recorded.recorder
    recorded.trainer.add_callback(At(1, lambda: recorder.log_evaluation("correct", 1, [4, 2], [1.0, np.nan])))
    with pytest.raises(RuntimeError, match="before training"):
        recorder.log_evaluation("correct", 0, [1], [1.0])
    recorded.train()
    recorder.log_evaluation("correct", 2, [1], [0.5])  # answers are often scored once training is over
    rows = recorded.rows("evaluations")
    assert rows == [
        {"step": 1, "name": "correct", "sample_id": 4, "score": 1.0},
        {"step": 1, "name": "correct", "sample_id": 2, "score": None},
        {"step": 2, "name": "correct", "sample_id": 1, "score": 0.5},
    ]


def test_log_evaluation_refuses_what_it_would_write_as_something_else(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=1))
    recorder = recorded.recorder
    recorded.train()
    masked = np.ma.masked_array([1.0, 0.5], mask=[False, True])
    for step, ids, scores, message in (
        (1.5, [1, 2], [1, 0], "step is 1.5; expected a whole number from 0"),
        (True, [1, 2], [1, 0], "step is True"),
        (-1, [1, 2], [1, 0], "step is -1"),
        (1, [True, False], [1, 0], "sample ids hold True and False"),
        (1, [1.0, 2.7], [1, 0], "sample ids hold float64"),
        (1, [[1, 2]], [1, 0], "sample ids have shape"),
        (1, [1, -2], [1, 0], "sample ids hold -2"),
        (1, [1, 2], masked, "scores hold masked entries"),
        (1, [1, 2], ["1", "0"], "scores hold <U1"),
        (1, [1, 2], [[1], [0]], "scores have shape"),
        (1, [1, 2], [1], "there are 2 sample ids and 1 scores; expected a score for each id"),
    ):
        with pytest.raises(InputError, match=message):
            recorder.log_evaluation("correct", step, ids, scores)
    recorder.log_evaluation("correct", np.int64(1), torch.tensor([2, 1]), [True, None])
    assert [(row["sample_id"], row["score"]) for row in recorded.rows("evaluations")] == [(2, 1.0), (1, None)]


# ---------------------------------------------------------------------- exposure


@pytest.mark.parametrize("name", ["tied", "left", "scaled", "scaled_fused"])
def test_exposure_is_planned_and_trained_for_each_epoch(runs, name, kit):
    recorded = runs(name)
    batch = recorded.case.batch * recorded.case.accumulation
    plan = kit.make_organizer(recorded.case).plan(batch, rows=np.array(recorded.ids))
    last = plan.epoch_of(recorded.case.max_steps - 1).organizer_epoch
    for number in range(last + 1):
        epoch = plan.epoch(number)
        end = min(epoch.stop, recorded.case.max_steps)
        updated = [step for step in range(end) if step != recorded.case.overflow]
        trained = [sample for step in updated for sample in recorded.step_ids(step)]
        rows = sorted(recorded.rows("exposure", organizer_epoch=number), key=lambda row: row["sample_id"])
        assert [row["sample_id"] for row in rows] == sorted(recorded.ids)
        assert [row["trained"] for row in rows] == [trained.count(i) for i in sorted(recorded.ids)]
        assert [row["planned"] for row in rows] == epoch.exposure.tolist()
        assert [row["in_pool"] for row in rows] == np.isin(sorted(recorded.ids), epoch.pool).tolist()
        assert sum(row["trained"] for row in rows) == batch * len(updated)
        assert sum(row["planned"] for row in rows) == batch * (epoch.stop)
    assert {row["organizer_epoch"] for row in recorded.rows("exposure")} == set(range(last + 1))


def test_the_organized_case_ends_within_a_later_epoch(runs, kit):
    recorded = runs("tied")
    plan = kit.make_organizer(recorded.case).plan(4, rows=np.array(recorded.ids))
    last = plan.epoch_of(recorded.case.max_steps - 1)
    assert last.organizer_epoch == 1
    assert recorded.case.max_steps < last.stop


def test_the_trained_ledger_agrees_with_the_organizers_own(runs):
    for name in ("tied", "left", "scaled"):
        recorded = runs(name)
        last = max(row["organizer_epoch"] for row in recorded.rows("exposure"))
        rows = sorted(recorded.rows("exposure", organizer_epoch=last), key=lambda row: row["sample_id"])
        assert [row["trained"] for row in rows] == recorded.handle.trained.tolist()


def test_without_an_organizer_there_is_no_exposure(runs):
    assert not (runs("fused").folder / "exposure").exists()


def test_an_early_stop_leaves_a_prefix_of_the_plan(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(batch=2, accumulation=2, organizer=True))
    recorded.trainer.add_callback(StopAfter(2))
    recorded.train()
    trained = recorded.step_ids(0) + recorded.step_ids(1)
    assert [row["step"] for row in recorded.rows("steps")] == [0, 1]
    counts = {row["sample_id"]: row["trained"] for row in recorded.rows("exposure")}
    assert counts == {i: trained.count(i) for i in recorded.ids}


# ---------------------------------------------------------------------- resuming


SAVING = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 1}


def interrupted(kit, folder, case, step):
    """A run that dies at a step, and the checkpoint of step 3 that it leaves."""
    recorded = kit.Recorded(folder, case)
    recorded.trainer.add_callback(Interrupt(step))
    with pytest.raises(KeyboardInterrupt):
        recorded.train()
    return str(folder / "trainer" / "checkpoint-3")


@pytest.mark.parametrize("organizer", [True, False])
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(kit, tmp_path, organizer):
    case = kit.Case(batch=2, accumulation=2, max_steps=8, organizer=organizer, args=SAVING)
    whole = kit.Recorded(tmp_path / "whole", case).train()
    checkpoint = interrupted(kit, tmp_path / "broken", case, step=5)
    again = kit.Recorded(tmp_path / "broken", case).train(resume_from_checkpoint=checkpoint)
    volatile = {"seconds": None, "recorder_seconds": None}
    for stream in ("steps", "gradients/weight", "gradients/hidden", *(["exposure"] if organizer else [])):
        assert [{**r, **volatile} for r in again.rows(stream)] == [{**r, **volatile} for r in whole.rows(stream)]
    assert again.info["status"] == "finished"
    assert again.info["resumed_at"] == [3]


def test_a_run_resumed_into_a_new_folder_begins_at_its_checkpoint(kit, tmp_path):
    case = kit.Case(trainer="right", max_steps=5, args=SAVING)
    checkpoint = interrupted(kit, tmp_path / "first", case, step=4)
    second = kit.Recorded(tmp_path / "second", case).train(resume_from_checkpoint=checkpoint)
    assert [row["step"] for row in second.rows("steps")] == [3, 4]
    assert second.info["first_step"] == 3


def test_resuming_under_another_organizer_is_refused(kit, tmp_path):
    case = kit.Case(trainer="right", max_steps=5, args=SAVING)
    checkpoint = interrupted(kit, tmp_path, kit.Case(trainer="right", max_steps=5, organizer=True, args=SAVING), step=4)
    without = kit.Recorded(tmp_path, case)
    before = read_all(without.folder)
    with pytest.raises(InputError, match="under another plan: name = sdo then and None now"):
        without.train(resume_from_checkpoint=checkpoint)
    assert read_all(without.folder) == before
    assert without.hooks() == without.hooks_before


def test_resuming_keeps_the_sketch_check_of_the_first_steps(kit, tmp_path):
    case = kit.Case(trainer="right", batch=2, sketch_size=512, max_steps=11, args={**SAVING, "save_steps": 10})
    interrupted(kit, tmp_path, case, step=10)
    recorded = kit.Recorded(tmp_path, case)
    before = recorded.info["sketch_check"]
    assert before["weight"]["pairs"] == 28
    recorded.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-10"))
    assert recorded.info["sketch_check"] == before


def test_resuming_with_another_version_of_the_sketch_is_refused(kit, tmp_path, monkeypatch):
    """The version alone: shape, k and seed are the same, and yet the numbers could not be compared."""
    case = kit.Case(trainer="right", sketch_size=512, max_steps=5, args=SAVING)
    checkpoint = interrupted(kit, tmp_path, case, step=4)
    again = kit.Recorded(tmp_path, case)
    before = read_all(again.folder)
    now = sketch.SKETCH_VERSION
    monkeypatch.setattr(sketch, "ROW_SKETCH_VERSION", now + 2)  # not the rule of these sketches
    kit.Recorded(tmp_path, case)
    monkeypatch.setattr(sketch, "SKETCH_VERSION", now + 1)
    with pytest.raises(InputError, match=rf"sketch\.version = {now}, which is now {now + 1}"):
        again.train(resume_from_checkpoint=checkpoint)
    assert read_all(again.folder) == before


def test_a_recorder_of_the_users_own_class_resumes_too(kit, tmp_path):
    """transformers keeps a callback's state under its class's name."""

    class Mine(GradientRecorder):
        pass

    case = kit.Case(trainer="right", max_steps=5, args=SAVING)
    recorded = kit.Recorded(tmp_path, case)
    recorded.recorder.__class__ = Mine
    recorded.trainer.add_callback(Interrupt(4))
    with pytest.raises(KeyboardInterrupt):
        recorded.train()
    again = kit.Recorded(tmp_path, case)
    again.recorder.__class__ = Mine
    again.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-3"))
    assert [row["step"] for row in again.rows("steps")] == [0, 1, 2, 3, 4]


def test_resuming_into_another_runs_folder_is_refused(kit, tmp_path):
    """The same organizer, data and signals, but another run: its steps must not be cut and replaced."""
    case = kit.Case(trainer="right", max_steps=5, organizer=True, args=SAVING)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    checkpoint = interrupted(kit, tmp_path / "a", case, step=4)
    interrupted(kit, tmp_path / "b", case, step=4)
    recorded = kit.Recorded(tmp_path / "b", case)
    before = read_all(recorded.folder)
    with pytest.raises(InputError, match="holds another run"):
        recorded.train(resume_from_checkpoint=checkpoint)
    assert read_all(recorded.folder) == before


def test_resuming_a_checkpoint_that_was_not_recorded_is_refused(kit, tmp_path):
    case = kit.Case(trainer="right", max_steps=5, args=SAVING)
    checkpoint = interrupted(kit, tmp_path, case, step=4)
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["GradientRecorder"]
    (Path(checkpoint) / "trainer_state.json").write_text(json.dumps(state))
    recorded = kit.Recorded(tmp_path, case)
    before = read_all(recorded.folder)
    with pytest.raises(InputError, match=r"than the checkpoint at step 3 \(none\)"):
        recorded.train(resume_from_checkpoint=checkpoint)
    assert read_all(recorded.folder) == before


def test_a_checkpoint_knows_no_step_that_the_folder_lacks(kit, tmp_path):
    """transformers asks for the callback's state just before it writes the checkpoint's own."""
    case = kit.Case(trainer="right", max_steps=5, args=SAVING)
    recorded = kit.Recorded(tmp_path, case)
    seen = []
    honest = type(recorded.recorder).state

    def state(recorder):
        answer = honest(recorder)
        if (recorded.folder / "steps").exists():
            seen.append(len(recorded.rows("steps")))
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(recorded.recorder), "state", state)
        recorded.train()
    saves = sorted(int(path.name.split("-")[1]) for path in (tmp_path / "trainer").glob("checkpoint-*"))
    assert seen == saves
    assert len(seen) >= 1


def test_an_evaluation_that_is_repeated_on_resuming_replaces_the_first(tmp_path):
    log = RunLog.create(tmp_path / "run", {"signals": {}})
    for step in range(3):
        log.add_step(StepRow(step, None, 0.0, 1.0, 0.1, 1.0, False, 1.0, False, 5, 0.1, 0.01, [0, 1]))
    log.add_evaluation(3, "eval_loss", [0, 1], [1.0, 2.0])
    log.add_evaluation(3, "other", [0], [9.0])
    log.close()
    log = RunLog.resume(tmp_path / "run", 3)
    log.add_evaluation(3, "eval_loss", [0, 1], [3.0, 4.0])
    log.close()
    rows = pq.read_table(tmp_path / "run" / "evaluations").to_pylist()
    assert sorted((row["name"], row["sample_id"], row["score"]) for row in rows) == [
        ("eval_loss", 0, 3.0),
        ("eval_loss", 1, 4.0),
        ("other", 0, 9.0),
    ]


def test_close_after_an_error_keeps_the_steps_and_lets_go(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=5))

    def fail():
        raise KeyboardInterrupt

    recorded.trainer.add_callback(At(3, fail))
    with pytest.raises(KeyboardInterrupt):
        recorded.train()
    recorded.recorder.close()
    recorded.recorder.close()
    assert recorded.info["status"] == "failed"
    assert [row["step"] for row in recorded.rows("steps")] == [0, 1, 2]
    assert recorded.hooks() == recorded.hooks_before


def test_no_limit_on_the_gradient_norm_is_written_as_a_word(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=2, args={"max_grad_norm": float("inf")}))
    recorded.train()
    assert recorded.info["trainer"]["max_grad_norm"] == "inf"
    assert {row["clipped"] for row in recorded.rows("steps")} == {False}


def test_a_loss_that_drops_the_ids_is_explained(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=2))

    def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(input_ids=inputs["input_ids"].clone(), labels=inputs["labels"]).loss

    recorded.trainer.compute_loss = compute_loss
    with pytest.raises(RuntimeError, match=r"compute_loss of your own must hand that very tensor to the model"):
        recorded.train()
    assert recorded.hooks() == recorded.hooks_before


def test_arguments_of_other_trl_trainers_are_refused():
    other = type("OtherConfig", (TrainingArguments,), {"__module__": "trl.experimental.other"})
    with pytest.raises(InputError, match="got a OtherConfig; this version supports SFTTrainer"):
        check_launch(other, SimpleNamespace())
    assert check_launch(SFTConfig, SimpleNamespace()).trainer == "SFTTrainer"
    assert check_launch(TrainingArguments, SimpleNamespace()).trainer == "Trainer"


# ---------------------------------------------------------------------- refusals


def assert_refused(recorded, error, match):
    """Training must be refused before its first step, the model left as it was."""
    before = {name: value.clone() for name, value in recorded.trainer.model.state_dict().items()}
    with pytest.raises(error, match=match):
        recorded.train()
    assert recorded.steps == []
    assert all(torch.equal(value, before[name]) for name, value in recorded.trainer.model.state_dict().items())
    assert recorded.hooks() == recorded.hooks_before


def test_a_frozen_weight_is_refused_before_anything_is_written(kit, tmp_path):
    model = kit.make_model(tied=False)
    model.lm_head.requires_grad_(False)
    recorded = kit.Recorded(tmp_path, kit.Case(tied=False, weight="lm_head.weight"), model=model)
    assert_refused(recorded, InputError, r"'lm_head\.weight' is frozen.*nearest trainable names: ")
    assert not recorded.folder.exists()


def test_an_unknown_weight_is_refused_before_anything_is_written(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(tied=False, weight="lm_heat.weight"))
    assert_refused(recorded, InputError, r"no parameter 'lm_heat\.weight'.*nearest.*lm_head\.weight")
    assert not recorded.folder.exists()


class Headless(torch.nn.Module):
    """A language model that is one module: it has no decoder apart from its head."""

    def __init__(self, vocabulary):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, 8)
        self.head = torch.nn.Linear(8, vocabulary)

    def forward(self, input_ids, attention_mask, labels):
        logits = self.head(self.embedding(input_ids))
        flat = (logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
        return {"loss": torch.nn.functional.cross_entropy(*flat), "logits": logits}


def test_a_model_without_decoder_is_refused_unless_only_its_weight_is_asked_for(kit, tmp_path):
    model = Headless(len(kit.make_tokenizer()))
    case = kit.Case(trainer="right", max_steps=1)
    assert_refused(
        kit.Recorded(tmp_path, case, model=model), InputError, r"Headless has no decoder.*signals=\['weight'\]"
    )
    assert not (tmp_path / "run").exists()
    recorder = GradientRecorder(tmp_path / "run", signals=["weight"])
    recorded = kit.Recorded(tmp_path, case, model=model, recorder=recorder).train()
    assert recorded.info["signals"]["weight"]["parameter"] == "head.weight"
    assert recorded.rows("steps")[0]["sample_ids"] == recorded.step_ids(0)


def test_an_iterable_dataset_is_refused(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right"))
    recorded.trainer.train_dataset = recorded.trainer.train_dataset.to_iterable_dataset()
    assert_refused(recorded, InputError, "iterable; expected a map-style dataset")
    assert not recorded.folder.exists()


@pytest.mark.parametrize("organizer", [True, False])
def test_a_folder_with_another_run_is_refused_and_stays_as_it_is(kit, runs, tmp_path, organizer):
    folder = runs("fused").folder
    before = read_all(folder)
    case = kit.Case(trainer="right", organizer=organizer)
    recorded = kit.Recorded(tmp_path, case, recorder=GradientRecorder(folder))
    with pytest.raises(InputError, match="holds another run"):
        recorded.train()
    assert recorded.steps == []
    assert read_all(folder) == before
    if organizer:
        recorded.handle.detach()
    assert recorded.hooks() == recorded.hooks_before


def test_a_second_training_into_the_same_folder_is_refused(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=1)).train()
    before = read_all(recorded.folder)
    with pytest.raises(InputError, match="holds another run"):
        recorded.trainer.train()
    assert read_all(recorded.folder) == before
    assert recorded.hooks() == recorded.hooks_before


def test_a_folder_that_cannot_be_made_leaves_no_hook(kit, tmp_path):
    (tmp_path / "file").write_text("")
    recorder = GradientRecorder(tmp_path / "file" / "run")
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right"), recorder=recorder)
    with pytest.raises((InputError, OSError)):
        recorded.train()
    assert recorded.hooks() == recorded.hooks_before


def test_a_parameter_that_gets_no_gradient_ends_the_run_after_one_step(kit, tmp_path):
    model = kit.make_model()
    model.unused = torch.nn.Parameter(torch.zeros(2, 2))
    recorded = kit.Recorded(tmp_path, kit.Case(weight="unused"), model=model)
    with pytest.raises(RuntimeError, match=r"'weight' did not fire in the first step: .*got no gradient"):
        recorded.train()
    assert len(recorded.steps) == 1
    assert not (recorded.folder / "gradients").exists()
    assert recorded.hooks() == recorded.hooks_before


def test_a_loss_beside_the_decoder_ends_the_run_after_one_step(kit, tmp_path):
    model = kit.make_model()

    def loss_of_the_embedding(outputs, labels, num_items_in_batch=None):
        return outputs.logits.detach().sum() * 0 + model.model.embed_tokens.weight.square().mean()

    case = kit.Case(trainer="right", weight=kit.EMBEDDING)
    recorded = kit.Recorded(tmp_path, case, model=model, compute_loss_func=loss_of_the_embedding)
    with pytest.raises(RuntimeError, match="'hidden' did not fire in the first step: the decoder's output"):
        recorded.train()
    assert recorded.hooks() == recorded.hooks_before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"signals": []}, "signals are"),
        ({"signals": ["weight", "head"]}, "head.*expected some of weight, hidden"),
        ({"sample_every": -1}, "sample_every is -1"),
        ({"sample_every": True}, "sample_every is True"),
        ({"sample_every": 2.0}, "sample_every is 2.0"),
        ({"sketch_size": 0}, "sketch_size is 0"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path, options, match):
    with pytest.raises(InputError, match=match):
        GradientRecorder(tmp_path, **options)


# ---------------------------------------------------------------------- what is left behind


@pytest.mark.parametrize("name", ["fused", "head", "bf16", "right", "masked", "smoothing", "workers"])
def test_no_hook_is_left_on_the_model(runs, name, kit):
    recorded = runs(name)
    assert recorded.hooks() == recorded.hooks_before


def test_no_hook_is_left_once_the_organizer_is_detached(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(max_steps=1, organizer=True)).train()
    recorded.handle.detach()
    assert recorded.hooks() == recorded.hooks_before


def test_gradient_copies_are_released_once_they_are_compared(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(weight=kit.EMBEDDING, max_steps=11))
    shape = dict(recorded.trainer.model.named_parameters())[kit.EMBEDDING].shape
    counts = {}

    def count(step):
        recorded.weights.clear()  # the witness's own copies
        gc.collect()
        tensors = (thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
        counts[step] = sum(tensor.shape == shape for tensor in tensors)

    for step in (1, 4, 10):
        recorded.trainer.add_callback(At(step, lambda step=step: count(step)))
    recorded.train()
    count("end")
    assert counts[4] == counts[1] + 3  # the copies of steps 1 to 3: the count does see them
    assert counts[10] == counts[1] - 1
    assert counts["end"] <= counts[10]
    assert recorded.hooks() == recorded.hooks_before


def test_no_storage_as_large_as_the_gradient_survives_a_step(kit, tmp_path):
    """Whatever its shape or type: views and casts count by the memory under them."""
    recorded = kit.Recorded(tmp_path, kit.Case(weight=kit.EMBEDDING, max_steps=11))
    parameters = dict(recorded.trainer.model.named_parameters())
    least = parameters[kit.EMBEDDING].numel() * 2  # a bfloat16 copy would have so many bytes
    found = {}

    def held():
        states = recorded.trainer.optimizer.state.values()
        own = [*parameters.values(), *recorded.trainer.model.buffers()]
        own += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return {tensor.untyped_storage().data_ptr() for tensor in own}

    def look(step):
        recorded.weights.clear()  # the witness's own copies
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
        storages = {t.untyped_storage().data_ptr() for t in tensors if t.untyped_storage().nbytes() >= least}
        found[step] = storages - held()

    for step in (1, 4, 10):
        recorded.trainer.add_callback(At(step, lambda step=step: look(step)))
    recorded.train()
    assert len(found[4] - found[1]) >= 3  # the copies of the first steps, which sketches are compared with
    assert found[10] <= found[1]


def test_two_runs_in_one_process_do_not_mix(kit, tmp_path):
    inner = kit.Recorded(
        tmp_path / "inner", kit.Case(batch=3, max_steps=3, organizer=True), model=kit.make_model(seed=4)
    )
    outer = kit.Recorded(tmp_path / "outer", kit.Case(batch=2, max_steps=4))
    outer.trainer.add_callback(At(2, inner.train))
    outer.train()
    for recorded in (inner, outer):
        rows = recorded.rows("steps")
        assert [row["sample_ids"] for row in rows] == [recorded.step_ids(s) for s in range(recorded.case.max_steps)]
        for row in recorded.rows("gradients/weight", kind="step"):
            assert kit.relative_error(row["sketch"], recorded.truth.weight(row["step"])) < 1e-5
        for row in recorded.rows("gradients/hidden", kind="step"):
            samples = recorded.truth.samples(row["step"])
            assert kit.relative_error(row["sketch"], kit.sum_of(samples, "hidden")) < 1e-5
    inner.handle.detach()
    for recorded in (inner, outer):
        assert recorded.hooks() == recorded.hooks_before


def test_two_recorders_watch_one_run(kit, tmp_path):
    case = kit.Case(batch=2, accumulation=2, max_steps=2)
    recorded = kit.Recorded(tmp_path, case)
    recorded.trainer.add_callback(GradientRecorder(tmp_path / "other", weight=kit.EMBEDDING, signals=["weight"]))
    recorded.train()
    first, recorded.folder = recorded.rows("steps"), tmp_path / "other"
    assert [row["sample_ids"] for row in recorded.rows("steps")] == [row["sample_ids"] for row in first]
    norms = [row["norm"] for row in recorded.rows("gradients/weight", kind="step")]
    truth = [float(kit.sum_of(recorded.truth.samples(step), kit.EMBEDDING).norm()) for step in range(2)]
    assert norms == pytest.approx(truth, rel=1e-5)
    assert recorded.hooks() == recorded.hooks_before


def test_two_forward_passes_of_one_micro_batch_count_its_samples_once(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", batch=3, max_steps=1))

    def twice(model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        return (model(**inputs).loss + model(**inputs).loss) / 2  # as losses that compare two passes do

    recorded.trainer.compute_loss = twice
    recorded.train()
    assert recorded.rows("steps")[0]["sample_ids"] == recorded.step_ids(0)
    rows = recorded.rows("gradients/hidden")
    assert [row["kind"] for row in rows] == ["step", "sample", "sample", "sample"]
    assert kit.relative_error(rows[0]["sketch"], kit.sum_of(recorded.truth.samples(0), "hidden")) < 1e-5


def test_recording_does_not_change_training(kit, runs, tmp_path):
    recorded = runs("head")
    trainer = kit.make_trainer(tmp_path, recorded.case)
    trainer.train()
    final = trainer.model.state_dict()
    assert all(torch.equal(final[name], value) for name, value in recorded.weights[-1].items())


def test_a_dataset_of_any_map_style_is_recorded(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=1, batch=2))
    assert isinstance(recorded.trainer.train_dataset, Dataset)
    recorded.trainer.train_dataset = list(recorded.trainer.train_dataset)  # no __getitems__, no fingerprint
    recorded.train()
    assert recorded.rows("steps")[0]["sample_ids"] == recorded.step_ids(0)
    assert recorded.info["dataset"]["fingerprint"] is None


def test_a_dataset_is_known_by_its_content(kit, tmp_path):
    """datasets' own fingerprint differs between two processes that prepare the same rows."""
    case = kit.Case(trainer="right", max_steps=1)
    found = {}
    for name in ("one", "same", "other"):
        recorded = kit.Recorded(tmp_path / name, case)
        rows = recorded.trainer.train_dataset.to_list()
        if name == "other":
            rows[0], rows[1] = rows[1], rows[0]
        recorded.trainer.train_dataset = Dataset.from_list(rows, split=name)
        recorded.train()
        found[name] = recorded.info["dataset"]["fingerprint"]
    assert found["one"] == found["same"] != found["other"]
