"""The paper's experiment: its settings, a tiny model through each setting's `paper` scale, its tables and its page."""

import dataclasses
import hashlib
import json
import math
import re
import sys
import types

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl", reason="experiments trains with TRL")

import torch
import yaml
from safetensors.torch import load_file, save_file
from scipy import integrate, stats
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from experiments import __main__ as command
from experiments import cell as cells_module
from experiments import material as material_module
from experiments import on_cpu, starts
from experiments.cell import finished, joins, result_file, start_of
from experiments.claims import CLAIMS, Finding, finding
from experiments.claims import Test as ClaimTest
from experiments.correctness import answers_right
from experiments.figures import (
    Measure,
    _power,
    difference,
    holm,
    inside,
    level,
    mean_score,
    score,
    seeds_needed,
    series_r,
)
from experiments.material import Material, embed, pick, write_rows
from experiments.page import DOCS, origin, write
from experiments.pictures import curves
from experiments.settings import FOLDER, load, merged
from experiments.tables import markdown
from sdo import SDO, Embeddings
from sdo.demo.tiny_model import build
from sdo.demo.word_problems import generate
from sdo.embeddings.sources import load_split, locate
from sdo.errors import InputError

trains = pytest.mark.skipif(
    "activation_checkpointing" not in {field.name for field in dataclasses.fields(SFTConfig)},
    reason="the settings are written for the newest transformers, whose option of this name they use",
)
SETTINGS = sorted(path.stem for path in FOLDER.glob("*.yaml"))

# ---------------------------------------------------------------------- settings


def test_all_settings_load_and_their_first_arm_is_uniform():
    found = {(name, scale) for name in SETTINGS for scale in ("paper", "small") if _loads(name, scale)}
    assert found == {("families", "small")} | {(n, s) for n in ("sft", "dpo", "grpo") for s in ("paper", "small")}
    for name, scale in found:
        setting = load(name, scale)
        assert setting.arms["main"]["uniform"] == {"name": "uniform"}
        assert setting.arms["main"]["sdo"] == {}
        assert setting.seeds["main"][:3] == (419, 617, 917)


def _loads(name, scale):
    try:
        return load(name, scale)
    except InputError:
        return None


def test_cells_come_seed_by_seed():
    setting = load("families", "small")
    cells = list(setting.cells())
    assert len(cells) == 20 + 40 + 30
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.seed for cell in cells[:12]} == {419}
    assert [cell.arm for cell in setting.cells(("main",))][:4] == ["uniform", "sdo", "uniform", "sdo"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"color": 1}, "unknown key 'color'"),
        ({"method": "ppo"}, "method is 'ppo'"),
        ({"arms": {"main": {"uniform": {"name": "uniform"}, "sdo": {"kk": 3}}}}, "kk"),
        ({"arms": {"main": {"../up": {}}}}, "'../up'"),
        ({"arms": {"other": {"sdo": {}}}}, "seeds are given for"),
    ],
)
def test_a_setting_with_a_fault_is_refused(tmp_path, change, words):
    tree = yaml.safe_load((FOLDER / "dpo.yaml").read_text(encoding="utf-8"))
    tree["arms"] = {"main": tree["arms"]["main"]}
    for scale in tree["scales"].values():
        scale["seeds"] = {"main": [1]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**tree, **change}, sort_keys=False), encoding="utf-8")
    with pytest.raises(InputError, match=words):
        load("mine", "small", tmp_path)


def test_unknown_names_are_refused(capsys):
    assert command.main(["run", "nothing"]) == 2
    assert "expected one of dpo, families, grpo, sft" in capsys.readouterr().err
    assert command.main(["run", "families", "--scale", "paper"]) == 2
    assert "has no scale 'paper'" in capsys.readouterr().err
    assert command.main(["check", "sft", "--group", "nothing"]) == 2
    assert "no group 'nothing'" in capsys.readouterr().err


def test_merged_goes_section_by_section():
    base = {"a": 1, "organizer": {"k": 4, "seed": 1}}
    assert merged(base, {"organizer": {"k": 8}, "b": 2}) == {"a": 1, "b": 2, "organizer": {"k": 8, "seed": 1}}
    assert base == {"a": 1, "organizer": {"k": 4, "seed": 1}}


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_the_dry_run_accepts_the_paper_scale(name, capsys, tmp_path):
    assert command.main(["check", name, "--scale", "paper", "--work", str(tmp_path / "work")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(load(name, "paper").cells()))
    assert all(line.endswith("to run") for line in lines)
    assert not (tmp_path / "work").exists()


# ---------------------------------------------------------------------- a tiny model through the paper's scale


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Word problems in every shape that the settings want, and a model that can read them."""
    folder = tmp_path_factory.mktemp("paper-material")
    problems = generate(40, seed=3)
    rows = [
        {
            "prompt": p.prompt,
            "completion": p.completion,
            "family": p.family,
            "chosen": p.completion,
            "rejected": " I do not know.",
            "question": p.prompt,
            "answer": p.completion,
        }
        for p in problems
    ]
    write_rows(folder / "train.jsonl", rows[:24])
    write_rows(folder / "test.jsonl", rows[24:])
    embed([row["prompt"] for row in rows[:24]], folder / "embeddings.npy", "lsa")
    model, tokenizer = build([r["prompt"] + r["completion"] for r in rows], seed=0, hidden=32, layers=2, vocab=400)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return Material(folder, str(folder / "model"), {"train": 24, "held_out": 16, "encoder": "lsa"})


def _small(name, steps, **changes):
    """The paper's own setting, with what a CPU and a tiny model need instead."""
    setting = load(name, "paper")
    cpu = {"use_cpu": True, "bf16": False, "use_peft": False, "activation_checkpointing": False, "max_steps": steps}
    cpu |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_length": 256, "warmup_steps": 1}
    cpu |= {"save_steps": 2, "learning_rate": 1e-3, "recorder": {"sample_every": 1, "sketch_size": 64}}
    if name == "grpo":
        del cpu["max_length"], cpu["warmup_steps"]
        cpu |= {"num_generations": 2, "gradient_accumulation_steps": 2, "max_completion_length": 8}
        cpu |= {"per_device_eval_batch_size": 4}
    run = merged(setting.run, cpu)
    run.pop("lora_r"), run.pop("lora_target_modules")
    return dataclasses.replace(setting, run=run, checkpoints=steps // 2, **changes)


def _cell(setting, arm):
    return next(cell for cell in setting.cells() if cell.arm == arm)


@trains
@pytest.mark.parametrize(
    ("name", "measure"),
    [("sft", "eval_loss"), ("dpo", "eval_rewards/margins"), ("grpo", "eval_reward")],
)
def test_a_tiny_model_goes_through_the_papers_setting(name, measure, tiny, tmp_path):
    setting = _small(name, 4)
    cell = _cell(setting, "sdo")
    cells_module.run(setting, cell, tiny, tmp_path / "work", tmp_path / "results")
    (file,) = (tmp_path / "results" / setting.label).iterdir()
    found = json.loads(file.read_text(encoding="utf-8"))
    assert file.name == "sdo-419.json"
    assert found["steps"] == 4
    assert [point["step"] for point in found["checkpoints"]] == [0, 2, 4]
    assert all(math.isfinite(point["scores"][measure]["mean"]) for point in found["checkpoints"])
    plan = SDO(Embeddings.read(tiny.folder / "embeddings.npy"), seed=419).plan(4)
    batches = [set(plan.batch(step).tolist()) for step in range(4)]
    for point in found["checkpoints"]:
        seen = batches[: point["step"]]
        assert point["distinct"] == len(set().union(*seen))
        assert point["samples"] == 4 * len(seen)
    assert -1 <= found["within_batch_cosine"] <= 1
    # The rewards of a model that knows nothing tie, so that its steps have no direction.
    assert (found["signals"]["weight"]["step_coherence"]["mean"] is None) == (name == "grpo")
    assert (found["checkpoints"][-1].get("training_reward") is not None) == (name == "grpo")
    rows = pq.read_table(tmp_path / "work" / "sdo-419" / "steps").to_pylist()
    assert found["updates"]["clipped"] == sum(row["clipped"] is True for row in rows) / 4
    assert found["updates"]["grad_norm"] == pytest.approx(sum(row["grad_norm"] for row in rows) / 4, rel=1e-6)
    text = markdown(setting, [found])
    assert "sdo" in text
    assert "nan" not in text


@trains
def test_a_cell_that_was_cut_off_continues(tiny, tmp_path):
    whole = cells_module.run(_small("sft", 6), _cell(_small("sft", 6), "sdo"), tiny, tmp_path / "a", tmp_path / "ra")
    half = _small("sft", 4)
    cells_module.train(half, _cell(half, "sdo"), tiny, tmp_path / "b")
    started = json.loads((tmp_path / "b" / "sdo-419" / "run.json").read_text(encoding="utf-8"))["run_id"]
    rest = _small("sft", 6)
    found = cells_module.run(rest, _cell(rest, "sdo"), tiny, tmp_path / "b", tmp_path / "rb")
    assert json.loads((tmp_path / "b" / "sdo-419" / "run.json").read_text(encoding="utf-8"))["run_id"] == started
    assert found["checkpoints"] == whole["checkpoints"]
    assert found["signals"] == whole["signals"]
    assert found["exposure"] == whole["exposure"]
    assert (whole["resumed"], found["resumed"]) == (0, 4)
    assert found["answers_alone"] is False  # of a vocabulary as small as this one


@trains
def test_balance_over_families_counts_what_is_right(tiny, tmp_path):
    setting = _small("sft", 2)
    found = cells_module.run(setting, _cell(setting, "uniform"), tiny, tmp_path / "w", tmp_path / "r")
    rows = [json.loads(line) for line in (tiny.folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    last = found["checkpoints"][-1]
    assert sum(last["balance"]["n"].values()) == len(rows)
    assert last["balance"]["n"] == {f: sum(r["family"] == f for r in rows) for f in {r["family"] for r in rows}}
    right = sum(last["balance"]["right"].values()) / len(rows)
    assert last["scores"]["eval_correct"]["mean"] == pytest.approx(right)


def test_an_answer_is_right_exactly_where_greedy_decoding_gives_it(tiny):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny.model).train()
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    rows = []
    for number, prompt in enumerate(["two apples and", "a train of seven", "red", "how many pens"]):
        ids = tokenizer(prompt)["input_ids"]
        answer = []
        model.eval()
        for _ in range(3):
            with torch.no_grad():
                answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
        model.train()
        if number % 2:
            answer[number % 3] = (answer[number % 3] + 1) % len(tokenizer)
        rows.append({"input_ids": ids + answer, "labels": [-100] * len(ids) + answer})

    def collate(some):
        longest = max(len(row["input_ids"]) for row in some)
        pad = [longest - len(row["input_ids"]) for row in some]
        return {
            "input_ids": torch.tensor([row["input_ids"] + [0] * n for row, n in zip(some, pad, strict=True)]),
            "attention_mask": torch.tensor(
                [[1] * len(r["input_ids"]) + [0] * n for r, n in zip(some, pad, strict=True)]
            ),
            "labels": torch.tensor([row["labels"] + [-100] * n for row, n in zip(some, pad, strict=True)]),
        }

    assert answers_right(model, collate, rows).tolist() == [1, 0, 1, 0]
    assert model.training


def test_claims_on_cells_are_taken_once_and_outlive_no_process(tmp_path):
    file = tmp_path / "deep" / "sdo-1.claim"
    assert command._claim(file)
    assert not command._claim(file)
    file.write_text("999999999", encoding="ascii")
    assert command._claim(file)


# ---------------------------------------------------------------------- material


@trains
def test_families_share_no_prompt_and_leave_a_model(tmp_path, monkeypatch):
    def create_dataset(name, *, size, seed, top=50):
        for number in range(size):
            value = (number * 7 + seed) % top
            yield {"question": f"{name}: what follows\n{value} ?", "answer": value + 1}

    monkeypatch.setitem(sys.modules, "reasoning_gym", types.SimpleNamespace(create_dataset=create_dataset))
    wanted = {
        "make": "families",
        "families": {"count": None, "step": {"top": 40}},
        "warm_up_families": {"other": None},
        "train": 16,
        "held_out": 8,
        "warm_up": 12,
        "warm_up_batch": 4,
        "hidden": 16,
        "layers": 1,
        "vocab": 300,
        "encoder": "lsa",
    }
    made = material_module.prepare(wanted, tmp_path / "m", tmp_path)
    parts = [(tmp_path / "m" / f"{stem}.jsonl").read_text(encoding="utf-8").splitlines() for stem in ("train", "test")]
    train, test = ([json.loads(line) for line in part] for part in parts)
    assert (len(train), len(test)) == (16, 8)
    assert len({row["prompt"] for row in train + test}) == 24
    assert all(row["prompt"].split()[-2] == str(int(row["completion"]) - 1) for row in train + test)
    assert made.groups == [row["family"] for row in test]
    assert sorted(made.groups) == ["count"] * 4 + ["step"] * 4
    assert len(np.load(tmp_path / "m" / "embeddings.npy")) == 16
    assert (tmp_path / "m" / "model" / "model.safetensors").is_file()
    assert material_module.prepare(wanted, tmp_path / "m", tmp_path) == made
    _a_kept_start_gives_the_same_material(wanted, made, tmp_path, monkeypatch)
    with pytest.raises(InputError, match="holds other material"):
        material_module.prepare({**wanted, "train": 8}, tmp_path / "m", tmp_path)
    with pytest.raises(InputError, match="no 60 different questions"):
        material_module.prepare({**wanted, "train": 100, "held_out": 20}, tmp_path / "n", tmp_path)
    with pytest.raises(InputError, match=r"material\.make is 'magic'"):
        material_module.prepare({"make": "magic"}, tmp_path / "o", tmp_path)


def _a_kept_start_gives_the_same_material(wanted, made, tmp_path, monkeypatch):
    """Kept, taken and checked: rounded weights and embeddings come back as they were kept, or not at all."""
    monkeypatch.setattr(starts, "FOLDER", tmp_path / "kept")
    starts.keep(tmp_path / "m" / "model", tmp_path / "m" / "embeddings.npy", tmp_path / "kept" / "mine")
    begun = {**wanted, "start": "mine"}
    taken = material_module.prepare(begun, tmp_path / "t", tmp_path)
    assert taken.about["parameters"] == made.about["parameters"]
    same = ("train.jsonl", "test.jsonl", "tokenizer.json")
    assert {taken.about[name] for name in same} == {made.about[name] for name in same}
    rounded = {key: one.bfloat16().float() for key, one in load_file(tmp_path / "m" / "model" / starts.WEIGHTS).items()}
    read = AutoModelForCausalLM.from_pretrained(taken.model, dtype="auto")
    assert {one.dtype for one in read.parameters()} == {torch.float32}
    assert all(torch.equal(read.state_dict()[key], one) for key, one in rounded.items())
    slow = hashlib.sha256()
    for key, one in sorted(rounded.items()):
        slow.update(f"{key} {list(one.shape)}\n".encode() + one.numpy().tobytes())
    assert taken.about["start"] == slow.hexdigest() == starts.weights_digest(tmp_path / "kept" / "mine")
    assert np.load(tmp_path / "t" / "embeddings.npy").dtype == np.float16
    with pytest.raises(
        InputError, match=r"^the weights of .*model have the SHA-256 [0-9a-f]{64}; expected 0123; fix: [^\n]*$"
    ):
        material_module.prepare({**begun, "digests": {"start": "0123"}}, tmp_path / "u", tmp_path)
    with pytest.raises(InputError, match="there is no kept start"):
        material_module.prepare({**wanted, "start": "nothing"}, tmp_path / "v", tmp_path)
    save_file({key: one + 1 for key, one in rounded.items()}, tmp_path / "t" / "model" / starts.WEIGHTS)
    with pytest.raises(InputError, match=r"weights of .*model have the SHA-256"):  # changed after it was made
        material_module.prepare(begun, tmp_path / "t", tmp_path)
    (tmp_path / "t" / "model" / starts.WEIGHTS).unlink()
    with pytest.raises(InputError, match=r"holds no \.safetensors file"):
        material_module.prepare(begun, tmp_path / "t", tmp_path)


def test_what_is_kept_in_git_is_what_the_settings_name(tmp_path):
    """The kept files against the digests, and that every small setting names its start."""
    for name in SETTINGS:
        material = load(name, "small").material
        assert re.fullmatch("[0-9a-f]{64}", material["digests"]["start"])
        if "start" in material:
            kept = starts.FOLDER / material["start"]
            digest = hashlib.sha256((kept / starts.EMBEDDINGS).read_bytes()).hexdigest()
            assert digest == material["digests"]["embeddings.npy"]
            assert len(np.load(kept / starts.EMBEDDINGS)) == material["train"]
    assert starts.unpack_model("families-small", tmp_path / "model") == 2_557_632
    digests = load("families", "small").material["digests"]
    assert starts.weights_digest(tmp_path / "model") == digests["start"]
    assert hashlib.sha256((tmp_path / "model" / "tokenizer.json").read_bytes()).hexdigest() == digests["tokenizer.json"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 1024


def _trained_on(material):
    """What a training command reads from a material's folder."""
    return load_split(locate(str(material.folder)), None, "train", progress=False)


def test_short_questions_are_taken_with_their_embeddings(gsm8k, tmp_path, monkeypatch):
    """The folder holds what it says and nothing beside it: a dataset is all files of a folder that match."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "gsm8k").symlink_to(gsm8k)
    model, tokenizer = build([p.prompt for p in generate(20, seed=0)], seed=0, hidden=16, layers=1, vocab=300)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(material_module, "smollm2", lambda shared: str(tmp_path / "model"))

    def length(*parts):
        return len(tokenizer(" ".join(parts))["input_ids"])

    train = [json.loads(line) for line in (gsm8k / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    longest = int(np.median([length(row["question"], row["answer"]) for row in train[:200]]))
    wanted = {"make": "gsm8k", "train": 9, "held_out": 4, "longest": longest}
    made = material_module.prepare(wanted, tmp_path / "sft", shared)
    at = [n for n, row in enumerate(train) if length(row["question"], row["answer"]) <= longest][:9]
    assert at != list(range(9))
    found = _trained_on(made)
    assert [(row["prompt"], row["completion"]) for row in found] == [
        (train[n]["question"], " " + train[n]["answer"]) for n in at
    ]
    embeddings = np.load(gsm8k / "train_minilm.npy", allow_pickle=False)
    assert np.array_equal(np.load(made.folder / "embeddings.npy"), embeddings[at])

    made = material_module.prepare({**wanted, "make": "pairs"}, tmp_path / "dpo", shared)
    found = _trained_on(made)
    assert len(found) == 9 == len(np.load(made.folder / "embeddings.npy"))
    for row in found:
        for answer in ("correct", "wrong"):
            assert row[answer].startswith(" ")
            assert length(row["question"], row[answer].strip()) <= longest
    with pytest.raises(InputError, match="of at most 1 tokens"):
        material_module.prepare({**wanted, "longest": 1}, tmp_path / "none", shared)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_scoring_the_answers_alone_changes_no_loss_and_no_gradient(monkeypatch, dtype, tolerance):
    """One row is masked whole, as an answer that was cut off."""
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("needs TRL's fused head")
    model, _ = build([problem.prompt for problem in generate(20, seed=0)], seed=0, hidden=16, layers=1, vocab=300)
    utils.add_fused_lm_head(model)
    ids = torch.randint(0, model.config.vocab_size, (3, 7), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :3] = -100
    labels[2] = -100
    monkeypatch.setattr(on_cpu, "TILE", 64)
    before = (utils._use_triton, utils._CHUNKED_LOGPROB_CHUNK_SIZE)
    seen, scored = [], utils._ChunkedLogProbFunction.apply
    monkeypatch.setattr(utils._ChunkedLogProbFunction, "apply", lambda *args: seen.append(args) or scored(*args))

    def trained(vocabulary):
        model.zero_grad()
        with on_cpu.answers_alone(vocabulary) as alone, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=ids, labels=labels, fused_lm_head=True).loss
        loss.backward()
        return alone, torch.cat([loss.detach()[None], *(one.grad.flatten() for one in model.parameters())])

    (yes, alone), (no, whole) = trained(model.config.vocab_size), trained(64)
    assert (yes, no) == (True, False)
    assert float((alone - whole).norm() / whole.norm()) < tolerance
    assert [(len(args[0]), args[5]) for args in seen] == [(2 * 4, 64), (3 * 6, before[1])]
    with pytest.raises(ZeroDivisionError), on_cpu.answers_alone(300):
        _ = 1 / 0
    assert (utils._use_triton, utils._CHUNKED_LOGPROB_CHUNK_SIZE) == before


def test_pick_follows_keys_and_positions():
    row = {"chosen": [{"content": "a"}, {"content": "b"}], "prompt": "p"}
    assert pick(row, "prompt") == "p"
    assert pick(row, "chosen[0].content") == "a"
    assert pick(row, "chosen[-1].content") == "b"


# ---------------------------------------------------------------------- figures, tables, page


def _made(arm, seed, losses, spread=0.1):
    points = [
        {"step": 10 * n, "distinct": 5 * n, "samples": 8 * n, "tokens": 80 * n, "scores": {"eval_loss": {"mean": loss}}}
        for n, loss in enumerate(losses)
    ]
    metrics = {name: {"value": spread, "latent": spread} for name in ("mean", "b20", "cv", "gini", "gap", "spread")}
    points[-1]["balance"] = {"metrics": metrics}
    points[-1]["scores"]["eval_correct"] = {"mean": 0.5}
    return {
        "group": "main",
        "arm": arm,
        "seed": seed,
        "checkpoints": points,
        "material": {"train": 16, "held_out": 8, "encoder": "lsa"},
        "training_seconds": 60.0,
        "within_batch_cosine": 0.25,
    }


def test_levels_and_differences_are_those_of_a_paired_t_test():
    rng = np.random.default_rng(1)
    first, second = rng.normal(1.0, 0.1, 6), rng.normal(0.9, 0.1, 6)
    cells = [_made("uniform", s, [2.0, x]) for s, x in enumerate(first)]
    cells += [_made("sdo", s, [2.0, x]) for s, x in reversed(list(enumerate(second)))]
    cells.append(_made("sdo", 99, [2.0, 50.0]))  # without a partner: in the level, not in the difference
    last = score("eval_loss", -1, "loss", "lower")
    one = difference(cells, "uniform", "sdo", last)
    reference = stats.ttest_rel(second, first)
    assert one.n == 6
    assert one.mean == pytest.approx(second.mean() - first.mean())
    assert one.p == pytest.approx(reference.pvalue)
    interval = reference.confidence_interval(0.95)
    assert (one.low, one.high) == pytest.approx((interval.low, interval.high))
    own = level(cells, "uniform", last)
    assert own.reach == pytest.approx(stats.t.ppf(0.975, 5) * stats.sem(first))
    assert level(cells, "sdo", last).n == 7
    assert level(cells, "sdo", score("eval_loss", 9, "loss", "lower")) is None
    assert mean_score("eval_loss", "loss", "lower").of(cells[0]) == pytest.approx(first[0])
    assert inside("signals", "weight", "batch_coherence", label="x").of(cells[0]) is None


@pytest.mark.parametrize(("effect", "n"), [(1.0, 50), (6.0, 4), (60.0, 2)])
def test_seeds_needed_reach_four_of_five(effect, n):
    """Against simulation: so many pairs find the effect in 80 of 100 cases, one pair less does not."""
    cells = [_made(arm, s, [1, x]) for arm, v in (("uniform", [0] * 8), ("sdo", range(8))) for s, x in enumerate(v)]
    one = difference(cells, "uniform", "sdo", score("eval_loss", -1, "loss", "lower"))
    assert seeds_needed(one, effect) == seeds_needed(one, -effect)
    assert seeds_needed(one, effect) == pytest.approx(n, abs=2)
    rng = np.random.default_rng(0)
    for count, enough in ((seeds_needed(one, effect), True), (seeds_needed(one, effect) - 1, False)):
        if count < 2:
            continue
        drawn = rng.normal(effect, np.std(range(8), ddof=1), (20_000, count))
        found = (stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05).mean()
        assert found > 0.79 if enough else found < 0.81
    assert seeds_needed(one, 0.0) is None


@pytest.mark.parametrize("n", [2, 3, 5, 10])
@pytest.mark.parametrize("size", [0.1, 1.0, 4.0, 8.6, 16.0, 40.0])
def test_power_is_that_of_the_t_test(n, size):
    """Against the definition, integrated over the standard deviation that n differences show."""
    bound, shift = stats.t.ppf(0.975, n - 1), size * math.sqrt(n)

    def density(seen):  # of the deviation seen, in units of the true one
        return stats.chi2.pdf((n - 1) * seen**2, n - 1) * 2 * (n - 1) * seen

    def found(seen):
        return density(seen) * (stats.norm.sf(bound * seen - shift) + stats.norm.cdf(-bound * seen - shift))

    # Most of the mass of a step function lies to one side of shift / bound.
    expected, _ = integrate.quad(found, 0, 12, points=[shift / bound, 1.0], limit=500)
    assert _power(n, size) == pytest.approx(expected, abs=1e-5)


def test_seeds_needed_for_a_tiny_effect_are_many():
    cells = [_made(arm, s, [1, x]) for arm, v in (("uniform", [0] * 8), ("sdo", range(8))) for s, x in enumerate(v)]
    one = difference(cells, "uniform", "sdo", score("eval_loss", -1, "loss", "lower"))
    normal = ((stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) * np.std(range(8), ddof=1) / 0.01) ** 2
    assert seeds_needed(one, 0.01) == pytest.approx(normal, rel=1e-3)


def test_holm_is_the_step_down_rule():
    """Against the rule in words: the k-th smallest is refuted while each before it was."""
    p_values = [0.010, 0.040, 0.030, 0.005, 0.9, 0.030]
    adjusted = holm(p_values)
    for level_of_test in (0.001, 0.02, 0.031, 0.04, 0.05, 0.12, 0.2, 1.0):
        refuted, left = set(), sorted(range(6), key=lambda at: p_values[at])
        while left and p_values[left[0]] <= level_of_test / len(left):
            refuted.add(left.pop(0))
        assert {at for at in range(6) if adjusted[at] <= level_of_test} == refuted
    assert holm([]) == []


@pytest.mark.parametrize(
    ("sdo", "said", "needed"),
    [
        ([0.80, 0.82, 0.81], "as claimed", "excludes the published 0.1, which is smaller"),
        ([0.90, 0.91, 0.90], "as claimed", "–"),
        ([0.95, 0.96, 0.95], "as claimed", "excludes the published 0.1, which is larger"),
        ([1.20, 1.22, 1.21], "the other way", "excludes the published 0.1"),
        ([1.01, 0.99, 1.00], "undetermined", "more than 0.027 in the claim's direction is unlikely; excludes the"),
        ([0.98, 0.93, 0.94], "undetermined", "holds 0 and the published 0.1"),
        (
            [1.20, 0.83, 1.01],
            "undetermined",
            "more than 0.449 in the claim's direction is unlikely; to tell the published 0.1 from 0 takes 29 seeds",
        ),
        ([1.0, 1.001, 1.002], "undetermined", "the differences do not vary"),
        ([0.8], "no verdict", "more seeds"),
        ([], "not measured", "cells of sdo"),
    ],
)
def test_a_verdict_is_read_off_the_interval(sdo, said, needed):
    cells = [_made("uniform", s, [2.0, 1.0 + s / 1000]) for s in range(3)]
    cells += [_made("sdo", s, [2.0, x]) for s, x in enumerate(sdo)]
    test = ClaimTest("mine", "sdo", "uniform", score("eval_loss", -1, "loss", "lower"), None, 0.1)
    found = finding(test, {"mine": cells})
    assert found.verdict == said
    assert needed in found.more


def test_a_measure_that_is_alike_in_every_cell_says_nothing():
    test = ClaimTest("mine", "sdo", "uniform", score("eval_loss", -1, "loss", "lower"), None, 0.5)
    floor = [_made(arm, s, [2.0, 0.0]) for arm in ("uniform", "sdo") for s in range(3)]
    assert finding(test, {"mine": floor}).more == "0.000 in every cell: it says nothing here"


def test_a_bound_is_that_of_the_claims_side():
    """The claim is a lower loss: 0.4 more loss is not what leaves the claim open, and 0.05 less is."""
    cells = [_made("uniform", s, [2.0, 1.0]) for s in range(3)]
    cells += [_made("sdo", s, [2.0, 1.0 + x]) for s, x in enumerate((0.10, 0.175, 0.25))]
    for expected, bound in (("lower", "0.011"), ("higher", "0.361")):
        test = ClaimTest("mine", "sdo", "uniform", score("eval_loss", -1, "loss", "lower"), expected)
        assert finding(test, {"mine": cells}) == Finding(
            "+0.175 [-0.011, +0.361] (3)",
            "undetermined",
            f"more than {bound} in the claim's direction is unlikely",
            pytest.approx(stats.ttest_1samp([0.10, 0.175, 0.25], 0.0).pvalue),
        )


def _slow_power(n, size):
    """Power of the two-sided paired t-test from the definition, by integration over the standard deviation seen."""
    bound, shift = stats.t.ppf(0.975, n - 1), size * math.sqrt(n)
    seen = np.sqrt(stats.chi2.ppf((np.arange(20_000) + 0.5) / 20_000, n - 1) / (n - 1))
    return float(np.mean(stats.norm.sf(bound * seen - shift) + stats.norm.cdf(-bound * seen - shift)))


def test_every_row_of_the_page_agrees_with_its_cells_and_its_own_words():
    """Each row against the JSON files: difference, interval, sign, verdict, bound, published value, seeds."""
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    part = page[page.index("## Claim by claim") : page.index("### The published balance figures")]
    rows = [line[2:-2].split(" | ") for line in part.splitlines() if re.match(r"\| [a-z]+-small", line)]
    cells = {
        folder.name: [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
        for folder in cells_module.RESULTS.iterdir()
        if folder.is_dir()
    }
    tests = [test for claim in CLAIMS for test in claim.tests]
    known = [test for test in tests if any(cell["arm"] == test.arm for cell in cells.get(test.setting, ()))]
    assert len(known) == len(rows) > 50
    for test, (setting, what, shown, verdict, _, words) in zip(known, rows, strict=True):
        assert (setting, what) == (test.setting, f"{test.measure.label}: {test.arm} − {test.baseline}")
        by_arm = {arm: {} for arm in (test.arm, test.baseline)}
        for cell in cells[setting]:
            by_arm.setdefault(cell["arm"], {})[cell["seed"]] = test.measure.of(cell)
        both = sorted(set(by_arm[test.arm]) & set(by_arm[test.baseline]))
        gaps = np.array([by_arm[test.arm][seed] - by_arm[test.baseline][seed] for seed in both])
        if len(gaps) == 1:
            assert (verdict, words) == ("no verdict", "more seeds")
            continue
        if np.ptp(gaps) == 0:
            assert verdict == "undetermined"
            assert "says nothing" in words
            continue
        # What is printed, from the cells.
        reach = stats.t.ppf(0.975, len(gaps) - 1) * stats.sem(gaps)
        low, high = gaps.mean() - reach, gaps.mean() + reach
        digits = test.measure.digits
        assert shown.strip("*") == f"{gaps.mean():+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}] ({len(gaps)})"
        assert shown.startswith("**") == (not low <= 0 <= high)
        # What is said, from what is printed.
        wanted_higher = {"higher": True, "lower": False}[test.expected or test.measure.better]
        if low <= 0 <= high:
            assert verdict == "undetermined"
            bound = re.search(r"more than ([\d.]+) in the claim's direction is unlikely", words)
            assert float(bound[1]) == pytest.approx(high if wanted_higher else -low, abs=0.51 * 10**-digits)
        else:
            assert verdict.removesuffix(", alone") == ("as claimed" if (low > 0) == wanted_higher else "the other way")
            assert "unlikely" not in words
        claimed = None if test.published is None else test.published * (1 if wanted_higher else -1)
        outside = claimed is not None and not low <= claimed <= high
        assert ("excludes the published" in words) == outside
        needed = re.search(r"from 0 takes ([\d,]+) seeds", words)
        if claimed is None or outside or verdict != "undetermined":
            assert needed is None
        else:
            count = int(needed[1].replace(",", ""))
            assert count > len(gaps)
            size = test.published / gaps.std(ddof=1)
            assert _slow_power(count, size) > 0.8 - 1e-3
            assert _slow_power(count - 1, size) < 0.8 + 1e-3


def test_cells_that_were_made_in_another_way_are_not_compared(tmp_path):
    setting = load("sft", "small")
    first, second = list(setting.cells())[:2]
    for cell, rate in ((first, 1e-5), (second, 2e-5)):
        file = result_file(setting, cell, tmp_path)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"arm": cell.arm, "run": {"learning_rate": rate}}), encoding="utf-8")
    with pytest.raises(InputError, match=r"sdo-419.json was made with run = .*2e-05.* expected one for all cells"):
        finished(setting, tmp_path)


def test_cells_of_different_starts_are_not_compared(tmp_path):
    """Recorded as the digest of the weights, as that of their file, or not at all: then the setting's own."""
    setting = load("sft", "small")
    named, (first, second) = setting.material["digests"]["start"], list(setting.cells())[:2]

    def keep(cell, **material):
        file = result_file(setting, cell, tmp_path)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"arm": cell.arm, "seed": cell.seed, "material": material}), encoding="utf-8")

    keep(first)
    keep(second, start=named)
    assert [start_of(setting, cell) for cell in finished(setting, tmp_path)] == [named, named]
    joins(setting, Material(tmp_path, "m", {"start": named}), tmp_path)
    words = (
        r"^a new cell starts from weights 77, uniform-419\.json from [0-9a-f]{64}; expected one start for all [^\n]*$"
    )
    with pytest.raises(InputError, match=words):
        joins(setting, Material(tmp_path, "m", {"start": "77"}), tmp_path)
    for other in ({"weights": "77"}, {"start": "77"}):
        keep(second, **other)
        with pytest.raises(InputError, match=r"sdo-419\.json starts from weights 77, uniform-419\.json from"):
            finished(setting, tmp_path)
    keep(first, start=named, **{"embeddings.npy": "a"})
    keep(second, start=named, **{"embeddings.npy": "b"})
    with pytest.raises(InputError, match=r"sdo-419\.json was made with embeddings\.npy = b, uniform-419\.json with a"):
        finished(setting, tmp_path)


def test_no_cell_is_trained_that_could_not_be_compared(tmp_path, monkeypatch, capsys):
    """The start of families-small's stored cells is lost: nothing is added to them, and nothing is trained."""
    setting = load("families", "small")
    monkeypatch.setattr(command, "prepare", lambda *_: Material(tmp_path, "m", {"start": "77"}))
    monkeypatch.setattr(command, "run", lambda *_: pytest.fail("it trained"))
    assert command.main(["run", "families", "--work", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "families-small: every cell is measured\n"
    monkeypatch.setattr(command, "result_file", lambda *_: tmp_path / "missing")
    assert command.main(["run", "families", "--work", str(tmp_path)]) == 2
    assert "a new cell starts from weights 77, uniform-419.json from d11d9417" in capsys.readouterr().err
    text = origin(setting, finished(setting))
    assert "weights and embeddings were not kept, and could not be made again" in text
    assert setting.material["digests"]["start"] in text


def test_undefined_figures_are_left_out_of_tables():
    setting = load("families", "small")
    cells = [_made(arm, s, [2.0, 1.0 + s]) for arm in ("uniform", "sdo") for s in (419, 617)]
    text = markdown(setting, cells)
    assert "| held-out loss, last | 310.000" not in text
    assert "| held-out loss, last | 519.000 ± 1,257.9" in text
    assert "step coherence" not in text
    assert "nan" not in text.lower()


def test_the_page_is_made_of_the_committed_figures(tmp_path):
    """A page that was not made anew after a cell was added fails here; fix: python -m experiments page."""
    files = write(tmp_path)
    assert files[0].read_text(encoding="utf-8") == (DOCS / "results.md").read_text(encoding="utf-8")
    for file in files[1:]:
        assert file.read_bytes()[:4] == b"\x89PNG"
        assert (DOCS / file.name).is_file()


def test_the_readmes_tables_are_those_of_the_cells():
    """Every figure of the tables under "Does it hold?" from the JSON files, by scipy."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    part = readme[readme.index("## Does it hold?") : readme.index("## Trainers and launches")]
    tables = [block.splitlines() for block in part.split("\n\n") if block.startswith("| |")]
    arms = {"SDO": "sdo", "no exposure": "no-exposure", "static graph": "static-graph"}
    arms |= {"uniform": "uniform", "random locality": "locality-random"}
    coherences = {
        f"{kind} coherence, `hidden`": ("signals", "hidden", f"{kind}_coherence") for kind in ("batch", "step")
    }
    for (head, _, *rows), label in zip(tables, ("families", "sft"), strict=True):
        cells = finished(load(label, "small"))
        for line in rows:
            name, uniform, *differences = line.strip("| ").split(" | ")
            words = re.sub(r" \(15 steps\)", "", name)
            if words.startswith("mean of"):
                measure = mean_score("eval_loss", "loss", "lower")
                assert int(words.split()[2]) == len(cells[0]["checkpoints"]) - 1
            elif words in coherences:
                path = coherences[words] + (("mean",) if words.startswith("step") else ())
                measure = inside(*path, label="coherence")
            else:
                steps = [point["step"] for point in cells[0]["checkpoints"]]
                measure = score("eval_loss", steps.index(int(words.split()[-1])), "loss", "lower")
            by_arm = {arm: {c["seed"]: measure.of(c) for c in cells if c["arm"] == arm} for arm in arms.values()}
            assert uniform == f"{np.mean(list(by_arm['uniform'].values())):.3f}"
            for arm, text in zip(head.strip("| ").split(" | ")[1:], differences, strict=True):
                pairs = np.array([(one, by_arm["uniform"][seed]) for seed, one in by_arm[arms[arm]].items()])
                test = stats.ttest_rel(pairs[:, 0], pairs[:, 1])
                low, high = test.confidence_interval(0.95)
                expected = f"{np.mean(pairs[:, 0] - pairs[:, 1]):+.3f} [{low:.3f}, {high:.3f}]".replace("-", "−")
                assert text == (expected if low <= 0 <= high else f"**{expected}**")


def test_later_checkpoints_alone_speak_of_arms_that_part_late():
    cell = _made("sdo", 419, [9.0, 8.0, 3.0, 1.0])
    assert mean_score("eval_loss", "loss", "lower").of(cell) == pytest.approx(4.0)
    assert mean_score("eval_loss", "loss", "lower", first=2).of(cell) == pytest.approx(2.0)
    epochs = {"families-small": [("static-graph", 3), ("no-exposure", 3), ("retain03", 3), ("delta-tau1", 3)]}
    for label, arms in epochs.items():
        cells = finished(load(label.split("-")[0], "small"))
        for arm, first in arms:  # what the page takes for granted of its own cells
            for at in range(first + 1):
                one = difference(cells, "sdo", arm, score("eval_loss", at, "loss", "lower"))
                assert (one.low is None and one.mean == 0) == (at < first)


def test_a_series_of_few_steps_is_left_out():
    cell = {"locality": {"hidden": {"series": {"value": -0.5}}}, "signals": {"hidden": {"batch_coherence_steps": 15}}}
    assert series_r("hidden").of(cell) is None
    cell["signals"]["hidden"]["batch_coherence_steps"] = 90
    assert series_r("hidden").of(cell) == -0.5


def test_a_difference_without_an_interval_has_no_bar():
    setting = load("families", "small")
    one = [_made(arm, 419, [2.0, 1.0]) for arm in ("uniform", "sdo")]
    several = [_made(arm, seed, [2.0, 1.0 + seed * (arm == "sdo")]) for arm in ("uniform", "sdo") for seed in (1, 2)]
    for cells, bars in ((one, 0), (several, 1)):  # of two checkpoints the first is the same for all seeds
        lower = curves(setting, cells, ["uniform", "sdo"]).axes[1]
        assert sum(len(container.lines[2]) for container in lower.containers) == bars


def test_a_measure_without_a_number_has_no_level():
    measure = Measure("b", lambda cell: None)
    assert level([_made("sdo", 1, [1.0])], "sdo", measure) is None
    assert difference([_made("sdo", 1, [1.0])], "uniform", "sdo", measure) is None
