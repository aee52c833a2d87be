"""A callback that organizes and records without the trainer object: as attach does, or refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("trl", reason="needs the extra train")

import torch

from analysis import Run
from diagnostics import GradientRecorder
from sdo import SDO, OrganizeAndRecord, attach
from sdo.errors import InputError
from sdo.trainers.session import TrainingSession
from tests import trainings

CASE = trainings.Case(
    trainer="right",
    batch=2,
    accumulation=1,
    max_steps=9,
    args={"logging_steps": 1, "save_strategy": "steps", "save_steps": 4},
)
pytestmark = pytest.mark.filterwarnings("ignore:.*TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.*:UserWarning")


def organizer(count=trainings.ROWS):
    return SDO(np.random.default_rng(5).standard_normal((count, 8)), k=2, seed=617)


def inside(folder, case=CASE, **args):
    """A trainer that is given its callbacks when it is built, as frameworks do."""
    recorder = GradientRecorder(folder / "run", sample_every=2)
    callback = OrganizeAndRecord(organizer(), recorder)
    case = replace(case, args={**case.args, **args})
    return trainings.make_trainer(folder / "trainer", case, callbacks=[callback]), callback


def test_it_is_attach_and_add_callback(tmp_path):
    trainer, callback = inside(tmp_path / "inside")
    before = trainings.count_hooks(trainer.model)
    trainer.train()
    other = trainings.make_trainer(tmp_path / "other" / "trainer", CASE)
    handle = attach(other, organizer())
    other.add_callback(GradientRecorder(tmp_path / "other" / "run", sample_every=2))
    other.train()
    assert callback.plan.fingerprint == handle.plan.fingerprint
    one, two = Run.open(tmp_path / "inside" / "run"), Run.open(tmp_path / "other" / "run")
    assert one.steps().to_pydict()["sample_ids"] == two.steps().to_pydict()["sample_ids"]
    assert one.steps().to_pydict()["loss"] == two.steps().to_pydict()["loss"]
    assert one.exposure().equals(two.exposure())
    assert np.array_equal(one.gradients("weight").sketch, two.gradients("weight").sketch)
    for a, b in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert trainings.count_hooks(trainer.model) == before
    assert TrainingSession.peek(trainer.model) is None


def test_it_resumes_in_the_middle_of_an_epoch(tmp_path):
    whole, callback = inside(tmp_path)
    whole.train()
    planned = [sorted(callback.plan.batch(step).tolist()) for step in range(9)]
    again, _ = inside(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-4"))
    run = Run.open(tmp_path / "run")
    assert [sorted(ids) for ids in run.steps().to_pydict()["sample_ids"]] == planned
    assert run.info["resumed_at"] == [4]
    assert run.exposure().to_pydict()["trained"][-trainings.ROWS :] == callback.plan.counts(9).tolist()
    third, other = inside(tmp_path / "third")
    other._organizer = SDO(np.eye(trainings.ROWS), k=2, seed=1)
    with pytest.raises(InputError, match="was written under another plan"):
        third.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-4"))
    assert TrainingSession.peek(third.model) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulation": 2, "batch": 3}, "the trainer counts 5 micro-batches an epoch, an organizer needs 6: 3 whole"),
        ({"args": {"train_sampling_strategy": "group_by_length"}}, "train_sampling_strategy is set"),
        ({"args": {"ignore_data_skip": True}}, "ignore_data_skip is set; an organizer cannot work with it"),
    ],
)
def test_what_a_callback_cannot_do_is_refused(tmp_path, changes, message):
    trainer, _ = inside(tmp_path, replace(CASE, **changes))
    with pytest.raises(InputError, match=message):
        trainer.train()
    assert not (tmp_path / "run").exists()
    assert TrainingSession.peek(trainer.model) is None


def test_another_number_of_embeddings_is_refused(tmp_path):
    callback = OrganizeAndRecord(organizer(9))
    trainer = trainings.make_trainer(tmp_path, CASE, callbacks=[callback])
    with pytest.raises(InputError, match="the training dataset has 14 rows, the embeddings have 9"):
        trainer.train()


def test_a_loader_of_another_kind_is_refused(tmp_path):
    trainer, _ = inside(tmp_path)
    trainer._get_train_sampler = lambda *args: torch.utils.data.SubsetRandomSampler(range(14))
    with pytest.raises(InputError, match="the training loader draws by a SubsetRandomSampler; expected one of RandomS"):
        trainer.train()
