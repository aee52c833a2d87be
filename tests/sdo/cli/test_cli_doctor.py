"""`sdo doctor`: the same run file as `sdo sft`, a report instead of training, and nothing written."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("trl")

import datasets

from sdo import SDO
from sdo.cli.main import main
from sdo.demo.tiny_model import build
from sdo.demo.word_problems import generate

N = 20
PROBLEMS = generate(N, seed=0)
MATRIX = np.random.default_rng(0).standard_normal((N, 5))
WEIGHT = "model.layers.1.mlp.down_proj.weight"
RUN = """
model_name_or_path: model
dataset_name: train.jsonl
output_dir: out
prompt_column: question
completion_column: answer
max_steps: 6
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
report_to: tensorboard
bf16: false
use_cpu: true
save_strategy: no
gradient_checkpointing: false
organizer: {embeddings: E.npy, k: 2, seed: 617}
recorder: {out: run, sketch_size: 64, sample_every: 2}
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Model, data and embeddings, made once and only read."""
    folder = tmp_path_factory.mktemp("house")
    model, tokenizer = build([p.prompt + p.completion for p in PROBLEMS], seed=0, hidden=32, layers=2, vocab=300)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"question": p.prompt, "answer": p.completion} for p in PROBLEMS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    np.save(folder / "E.npy", MATRIX)
    (folder / "run.yaml").write_text(RUN)
    return folder


@pytest.fixture
def here(house, tmp_path, monkeypatch):
    """A fresh working folder with the material in it; its cache and the system's temporary folder lie outside."""
    work = tmp_path / "work"
    shutil.copytree(house, work)
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield work
    datasets.enable_progress_bars()


def doctor(*argv):
    return main(["doctor", "--config", "run.yaml", *map(str, argv)])


def as_json(capsys, *argv, status=0):
    assert doctor(*argv, "--json") == status
    return json.loads(capsys.readouterr().out)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_is_well_and_nothing_is_written(here, capsys):
    before = files(here)
    assert doctor() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all is well"
    assert any(line.startswith("  weight") and f"fires: {WEIGHT} (32 x 128, not tied)" in line for line in lines)
    assert any(line.startswith("micro-step") and "2 row(s)" in line for line in lines)
    assert files(here) == before
    assert sorted(path.name for path in here.iterdir()) == ["E.npy", "model", "run.yaml", "train.jsonl"]
    assert list((here.parent / "temporary").iterdir()) == []


def test_the_report_is_what_the_run_then_holds(here, capsys):
    report = as_json(capsys)
    plan = SDO(MATRIX, k=2, seed=617).plan(4)
    assert report["ok"] is True
    assert report["ids"] == "column 'sample_id', row of the embeddings"
    assert report["organizer"]["steps"] == len(plan.epoch(0).steps)
    assert report["micro_step"]["sample_ids"] == plan.batch(0)[:2].tolist()
    assert report["schedule"] == {"step_samples": 4, "micro_batches": 2, "steps_per_epoch": 5, "steps": 6}
    assert main(["sft", "--config", "run.yaml", "--report_to", "none"]) == 0
    info = json.loads((here / "run" / "run.json").read_text())
    assert {s["name"]: [s["parameter"], s["stored"]] for s in report["signals"]} == {
        name: [signal["parameter"], signal["stored"]] for name, signal in info["signals"].items()
    }
    assert report["model"].items() <= info["model"].items()


def test_overrides_are_those_of_sft(here, capsys):
    pytest.importorskip("peft")
    lora = ["--use_peft", "true", "--lora_target_modules", "q_proj", "down_proj", "--lora_r", 2]
    report = as_json(capsys, *lora, "--recorder.weight", "model.layers.0.self_attn.q_proj.lora_B.weight")
    weight = report["signals"][0]
    assert weight["parameter"] == "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
    assert weight["shape"] == [32, 2]
    assert report["model"]["class"] == "PeftModelForCausalLM"


def test_without_sections_the_defaults_are_looked_at(here, capsys):
    (here / "run.yaml").write_text(RUN.partition("organizer:")[0])
    report = as_json(capsys)
    assert report["organizer"] is None
    assert report["recorder"]["out"] is None
    assert [signal["fires"] for signal in report["signals"]] == [True, True]


@pytest.mark.parametrize(
    ("argv", "reasons"),
    [
        (["--recorder.weight", "lm_head"], ["there is no parameter 'lm_head'"]),
        (["--dataset_train_split", "train[:10]"], []),
        (["--dataset_train_split", "train[5:]"], []),
        (["--organizer.embeddings", "short.npy"], ["short.npy have 19 rows, the dataset has 20"]),
        (["--per_device_train_batch_size", "20"], ["batch size 40 is larger than the 20 samples"]),
        (
            ["--packing", "true", "--ignore_data_skip", "true"],
            ["packing is set", "ignore_data_skip is set", "fix: padding_free=False"],
        ),
        (["--auto_find_batch_size", "true", "--recorder.out", "model"], ["auto_find_batch_size", "holds other files"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*[Pp]ack:UserWarning")
def test_what_is_refused_is_said_with_its_remedy(here, capsys, argv, reasons):
    np.save("short.npy", MATRIX[1:])
    report = as_json(capsys, *argv, status=1 if reasons else 0)
    assert len(report["refused"]) == len(reasons)
    for found, expected in zip(report["refused"], reasons, strict=True):
        assert expected in found
        assert "\n" not in found
    assert report["ok"] is not bool(reasons)
    assert not (here / "run").exists()


def test_a_run_that_is_resumed_may_find_its_folder(here, capsys):
    assert main(["sft", "--config", "run.yaml", "--report_to", "none", "--save_strategy", "steps"]) == 0
    capsys.readouterr()
    assert "run holds another run (6 steps" in as_json(capsys, status=1)["refused"][0]
    before = files(here)
    assert as_json(capsys, "--resume_from_checkpoint", "out/checkpoint-6")["ok"]
    assert files(here) == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learning_rat", "1"], "unknown key 'learning_rat'"),
        (["--model_name_or_path", "missing/model"], "model missing/model"),
        (["--dataset_name", "missing.jsonl"], "no such file"),
        (["--prompt_column", "q"], "has no column 'q'"),
        (["--recorder.sample_every", "-1"], "sample_every is -1"),
        (["--recorder.signals", "head"], "signals are ['head']"),
        (["--resume_from_checkpoint", "nowhere"], "which is no whole checkpoint"),
    ],
)
def test_wrong_input_is_one_line(here, capsys, argv, message):
    assert doctor(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("sdo doctor: ")]
    assert message in line


def test_a_recorder_needs_a_folder(here, capsys):
    (here / "run.yaml").write_text(RUN.replace("{out: run, ", "{"))
    assert doctor() == 2
    assert "recorder.out is missing" in capsys.readouterr().err
