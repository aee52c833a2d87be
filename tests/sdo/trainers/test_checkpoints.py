"""Which checkpoint is the last whole one, and digests of the data that one was trained on."""

import json

import numpy as np
import pytest

pytest.importorskip("datasets")

import datasets

from sdo.trainers.checkpoints import checkpoint_damage, dataset_digest, last_checkpoint, later_damaged

ROWS = [[i, i + 1, 2 * i] for i in range(600)]


def save(folder, step, text=None):
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}) if text is None else text)
    return checkpoint


def test_the_last_is_the_one_with_the_largest_number(tmp_path):
    assert last_checkpoint(tmp_path / "nothing") is None
    assert last_checkpoint(tmp_path) is None
    for step in (9, 100, 20):
        save(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-1000.tmp").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


@pytest.mark.parametrize("text", ["", '{"global_step": 5', "[]", "{}", "\x00\x00", "[" * 100_000])
def test_one_that_was_cut_off_is_passed_over(tmp_path, text):
    """A process that is killed while it saves leaves a folder without a state, or with half of one."""
    whole = save(tmp_path, 4)
    cut = save(tmp_path, 5, text)
    (tmp_path / "checkpoint-6").mkdir()
    assert checkpoint_damage(whole) is None
    assert "trainer_state.json" in checkpoint_damage(cut)
    assert last_checkpoint(tmp_path) == whole
    assert later_damaged(tmp_path, whole) == [
        f"{tmp_path / 'checkpoint-6'}: trainer_state.json is missing",
        f"{cut}: {checkpoint_damage(cut)}",
    ]


@pytest.fixture
def saved(tmp_path):
    """A whole checkpoint 4, and a later one with weights, optimizer and random state as transformers writes them."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    save(tmp_path, 4)
    checkpoint = save(tmp_path, 6)
    safetensors.save_file({"a": torch.arange(6.0), "b": torch.ones(2, 2)}, checkpoint / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.arange(50.0)}, checkpoint / name)
    return checkpoint


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("kept", [0, 5, 0.5, -1])
def test_one_whose_weights_or_optimizer_are_cut_off_is_passed_over(tmp_path, saved, name, kept):
    """A machine that dies can leave files of the right name whose end never reached the disk."""
    assert checkpoint_damage(saved) is None
    file = saved / name
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    assert checkpoint_damage(saved) == f"{name} is cut off"
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"


def test_a_shard_that_is_gone_is_named(saved):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    (saved / "model.safetensors").rename(saved / "model-00001-of-00002.safetensors")
    assert checkpoint_damage(saved) == "model-00002-of-00002.safetensors is missing"
    (saved / "model.safetensors.index.json").write_text("[" * 100_000)
    assert checkpoint_damage(saved) == "model.safetensors.index.json cannot be read"


def test_files_of_another_kind_are_taken_as_they_are(saved):
    (saved / "old.bin").write_bytes(b"\x80\x02old pickle")
    (saved / "vocab.json").write_text("cut")
    assert checkpoint_damage(saved) is None
    assert checkpoint_damage(saved.parent / "checkpoint-9") == "there is no such folder"


def digest(rows, ids=None, **more):
    ids = np.arange(len(rows)) if ids is None else np.asarray(ids)
    return dataset_digest(datasets.Dataset.from_dict({"input_ids": rows, **more}), ids)


def test_a_digest_depends_on_the_rows_by_id_and_on_nothing_else():
    order = np.random.default_rng(0).permutation(len(ROWS))
    assert digest(ROWS) == digest([ROWS[i] for i in order], order)
    assert digest(ROWS) == digest(ROWS, text=["other columns"] * len(ROWS))
    others = [
        digest(ROWS[:-1]),
        digest(ROWS, np.arange(len(ROWS)) + 1),
        digest([ROWS[i] for i in order]),
        digest([[7], *ROWS[1:]]),
        digest([*ROWS[:-1], [7]]),
    ]
    assert len({digest(ROWS), *others}) == 6


def test_a_digest_is_of_what_is_stored():
    plain = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 2]})
    ids = np.arange(3)
    assert dataset_digest(plain, ids) == dataset_digest(plain.with_format("numpy"), ids)
    chance = plain.with_transform(lambda rows: {"text": [str(np.random.default_rng().random())] * len(rows["text"])})
    assert dataset_digest(chance, ids) == dataset_digest(plain, ids)
    assert dataset_digest(plain.map(lambda row: {"text": row["text"] * 2}), ids) != dataset_digest(plain, ids)
    assert dataset_digest(plain.select([2, 0]), ids[:2]) != dataset_digest(plain.select([2, 1]), ids[:2])


def test_rows_that_might_be_made_anew_have_none():
    assert dataset_digest([{"input_ids": [1]}], np.arange(1)) is None
