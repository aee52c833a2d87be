"""Cells of text in training data: what TRL takes stays, anything else is refused by row and column before it loads."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("trl")

from datasets import Dataset

from sdo.cli.grpo import GRPOColumns
from sdo.cli.main import main
from sdo.cli.training.cells import check_cells, text_columns
from sdo.cli.training.data import DPOColumns, SFTColumns
from sdo.demo.tiny_model import build
from sdo.errors import InputError

USER = {"role": "user", "content": "what"}
CALL = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("house")
    model, tokenizer = build(["what 12"], seed=0, hidden=32, layers=2, vocab=300)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    np.save(folder / "E.npy", np.random.default_rng(0).standard_normal((24, 4)))
    return folder


def check(cells, **columns):
    rows = Dataset.from_dict({"a": cells, "sample_id": list(range(10, 10 + len(cells))), **columns})
    check_cells(rows, ["a"], what="data", id_column="sample_id", numbered=True)


@pytest.mark.parametrize(
    ("cells", "fault"),
    [
        (["x", None], "row 11, column 'a' is null"),
        ([1, 2], r"row 10, column 'a' holds 1 \(int\)"),
        ([True], r"row 10, column 'a' holds True \(bool\)"),
        ([0.5], r"row 10, column 'a' holds 0.5 \(float\)"),
        ([{"b": 1}], r"row 10, column 'a' holds {'b': 1} \(dict\)"),
        ([["x"]], r"holds a chat whose message 0 is 'x' \(str\)"),
        ([[USER], []], "row 11, column 'a' is an empty list"),
        ([[USER], None], "row 11, column 'a' is null"),
        ([[USER, None]], r"row 10, column 'a' holds a chat whose message 1 is None \(null\)"),
        ([[USER, {"role": "user", "content": None}]], "holds a chat whose message 1 has no content"),
        ([[{"role": "user"}]], "holds a chat whose message 0 has no content"),
        ([[{"content": "x"}]], "holds a chat whose message 0 has no role"),
        ([[{"role": None, "content": "x"}]], "holds a chat whose message 0 has no role"),
        ([[{"role": 3, "content": "x"}]], r"holds a chat whose message 0 has the role 3 \(int\)"),
        ([[{"role": "user", "content": 4}]], r"holds a chat whose message 0 has the content 4 \(int\)"),
    ],
)
def test_what_is_neither_text_nor_chat_is_refused(cells, fault):
    with pytest.raises(InputError, match=f"^data: .*{fault}; expected a string or a chat$"):
        check(cells)


@pytest.mark.parametrize(
    "cells",
    [
        ["x", ""],
        [[USER], [{"role": "system", "content": ""}, USER]],
        [[USER, {"role": "assistant", "content": None, "tool_calls": CALL}]],
        [[USER, {"role": "assistant", "tool_calls": CALL}]],
        [[USER, {"role": "assistant", "content": None, "thinking": "hm"}]],
        [[{"role": "user", "content": [{"type": "text", "text": "what"}]}]],
    ],
)
def test_what_trl_takes_is_let_through(cells):
    check(cells)


def test_rows_count_from_the_beginning_where_ids_are_the_datas_own():
    rows = Dataset.from_dict({"a": ["x"] * 1500 + [None], "key": [f"k{i}" for i in range(1501)]})
    with pytest.raises(InputError, match="data: row 1500, column 'a' is null"):
        check_cells(rows, ["a"], what="data", id_column="key", numbered=False)


ALL = ["input_ids", "prompt", "completion", "chosen", "rejected", "messages", "text", "body", "q", "sample_id"]


@pytest.mark.parametrize(
    ("columns", "names", "read"),
    [
        (SFTColumns(prompt_column="q", completion_column="body"), ALL, ["q", "body"]),
        (SFTColumns(), ALL, []),
        (SFTColumns(), ALL[1:], ["prompt", "completion"]),
        (SFTColumns(), ALL[5:], ["messages"]),
        (SFTColumns(), ALL[6:], ["text"]),
        (SFTColumns(), ALL[8:], []),
        (DPOColumns(), ALL, ["prompt", "chosen", "rejected"]),
        (DPOColumns(prompt_column="q"), ALL, ["q", "chosen", "rejected"]),
        (DPOColumns(), ["chosen", "rejected"], ["chosen", "rejected"]),
        (GRPOColumns(), ALL, ["prompt"]),
        (GRPOColumns(prompt_column="q"), ALL, ["q"]),
    ],
)
def test_the_columns_that_are_read(columns, names, read):
    assert text_columns(columns, SimpleNamespace(), names) == read


def test_the_text_field_may_have_another_name():
    assert text_columns(SFTColumns(), SimpleNamespace(dataset_text_field="body"), ALL[6:]) == ["body"]


SFT = "--prompt_column q --completion_column a"
SAME = "--dataset_name rows.jsonl --model_name_or_path model --use_cpu true --report_to none --bf16 false --max_steps 1"


@pytest.mark.parametrize(
    ("command", "column", "row"),
    [
        (f"sft {SFT}", "a", 3),
        (f"sft {SFT} --dataset_train_split train[2:]", "q", 3),
        (f"sft {SFT} --dataset_train_split train[:9] --dataset_test_split train[9:] --eval_strategy epoch", "a", 20),
        (f"doctor {SFT}", "a", 3),
        (f"probe {SFT} --embeddings E.npy --out probe", "a", 3),
        ("dpo --prompt_column q --chosen_column a --rejected_column b", "b", 3),
        ("grpo --prompt_column q --reward gsm8k", "q", 3),
    ],
)
def test_a_null_cell_is_one_line_before_the_model_is_loaded(here, capsys, command, column, row):
    rows = [{"q": f"what {i}", "a": f" {i}", "b": " no", "answer": "#### 1"} for i in range(24)]
    rows[row][column] = None
    Path("rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    Path("model/model.safetensors").unlink()
    name, *argv = command.split()
    assert main([name, *argv, *SAME.split(), "--output_dir", "out"]) == 2
    line = f"sdo {name}: dataset_name rows.jsonl: row {row}, column {column!r} is null; expected a string or a chat"
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert not Path("out").exists()


def test_an_answer_that_is_null_is_refused(here, capsys):
    rows = [{"prompt": f"what {i}", "answer": None if i == 5 else "#### 1"} for i in range(24)]
    Path("rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert main(["grpo", "--reward", "gsm8k", *SAME.split(), "--output_dir", "out"]) == 2
    assert "row 5, column 'answer' is null; expected the answer" in capsys.readouterr().err
