"""`sdo dpo` end to end: pairs in a file, a run file; what is on disk afterwards, or the one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from trl import DPOConfig, DPOTrainer

from sdo import SDO
from sdo.cli.main import main
from sdo.demo.tiny_model import build
from sdo.demo.word_problems import generate

N = 12
PROBLEMS = generate(N, seed=0)
PAIRS = [
    {"question": p.prompt, "good": p.completion, "bad": p.completion[::-1][: 8 + n % 5]} for n, p in enumerate(PROBLEMS)
]
MATRIX = np.random.default_rng(0).standard_normal((N, 5))
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SHARED = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "beta": 0.3,
    "report_to": "none",
    "bf16": False,
    "use_cpu": True,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}
KEYS = {
    "model_name_or_path": "model",
    "dataset_name": "train.jsonl",
    "output_dir": "out",
    "prompt_column": "question",
    "chosen_column": "good",
    "rejected_column": "bad",
    **SHARED,
}
ORGANIZER = {"embeddings": "E.npy", "k": 2, "seed": 617}
RECORDER = {"out": "run", "sketch_size": 64, "sample_every": 2, "signals": ["weight", "hidden", "head_only"]}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Model, data and embeddings, made once and only read."""
    folder = tmp_path_factory.mktemp("house")
    texts = [row["question"] + row["good"] for row in PAIRS]
    model, tokenizer = build(texts, seed=0, hidden=32, layers=2, vocab=300)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    np.save(folder / "E.npy", MATRIX)
    return folder


@pytest.fixture(autouse=True)
def training(monkeypatch):
    """Count micro-batches: a refusal must come before the first of them."""
    steps = []
    original = Trainer.training_step

    def counted(self, *args, **kwargs):
        steps.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", counted)
    return steps


def run(command, *argv, organizer=None, recorder=None, **changes):
    """Write a run file (JSON is YAML) and run a command with it; None leaves a key out."""
    keys = {key: value for key, value in {**KEYS, **changes}.items() if value is not None}
    sections = {name: value for name, value in (("organizer", organizer), ("recorder", recorder)) if value is not None}
    Path("run.yaml").write_text(json.dumps({**keys, **sections}))
    return main([command, "--config", "run.yaml", *map(str, argv)])


def dpo(*argv, **given):
    return run("dpo", *argv, **given)


def rows(stream, folder="run"):
    parts = sorted(Path(folder, stream).glob("part-*.parquet"))
    return pa.concat_tables([pq.read_table(p, partitioning=None).replace_schema_metadata() for p in parts])


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def direct(out, **changes):
    """The same training through TRL alone."""
    data = [{"prompt": r["question"], "chosen": r["good"], "rejected": r["bad"]} for r in PAIRS]
    args = DPOConfig(output_dir=str(out), disable_tqdm=True, **{**SHARED, **changes})
    trainer = DPOTrainer(model="model", args=args, train_dataset=Dataset.from_list(data))
    trainer.train()
    return trainer.model.state_dict()


def test_end_to_end(here, capsys):
    assert dpo(organizer=ORGANIZER, recorder=RECORDER, save_strategy="steps") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "data: file train.jsonl, 12 rows" in lines
    assert lines[-1].startswith("4 steps, mean training loss ")
    assert lines[-1].endswith("run folder run")
    plan = SDO(MATRIX, k=2, seed=617).plan(4)
    steps = rows("steps")
    assert steps.column("sample_ids").to_pylist() == plan.batches(0, 4).tolist()
    assert steps.column("loss").to_pylist()[0] == pytest.approx(np.log(2), rel=1e-5)  # policy and reference are one
    info = json.loads(Path("run", "run.json").read_text())
    assert info["meaning"]["trainer"] == "DPOTrainer"
    assert list(info["signals"]) == RECORDER["signals"]
    for signal in ("hidden", "head_only"):
        kinds = rows(f"gradients/{signal}").column("kind").to_pylist()
        assert [kinds.count(kind) for kind in ("step", "micro_batch", "sample")] == [4, 8, 8]
    assert not same(weights("out"), weights("model"))


def test_without_sections_it_is_plain_trl(here):
    assert dpo(save_strategy="steps") == 0
    assert not (here / "run").exists()
    assert same(weights("out"), direct("direct"))


def test_recording_alone_changes_nothing(here):
    assert dpo(recorder=RECORDER, save_strategy="steps") == 0
    assert same(weights("out"), direct("direct"))


def test_trls_own_arguments_reach_the_trainer(here):
    assert dpo("--loss_type", "ipo", "--beta", "0.2", save_strategy="steps") == 0
    assert same(weights("out"), direct("direct", loss_type=["ipo"], beta=0.2))


# datasets 4.7 leaves a CSV file to pandas to close, which 2.2 does when it is collected.
@pytest.mark.filterwarnings(r"ignore:Exception ignored in. <_io\.FileIO:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("form", ["csv", "parquet", "folder"])
def test_other_sources(here, capsys, form):
    table = pa.Table.from_pylist(PAIRS)
    if form == "csv":
        pyarrow.csv.write_csv(table, "pairs.csv")
        name = "pairs.csv"
    elif form == "parquet":
        pq.write_table(table, "pairs.parquet")
        name = "pairs.parquet"
    else:
        Dataset.from_list(PAIRS).save_to_disk("pairs")
        name = "pairs"
    assert dpo("--max_steps", 1, organizer=ORGANIZER, recorder=RECORDER, dataset_name=name) == 0
    place = f"folder {name}, split train" if form == "folder" else f"file {name}"
    assert f"data: {place}, 12 rows" in capsys.readouterr().out
    assert rows("steps").column("sample_ids").to_pylist() == SDO(MATRIX, k=2, seed=617).plan(4).batches(0, 1).tolist()


def test_trls_own_columns(here):
    data = [{"prompt": r["question"], "chosen": r["good"], "rejected": r["bad"], "note": "x"} for r in PAIRS]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    given = {"prompt_column": None, "chosen_column": None, "rejected_column": None, "save_strategy": "steps"}
    assert dpo(dataset_name="own.jsonl", **given) == 0
    assert same(weights("out"), direct("direct"))


def test_pairs_without_a_prompt(here):
    """Both answers begin with it, and TRL finds it."""
    data = [{"yes": r["question"] + r["good"], "no": r["question"] + r["bad"]} for r in PAIRS]
    Path("whole.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    given = {"prompt_column": None, "chosen_column": "yes", "rejected_column": "no"}
    assert dpo("--max_steps", 2, dataset_name="whole.jsonl", organizer=ORGANIZER, recorder=RECORDER, **given) == 0
    assert min(rows("steps").column("tokens").to_pylist()) > 0


def test_chat_form(here):
    """With a chat template plain rows become conversations; `chat: false` leaves them as they are."""
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("model")
    margins = []
    for chat in (None, True, False):
        given = {"eval_strategy": "steps", "eval_on_start": True, "dataset_test_split": "train[:4]", "max_steps": 1}
        assert dpo(recorder={**RECORDER, "out": f"run-{chat}"}, chat=chat, **given) == 0
        scores = rows("evaluations", f"run-{chat}")
        assert set(scores.column("name").to_pylist()) == {"eval_logp_margin"}
        margins.append(scores.column("score").to_pylist()[:4])
    assert margins[0] == margins[1] != margins[2]


def test_rows_dropped_in_preparation(here):
    """A prompt that fills max_length leaves nothing to prefer; TRL drops the pair, the others keep their ids."""
    data = [{**row, "question": row["question"] * (9 if n == 5 else 1)} for n, row in enumerate(PAIRS)]
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    assert dpo(organizer=ORGANIZER, recorder=RECORDER, dataset_name="long.jsonl", max_length=300) == 0
    expected = SDO(MATRIX, k=2, seed=617).plan(4, rows=np.setdiff1d(np.arange(N), [5])).batches(0, 4)
    assert rows("steps").column("sample_ids").to_pylist() == expected.tolist()


def test_resuming(here):
    """The run folder and the weights are those of an uninterrupted run, wall times aside."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    assert dpo(organizer=ORGANIZER, recorder=RECORDER, **saving) == 0
    for source, copy in (("out", "out2"), ("run", "run2")):
        shutil.copytree(source, copy)
    argv = ["--resume_from_checkpoint", "out2/checkpoint-2", "--output_dir", "out2", "--recorder.out", "run2"]
    assert dpo(*argv, organizer=ORGANIZER, recorder=RECORDER, **saving) == 0
    for stream in ("steps", "gradients/weight", "gradients/hidden", "gradients/head_only", "exposure"):
        first, second = (
            table.drop_columns([c for c in ("seconds", "recorder_seconds") if c in table.column_names])
            for table in (rows(stream), rows(stream, "run2"))
        )
        assert second.equals(first), stream
    assert same(weights("out2"), weights("out"))


def test_the_doctor_looks_at_it(here, capsys, training):
    given = {"organizer": ORGANIZER, "recorder": RECORDER}
    assert run("doctor", "--method", "dpo", "--json", **given) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["ok"]
    assert [signal["fires"] for signal in found["signals"]] == [True] * 3
    assert found["micro_step"]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert "data: file train.jsonl, 12 rows" in captured.err
    assert training == []
    assert not (here / "run").exists()
    assert not (here / "out").exists()


CASES = {
    "unknown key": (["--betta", "1"], {}, "unknown key 'betta'; did you mean 'beta'?"),
    "a key of sdo sft": (["--completion_column", "good"], {}, "unknown key 'completion_column'"),
    "column not there": (["--rejected_column", "bat"], {}, "has no column 'bat'; did you mean 'bad'?"),
    "no columns": (
        [],
        {"prompt_column": None, "chosen_column": None, "rejected_column": None},
        "has the columns question, good, bad; expected chosen and rejected, and prompt unless both begin with it",
    ),
    "one column only": ([], {"rejected_column": None}, "expected chosen and rejected"),
    "data not there": ([], {"dataset_name": "none.jsonl"}, "dataset_name none.jsonl: no such file"),
    "another ending": ([], {"dataset_name": "run.yaml"}, "dataset_name run.yaml ends in .yaml; expected .jsonl, .csv"),
    "no data": ([], {"dataset_name": None}, "dataset_name is missing"),
    "a refusal of TRL's": (
        ["--sync_ref_model", "true", "--precompute_ref_log_probs", "true"],
        {},
        "DPOTrainer refuses: You cannot use `sync_ref_model=True` together with",
    ),
    "too few embeddings": (["--organizer.embeddings", "short.npy"], {}, "have 11 rows, the dataset has 12"),
    "signal unknown": (["--recorder.signals", "head"], {}, "did you mean 'head_only'? expected some of weight, hidden"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_wrong_input_is_one_line_before_any_training(here, capsys, training, case):
    argv, changes, message = CASES[case]
    np.save("short.npy", MATRIX[:11])
    capsys.readouterr()
    assert dpo(*argv, **{"organizer": ORGANIZER, "recorder": RECORDER, **changes}) == 2
    ours = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sdo dpo: ")]
    assert len(ours) == 1
    assert message in ours[0]
    assert training == []
    assert not (here / "run").exists()
