"""An organizer and a signal that are not ours: registered, examined, recorded, explained and run by the commands."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl")

import torch
from trl import SFTConfig, SFTTrainer

from analysis import Run, run_coherence, run_exposure, run_locality
from analysis.report import SECTIONS, Section, SectionSpec, build_report
from diagnostics import GradientRecorder, doctor, register_signal
from diagnostics.sample_gradients import sample_gradients
from diagnostics.signals import registry as signal_registry
from sdo import SDO, InputError, attach, register_organizer
from sdo.cli.main import main
from sdo.demo.tiny_model import build
from sdo.organizers import registry
from tests.third_party import BLOCKS, LONGEST, Blocks, broken, not_a_section
from tests.third_party_signal import Embedded

N, STEPS = 20, 104
TEXTS = [f"question {i} 12" for i in range(N)]
SIGNALS = ("weight", "hidden", "embedded")
MATRIX = np.random.default_rng(0).standard_normal((N, 5))

pytestmark = [
    pytest.mark.usefixtures("quiet_datasets"),
    pytest.mark.filterwarnings("ignore:.*TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.*:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def registered():
    before = dict(registry._SPECS)
    words = dict(signal_registry._known)
    register_organizer(BLOCKS)
    register_signal(Embedded)
    yield
    registry._SPECS.clear()
    registry._SPECS.update(before)
    signal_registry._known.clear()
    signal_registry._known.update(words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("third")
    model, tokenizer = build(TEXTS, seed=0, hidden=16, layers=1, vocab=300)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"question": text, "answer": f" {i}"} for i, text in enumerate(TEXTS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    np.save(folder / "E.npy", MATRIX)
    return folder


@pytest.fixture(scope="module")
def recorded(folder):
    """A recorded run of Blocks, and what the doctor said before it."""
    from datasets import Dataset

    model, tokenizer = build(TEXTS, seed=0, hidden=16, layers=1, vocab=300)
    arguments = SFTConfig(
        output_dir=str(folder / "out"),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        per_device_train_batch_size=4,
        max_steps=STEPS,
        learning_rate=1e-4,
    )
    rows = Dataset.from_dict({"prompt": TEXTS, "completion": [f" {i}" for i in range(N)]})
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    handle = attach(trainer, Blocks(SDO(str(folder / "E.npy")).embeddings, turn=2, seed=1))
    trainer.add_callback(GradientRecorder(str(folder / "run"), signals=SIGNALS, sample_every=4))
    said = doctor(trainer)
    trainer.train()
    return Run.open(folder / "run"), handle, said


def test_it_is_attached_looked_at_and_recorded(recorded):
    run, handle, said = recorded
    assert said.ok, str(said)
    assert "blocks; its first epoch: 5 steps" in str(said)
    assert run.info["organizer"] == {**handle.plan.describe(), "fingerprint": handle.plan.fingerprint}
    assert run.info["organizer"]["options"] == {"turn": 2, "seed": 1}
    ids = run.steps().column("sample_ids").to_pylist()
    assert [sorted(row) for row in ids] == [sorted(handle.plan.batch(t).tolist()) for t in range(STEPS)]
    exposure = run_exposure(run)
    assert exposure.times.tolist() == handle.trained.tolist() == handle.plan.counts(STEPS).tolist()


def test_its_signal_is_recorded_and_explained(recorded):
    run, _, said = recorded
    assert [(finding.name, finding.fires) for finding in said.signals] == [(name, True) for name in SIGNALS]
    assert run.signals == SIGNALS
    steps, samples = run.gradients("embedded", "step"), run.gradients("embedded", "sample")
    assert len(steps) == STEPS
    assert steps.sketch.shape[1] == run.info["signals"]["embedded"]["stored"] == 16
    total = np.stack([samples.sketch[samples.step == step].sum(axis=0) for step in range(0, STEPS, 4)])
    assert np.abs(total - steps.sketch[::4]).max() < 1e-5 * np.abs(steps.sketch).max()
    assert run_coherence(run).keys() >= {*SIGNALS}


def test_the_rows_of_its_signal_are_plain_autograds(recorded, folder):
    """The tiny model's own passes, one sample at a time, through the probe's function."""
    trainer = recorded[1]._trainer
    found = sample_gradients(trainer, np.array([3, 11]), signals=["embedded"]).signals["embedded"]
    model, dataset = trainer.model, trainer.train_dataset
    for n, sample in enumerate((3, 11)):
        row = dataset[sample]
        states = model.get_input_embeddings()(torch.tensor([row["input_ids"]])).detach().requires_grad_()
        logits = model(inputs_embeds=states).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, torch.tensor(row["labels"][1:]), reduction="sum").backward()
        exact = states.grad[0].sum(dim=0)
        assert np.abs(found.sketch[n] - exact.numpy()).max() < 1e-4 * float(exact.norm())


def test_its_plan_is_drawn_anew_for_the_tests_of_locality(recorded):
    found = run_locality(recorded[0], redraws=19)
    assert found.reason is None
    matrix = found.signals["hidden"].matrix
    assert (matrix.steps, matrix.redraws) == (STEPS, 19)
    assert 1 / 20 <= matrix.p <= 1


def test_the_report_shows_it(recorded):
    report = build_report({"mine": recorded[0]}, redraws=19)
    assert not report.failed
    assert "blocks" in report.html


def test_a_section_of_ones_own_stands_among_ours_or_alone(recorded):
    runs = {"mine": recorded[0]}
    report = build_report(runs, sections=[*SECTIONS[2:3], LONGEST])
    assert list(report.numbers["sections"]) == ["training", "longest"]
    seconds = max(recorded[0].steps().column("seconds").to_pylist())
    assert report.numbers["sections"]["longest"] == {
        "title": "Longest steps",
        "state": "shown",
        "seconds": {"mine": seconds},
    }
    assert "Seconds &lt;of&gt; the longest step." in report.html
    assert {"tone": "plain", "words": "No step took longer than shown below."} in report.numbers["verdict"]
    assert build_report({}, sections=[LONGEST]).numbers["sections"]["longest"]["reason"] == "No run folder was given."


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (broken, "RuntimeError: no ink"),
        (not_a_section, "TypeError: it gave str; expected a Section, or Absent where there is nothing"),
        (lambda material: Section(data={"x": float("nan")}), "ValueError: Out of range float values"),
    ],
)
def test_a_section_that_fails_takes_nothing_with_it(recorded, compute, reason):
    report = build_report({"mine": recorded[0]}, sections=[SectionSpec("own", "My own", compute), LONGEST])
    assert report.failed == ("My own",)
    assert reason in report.numbers["sections"]["own"]["reason"]
    assert report.numbers["sections"]["longest"]["state"] == "shown"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([LONGEST, LONGEST], "two sections have the key 'longest'; expected each once"),
        ([SectionSpec("my key", "x", broken)], "the key of a section is 'my key'; expected letters, digits, - and _"),
        ([broken], "a section of the report is function; expected a SectionSpec"),
    ],
)
def test_sections_that_cannot_stand_are_refused(sections, message):
    with pytest.raises(InputError, match=message):
        build_report({}, sections=sections)


def test_the_report_command_takes_a_section(recorded, tmp_path, monkeypatch, capsys):
    common = ["report", str(recorded[0].path), "--redraws", "0", "--out"]
    out = tmp_path / "a.html"
    assert main([*common, str(out), "--section", "tests.third_party:longest_steps"]) == 0
    entry = json.loads((tmp_path / "a.json").read_text())["sections"]["longest_steps"]
    assert (entry["title"], entry["state"]) == ("The longest step of each run", "shown")
    assert main([*common, str(tmp_path / "b.html"), "--section", "tests.third_party:LONGEST"]) == 0
    assert main([*common, str(tmp_path / "c.html"), "--section", "tests.third_party:broken"]) == 1
    assert "the section 'broken' failed; the page shows why" in capsys.readouterr().err
    for place, said in {
        "tests.third_party": "--section is 'tests.third_party'; expected module:name",
        "tests.third_party:gone": "module tests.third_party has no gone",
        "no_such_module:x": "there is no module 'no_such_module'",
        "tests.third_party:np": "--section tests.third_party:np is module; expected a SectionSpec or a function",
    }.items():
        assert main([*common, str(tmp_path / "d.html"), "--section", place]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "d.html").exists()


def test_the_commands_run_it(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    common = ["--model_name_or_path", "model", "--dataset_name", "train.jsonl", "--prompt_column", "question"]
    common += ["--completion_column", "answer", "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
    common += ["--per_device_train_batch_size", "4", "--max_steps", "3", "--save_strategy", "no", "--output_dir", "o"]
    common += ["--organizer.name", "blocks", "--organizer.embeddings", "E.npy", "--organizer.seed", "2"]
    recorder = ["--recorder.signals", "weight", "embedded", "--recorder.sample_every", "1", "--recorder.out"]
    assert main(["sft", *common, "--organizer.turn", "3", *recorder, "sft-run"]) == 0
    assert len(pq.read_table(folder / "sft-run" / "gradients" / "embedded")) == 3 * (1 + 4)
    plan = Blocks(SDO(MATRIX).embeddings, turn=3, seed=2).plan(4)
    ids = pq.read_table(folder / "sft-run" / "steps").column("sample_ids").to_pylist()
    assert [sorted(row) for row in ids] == [sorted(plan.batch(t).tolist()) for t in range(3)]
    capsys.readouterr()
    assert main(["doctor", *common, "--organizer.turn", "3", *recorder, "next-run"]) == 0
    said = capsys.readouterr().out
    assert "blocks; its first epoch" in said
    assert "embedded" in said
    assert main(["sft", *common, "--organizer.turns", "3"]) == 2
    assert "organizer: unknown key 'turns'; did you mean 'turn'?" in capsys.readouterr().err
    assert main(["sft", *common, "--organizer.turn", "-3"]) == 2
    assert "turn is -3; expected a whole number from 0" in capsys.readouterr().err
    assert main(["sft", *common, "--recorder.out", "x", "--recorder.signals", "embeded"]) == 2
    assert "did you mean 'embedded'?" in capsys.readouterr().err
    assert main(["sft", *common, "--recorder.out", "x", "--recorder.signals", "embedded:lm_head.weight"]) == 2
    assert "embedded got the target 'lm_head.weight'; expected none" in capsys.readouterr().err
