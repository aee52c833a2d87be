"""Every snippet of the README is run, in its order, by a user who has a dataset and a small model."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [code for name, code in BLOCK.findall((ROOT / "README.md").read_text()) if name == language]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with train.jsonl, E.npy, run.yaml and a small model, as the README's reader has them."""
    import json

    pytest.importorskip("trl", reason="the README trains a model: needs the extra train")
    from sdo.cli.main import main
    from sdo.demo import tiny_model, word_problems

    folder = tmp_path_factory.mktemp("desk")
    problems = word_problems.generate(48, seed=1)
    rows = [{"question": p.prompt, "answer": p.completion} for p in problems]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, tokenizer = tiny_model.build([p.prompt + p.completion for p in problems], seed=0, hidden=32, layers=2)
    model.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    (folder / "run.yaml").write_text(blocks("yaml")[0])
    for run in ("uniform", "sdo"):
        answers = [{"sample_id": i, "correct": (i * len(run)) % 4 > 0} for i in range(len(rows))]
        (folder / f"{run}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    assert main(["embed", str(folder / "train.jsonl"), "--column", "question", "--out", str(folder / "E.npy")]) == 0
    return folder, rows


def test_python_snippets_run_in_their_order(desk, monkeypatch, capsys):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig

    folder, rows = desk
    monkeypatch.chdir(folder)
    # SFTTrainer loads the tokenizer by the model's name, as it does for a hub model.
    model = AutoModelForCausalLM.from_pretrained("tiny")
    AutoTokenizer.from_pretrained("tiny")
    names = {
        "model": model,
        "args": SFTConfig(
            output_dir="output",
            per_device_train_batch_size=4,
            max_steps=12,
            use_cpu=True,
            bf16=False,
            report_to=[],
            eval_strategy="steps",
            eval_steps=6,
            save_strategy="no",
        ),
        "dataset": Dataset.from_list([{"prompt": r["question"], "completion": r["answer"]} for r in rows]),
    }
    snippets = blocks("python")
    assert len(snippets) == 7
    for snippet in snippets:
        code = snippet.replace("train_dataset=dataset", "train_dataset=dataset, eval_dataset=dataset")
        exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - the README's own code
    assert names["handle"].trained.sum() == 12 * 4
    assert len(names["steps"]) == 12
    assert len(names["samples"]) == 2 * 4
    assert list(names["held_out"].index) == [6, 12]
    assert names["matrix"].shape == (12, 12)
    assert "sample_id" in names["dataset"].column_names
    assert "(" in capsys.readouterr().out


def test_commands_run_in_their_order(desk, monkeypatch, capsys):
    from sdo.cli.main import main

    folder, _ = desk
    monkeypatch.chdir(folder)
    small = {
        "embed": ["--overwrite"],
        "doctor": shlex.split("--model_name_or_path tiny --output_dir out --use_cpu true --bf16 false"),
        "probe": shlex.split("--model tiny --output_dir out --samples 64 --batch-size 4 --use_cpu true --bf16 false"),
        "sft": shlex.split("--model_name_or_path tiny --output_dir out --max_steps 3 --use_cpu --bf16 false"),
    }
    ran = []
    for line in blocks("bash")[1].splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "sdo"
        if words[1] == "demo":  # minutes long; its own test runs it
            continue
        arguments = words[1:] + small.get(words[1], [])
        arguments = [word.replace("runs/", "command-runs/") for word in arguments]
        assert main(arguments) == 0, capsys.readouterr().err
        ran.append(words[1])
    analysed = ["coherence", "locality", "exposure", "balance", "report"]
    assert ran == ["embed", "plan", "doctor", "probe", "sft", "sft", *analysed]
    assert (folder / "PLAN.parquet").is_file()
    assert (folder / "probe" / "probe.json").is_file()
    assert (folder / "coherence" / "coherence.json").is_file()
    assert list((folder / "coherence").glob("*.png"))
    assert (folder / "balance" / "balance.json").is_file()
    assert (folder / "report.html").is_file()


# TRL 1.16's GRPO switches it off to generate; transformers 5.24 minds the name.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_.* is deprecated:FutureWarning")
def test_commands_of_other_trainers_run(desk, monkeypatch, capsys):
    import json

    import numpy as np

    from diagnostics.run_folder.writer import RunLog
    from sdo.cli.main import main

    folder, rows = desk
    monkeypatch.chdir(folder)
    answers = [row["answer"] for row in rows]
    pairs = [
        {"prompt": row["question"], "chosen": right, "rejected": wrong}
        for row, right, wrong in zip(rows, answers, answers[1:] + answers[:1], strict=True)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    both = ["model_name_or_path: tiny", "use_cpu: true", "bf16: false", "save_strategy: 'no'", "max_steps: 2"]
    both += ["per_device_train_batch_size: 4", "organizer: {embeddings: E.npy, seed: 1}"]
    (folder / "pairs.yaml").write_text("\n".join([*both, "dataset_name: pairs.jsonl", "output_dir: output"]))
    grpo = ["dataset_name: train.jsonl", "prompt_column: question", "num_generations: 2", "max_completion_length: 4"]
    (folder / "prompts.yaml").write_text("\n".join([*both, *grpo]))
    for seed in (1, 2):
        for kind in ("uniform", "sdo"):
            log = RunLog.create(folder / "seeds" / f"{kind}-{seed}", {"seeds": {"seed": seed}})
            log.add_evaluation(1, "eval_loss", np.arange(3), np.arange(3) / seed)
            log.close()
    ran = []
    for line in blocks("bash")[2].splitlines():
        words = shlex.split(line, comments=True)[1:]
        words = [word.replace("runs/", "seeds/") if words[0] == "compare" else word for word in words]
        assert main(words) == 0, capsys.readouterr().err
        ran.append(words[0])
    assert ran == ["doctor", "dpo", "grpo", "compare"]
    assert (folder / "runs" / "dpo" / "run.json").is_file()
    assert list((folder / "runs" / "grpo" / "evaluations").glob("*.parquet"))


def test_embedding_commands_run(desk, tiny_bert, monkeypatch, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sdo.cli.main import main

    pytest.importorskip("sentence_transformers")
    folder, rows = desk
    monkeypatch.chdir(folder)
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    pq.write_table(pa.table({"messages": chats, "uid": [f"q{i}" for i in range(len(rows))]}), "train.parquet")
    by_model, from_hub = blocks("bash")[3].replace("\\\n", " ").splitlines()
    argv = by_model.replace("sentence-transformers/all-MiniLM-L6-v2", str(tiny_bert))
    assert main(shlex.split(argv)[1:]) == 0
    assert (folder / "chats.npz").is_file()
    # The tests have no network: the hub's data set is either in the cache, or missed in one line.
    capsys.readouterr()
    if main(shlex.split(from_hub)[1:]) != 0:
        error = capsys.readouterr().err
        assert "openai/gsm8k (hub id)" in error
        assert len(error.splitlines()) == 1


def test_make_targets_exist():
    lines = blocks("bash")[0].splitlines()
    targets = [shlex.split(line, comments=True)[1] for line in lines if line.startswith("make")]
    assert targets == ["demo", "test"]
    for target in targets:
        dry = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
        assert "sdo demo" in dry.stdout if target == "demo" else "pytest" in dry.stdout


def test_relative_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+?)(?:#[\w-]+)?\)", (ROOT / "README.md").read_text())
    local = [target for target in targets if "://" not in target]
    assert len(local) >= 4
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_every_command_is_in_the_readme():
    from sdo.cli.commands import COMMANDS

    text = (ROOT / "README.md").read_text()
    assert [name for name in COMMANDS if f"sdo {name} " not in text] == []
