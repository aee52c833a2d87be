"""`sdo sft` end to end: a model folder, a JSON Lines file, a run file; what is on disk afterwards, or the one line."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from trl import SFTConfig, SFTTrainer

from sdo import SDO, Uniform
from sdo.cli.main import main
from sdo.demo.tiny_model import build
from sdo.demo.word_problems import generate

N = 20
PROBLEMS = generate(N, seed=0)
MATRIX = np.random.default_rng(0).standard_normal((N, 5))
Row = namedtuple("Row", ["prompt", "completion"])
WEIGHT = "model.layers.1.mlp.down_proj.weight"
# Values are YAML as a user would write it.
BASE = {
    "prompt_column": "question",
    "completion_column": "answer",
    "max_steps": "6",
    "per_device_train_batch_size": "2",
    "gradient_accumulation_steps": "2",
    "learning_rate": "1e-5",
    "report_to": "none",
    "bf16": "false",
    "use_cpu": "true",
    "save_strategy": "no",
    "gradient_checkpointing": "false",
}
ORGANIZER = {"embeddings": "E.npy", "k": "2", "seed": "617"}
RECORDER = {"out": "run", "sketch_size": "64", "sample_every": "2"}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Model, data and embeddings, made once and only read."""
    folder = tmp_path_factory.mktemp("house")
    model, tokenizer = build([p.prompt + p.completion for p in PROBLEMS], seed=0, hidden=32, layers=2, vocab=300)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "train.jsonl")
    np.save(folder / "E.npy", MATRIX)
    return folder


def write_rows(path, problems=PROBLEMS, **columns):
    rows = [{"question": p.prompt, "answer": p.completion} for p in problems]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def yaml_text(organizer=None, recorder=None, **changes):
    """A run file; None leaves a key out."""
    top = {"model_name_or_path": "model", "dataset_name": "train.jsonl", "output_dir": "out", **BASE, **changes}
    lines = [f"{key}: {value}" for key, value in top.items() if value is not None]
    for name, section in (("organizer", organizer), ("recorder", recorder)):
        if section is not None:
            lines += [f"{name}:", *(f"  {key}: {value}" for key, value in section.items() if value is not None)]
    return "\n".join(lines) + "\n"


def sft(*argv, organizer=None, recorder=None, **changes):
    Path("run.yaml").write_text(yaml_text(organizer, recorder, **changes))
    return main(["sft", "--config", "run.yaml", *map(str, argv)])


def rows(stream, run="run"):
    parts = sorted(Path(run, stream).glob("part-*.parquet"))
    return pa.concat_tables([pq.read_table(p, partitioning=None).replace_schema_metadata() for p in parts])


def info(run="run"):
    return json.loads(Path(run, "run.json").read_text())


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------------- what works


def test_end_to_end(here, capsys):
    assert sft(organizer=ORGANIZER, recorder=RECORDER, save_strategy="steps") == 0
    captured = capsys.readouterr()
    assert "6 steps, mean training loss" in captured.out.splitlines()[-1]
    assert captured.out.splitlines()[-1].endswith("run folder run")
    plan = SDO(MATRIX, k=2, seed=617).plan(4)
    steps = rows("steps")
    assert steps.column("sample_ids").to_pylist() == plan.batches(0, 6).tolist()
    assert steps.column("step").to_pylist() == list(range(6))
    # Linear decay from 1e-5, which PyYAML would read as a string.
    np.testing.assert_allclose(steps.column("learning_rate"), 1e-5 * (1 - np.arange(6) / 6))
    assert min(steps.column("grad_norm").to_pylist()) > 0
    found = info()
    assert found["status"] == "finished"
    assert found["organizer"]["fingerprint"] == plan.fingerprint
    assert found["embeddings"]["path"] == str(Path("E.npy").resolve())
    assert found["trainer"]["learning_rate"] == 1e-5
    assert found["dataset"]["sample_id"] == "column 'sample_id', row of the embeddings"
    assert found["signals"]["weight"]["parameter"] == WEIGHT
    gradients = rows("gradients/weight")
    assert gradients.column("kind").to_pylist().count("step") == 6
    samples = rows("gradients/hidden").filter(pa.compute.field("kind") == "sample")
    assert set(samples.column("step").to_pylist()) == {0, 2, 4}
    assert (
        rows("exposure").column("trained").to_pylist()[:N]
        == np.bincount(plan.batches(0, 6).ravel(), minlength=N).tolist()
    )
    # The trained model is there, with its tokenizer, and has moved.
    assert not same(weights("out"), weights("model"))
    assert AutoTokenizer.from_pretrained("out").eos_token == "<eos>"  # noqa: S105 - no password


def test_the_command_line_lies_over_the_run_file(here):
    argv = ["--learning_rate", "1E-4", "--organizer.k", 3, "--organizer.seed=-0", "--recorder.out", "k3"]
    more = ["--recorder.signals", "hidden", "--max_steps=2", "--organizer.visit", "anchor"]
    assert sft(*argv, *more, organizer=ORGANIZER, recorder=RECORDER) == 0
    found = info("k3")
    assert found["trainer"]["learning_rate"] == 1e-4
    assert found["organizer"]["options"] == SDO(MATRIX, k=3, visit="anchor", seed=0).options
    assert list(found["signals"]) == ["hidden"]
    assert len(rows("steps", "k3")) == 2
    assert not (here / "run").exists()


def test_a_column_of_keys_finds_the_rows_of_embeddings_with_ids(here, capsys):
    keys = [f"p{i}" for i in range(N)]
    np.savez("E.npz", embeddings=MATRIX[::-1], ids=np.array(keys[::-1]))
    write_rows(Path("keyed.jsonl"), uid=keys)
    organizer = {**ORGANIZER, "embeddings": "E.npz", "id_column": "uid"}
    assert sft(dataset_name="keyed.jsonl", organizer=organizer, recorder=RECORDER) == 0
    plan = SDO(MATRIX[::-1], k=2, seed=617).plan(4)
    assert rows("steps").column("sample_ids").to_pylist() == plan.batches(0, 6).tolist()
    assert info()["dataset"]["sample_id"] == "row of the embeddings whose id is in column 'uid'"
    assert info()["embeddings"]["ids"] == "strings"
    capsys.readouterr()
    # Without the embeddings nothing says what the keys mean; nor are true and false the rows 1 and 0.
    write_rows(Path("flags.jsonl"), uid=[i % 2 == 0 for i in range(N)])
    for name in ("keyed.jsonl", "flags.jsonl"):
        assert sft(dataset_name=name, organizer={"name": "uniform", "id_column": "uid"}) == 2
        assert (
            "column 'uid' holds other things than row numbers, and organizer.embeddings is missing"
            in capsys.readouterr().err
        )


def test_ids_that_no_column_names_leave_the_position(here, capsys):
    np.savez("E.npz", embeddings=MATRIX, ids=np.arange(N)[::-1])  # would match positions, wrongly
    assert sft(organizer={**ORGANIZER, "embeddings": "E.npz"}, recorder=RECORDER) == 0
    assert "bring ids, the data have no column 'sample_id': row i of the data is taken" in capsys.readouterr().err
    plan = SDO(MATRIX, k=2, seed=617).plan(4)
    assert rows("steps").column("sample_ids").to_pylist() == plan.batches(0, 6).tolist()


def test_everything_on_the_command_line(here):
    argv = [f"--{key}={value}" for key, value in BASE.items()]
    argv += ["--model_name_or_path", "model", "--dataset_name", "train.jsonl", "--output_dir", "out"]
    argv += ["--organizer.embeddings", "E.npy", "--recorder.out", "run", "--recorder.sketch_size", "16"]
    assert main(["sft", *argv]) == 0
    assert len(rows("steps")) == 6


def test_the_organizers_seed_is_that_of_the_training_unless_given(here):
    assert sft("--seed", 7, "--max_steps", 1, organizer={"embeddings": "E.npy"}, recorder=RECORDER) == 0
    assert info()["organizer"]["options"]["seed"] == 7


@pytest.mark.parametrize("embeddings", [None, "E.npy"])
def test_uniform_needs_no_embeddings(here, embeddings):
    assert sft(organizer={"name": "uniform", "embeddings": embeddings, "seed": "3"}, recorder=RECORDER) == 0
    assert rows("steps").column("sample_ids").to_pylist() == Uniform(N, seed=3).plan(4).batches(0, 6).tolist()


def direct_training(out, problems=PROBLEMS, **changes):
    """The same training through TRL alone."""
    args = SFTConfig(
        output_dir=str(out),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-5,
        report_to="none",
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        **changes,
    )
    data = Dataset.from_list([{"prompt": p.prompt, "completion": p.completion} for p in problems])
    trainer = SFTTrainer(model="model", args=args, train_dataset=data)
    trainer.train()
    return trainer.model.state_dict()


def test_without_sections_it_is_plain_trl(here):
    assert sft(save_strategy="steps") == 0
    assert not (here / "run").exists()
    assert same(weights("out"), direct_training("direct"))


def test_recording_alone_changes_nothing(here):
    assert sft(recorder=RECORDER, save_strategy="steps") == 0
    assert info()["organizer"] is None
    assert same(weights("out"), direct_training("direct"))


def test_a_slice_of_the_data(here):
    """As the paper trains on the first part of GSM8K; the embeddings may cover the whole or the slice."""
    np.save("slice.npy", MATRIX[:14])
    for run, file in (("whole", "E.npy"), ("part", "slice.npy")):
        section = {**ORGANIZER, "embeddings": file}
        assert sft(organizer=section, recorder={**RECORDER, "out": run}, dataset_train_split="train[:14]") == 0
        assert max(max(ids) for ids in rows("steps", run).column("sample_ids").to_pylist()) < 14
    expected = SDO(MATRIX, k=2, seed=617).plan(4, rows=np.arange(14)).batches(0, 6)
    assert rows("steps", "whole").column("sample_ids").to_pylist() == expected.tolist()


def test_rows_with_ids_of_their_own(here):
    write_rows(here / "own.jsonl", PROBLEMS[:12], row=[19 - i for i in range(12)])
    section = {**ORGANIZER, "id_column": "row"}
    assert sft(organizer=section, recorder=RECORDER, dataset_name="own.jsonl") == 0
    expected = SDO(MATRIX, k=2, seed=617).plan(4, rows=np.arange(8, 20)).batches(0, 6)
    assert rows("steps").column("sample_ids").to_pylist() == expected.tolist()


def test_rows_dropped_in_preparation(here):
    """A prompt that fills max_length leaves nothing to learn; TRL drops the row, the others keep their ids."""
    problems = [Row(p.prompt * (9 if i == 5 else 1), p.completion) for i, p in enumerate(PROBLEMS)]
    write_rows(here / "long.jsonl", problems)
    assert sft(organizer=ORGANIZER, recorder=RECORDER, dataset_name="long.jsonl", max_length="300") == 0
    rest = np.setdiff1d(np.arange(N), [5])
    expected = SDO(MATRIX, k=2, seed=617).plan(4, rows=rest).batches(0, 6)
    assert rows("steps").column("sample_ids").to_pylist() == expected.tolist()
    assert info()["dataset"]["rows"] == N - 1


def test_evaluation(here):
    more = {"dataset_train_split": "train[:16]", "dataset_test_split": "train[16:]", "eval_strategy": "steps"}
    assert sft(organizer=ORGANIZER, recorder=RECORDER, eval_steps="3", **more) == 0
    scores = rows("evaluations")
    assert scores.column("step").to_pylist() == [3] * 4 + [6] * 4
    assert set(scores.column("name").to_pylist()) == {"eval_loss"}
    assert np.isfinite(scores.column("score").to_numpy()).all()


def test_evaluating_on_the_training_rows_by_accident_is_refused(here, capsys):
    """One .jsonl file has no test split; taking the file itself would call training rows held out."""
    refused(capsys, sft, organizer=ORGANIZER, recorder=RECORDER, eval_strategy="epoch")


def test_a_split_that_a_file_does_not_have(here, capsys):
    refused(capsys, sft, organizer=ORGANIZER, dataset_train_split="validation")


def test_chat_form(here):
    """With a chat template the rows become conversations; `chat: false` leaves them as they are."""
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer.save_pretrained("model")
    losses = []
    for chat in (None, "false"):
        run = f"run-{chat}"
        assert sft(organizer=ORGANIZER, recorder={**RECORDER, "out": run}, max_steps="2", chat=chat) == 0
        losses.append(rows("steps", run).column("loss").to_pylist())
    assert sft(organizer=ORGANIZER, recorder={**RECORDER, "out": "again"}, max_steps="2", chat="true") == 0
    losses.append(rows("steps", "again").column("loss").to_pylist())
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.parametrize("by_path", [True, False])
def test_resuming(here, by_path):
    """The run folder and the weights are those of an uninterrupted run, wall times aside."""
    saving = {"save_strategy": "steps", "save_steps": "2"}
    assert sft(organizer=ORGANIZER, recorder=RECORDER, **saving) == 0
    for source, copy in (("out", "out2"), ("run", "run2")):
        shutil.copytree(source, copy)
    # As if the job had been killed between the second checkpoint and the third.
    shutil.rmtree("out2/checkpoint-6")
    resume = "out2/checkpoint-4" if by_path else "true"
    argv = ["--resume_from_checkpoint", resume, "--output_dir", "out2", "--recorder.out", "run2"]
    assert sft(*argv, organizer=ORGANIZER, recorder=RECORDER, **saving) == 0
    for stream in ("steps", "gradients/weight", "gradients/hidden", "exposure"):
        first, second = (
            table.drop_columns([c for c in ("seconds", "recorder_seconds") if c in table.column_names])
            for table in (rows(stream), rows(stream, "run2"))
        )
        assert second.equals(first), stream
    assert same(weights("out2"), weights("out"))
    assert (info("run2")["status"], info("run2")["resumed_at"]) == ("finished", [4])


def test_no_bar_is_drawn_off_a_terminal(here, capsys):
    assert sft("--max_steps", 1, organizer=ORGANIZER, recorder=RECORDER) == 0
    captured = capsys.readouterr()
    assert "%|" not in captured.err + captured.out


# ---------------------------------------------------------------------- wrong input


@pytest.fixture(autouse=True)
def training(monkeypatch):
    """Count optimizer steps: a refusal must come before the first of them."""
    steps = []
    original = Trainer.training_step

    def counted(self, *args, **kwargs):
        steps.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", counted)
    return steps


def refused(capsys, command, *argv, **kwargs):
    """Run a command that must be refused in one line; return the line."""
    capsys.readouterr()
    status = command(*argv, **kwargs)
    captured = capsys.readouterr()
    assert status == 2
    # Loading a model may draw a bar of its own; the refusal itself is one line, the last one.
    ours = [line for line in captured.err.splitlines() if line.startswith("sdo")]
    assert len(ours) == 1
    assert captured.err.splitlines()[-1] == ours[0]
    assert "Traceback" not in captured.err
    return ours[0]


CASES = {
    "unknown key": (["--learning_rat", "1"], {}, "unknown key 'learning_rat'; did you mean 'learning_rate'?"),
    "unknown organizer key": (
        ["--organizer.delta_tua", "3"],
        {},
        "organizer: unknown key 'delta_tua'; did you mean 'delta_tau'?",
    ),
    "unknown recorder key": (
        [],
        {"recorder": {**RECORDER, "sample_evry": "1"}},
        "recorder: unknown key 'sample_evry'; did you mean 'sample_every'?",
    ),
    "unknown section": (["--recoder.out", "x"], {}, "unknown section 'recoder'; did you mean 'recorder'?"),
    "wrong type": (["--organizer.k", "four"], {}, "organizer.k: got 'four' (str), expected int"),
    "not a number": (["--learning_rate", "fast"], {}, "learning_rate: got 'fast' (str), expected float"),
    "not an option": (["surplus"], {}, "unexpected argument 'surplus'"),
    "no model": ([], {"model_name_or_path": None}, "model_name_or_path is missing"),
    "no dataset": ([], {"dataset_name": None}, "dataset_name is missing"),
    "dataset not there": ([], {"dataset_name": "none.jsonl"}, "none.jsonl: no such file"),
    "prompt column not there": (
        [],
        {"prompt_column": "querstion"},
        "has no column 'querstion'; did you mean 'question'? its columns are question, answer",
    ),
    "one column only": ([], {"completion_column": None}, "prompt_column and completion_column go together"),
    "model not there": ([], {"model_name_or_path": "missing/model"}, "model missing/model: "),
    "recorder without out": ([], {"recorder": {"sketch_size": "8"}}, "recorder.out is missing"),
    "organizer without embeddings": ([], {"organizer": {"k": "2"}}, "organizer.embeddings is missing"),
    "embeddings not there": (["--organizer.embeddings", "none.npy"], {}, "none.npy: no such file"),
    "too few embeddings": (["--organizer.embeddings", "short.npy"], {}, "have 19 rows, the dataset has 20"),
    "too many embeddings": (["--organizer.embeddings", "long.npy"], {}, "have 21 rows, the dataset has 20"),
    "NaN in embeddings": (["--organizer.embeddings", "nan.npy"], {}, "are zero: 3;"),
    "1-D embeddings": (["--organizer.embeddings", "flat.npy"], {}, "expected (N, d)"),
    "k out of range": (["--organizer.k", "0"], {}, "k is 0; expected a whole number from 1"),
    "retain out of range": (["--organizer.retain", "1.5"], {}, "retain is 1.5"),
    "seed out of range": (["--organizer.seed", "-1"], {}, "seed is -1"),
    "another locality": (["--organizer.locality", "none"], {}, "expected one of 'knn', 'random', 'shuffle'"),
    "batch over N": (["--gradient_accumulation_steps", "11"], {}, "batch size 22 is larger than the 20 samples"),
    "packing": (["--packing", "true"], {}, "packing is set"),
    "no such weight": (
        ["--recorder.weight", "model.layers.1.mlp.down_proj.weigth"],
        {},
        f"there is no parameter 'model.layers.1.mlp.down_proj.weigth'; nearest trainable names: {WEIGHT}",
    ),
    "signal unknown": (["--recorder.signals", "head"], {}, "head"),
    "sketch size out of range": (["--recorder.sketch_size", "0"], {}, "sketch_size is 0"),
    "no such checkpoint": (["--resume_from_checkpoint", "nowhere"], {}, "nowhere"),
    "no checkpoint yet": (["--resume_from_checkpoint", "true"], {}, "checkpoint"),
    "no batch": (
        ["--per_device_train_batch_size", "0"],
        {},
        "per_device_train_batch_size is 0; expected a number from 1",
    ),
    "batch below zero": (
        ["--per_device_train_batch_size=-2"],
        {},
        "per_device_train_batch_size is -2; expected a number",
    ),
    "no accumulation": (
        ["--gradient_accumulation_steps", "0"],
        {"organizer": None},
        "gradient_accumulation_steps is 0",
    ),
    "length below zero": (["--max_length=-2"], {}, "max_length is -2; expected a number from 1"),
    "workers below zero": (
        ["--dataloader_num_workers=-1"],
        {},
        "dataloader_num_workers is -1; expected a number from 0",
    ),
    "learning rate NaN": (["--learning_rate", ".nan"], {}, "learning_rate is nan; expected a number from 0"),
    "beta of one": (["--adam_beta2", "1"], {}, "adam_beta2 is 1.0; expected a number from 0 and below 1"),
    "columns TRL does not know": ([], {"prompt_column": None, "completion_column": None}, "column"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_wrong_input_is_one_line_before_any_training(here, capsys, training, case):
    argv, changes, message = CASES[case]
    nan = MATRIX.copy()
    nan[3, 0] = np.nan
    for name, matrix in (
        ("short", MATRIX[:19]),
        ("long", np.concatenate([MATRIX, MATRIX[:1]])),
        ("nan", nan),
        ("flat", MATRIX[0]),
    ):
        np.save(f"{name}.npy", matrix)
    line = refused(capsys, sft, *argv, **{"organizer": ORGANIZER, "recorder": RECORDER, **changes})
    assert message in line
    assert training == []
    assert not (here / "run").exists()


def broken(folder, file, content):
    """Put something else in the place of a model's file; None removes it."""
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)


BROKEN = {
    "no config": ("config.json", None, "model model: ValueError: Unrecognized model in model."),
    "empty config": ("config.json", b"", "config file at 'model/config.json' is not a valid JSON file"),
    "config in brackets": ("config.json", b"[" * 100_000, "model model: RecursionError: maximum recursion depth"),
    "unknown kind": ("config.json", b'{"model_type": "nonsense"}', "has model type `nonsense` but Transformers"),
    "no architecture": (
        "config.json",
        b'{"model_type": "bert"}',
        "with the model model (its config.json names no archi",
    ),
    "heads that do not fit": (
        "config.json",
        b'{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 3}',
        "The hidden size (32) is not a multiple of the number of attention heads (3)",
    ),
    "no tokenizer": ("tokenizer.json", None, "model model: ValueError: Couldn't instantiate the backend tokenizer"),
    "broken tokenizer": ("tokenizer.json", b"{broken", "model model: JSONDecodeError: Expecting property name"),
    "no weights": ("model.safetensors", None, "with the model model (LlamaForCausalLM): OSError: Error no file named"),
    "empty weights": ("model.safetensors", b"", "SafetensorError: Error while deserializing header"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_one_line(here, capsys, training, case):
    file, content, message = BROKEN[case]
    broken(here / "model", file, content)
    Path("run.yaml").touch()
    before = listing(here)
    assert message in refused(capsys, sft)
    assert listing(here) == before
    assert training == []


@pytest.mark.parametrize("command", ["doctor", "dpo", "grpo", "probe"])
def test_a_model_folder_without_config_is_one_line_elsewhere_too(here, capsys, command):
    broken(here / "model", "config.json", None)
    argv = [
        "--model_name_or_path",
        "model",
        "--dataset_name",
        "train.jsonl",
        "--report_to",
        "none",
        "--use_cpu",
        "true",
    ]
    more = {"probe": ["--embeddings", "E.npy", "--out", "probe"], "grpo": ["--reward", "gsm8k"]}
    assert "model model: ValueError: Unrecognized model" in refused(
        capsys, main, [command, *argv, "--bf16", "false", *more.get(command, [])]
    )


def test_a_mistake_of_ours_keeps_its_traceback(here, monkeypatch):
    """Errors of the packages below become one line; a call that does not fit them is our own."""
    monkeypatch.setattr("trl.SFTTrainer", lambda: None)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        sft(output_dir="new")
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_steps: 3\nmax_steps: 4\n", "run.yaml:2"),
        ("organizer: 4\n", "organizer"),
        ("- a\n- b\n", "run.yaml"),
        ("a: [1\n", "run.yaml"),
        ("organizer:\n  k: 2\n  kk: 3\n", "run.yaml:3"),
    ],
    ids=["twice", "section without keys", "a list", "not YAML", "line of the key"],
)
def test_wrong_run_files(here, capsys, text, message):
    (here / "run.yaml").write_text(text)
    assert message in refused(capsys, main, ["sft", "--config", "run.yaml"])
    assert "missing.yaml" in refused(capsys, main, ["sft", "--config", "missing.yaml"])


def test_malformed_data(here, capsys, training):
    (here / "broken.jsonl").write_text('{"question": "a"\n{"quest')
    assert "broken.jsonl" in refused(capsys, sft, organizer=ORGANIZER, dataset_name="broken.jsonl")
    (here / "empty.jsonl").write_text("")
    assert "empty.jsonl" in refused(capsys, sft, organizer=ORGANIZER, dataset_name="empty.jsonl")
    assert "has no rows" in refused(capsys, sft, organizer=ORGANIZER, dataset_train_split="train[20:]")
    assert training == []


@pytest.mark.parametrize("recorder", [None, RECORDER])
def test_rows_of_nothing_but_empty_texts(here, capsys, training, recorder):
    """TRL trains them to a loss of 0."""
    write_rows(here / "train.jsonl", [Row("", "")] * N)
    assert f"no token of the training dataset's {N} row(s) is trained on" in refused(capsys, sft, recorder=recorder)
    assert training == []
    assert not (here / "run").exists()


def test_an_empty_evaluation_split(here, capsys, training):
    """Found before training, not at the first evaluation."""
    line = refused(
        capsys,
        sft,
        organizer=ORGANIZER,
        dataset_test_split="train[20:]",
        eval_strategy="steps",
        eval_steps="3",
    )
    assert "train[20:]" in line
    assert training == []


# LoRA's name for a matrix that it leaves as it is.
FROZEN = "base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own
def test_a_frozen_weight(here, capsys, training):
    pytest.importorskip("peft")
    line = refused(capsys, sft, "--use_peft", "true", "--recorder.weight", FROZEN, recorder=RECORDER)
    assert "is frozen and gets no gradient; nearest trainable names: " in line
    assert "lora_" in line
    assert training == []
    assert not (here / "run").exists()


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_folder_with_another_run_is_left_as_it_is(here, capsys, training):
    assert sft(organizer=ORGANIZER, recorder=RECORDER) == 0
    before = snapshot(here / "run")
    training.clear()
    line = refused(capsys, sft, organizer=ORGANIZER, recorder=RECORDER, model_name_or_path="missing/model")
    assert "run holds another run" in line  # before anything was loaded
    assert training == []
    assert snapshot(here / "run") == before


def test_resuming_into_another_run(here, capsys, training):
    """The checkpoint of one run and the folder of another: neither is touched."""
    saving = {"save_strategy": "steps", "save_steps": "3"}
    assert sft(organizer=ORGANIZER, recorder=RECORDER, **saving) == 0
    other = {**ORGANIZER, "k": "3"}
    assert sft(organizer=other, recorder={**RECORDER, "out": "other"}, output_dir="out2") == 0
    before = snapshot(here / "other"), snapshot(here / "run")
    training.clear()
    resume = ["--resume_from_checkpoint", "out/checkpoint-3"]
    line = refused(capsys, sft, *resume, organizer=ORGANIZER, recorder={**RECORDER, "out": "other"}, **saving)
    assert "other holds a run under another plan: k = 3 then and 2 now" in line
    line = refused(capsys, sft, *resume, organizer=other, recorder=RECORDER, **saving)
    assert "written under another plan: k = 2 then and 3 now" in line
    assert training == []
    assert (snapshot(here / "other"), snapshot(here / "run")) == before


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "cache" not in path.parts)


@pytest.mark.parametrize(
    "argv",
    [
        ["--packing", "true"],
        ["--gradient_accumulation_steps", "11"],
        ["--recorder.weight", "none"],
        ["--recorder.signals", "head"],
        ["--dataset_train_split", "train[20:]"],
        ["--model_name_or_path", "missing/model"],
    ],
)
def test_a_refused_training_leaves_nothing_that_was_not_there(here, capsys, training, argv):
    outputs = {"output_dir": "new/deep/out", "recorder": {**RECORDER, "out": "new/runs/run"}}
    Path("run.yaml").touch()
    before = listing(here)
    refused(capsys, sft, *argv, organizer=ORGANIZER, **outputs)
    assert listing(here) == before
    Path("new/deep/out").mkdir(parents=True)  # what was there stays, though it is empty
    refused(capsys, sft, *argv, organizer=ORGANIZER, **outputs)
    assert listing(here) == sorted([*before, "new", "new/deep", "new/deep/out"])
    assert training == []


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"output_dir": "train.jsonl/out"}, "output_dir train.jsonl/out cannot be written: Not a directory"),
        ({"output_dir": "train.jsonl"}, "output_dir train.jsonl cannot be written: a file stands there"),
        ({"output_dir": "/proc/nothing"}, "output_dir /proc/nothing cannot be written"),
        ({"output_dir": "o" * 300}, "cannot be written: File name too long"),
        ({"output_dir": '"a\\0b"'}, "cannot be written: embedded null byte"),
        ({"output_dir": "earlier/steps"}, "output_dir earlier/steps is in the run folder"),
        ({"output_dir": "model"}, "output_dir model is the folder of the model that is trained"),
        ({"output_dir": "run/out"}, "output_dir run/out is in recorder.out run"),
        ({"output_dir": "run"}, "output_dir run is in recorder.out run"),
        (
            {"output_dir": "data/out", "dataset_name": "data"},
            "output_dir data/out is in the folder data, ",
        ),
        ({"recorder": {"out": "earlier/more"}}, "recorder.out earlier/more is in the run folder"),
        ({"recorder": {"out": "data/run"}, "dataset_name": "data"}, "recorder.out data/run is in the folder data"),
        ({"recorder": {"out": "train.jsonl/run"}}, "recorder.out train.jsonl/run cannot be written"),
        ({"recorder": {"out": '"a\\0b"'}}, "holds a NUL character"),
    ],
)
def test_places_that_outputs_cannot_have(here, capsys, training, outputs, message):
    """Said before a model is loaded; the doctor, who writes nowhere, says it too."""
    Path("earlier/steps").mkdir(parents=True)
    Path("earlier/run.json").write_text('{"format": "sdo-run"}')
    Path("data").mkdir()
    write_rows(Path("data/train.jsonl"))
    Path("run.yaml").touch()
    before = listing(here)
    given = {"recorder": RECORDER, **outputs}
    assert message in refused(capsys, sft, model_name_or_path="model", **given)
    assert main(["doctor", "--config", "run.yaml"]) == 1
    assert message in " ".join(capsys.readouterr().out.split())
    assert listing(here) == before
    assert training == []


def test_a_file_in_the_run_folders_place(here, capsys):
    (here / "run").write_text("mine")
    assert "run" in refused(capsys, sft, organizer=ORGANIZER, recorder=RECORDER)
    assert (here / "run").read_text() == "mine"


def test_thresholds_between_whole_numbers(here):
    """`SDO` and `sdo plan` take delta_tau 1.5; a run file may hold it as well."""
    assert sft("--max_steps", 1, organizer={**ORGANIZER, "delta_tau": "1.5"}, recorder=RECORDER) == 0
    assert info()["organizer"]["fingerprint"] == SDO(MATRIX, k=2, delta_tau=1.5, seed=617).plan(4).fingerprint


def test_embeddings_of_the_same_rows_in_another_order_are_warned_of(here, capsys):
    """Reordered data fit in number; only the record of sdo embed can tell."""
    rows = (here / "train.jsonl").read_text().splitlines()
    assert main(["embed", "train.jsonl", "--column", "question", "--out", "F.npy"]) == 0
    (here / "reversed.jsonl").write_text("\n".join(reversed(rows)) + "\n")
    given = {"organizer": {"embeddings": "F.npy"}, "recorder": {"out": "right"}}
    assert sft("--max_steps", 1, **given) == 0
    assert "was made from other texts" not in capsys.readouterr().err
    given = {"organizer": {"embeddings": "F.npy"}, "recorder": {"out": "wrong"}}
    assert sft("--max_steps", 1, "--dataset_name", "reversed.jsonl", **given) == 0
    assert "F.npy was made from other texts than column 'question' of the data" in capsys.readouterr().err


def test_rows_that_trl_drops_are_said_aloud(here, capsys):
    long = [*PROBLEMS[:-2], *(replace(p, prompt=p.prompt + " more" * 400) for p in PROBLEMS[-2:])]
    write_rows(here / "train.jsonl", long)
    assert sft(max_length=200, max_steps=1) == 0
    assert "note: TRL dropped 2 of 20 rows: rows whose completion lies beyond max_length=200" in capsys.readouterr().out
    assert sft(max_length=2, max_steps=1) == 2
    assert "the training dataset is empty: TRL dropped all 20 rows whose completion lies" in capsys.readouterr().err
