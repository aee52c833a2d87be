"""Trainings that end without a word or never begin, and what the next one finds: the model's hooks and the folder."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import TrainerCallback

from diagnostics import GradientRecorder
from sdo import attach
from sdo.errors import InputError
from sdo.trainers.session import TrainingSession

SAVING = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}

pytestmark = [
    # transformers says so of every second recorder, and pytest turns its own notice on checkpoints into an error.
    pytest.mark.filterwarnings("ignore:.*TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:mtime may not be reliable:UserWarning"),
]


class Interrupt(TrainerCallback):
    """Kills training after a number of steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.steps:
            raise KeyboardInterrupt


def interrupted(kit, folder, case, steps=2):
    recorded = kit.Recorded(folder, case)
    recorded.trainer.add_callback(Interrupt(steps))
    with pytest.raises(KeyboardInterrupt):
        recorded.trainer.train()
    return recorded


def status(folder):
    return json.loads((folder / "run.json").read_text())["status"]


@pytest.mark.parametrize("organizer", [True, False])
def test_an_interrupted_recording_ends_where_another_training_takes_its_model(kit, tmp_path, organizer):
    """A cell of a notebook is interrupted and run again: the first recorder must not go on hearing of the model."""
    case = kit.Case(trainer="right", max_steps=4, organizer=organizer)
    first = interrupted(kit, tmp_path / "first", case)
    hooks = {id(module): len(module._forward_hooks) for module in first.trainer.model.modules()}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        # With an organizer the model is taken by attach, else where training begins.
        second = kit.Recorded(tmp_path / "second", case, model=first.trainer.model)
        second.train()
    told = [str(one.message) for one in heard if one.category is UserWarning]
    assert sum("had not ended" in one and "fix: recorder.close()" in one for one in told) == 1
    assert sum("organizer of an earlier trainer" in one for one in told) == organizer
    assert (status(first.folder), status(second.folder)) == ("failed", "finished")
    assert len(first.rows("steps")) == 2  # what it had is written
    assert len(second.rows("steps")) == 4
    assert first.recorder._recording is None
    after = {id(module): len(module._forward_hooks) for module in first.trainer.model.modules()}
    assert any(count < hooks[module] for module, count in after.items())
    assert all(count <= hooks[module] for module, count in after.items())
    channel = TrainingSession.peek(second.trainer.model)
    assert channel is None or not channel.recordings


@pytest.mark.filterwarnings("ignore:the recording into .* had not ended:UserWarning")
@pytest.mark.parametrize("recorder_first", [True, False])
def test_a_recorder_that_goes_on_after_an_interrupt_keeps_what_it_had(kit, tmp_path, recorder_first):
    case = kit.Case(trainer="right", max_steps=4, organizer=True, recorder_first=recorder_first)
    recorded = interrupted(kit, tmp_path, case)
    batches = [recorded.handle.plan.batch(step) for step in range(2)]
    with pytest.raises(InputError, match=r"holds another run \(2 steps"):
        recorded.trainer.train()
    assert status(recorded.folder) == "failed"
    trained = {row["sample_id"]: row["trained"] for row in recorded.rows("exposure")}
    assert {sample for sample, count in trained.items() if count} == set(np.concatenate(batches).tolist())


def test_a_start_that_is_refused_takes_nothing_from_others(kit, tmp_path):
    """The folder of a baseline's recorder is taken: the organized trainer of the same model keeps its organizer."""
    case = kit.Case(trainer="right", max_steps=2)
    (tmp_path / "second" / "run").mkdir(parents=True)
    (tmp_path / "second" / "run" / "notes.txt").write_text("mine")
    first = kit.Recorded(tmp_path / "first", kit.Case(trainer="right", max_steps=2, organizer=True))
    second = kit.Recorded(tmp_path / "second", case, model=first.trainer.model)
    with pytest.raises(InputError, match="holds other files"):
        second.trainer.train()
    first.train()
    assert len(first.rows("steps")) == 2


def test_an_interrupt_before_the_first_row_leaves_the_folder_free(kit, tmp_path):
    """The cell is run again with the same folder."""

    class AtOnce(Interrupt):
        def on_step_begin(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    case = kit.Case(trainer="right", max_steps=2)
    first = kit.Recorded(tmp_path, case)
    first.trainer.add_callback(AtOnce(0))
    with pytest.raises(KeyboardInterrupt):
        first.trainer.train()
    again = kit.Recorded(tmp_path, case, model=first.trainer.model).train()
    assert (status(again.folder), len(again.rows("steps"))) == ("finished", 2)


def test_what_the_organizer_refuses_leaves_no_folder(kit, tmp_path):
    """The recorder was added first, so that transformers asks it first."""
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", organizer=True, recorder_first=True, max_steps=2))
    recorded.trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(InputError, match="one optimizer step now takes 8 samples"):
        recorded.trainer.train()
    assert not recorded.folder.exists()
    recorded.trainer.args.gradient_accumulation_steps = 1
    recorded.train()
    assert len(recorded.rows("steps")) == 2


def test_a_batch_size_that_is_searched_for_begins_its_folder_anew(kit, tmp_path):
    """auto_find_batch_size: training begins again after the first step ran out of memory."""
    case = kit.Case(trainer="right", batch=4, max_steps=3, args={"auto_find_batch_size": True})
    recorded = kit.Recorded(tmp_path, case)
    compute = recorded.trainer.compute_loss
    sizes = []

    def limited(model, inputs, *args, **kwargs):
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        return compute(model, inputs, *args, **kwargs)

    recorded.trainer.compute_loss = limited
    recorded.trainer.train()
    assert max(sizes) == 4
    rows = recorded.rows("steps")
    assert [len(row["sample_ids"]) for row in rows] == sizes[-3:]
    assert status(recorded.folder) == "finished"


def test_two_recorders_of_one_trainer_resume(kit, tmp_path):
    """Two parameters take two recorders; transformers keeps a list of their states."""
    case = kit.Case(trainer="right", max_steps=4, args=SAVING)

    def both():
        recorded = kit.Recorded(tmp_path, case)
        other = GradientRecorder(tmp_path / "other", signals=["weight"], weight="model.layers.0.mlp.down_proj.weight")
        recorded.trainer.add_callback(other)
        return recorded

    both().train()
    steps = pq.read_table(tmp_path / "other" / "steps").to_pylist()
    again = both()
    again.trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-2"))
    for folder in (tmp_path / "run", tmp_path / "other"):
        info = json.loads((folder / "run.json").read_text())
        assert (info["status"], info["resumed_at"]) == ("finished", [2])
    ids = [row["sample_ids"] for row in pq.read_table(tmp_path / "other" / "steps").to_pylist()]
    assert ids == [row["sample_ids"] for row in steps]


def test_scores_given_in_parts_after_resuming_are_all_kept(kit, tmp_path):
    case = kit.Case(trainer="right", max_steps=4, args=SAVING)
    first = kit.Recorded(tmp_path, case).train()
    first.recorder.log_evaluation("correct", 4, [0, 1, 2], [0, 0, 0])
    again = kit.Recorded(tmp_path, case)
    with pytest.warns(UserWarning, match="this run had ended at step 4 of 4"):
        again.trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-4"))
    for part in ([0, 1], [2, 3]):
        again.recorder.log_evaluation("correct", 4, part, [1, 1])
    rows = [row for row in again.rows("evaluations") if row["name"] == "correct"]
    assert [(row["sample_id"], row["score"]) for row in rows] == [(n, 1.0) for n in range(4)]


def test_batches_without_padding_are_counted_as_a_whole(kit, tmp_path):
    """TRL's padding_free: a micro-batch is one row, so that only its sum of tokens is known."""
    args = {"padding_free": True, "max_length": None}
    case = kit.Case(batch=3, accumulation=2, max_steps=2, organizer=True, args=args)
    recorder = GradientRecorder(tmp_path / "run", signals=["weight"])
    trainer = kit.make_trainer(tmp_path / "trainer", case)
    handle = attach(trainer, kit.make_organizer(case))
    trainer.add_callback(recorder)
    rows = trainer.train_dataset
    trainer.train()
    for step, row in enumerate(pq.read_table(tmp_path / "run" / "steps").to_pylist()):
        ids = handle.plan.batch(step).tolist()
        assert row["sample_ids"] == ids
        assert row["tokens"] == sum((np.array(rows[i]["labels"][1:]) != -100).sum() for i in ids)
        assert row["loss"] == pytest.approx(np.log(300), rel=0.5)  # an untrained model's; sums of micro-batches are 2x


def test_evaluating_without_padding_names_the_reason(kit, tmp_path):
    args = {"padding_free": True, "max_length": None, "per_device_eval_batch_size": 3}
    case = kit.Case(batch=3, max_steps=1, args={**args, "eval_strategy": "steps", "eval_steps": 1})
    trainer = kit.make_trainer(tmp_path / "trainer", case)
    trainer.add_callback(GradientRecorder(tmp_path / "run", signals=["weight"]))
    with pytest.warns(UserWarning, match="single rows of several samples, without padding.*fix: padding_free=False"):
        trainer.train()
    assert not (tmp_path / "run" / "evaluations").exists()
