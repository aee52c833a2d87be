"""Embeddings and data that belong together, and those that do not, by the record that `sdo embed` leaves."""

import json

import numpy as np
import pytest

pytest.importorskip("trl")

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from sdo import SDO, attach
from sdo.cli.main import main
from sdo.demo.tiny_model import build
from sdo.embeddings.belonging import match_texts, read_record

N = 24
TEXTS = [("red apples pears plums %d" if i % 2 else "fast trains cars planes %d") % i for i in range(N)]
ORDER = np.random.default_rng(1).permutation(N)

pytestmark = pytest.mark.usefixtures("quiet_datasets")


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """A model, and E.npy of the texts in the order of train.jsonl, whose own ids name another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDO_CACHE", str(tmp_path / "cache"))
    model, tokenizer = build(TEXTS, seed=0, hidden=16, layers=1, vocab=300)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    write("train.jsonl", ORDER.tolist(), [TEXTS[i] for i in ORDER])
    assert main(["embed", "train.jsonl", "--column", "question", "--out", "E.npy", "--dim", "4"]) == 0
    capsys.readouterr()
    return tmp_path


def write(name, ids, texts):
    rows = [
        {"question": text, "answer": " ok"} | ({} if ids is None else {"sample_id": ids[i]})
        for i, text in enumerate(texts)
    ]
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def run(command, data="train.jsonl", embeddings="E.npy", *more):
    argv = ["--model_name_or_path", "model", "--dataset_name", data, "--prompt_column", "question", "--use_cpu", "true"]
    argv += ["--completion_column", "answer", "--report_to", "none", "--max_steps", "2", "--save_strategy", "no"]
    argv += ["--per_device_train_batch_size", "4", "--bf16", "false", "--output_dir", "o", *more]
    return main([command, *argv, "--organizer.embeddings", embeddings, "--organizer.k", "2"])


def test_ids_of_ones_own_are_refused_beside_embeddings_in_file_order(here, capsys):
    assert run("sft") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "column 'sample_id' names another order" in line
    assert "fix: sdo embed --id-column sample_id" in line
    assert run("doctor") == 1
    assert "names another order" in capsys.readouterr().out
    assert (
        main(
            ["embed", "train.jsonl", "--column", "question", "--out", "K.npz", "--dim", "4", "--id-column", "sample_id"]
        )
        == 0
    )
    assert run("sft", "train.jsonl", "K.npz") == 0


def test_rows_that_were_named_and_then_shuffled_are_silent(here, capsys):
    write("plain.jsonl", None, TEXTS)
    assert main(["embed", "plain.jsonl", "--column", "question", "--out", "P.npy", "--dim", "4"]) == 0
    capsys.readouterr()
    assert run("sft", "train.jsonl", "P.npy") == 0  # the README's recipe: ids are the rows of what was embedded
    assert "warning" not in capsys.readouterr().err
    assert run("sft", "plain.jsonl", "E.npy") == 0
    assert "was made from other texts than column 'question'" in capsys.readouterr().err


def test_keys_that_are_no_rows_and_other_columns_are_not_compared(here):
    record = read_record(here / "E.npy")
    shuffled = [TEXTS[i] for i in ORDER]

    def match(own, texts=shuffled, column="question", **changes):
        return match_texts({**record, **changes}, Dataset.from_dict({column: texts}), own)

    assert match(ORDER.tolist()) == "by position"
    assert match(list(range(N))) == "by id"
    assert match(None) == "by position"
    assert match(None, TEXTS) == "no"
    assert match(ORDER[::-1].tolist(), TEXTS) == "no"
    assert match([f"key {i}" for i in ORDER]) == "by position"
    assert match([f"key {i}" for i in ORDER], TEXTS) is None
    assert match(None, column="answer") is match(None, shuffled[:-1]) is match(None, strip_think=True) is None
    assert match(None, ids="integers") is None
    assert read_record(here / "train.jsonl") is None
    (here / "E.json").write_text("[" * 100_000)
    assert read_record(here / "E.npy") is None


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"question": [TEXTS[i] for i in ORDER], "sample_id": ORDER.tolist()}, "names another order"),
        ({"question": [TEXTS[i] for i in ORDER]}, None),
        ({"question": TEXTS}, None),  # TRL adds an end to a text: other texts prove nothing
        ({"sample_id": ORDER.tolist()}, "made from the rows of column 'prompt'"),
    ],
)
def test_attach_warns_where_the_texts_are_still_there(here, rows, said, recwarn):
    prompts = rows.get("question", [TEXTS[i] for i in ORDER])
    dataset = Dataset.from_dict({"prompt": prompts, "completion": [" ok"] * N, **rows})
    model, tokenizer = build(TEXTS, seed=0, hidden=16, layers=1, vocab=300)
    args = SFTConfig(output_dir="o", use_cpu=True, bf16=False, report_to=[], max_steps=1, per_device_train_batch_size=4)
    trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    recwarn.clear()
    if said is None:
        attach(trainer, SDO("E.npy", k=2))
        assert not [one for one in recwarn if "embeddings" in str(one.message)]
    else:
        with pytest.warns(UserWarning, match=said):
            attach(trainer, SDO("E.npy", k=2))
