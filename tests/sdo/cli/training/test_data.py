"""Splits and slices of a file, a folder, a saved dataset and a dataset of the hub: rows keep their own positions."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("datasets")

import datasets
from datasets import Dataset

from sdo.cli.training.config import parse_organizer
from sdo.cli.training.data import DPOColumns, SFTColumns, as_completions, as_pairs, load_rows
from sdo.cli.training.run_file import build_organizer
from sdo.embeddings.sources import Selection, open_source
from sdo.errors import InputError

N, HELD_OUT = 200, 7
KINDS = ("file", "folder", "saved", "saved split", "hub")


def write(path, numbers):
    path.write_text("".join(json.dumps({"text": f"row {i}", "i": i}) + "\n" for i in numbers))


@pytest.fixture
def names(tmp_path, monkeypatch):
    """The same rows in every place that a name can mean; the hub's lie in the cache, as after a download."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", range(N))
    write(folder / "test.jsonl", range(N, N + HELD_OUT))
    loaded = datasets.load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
    datasets.DatasetDict({"train": loaded, "test": loaded.select(range(HELD_OUT))}).save_to_disk("saved")
    datasets.Dataset.from_dict(loaded.to_dict()).save_to_disk("one")
    made = Path(loaded.cache_files[0]["filename"]).parent
    cached = tmp_path / "cache" / "org___rows" / "default" / "0.0.0" / ("0" * 40)
    shutil.copytree(made, cached)
    (cached / "json-train.arrow").rename(cached / "rows-train.arrow")
    info = json.loads((cached / "dataset_info.json").read_text())
    (cached / "dataset_info.json").write_text(json.dumps({**info, "dataset_name": "rows"}))
    return dict(zip(KINDS, ("folder/train.jsonl", "folder", "saved", "one", "org/rows"), strict=True))


def load(name, split):
    return load_rows(name, None, split, id_column="sample_id", what="dataset_name")


@pytest.mark.filterwarnings("ignore:Using the latest cached version")
@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", range(N)),
        ("train[:14]", range(14)),
        ("train[14:]", range(14, N)),
        ("train[3:5]", range(3, 5)),
        ("train[-16:]", range(N - 16, N)),
        ("train[:-16]", range(N - 16)),
        ("train[-16:-2]", range(N - 16, N - 2)),
        ("train[:10%]", range(20)),
        ("train[50%:]", range(100, N)),
        ("train[-5%:]", range(190, N)),
        ("train[:1%](pct1_dropremainder)", range(2)),
        ("train[:10%]+train[95%:]", [*range(20), *range(190, N)]),
        ("train[190:] + train[:2]", [*range(190, N), 0, 1]),
        ("train[:900]", range(N)),
    ],
)
def test_rows_of_a_slice_have_their_positions_in_the_whole_split(names, split, expected):
    for kind in KINDS:
        rows = load(names[kind], split)
        assert list(rows.dataset["i"]) == list(rows.dataset["sample_id"]) == list(expected), kind
        assert rows.whole == N, kind
        assert rows.source.endswith(f", {len(expected)} rows"), kind


def test_of_several_splits_the_whole_is_all_their_rows(names):
    rows = load("folder", "test[-2:]+train[:3]")
    assert rows.dataset["i"][:] == [N + HELD_OUT - 2, N + HELD_OUT - 1, 0, 1, 2]
    assert rows.dataset["sample_id"][:] == [HELD_OUT - 2, HELD_OUT - 1, HELD_OUT, HELD_OUT + 1, HELD_OUT + 2]
    assert rows.whole == N + HELD_OUT
    assert load("folder", "train+test").dataset["sample_id"][:] == list(range(N + HELD_OUT))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_embeddings_of_the_whole_fit_every_slice_and_those_of_one_half_not_the_other(names, kind):
    half = np.random.default_rng(0).standard_normal((N // 2, 4))
    np.save("half.npy", half)
    np.save("whole.npy", np.concatenate([half, half]))
    for split in ("train[50%:]", "train[-100:]", "train[:100]"):
        organizer = build_organizer(parse_organizer({"embeddings": "whole.npy"})[0], load(names[kind], split), 0)
        assert organizer.n_samples == N
    assert (
        build_organizer(parse_organizer({"embeddings": "half.npy"})[0], load(names[kind], "train[:50%]"), 0).n_samples
        == 100
    )
    for split in ("train[50%:]", "train[-100:]", "train[100:]"):
        with pytest.raises(
            InputError, match=r"half\.npy have 100 rows, the dataset has 200, of which 100 are trained on"
        ):
            build_organizer(parse_organizer({"embeddings": "half.npy"})[0], load(names[kind], split), 0)


@pytest.mark.parametrize("kind", ["file", "folder", "saved"])
@pytest.mark.parametrize(
    ("split", "message"),
    [
        (
            "train[50%]",
            r"split train\[50%\]: Unrecognized instruction format: train\[50%\]; expected a split or a slice",
        ),
        ("train[:200%]", r"split train\[:200%\]: Percent slice boundaries .*; expected .* such as train\[:1000\]"),
        ("train[:5](closest)", "rounding if not using percent"),
        ("train[:5]+train[5", r"format: train\[5; expected"),
        ("train[300:]", r"split train\[300:\], has no rows"),
        ("train[3:2]", "has no rows"),
        ("validation[:3]", "validation"),
    ],
)
def test_what_no_slice_means_is_one_line(names, kind, split, message):
    with pytest.raises(InputError, match=f"^dataset_name .*{message}") as refusal:
        load(names[kind], split)
    assert "\n" not in str(refusal.value)


def test_a_saved_dataset_without_splits_has_one(names):
    """To evaluate on it would be to evaluate on the training rows."""
    with pytest.raises(InputError, match="split test: no such split; splits there: train"):
        load("one", "test")


def test_embeddings_are_made_of_the_same_slices(names):
    for name in ("folder", "saved", "one"):
        texts = [text for _, text in open_source(name, split="train[-2:]+train[:1%]").texts(Selection("text"))]
        assert texts == ["row 198", "row 199", "row 0", "row 1"]


def test_two_columns_of_one_name_are_refused_wherever_the_file_lies(tmp_path, monkeypatch):
    """datasets would call the second one q.1, and train on the first."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name in ("a.csv", "folder/train.csv"):
        Path(name).write_text("q,a,q\nx,1,y\n")
    for name, there in (("a.csv", "a.csv"), ("folder", "folder/train.csv")):
        with pytest.raises(InputError, match=f"^dataset_name {there}: 'q' stands there 2 times; expected each"):
            load(name, "train")


def test_columns_that_trl_reads_stay_beside_named_ones():
    """huggingface/trl#3597, #6259: tools are rendered into the prompt, so that without them it is another prompt."""
    own = {
        "tools": ['[{"type": "function"}]'],
        "chat_template_kwargs": [{"enable_thinking": False}],
        "ref_chosen_logps": [-1.0],
        "sample_id": [7],
    }
    chat = [{"role": "user", "content": "u"}]
    rows = Dataset.from_dict({"q": [chat], "a": ["x"], "b": ["y"], "note": ["n"], **own})
    tokenizer = SimpleNamespace(chat_template="x")
    named = as_completions(rows, SFTColumns("q", "a"), tokenizer, id_column="sample_id", what="data")
    assert set(named.column_names) == {"prompt", "completion", *own}
    assert named[0]["tools"] == own["tools"][0]
    pairs = as_pairs(rows, DPOColumns("q", "a", "b"), tokenizer, id_column="sample_id", what="data")
    assert set(pairs.column_names) == {"prompt", "chosen", "rejected", *own}
    # A column that is named as a prompt is one, whatever it is called.
    odd = as_completions(rows, SFTColumns("tools", "a"), tokenizer, id_column="sample_id", what="data")
    assert set(odd.column_names) == {"prompt", "completion", *own} - {"tools"}
