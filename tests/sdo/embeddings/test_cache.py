from pathlib import Path

import numpy as np
import pytest

from sdo.embeddings.cache import EmbeddingCache, cache_folder, cache_key

KEY = cache_key({"texts_sha256": "a"})


@pytest.fixture
def matrix(tmp_path):
    path = tmp_path / "E.npy"
    np.save(path, np.eye(3, dtype=np.float32))
    return path


def test_a_stored_matrix_comes_back_with_its_record(tmp_path, matrix):
    cache, target = EmbeddingCache(tmp_path / "deep" / "cache"), tmp_path / "out.npy"
    assert cache.fetch(KEY, target) is None
    cache.store(KEY, matrix, {"notes": ["n"]})
    assert cache.fetch(KEY, target)["notes"] == ["n"]
    assert target.read_bytes() == matrix.read_bytes()
    assert cache.fetch(cache_key({"texts_sha256": "b"}), target) is None
    assert sorted(path.suffix for path in cache.folder.iterdir()) == [".json", ".npy"]


@pytest.mark.parametrize("damage", ["matrix", "cut", "no matrix", "record", "list"])
def test_a_damaged_entry_is_a_miss(tmp_path, matrix, damage):
    cache = EmbeddingCache(tmp_path / "cache")
    cache.store(KEY, matrix, {})
    file, record = cache.folder / f"{KEY}.npy", cache.folder / f"{KEY}.json"
    content = file.read_bytes()
    if damage == "matrix":
        file.write_bytes(content[:-1] + b"\x01")  # the length stays
    elif damage == "cut":
        file.write_bytes(content[:-5])
    elif damage == "no matrix":
        file.unlink()
    else:
        record.write_text("{" if damage == "record" else "[]")
    assert cache.fetch(KEY, tmp_path / "out.npy") is None
    cache.store(KEY, matrix, {})
    assert cache.fetch(KEY, tmp_path / "out.npy") is not None


def test_a_failed_store_leaves_no_entry(tmp_path, matrix, monkeypatch):
    cache = EmbeddingCache(tmp_path / "cache")
    cache.store(KEY, matrix, {})

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            cache.store(KEY, matrix, {})
    assert cache.fetch(KEY, tmp_path / "out.npy") is None
    assert not list(cache.folder.glob(".*"))


def test_keys_follow_every_value_and_no_order():
    description = {"texts_sha256": "a", "model": "m", "options": {"pooling": "own", "prompt": None}}
    assert cache_key(dict(reversed(description.items()))) == cache_key(description)
    others = [
        {**description, "texts_sha256": "b"},
        {**description, "model": "n"},
        {**description, "options": {"pooling": "mean", "prompt": None}},
        {**description, "options": {"pooling": "own", "prompt": ""}},
    ]
    assert len({cache_key(d) for d in [description, *others]}) == 5


def test_the_folder_is_that_of_the_variable_or_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("SDO_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("SDO_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "sdo-toolkit" / "embeddings"
