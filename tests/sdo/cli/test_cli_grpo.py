"""`sdo grpo` end to end: a model folder, a JSON Lines file, a run file; what is on disk afterwards, or the one line."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("trl")

from datasets import Dataset

from sdo import SDO, InputError
from sdo.cli.grpo import GRPOColumns, as_prompts
from sdo.cli.main import main
from sdo.demo.tiny_model import build
from sdo.demo.word_problems import generate

N = 12
PROBLEMS = generate(N, seed=0)
MATRIX = np.random.default_rng(0).standard_normal((N, 5))
# Values are YAML as a user would write it.
BASE = {
    "model_name_or_path": "model",
    "dataset_name": "train.jsonl",
    "output_dir": "out",
    "prompt_column": "question",
    "reward": "own_rewards:length",
    "max_steps": "3",
    "per_device_train_batch_size": "4",
    "gradient_accumulation_steps": "2",
    "num_generations": "2",
    "max_completion_length": "3",
    "report_to": "none",
    "bf16": "false",
    "use_cpu": "true",
    "save_strategy": "no",
    "gradient_checkpointing": "false",
}
OWN = "def length(completions, **kwargs):\n    return [float(len(text) % 2) for text in completions]\n"


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Model, data, embeddings and a reward, made once and only read."""
    folder = tmp_path_factory.mktemp("house")
    model, tokenizer = build([p.prompt + p.completion for p in PROBLEMS], seed=0, hidden=32, layers=2, vocab=300)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"question": p.prompt, "answer": p.completion} for p in PROBLEMS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own_rewards.py").write_text(OWN)
    np.save(folder / "E.npy", MATRIX)
    return folder


@pytest.fixture
def here(here, monkeypatch):
    """The same, where a module of rewards of its own may be imported."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield here
    sys.modules.pop("own_rewards", None)


def grpo(*argv, command="grpo", **changes):
    top = {**BASE, **changes}
    sections = "organizer:\n  embeddings: E.npy\n  k: 2\n  seed: 617\nrecorder:\n  out: run\n  sample_every: 1\n"
    Path("run.yaml").write_text("".join(f"{k}: {v}\n" for k, v in top.items() if v is not None) + sections)
    return main([command, "--config", "run.yaml", *map(str, argv)])


def test_end_to_end(here, capsys):
    assert grpo(reward="[own_rewards:length, gsm8k]") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("run folder run")
    plan = SDO(MATRIX, k=2, seed=617).plan(4)
    steps = pd.read_parquet("run/steps")
    assert [sorted(ids) for ids in steps.sample_ids] == [sorted([*b, *b]) for b in plan.batches(0, 3).tolist()]
    rewards = pd.read_parquet("run/evaluations")
    assert rewards.groupby("name").size().to_dict() == {"reward": 24, "reward/gsm8k": 24, "reward/length": 24}
    assert set(rewards.query("name == 'reward/gsm8k'").score) <= {0.0, 1.0}
    info = json.loads(Path("run/run.json").read_text())
    assert info["meaning"]["trainer"] == "GRPOTrainer"
    assert info["dataset"]["sample_id"].startswith("column 'sample_id'")


def test_a_run_without_organizer_is_recorded_too(here):
    top = {**BASE, "max_steps": "1"}
    Path("run.yaml").write_text("".join(f"{k}: {v}\n" for k, v in top.items()) + "recorder:\n  out: run\n")
    assert main(["grpo", "--config", "run.yaml"]) == 0
    assert len(pd.read_parquet("run/steps").sample_ids[0]) == 8


def test_the_doctor_looks_at_it(here, capsys):
    assert grpo("--method", "grpo", command="doctor") == 0
    report = capsys.readouterr().out
    assert report.startswith("all is well")
    assert "the rows are completions of one prompt, cut at 3 tokens" in report
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("argv", "changes", "message"),
    [
        ((), {"reward": None}, "reward is missing; expected gsm8k, math_verify or module:function"),
        ((), {"reward": "gsm"}, "reward is 'gsm'; expected gsm8k"),
        ((), {"reward": "own_rewards:width"}, "module own_rewards has no width"),
        ((), {"prompt_column": "questions"}, "has no column 'questions'; did you mean 'question'?"),
        ((), {"prompt_column": None}, "expected prompt; fix: name yours with prompt_column"),
        ((), {"reward": "gsm8k", "answer_column": "key"}, "has no column 'key'"),
        ((), {"system_prompt": "Be brief."}, "expected a tokenizer with a chat template"),
        ((), {"num_generations": "3"}, "must be divisible by num_generations"),
        ((), {"steps_per_generation": "3", "num_generations": "2"}, "optimizer steps would mix generation batches"),
        (("--organizer.k",), {}, "--organizer.k came without a value"),
    ],
)
def test_wrong_input_is_one_line(here, capsys, argv, changes, message):
    assert grpo(*argv, **changes) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("sdo grpo: ")
    assert message in lines[-1]
    assert not Path("run").exists()


def test_prompts_become_chats_where_there_is_a_template():
    rows = Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"], "sample_id": [4, 5]})
    asked = {"id_column": "sample_id", "what": "the data"}
    chat, plain = SimpleNamespace(chat_template="{{ messages }}"), SimpleNamespace(chat_template=None)
    options = GRPOColumns(prompt_column="prompt", system_prompt="s")
    made = as_prompts(rows, options, chat, **asked)
    assert made[1] == {
        "answer": "2",
        "sample_id": 5,
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}],
    }
    assert as_prompts(rows, GRPOColumns(prompt_column="answer"), plain, **asked)["prompt"] == ["1", "2"]
    assert as_prompts(rows, GRPOColumns(), chat, **asked)["prompt"] == ["a", "b"]
    with pytest.raises(InputError, match="which has no number"):
        as_prompts(rows, GRPOColumns(reward=["gsm8k"], answer_column="prompt"), chat, **asked)
