"""Figures in the trainer's own log: what they are, who gets them, and that nothing stays behind."""

from __future__ import annotations

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from analysis import Run, batch_coherence
from diagnostics import log_scalars
from sdo.embeddings.matrix import as_embeddings, within_batch_cosine
from sdo.organizers.steps import Steps
from sdo.trainers.log_figures import ScalarLog
from sdo.trainers.session import TrainingSession

NAMES = ("within_batch_cosine", "batch_coherence", "coverage")


@pytest.fixture(scope="module", params=[1, 5])
def logged(request, kit, tmp_path_factory):
    """A run of 12 steps, samples recorded at every third, logged at every step or every fifth, and its events."""
    folder = tmp_path_factory.mktemp("logged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
        args = {"logging_steps": request.param, "report_to": ["tensorboard"], "logging_first_step": False}
        args |= {"eval_strategy": "steps", "eval_steps": 4}
        case = kit.Case(batch=2, accumulation=2, max_steps=12, sample_every=3, organizer=True, args=args)
        recorded = kit.Recorded(folder, case).train()
    events = EventAccumulator(str(folder / "events")).Reload()
    return recorded, events


def windows(recorded):
    """Return (first step, number of steps trained at the log) of each log of training steps."""
    every, count = recorded.case.args["logging_steps"], recorded.case.max_steps
    return [(end - every, end) for end in range(every, count + 1, every)]


def expected(recorded, kit):
    """Return step -> figures, from the plan, the run folder and the trained ids."""
    embeddings = as_embeddings(kit.make_organizer(recorded.case).embeddings)
    batches = np.array([recorded.step_ids(step) for step in range(recorded.case.max_steps)])
    cosine = within_batch_cosine(embeddings.unit, embeddings.valid, *Steps.of(batches).trained())
    coherence = batch_coherence(Run.open(recorded.folder).iter_steps("hidden", "sample"))
    sampled = dict(zip(coherence.step.tolist(), coherence.value.tolist(), strict=True))
    figures = {}
    for start, end in windows(recorded):
        inside = [sampled[step] for step in range(start, end) if step in sampled]
        figures[end] = {
            "within_batch_cosine": cosine[start:end].mean(),
            "coverage": len(np.unique(batches[:end])) / kit.ROWS,
            **({"batch_coherence": np.mean(inside)} if inside else {}),
        }
    return figures


def test_tensorboard_gets_every_figure(logged, kit):
    recorded, events = logged
    figures = expected(recorded, kit)
    assert sorted(tag for tag in events.Tags()["scalars"] if "sdo/" in tag) == sorted(f"train/sdo/{n}" for n in NAMES)
    for name in NAMES:
        found = {event.step: event.value for event in events.Scalars(f"train/sdo/{name}")}
        wanted = {step: values[name] for step, values in figures.items() if name in values}
        assert found == pytest.approx(wanted, abs=1e-6)  # events are float32


def test_the_log_history_gets_them_and_evaluations_do_not(logged, kit):
    recorded, _ = logged
    figures = expected(recorded, kit)
    history = recorded.trainer.state.log_history
    for entry in history:
        found = {key.removeprefix("sdo/"): value for key, value in entry.items() if key.startswith("sdo/")}
        assert found == pytest.approx(figures[entry["step"]] if "loss" in entry else {}, abs=1e-9)
    assert any("eval_single_loss" in entry for entry in history)


def test_a_recorder_alone_logs_its_coherence_once_asked_to(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(max_steps=2, args={"logging_steps": 1}))
    log = log_scalars(recorded.trainer)
    recorded.train()
    found = [{k for k in entry if k.startswith("sdo/")} for entry in recorded.trainer.state.log_history]
    assert found == [{"sdo/batch_coherence"}, {"sdo/batch_coherence"}, set()]
    log.detach()
    assert "log" not in vars(recorded.trainer)


def test_an_organizer_alone_logs_what_it_knows(kit, tmp_path):
    recorded = kit.Recorded(tmp_path, kit.Case(organizer=True, max_steps=2, args={"logging_steps": 1}))
    recorded.trainer.remove_callback(recorded.recorder)
    recorded.train()
    found = {k for entry in recorded.trainer.state.log_history for k in entry if k.startswith("sdo/")}
    assert found == {"sdo/coverage", "sdo/within_batch_cosine"}


def test_a_second_training_begins_anew(kit, tmp_path):
    case = kit.Case(organizer=True, max_steps=3, args={"logging_steps": 2})
    recorded = kit.Recorded(tmp_path, case)
    recorded.trainer.remove_callback(recorded.recorder)
    recorded.trainer.train()  # its last step is not logged
    first = [e for e in recorded.trainer.state.log_history if "loss" in e]
    recorded.trainer.train()
    second = [e for e in recorded.trainer.state.log_history if "loss" in e]
    assert [e["sdo/coverage"] for e in second] == [e["sdo/coverage"] for e in first]
    assert second[0]["sdo/within_batch_cosine"] == first[0]["sdo/within_batch_cosine"]


def test_users_share_one_wrapper_and_the_last_to_leave_removes_it(kit, tmp_path):
    case = kit.Case(organizer=True)
    recorded = kit.Recorded(tmp_path, case)
    own = log_scalars(recorded.trainer)
    assert own is recorded.trainer.log
    recorded.handle.detach()
    assert recorded.trainer.log is own
    own.detach()
    own.detach()
    assert "log" not in vars(recorded.trainer)


def test_a_log_of_the_users_own_is_kept(kit, tmp_path):
    trainer = kit.Recorded(tmp_path, kit.Case()).trainer
    seen = []
    before = trainer.log = lambda logs, *args: seen.append(dict(logs))
    log = log_scalars(trainer)
    TrainingSession.of(trainer.model).figures.put("coverage", 0.5)
    trainer.log({"loss": 1.0})
    trainer.log({"eval_loss": 1.0})
    assert seen == [{"loss": 1.0, "sdo/coverage": 0.5}, {"eval_loss": 1.0}]
    log.detach()
    assert trainer.log is before


def test_a_wrapper_around_ours_keeps_working_after_detach(kit, tmp_path):
    trainer = kit.Recorded(tmp_path, kit.Case()).trainer
    seen = []
    trainer.log = lambda logs, *args: seen.append(dict(logs))
    log = log_scalars(trainer)
    inner = trainer.log
    trainer.log = later = lambda logs, *args: inner(logs, *args)
    TrainingSession.of(trainer.model).figures.put("coverage", 0.5)
    log.detach()
    assert trainer.log is later
    trainer.log({"loss": 1.0})
    assert seen == [{"loss": 1.0}]
    assert not isinstance(trainer.log, ScalarLog)
