"""`doctor` on real trainers: what it says is what a run does, and the trainer does not notice."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from diagnostics import GradientRecorder, doctor
from diagnostics.sketches.count_sketch import GradientSketch
from sdo import SDO, attach
from sdo.errors import InputError
from sdo.trainers.session import _sessions

CASES = ["fused", "tied", "head", "right", "bf16", "qwen3", "gemma2", "gpt2", "lora", "lora_a", "lora_head"]
CASES += ["lora_reentrant", "lora_not_reentrant", "prompt_tuning"]


def by_name(diagnosis):
    return {finding.name: finding for finding in diagnosis.signals}


def fresh(kit, runs, name, folder, **changes):
    """A trainer of a case that was not trained, with organizer and recorder."""
    return kit.Recorded(folder, runs(name).case, **changes)


@pytest.mark.parametrize("name", CASES)
def test_it_foretells_what_the_run_does(kit, runs, name, tmp_path):
    trained = runs(name)
    diagnosis = doctor(fresh(kit, runs, name, tmp_path).trainer)
    assert diagnosis.ok, diagnosis.refused
    info, case = trained.info, trained.case
    for finding in diagnosis.signals:
        said = info["signals"][finding.name]
        assert finding.fires
        assert (finding.parameter, list(finding.shape)) == (said["parameter"], said["shape"])
        assert (bool(finding.tied_with), list(finding.tied_with)) == (said["tied"], said["tied_with"])
        assert (finding.kind, finding.stored) == (said["sketch"]["kind"], said["stored"])
    assert [finding.name for finding in diagnosis.signals] == list(info["signals"])
    assert diagnosis.ids == info["dataset"]["sample_id"]
    assert diagnosis.model == {key: info["model"][key] for key in diagnosis.model}
    assert diagnosis.samples == info["dataset"]["rows"]
    assert diagnosis.schedule["steps"] == info["trainer"]["max_steps"]
    assert diagnosis.schedule["micro_batches"] == case.accumulation
    rows = {stream.name: stream.rows for stream in diagnosis.disk}
    assert rows["steps"] == len(trained.rows("steps"))
    for signal in info["signals"]:
        assert rows[f"gradients/{signal}, step"] == len(trained.rows(f"gradients/{signal}", kind="step"))
    json.dumps(diagnosis.to_dict(), allow_nan=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["fused", "lora", "gpt2", "prompt_tuning"])
def test_the_micro_step_is_the_first_rows_of_the_first_batch(kit, runs, name, tmp_path):
    recorded = fresh(kit, runs, name, tmp_path)
    diagnosis = doctor(recorded.trainer)
    step = diagnosis.micro_step
    assert list(step.sample_ids) == runs(name).step_ids(0)[:2]
    recorded.weights.append(recorded.trainer.model.state_dict())
    recorded.steps = [[[recorded.ids.index(i) for i in step.sample_ids]]]
    samples = recorded.truth.samples(0)
    assert step.tokens == sum(sample.tokens for sample in samples)
    assert step.loss == pytest.approx(recorded.truth.loss(0), rel=1e-5)
    assert step.seconds > 0
    assert step.peak_bytes > 1e6
    for finding in diagnosis.signals:
        if finding.name == "head_only":
            gradient = kit.head_gradient(recorded.truth_of_head.samples(0))
        else:
            gradient = kit.sum_of(samples, finding.parameter or "hidden")
        assert finding.norm == pytest.approx(float(gradient.norm()), rel=1e-5)


def test_a_zero_gradient_at_the_first_step_is_no_refusal(kit, runs, tmp_path):
    diagnosis = doctor(fresh(kit, runs, "lora_a", tmp_path).trainer)
    assert by_name(diagnosis)["weight"].norm == 0.0
    assert "fires, with a zero gradient at the first step" in str(diagnosis)
    assert diagnosis.ok


def test_the_plan_is_summed_up(kit, runs, tmp_path):
    recorded = fresh(kit, runs, "tied", tmp_path)
    diagnosis = doctor(recorded.trainer)
    epoch = recorded.handle.plan.epoch(0)
    assert diagnosis.organizer["steps"] == len(epoch.steps)
    assert diagnosis.organizer["exposure_mean"] == pytest.approx(epoch.exposure.mean())
    assert -1 <= diagnosis.organizer["within_batch_cosine"] <= 1
    assert diagnosis.schedule["steps_per_epoch"] == recorded.handle.sampler.steps_per_epoch
    assert f"its first epoch: {len(epoch.steps)} steps" in str(diagnosis)
    assert "tied with lm_head.weight" in str(diagnosis)


def test_neighbors_that_rounding_decides_are_named(kit, runs, tmp_path):
    recorded = fresh(kit, runs, "tied", tmp_path)
    (left_out,) = doctor(recorded.trainer).organizer["notes"]
    assert "samples have no row in the training dataset" in left_out  # the kit's organizer knows more samples
    recorded.handle.detach()
    n = len(recorded.trainer.train_dataset)
    rows = 1 + 1e-4 * np.random.default_rng(0).standard_normal((max(recorded.ids) + 1, 64))
    attach(recorded.trainer, SDO(rows, k=2))
    with pytest.warns(UserWarning, match="so nearly parallel that rounding"):
        diagnosis = doctor(recorded.trainer)
    (note,) = (one for one in diagnosis.organizer["notes"] if "no row in the training" not in one)
    assert f"of the 2 nearest of each of {n} rows" in note
    assert f"\nnote        {note}\n" in str(diagnosis)
    assert note in diagnosis.to_dict()["organizer"]["notes"]
    assert diagnosis.ok


def test_memory_is_that_of_the_tables_and_of_the_copies(kit, runs, tmp_path):
    diagnosis = doctor(fresh(kit, runs, "tied", tmp_path).trainer)
    weight = by_name(diagnosis)["weight"]
    sketcher = GradientSketch(weight.shape, k=2048)
    assert (weight.kind, weight.table_bytes) == ("count", 4 * np.prod(weight.shape))
    assert sketcher.table_bytes == 0
    sketcher.sketch(torch.zeros(weight.shape))
    assert sketcher.table_bytes == weight.table_bytes
    assert (weight.copies, weight.copy_bytes) == (8, 8 * 4 * np.prod(weight.shape))
    assert by_name(diagnosis)["hidden"].copy_bytes == 0


def test_it_works_without_recorder_and_organizer(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(max_steps=-1, args={"num_train_epochs": 3}))
    recorded.trainer.remove_callback(recorded.recorder)
    diagnosis = doctor(recorded.trainer, rows=1)
    assert diagnosis.ok
    assert diagnosis.organizer is None
    assert diagnosis.schedule == {"step_samples": 4, "micro_batches": 1, "steps_per_epoch": 4, "steps": 12}
    assert len(diagnosis.micro_step.sample_ids) == 1
    assert "none; with the default options there would be:" in str(diagnosis)


def test_evaluations_are_counted(kit, runs, tmp_path):
    diagnosis = doctor(fresh(kit, runs, "fused", tmp_path).trainer)
    counted = next(stream.rows for stream in diagnosis.disk if stream.name == "evaluations")
    assert counted == sum(row["step"] in (0, 3) for row in runs("fused").rows("evaluations"))


# ---------------------------------------------------------------------- what is refused


def refused(trainer, **options):
    diagnosis = doctor(trainer, **options)
    assert not diagnosis.ok
    assert diagnosis.to_dict()["ok"] is False
    for reason in diagnosis.refused:
        assert "\n" not in reason
        assert f"refused     {reason}" in str(diagnosis)
    return diagnosis


@pytest.mark.parametrize("weight", ["lm_head", "model.layers.9.weight"])
def test_a_weight_that_is_not_there(kit, tmp_path, weight):
    diagnosis = refused(kit.Recorded(tmp_path, kit.Case(weight=weight, max_steps=2)).trainer)
    assert diagnosis.refused[0].startswith(f"there is no parameter {weight!r}; nearest trainable names: ")
    assert by_name(diagnosis)["hidden"].fires  # the rest is looked at all the same


def test_a_weight_that_the_loss_does_not_reach(kit, tmp_path):
    model = kit.make_model()
    model.extra = torch.nn.Linear(3, 3)
    recorded = kit.Recorded(tmp_path, kit.Case(weight="extra.weight", max_steps=2), model=model)
    diagnosis = refused(recorded.trainer)
    assert diagnosis.refused == (
        "signal 'weight' does not fire: its parameter got no gradient in backward: the loss does not reach it, or it "
        "is sharded",
    )
    with pytest.raises(RuntimeError, match="'weight' did not fire"):
        recorded.train()


def test_a_folder_that_is_taken(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(max_steps=1))
    recorded.folder.mkdir()
    (recorded.folder / "notes.txt").touch()
    assert "holds other files" in refused(recorded.trainer).refused[0]
    assert doctor(recorded.trainer, resume=True).ok


class Streamed(IterableDataset):
    def __iter__(self):
        yield {"input_ids": [1, 2], "labels": [1, 2]}


def test_an_iterable_dataset(kit, tmp_path):
    trainer = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=1)).trainer
    trainer.train_dataset = Streamed()
    diagnosis = refused(trainer)
    assert diagnosis.refused == (
        "the training dataset is iterable; expected a map-style dataset, whose rows have positions; fix: load it "
        "without streaming",
    )
    assert (diagnosis.samples, diagnosis.micro_step, diagnosis.disk) == (None, None, ())
    assert {finding.fires for finding in diagnosis.signals} == {None}
    assert "not tried" in str(diagnosis)


def test_a_collator_that_fails_is_what_training_would_end_with(kit, tmp_path):
    trainer = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=1)).trainer

    def collate(items):
        raise ValueError("rows of different\nlengths")

    trainer.data_collator = collate
    assert refused(trainer).refused == (
        "the first micro-step fails, and so would training: ValueError: rows of different",
    )
    assert trainer.model not in _sessions


def test_rows_without_padding_have_no_sample_rows(kit, tmp_path):
    args = {"packing": True, "max_length": 64}
    trainer = kit.Recorded(tmp_path, kit.Case(max_steps=1, args=args)).trainer
    assert "fix: padding_free=False, or signals=['weight']" in refused(trainer).refused[-1]


def test_a_loss_that_is_no_number_is_no_good_sign(kit, tmp_path):
    trainer = kit.Recorded(tmp_path, kit.Case(max_steps=1)).trainer
    with torch.no_grad():
        trainer.model.get_decoder().norm.weight.fill_(float("nan"))
    diagnosis = refused(trainer)
    assert diagnosis.refused[0].startswith("the loss of the micro-step is nan; expected a finite one; fix: look for")
    found = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert (found["micro_step"]["loss"], found["micro_step"]["loss_reason"]) == (None, "the loss is nan")


def test_a_gradient_that_is_no_number_beside_a_loss_that_is(kit, tmp_path):
    trainer = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=1)).trainer
    compute = trainer.compute_loss

    def undefined(*args, **kwargs):
        loss = compute(*args, **kwargs)
        return loss + (loss - loss).sqrt()  # 0, and its derivative has no value

    trainer.compute_loss = undefined
    assert "not finite in the micro-step, though the loss is" in refused(trainer).refused[0]


def test_reasons_of_others_come_first(kit, tmp_path):
    diagnosis = doctor(kit.Recorded(tmp_path, kit.Case(max_steps=1)).trainer).refuse(["no embeddings"])
    assert (diagnosis.ok, diagnosis.refused) == (False, ("no embeddings",))


@pytest.mark.parametrize("trainer", [[], None, torch.nn.Linear(2, 2)])
def test_no_trainer(trainer):
    with pytest.raises(InputError, match=r"doctor got a \w+; expected a transformers or TRL trainer"):
        doctor(trainer)


@pytest.mark.parametrize("rows", [0, -1, 1.5, True])
def test_rows_out_of_range(kit, tmp_path, rows):
    with pytest.raises(InputError, match="expected a whole number from 1"):
        doctor(kit.Recorded(tmp_path, kit.Case()).trainer, rows=rows)


def test_only_the_signals_that_are_wanted(kit, tmp_path):
    recorder = GradientRecorder(tmp_path / "run", signals=["hidden"], sample_every=0)
    diagnosis = doctor(kit.Recorded(tmp_path, kit.Case(max_steps=2), recorder=recorder).trainer)
    assert list(by_name(diagnosis)) == ["hidden"]
    assert [stream.name for stream in diagnosis.disk] == ["gradients/hidden, step", "steps"]
