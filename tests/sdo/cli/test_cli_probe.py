"""`sdo probe` through the command, on a tiny model whose gradients follow the embeddings given, or do not."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest

pytest.importorskip("trl")

import datasets
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from analysis.probe.design import design_probe
from sdo import SDO, Embeddings
from sdo.cli.main import main
from sdo.demo.tiny_model import build
from sdo.demo.word_problems import generate

N, B, SAMPLES = 96, 4, 96
PROBLEMS = generate(N, seed=0)
WEIGHT = "model.layers.1.mlp.down_proj.weight"
OPTIONS = (
    *("--model", "model", "--data", "train.jsonl", "--prompt_column", "question", "--completion_column", "answer"),
    *("--batch-size", str(B), "--samples", str(SAMPLES), "--use_cpu", "true", "--bf16", "false", "--seed", "617"),
)


def hidden_gradients(folder):
    """By plain autograd: each sample's gradient at the final norm's output, of the mean loss of its completion."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found, tokens, kept = [], [], []
    model.model.norm.register_forward_hook(lambda module, args, output: kept.append(output))
    for problem in PROBLEMS:
        prompt = tokenizer(problem.prompt)["input_ids"]
        whole = tokenizer(problem.prompt + problem.completion)["input_ids"] + [tokenizer.eos_token_id]
        logits = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1]
        loss = functional.cross_entropy(logits, torch.tensor(whole[len(prompt) :]))
        (grad,) = torch.autograd.grad(loss, kept.pop())
        found.append(grad[0].double().sum(dim=0).numpy())
        tokens.append(len(whole) - len(prompt))
    return np.stack(found), np.array(tokens)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Model, data, embeddings that gradients follow, and others that they do not; made once and only read."""
    folder = tmp_path_factory.mktemp("house")
    model, tokenizer = build([p.prompt + p.completion for p in PROBLEMS], seed=0, hidden=32, layers=2, vocab=300)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"question": p.prompt, "answer": p.completion} for p in PROBLEMS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gradients, tokens = hidden_gradients(folder / "model")
    unit = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
    np.save(folder / "follow.npy", unit)
    np.save(folder / "other.npy", np.random.default_rng(0).standard_normal((N, 32)))
    return folder, gradients, tokens


@pytest.fixture
def here(house, tmp_path, monkeypatch):
    """A fresh working folder with the material in it."""
    work = tmp_path / "work"
    shutil.copytree(house[0], work)
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield work
    datasets.enable_progress_bars()


def probe(*argv, embeddings="follow.npy", out="out"):
    return main(["probe", *OPTIONS, "--embeddings", embeddings, "--out", out, *map(str, argv)])


def result(here, out="out"):
    def refuse(constant):
        raise AssertionError(f"{constant} in probe.json")

    return json.loads((here / out / "probe.json").read_text(), parse_constant=refuse)


def test_where_gradients_follow_it_is_likely_and_the_numbers_are_those_of_autograd(house, here, capsys):
    assert probe() == 0
    printed, found = capsys.readouterr(), result(here)
    assert sorted(path.name for path in (here / "out").iterdir()) == ["probe.json", "probe.png"]
    assert (here / "out" / "probe.png").read_bytes().startswith(b"\x89PNG")
    assert list((here.parent / "temporary").iterdir()) == []
    assert found["format"] == "sdo-probe"
    hidden, weight = found["signals"]["hidden"], found["signals"]["weight"]
    assert weight["parameter"] == WEIGHT
    assert hidden["outcome"] == "likely"
    assert hidden["slope"]["low"] > 0
    assert hidden["mantel"]["p"] == 0.001
    assert found["advice"]["signal"] == "weight"
    assert printed.out.rstrip().endswith(found["advice"]["sentence"])
    assert found["advice"]["sentence"].startswith(weight["outcome"])
    assert "sdo" in printed.out
    assert "a sample;" in printed.out

    # Everything observed once more, from gradients by plain autograd and the plan, by loops.
    _, gradients, tokens = house
    plan = SDO(Embeddings.read(here / "follow.npy"), seed=617).plan(B)
    assert found["plan_fingerprint"] == plan.fingerprint
    design = design_probe(plan, samples=SAMPLES)
    assert found["design"]["steps"] == design.steps

    def cosine(i, j):
        return gradients[i] @ gradients[j] / np.linalg.norm(gradients[i]) / np.linalg.norm(gradients[j])

    summed = gradients * tokens[:, None]  # as samples of one step weigh
    for name, arm in design.arms.items():
        batches, entry = arm.batches.tolist(), hidden["arms"][name]
        within = np.mean([cosine(i, j) for batch in batches for i, j in itertools.combinations(batch, 2)])
        pairs = [(i, j) for a, b in itertools.combinations(batches, 2) for i in a for j in b if i != j]
        assert entry["within"]["value"] == pytest.approx(within, abs=1e-5)
        assert entry["between"]["value"] == pytest.approx(np.mean([cosine(i, j) for i, j in pairs]), abs=1e-5)
        top = sum(float(np.square(summed[batch]).sum()) for batch in batches)
        bottom = sum(float(np.square(summed[batch].sum(axis=0)).sum()) for batch in batches)
        assert entry["size"]["value"] == pytest.approx(B * top / bottom, rel=1e-4)
        assert entry["batches"] == len(batches)
    sdo = hidden["arms"]["sdo"]
    assert sdo["difference"]["low"] > 0
    assert sdo["predicted"]["value"] == pytest.approx(sdo["within"]["value"], abs=0.1)


def test_where_they_do_not_follow_it_is_not_likely(here, capsys):
    assert probe(embeddings="other.npy") == 0
    found = result(here)
    assert {one["outcome"] for one in found["signals"].values()} <= {"unlikely", "cannot tell"}
    for one in found["signals"].values():
        assert one["slope"]["low"] < 0.1
        assert one["arms"]["sdo"]["difference"]["low"] < 0.02
    sentence = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert sentence == found["advice"]["sentence"]
    assert sentence.startswith(("unlikely", "cannot tell"))


def test_the_same_command_gives_the_same_numbers(here):
    assert probe("--organizer.k", 2) == 0
    assert probe("--organizer.k", 2, out="again") == 0
    first, second = result(here), result(here, "again")
    assert first["plan"]["options"]["k"] == 2
    for one in (first, second):
        del one["seconds"], one["more_samples"]["seconds_per_sample"], one["more_samples"]["more_seconds"]
        del one["advice"]["sentence"]  # may hold a time
    assert first == second


def test_a_run_file_serves_as_it_does_for_sft(here, capsys):
    text = """
model_name_or_path: model
dataset_name: train.jsonl
dataset_train_split: train[:60]
prompt_column: question
completion_column: answer
output_dir: out
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
use_cpu: true
bf16: false
organizer: {embeddings: follow.npy, seed: 3}
recorder: {out: run, signals: [hidden], sketch_size: 16}
"""
    (here / "run.yaml").write_text(text)
    assert main(["probe", "--config", "run.yaml", "--samples", "64", "--steps", "15", "--out", "probe"]) == 0
    found = result(here, "probe")
    assert found["plan"]["batch_size"] == 4
    assert found["plan"]["n_samples"] == 60
    assert found["plan"]["options"]["seed"] == 3
    assert found["design"]["steps"] == 15
    assert list(found["signals"]) == ["hidden"]
    assert found["signals"]["hidden"]["sketch"]["k"] == 16
    assert found["signals"]["hidden"]["sketch_check"]["rmse"] > 0
    assert found["advice"]["signal"] == "hidden"
    assert not (here / "run").exists()
    assert not (here / "out").exists()
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert any("asked for 64 samples" in note for note in notes)


def test_fewer_samples_than_asked_and_repeated_texts(here, capsys):
    rows = (here / "train.jsonl").read_text().splitlines()[:12]
    (here / "train.jsonl").write_text("\n".join(rows * 2) + "\n")
    np.save(here / "E.npy", np.tile(np.load(here / "other.npy")[:12], (2, 1)))
    assert probe(embeddings="E.npy") == 0
    found = result(here)
    assert found["design"]["samples"] == 24
    printed = capsys.readouterr().out
    assert "asked for 96 samples; the batches drawn hold 24 different ones" in printed
    assert "of the pairs inside sdo batches have equal embeddings" in printed


def test_samples_that_the_trainer_drops_are_not_in_the_plan(here):
    rows = [json.loads(line) for line in (here / "train.jsonl").read_text().splitlines()]
    cut = range(0, len(rows), 3)
    for number in cut:
        rows[number]["question"] += " again and again" * 40  # no token of the answer is left: TRL drops the row
    (here / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert probe("--max_length", 100) == 0
    found = result(here)
    assert found["plan"]["n_samples"] == len(rows) - len(cut)
    assert all(one["undefined"] == 0 for one in found["signals"].values())


def test_gradients_of_zero_are_left_out_and_said(here, capsys):
    """lora_B begins at zero, and with it every gradient of lora_A."""
    pytest.importorskip("peft")
    lora = ["--use_peft", "true", "--lora_target_modules", "q_proj", "down_proj", "--lora_r", 2]
    assert probe(*lora, "--recorder.weight", "model.layers.1.mlp.down_proj.lora_A.weight") == 0
    found = result(here)
    weight, hidden = found["signals"]["weight"], found["signals"]["hidden"]
    assert weight["undefined"] == weight["samples"] == found["design"]["samples"]
    assert (weight["slope"]["value"], weight["outcome"]) == (None, "cannot tell")
    assert (hidden["undefined"], hidden["outcome"]) == (0, "likely")
    printed = capsys.readouterr().out
    n = weight["samples"]
    assert f"weight: {n} of {n} gradients have no direction and are left out (zero gradient: {n})" in printed
    assert found["advice"]["sentence"].startswith("cannot tell: ")


def test_pairs_of_dpo(here):
    rows = [json.loads(line) for line in (here / "train.jsonl").read_text().splitlines()]
    pairs = [{"prompt": r["question"], "chosen": r["answer"], "rejected": r["answer"][::-1]} for r in rows]
    (here / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = [o for o in OPTIONS if o not in ("--prompt_column", "question", "--completion_column", "answer")]
    argv = ["probe", "--method", "dpo", *options, "--embeddings", "follow.npy", "--out", "out", "--samples", "64"]
    assert main(argv) == 0
    found = result(here)
    assert found["method"] == "dpo"
    assert "own loss" in found["signals"]["weight"]["norm_state"]


def test_a_picture_that_fails_is_named_and_the_numbers_stay(here, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no ink")

    monkeypatch.setattr("analysis.probe.plots.probe_figure", fail)
    assert probe("--samples", 32) == 1
    found = result(here)
    assert (found["failed"], found["files"]) == (["probe.png"], [])
    captured = capsys.readouterr()
    assert "sdo probe: probe.png failed: no ink" in captured.err
    assert captured.out.rstrip().endswith(found["advice"]["sentence"])
    assert found["advice"]["outcome"] == "cannot tell"  # four batches
    assert "an interval takes 6" in found["advice"]["sentence"]
    assert re.search(r"cost: [\d.]+ s a sample; 64 samples would take \d+ s more\.", captured.out)


def test_an_out_folder_that_holds_other_things_is_left_alone(here, capsys):
    (here / "out").mkdir()
    (here / "out" / "mine.txt").write_text("mine")
    assert probe() == 2
    assert "--out out holds files; choose another folder or add --overwrite" in capsys.readouterr().err
    assert [path.name for path in (here / "out").iterdir()] == ["mine.txt"]
    assert probe("--overwrite", "--samples", 32) == 0
    assert sorted(path.name for path in (here / "out").iterdir()) == ["mine.txt", "probe.json", "probe.png"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--samples", "4"], "--samples is 4; expected a whole number from 16"),
        (["--samples", "20"], "samples is 20; expected at least 32"),
        (["--batch-size", "1"], "--batch-size is 1"),
        (["--batch-size", "97"], "batch size 97 is larger than the 96 samples"),
        (["--smallest-change", "0"], "--smallest-change is 0.0"),
        (["--steps", "0"], "steps is 0"),
        (["--embeddings", "short.npy"], "short.npy have 95 rows, the dataset has 96"),
        (["--embeddings", "missing.npy"], "missing.npy"),
        (["--embeddings", ""], "--embeddings is missing"),
        (["--organizer.name", "uniform"], "the organizer is uniform; expected SDO"),
        (["--organizer.locality", "random"], "locality 'random'"),
        (["--recorder.signals", "samples:*.down_proj.weight"], "has no gradient of a micro-batch"),
        (["--recorder.weight", "lm_head"], "there is no parameter 'lm_head'"),
        (["--prompt_column", "q"], "has no column 'q'"),
        (["--model", "nowhere/model"], "model nowhere/model"),
        (["--data", "missing.jsonl"], "no such file"),
        (["--learning_rat", "1"], "unknown key 'learning_rat'"),
        (["--packing", "true"], "packing is set"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*[Pp]ack:UserWarning")
def test_wrong_input_is_one_line_and_writes_nothing(here, capsys, argv, message):
    np.save("short.npy", np.load("other.npy")[1:])
    assert probe(*argv) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sdo probe: ")]
    assert message in line
    assert not (here / "out").exists()
