"""Real sentence-transformers models on the CPU: a random BERT of two layers; all-MiniLM-L6-v2 where it is installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

import huggingface_hub
import torch
from huggingface_hub import constants

from sdo.embeddings.sentence import ModelPlace, SentenceEncoder, find_model
from sdo.errors import InputError

TEXTS = ["red apples", "a green apple and more", "", "trains", "\ud800"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def folder(tiny_bert):
    return tiny_bert


def by_hand(folder, texts, pooling, prompt="", length=32):
    """Token vectors of one text at a time, without padding, and the pooling from its definition."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    rows = []
    for text in texts:
        with torch.no_grad():
            states = model(**tokenizer(prompt + text, return_tensors="pt", truncation=True, max_length=length))[0][0]
        rows.append({"mean": states.mean(dim=0), "cls": states[0], "last": states[-1]}[pooling].numpy())
    return np.array(rows)


@pytest.mark.parametrize("pooling", ["own", "mean", "cls", "last"])
def test_poolings_agree_with_their_definitions(folder, pooling):
    encoder = SentenceEncoder(find_model(str(folder)), pooling=pooling, device="cpu", batch_size=2)
    rows = encoder.encode(TEXTS)
    assert rows.dtype == np.float32
    expected = by_hand(folder, [*TEXTS[:-1], "\ufffd"], "mean" if pooling == "own" else pooling)
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    assert encoder.load()["pooling"] == {"own": "mean", "last": "lasttoken"}.get(pooling, pooling)
    np.testing.assert_array_equal(rows, encoder.encode(TEXTS))


def test_prompt_and_length_reach_the_model(folder):
    encoder = SentenceEncoder(find_model(str(folder)), prompt="query ", device="cpu", max_length=4)
    np.testing.assert_allclose(encoder.encode(TEXTS[:2]), by_hand(folder, TEXTS[:2], "mean", "query ", 4), atol=1e-5)
    assert encoder.load() == {"pooling": "mean", "prompt": "query ", "max_length": 4, "dtype": "float32"}


def test_a_folder_is_known_by_its_contents(folder, tmp_path):
    first = find_model(str(folder))
    assert first.kind == "local folder"
    copy = tmp_path / "org" / "model"
    shutil.copytree(folder, copy)
    second = find_model(str(copy))
    assert second.identity == first.identity
    assert second.name != first.name
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"num_attention_heads": 2', '"num_attention_heads": 4'))
    assert find_model(str(copy)).identity != first.identity
    with pytest.raises(InputError, match=r"--revision main: .* is a local folder and has none; fix: leave it out"):
        find_model(str(copy), "main")


def test_options_out_of_range_are_refused(folder):
    place = find_model(str(folder))
    for options, message in (
        ({"pooling": "max"}, "pooling is 'max'; expected one of own, mean, cls, last"),
        ({"batch_size": 0}, "batch size is 0; expected a whole number from 1"),
        ({"max_length": 0}, "max length is 0"),
    ):
        with pytest.raises(InputError, match=message):
            SentenceEncoder(place, **options)
    with pytest.raises(InputError, match=r"--model local folder .* cannot be loaded: "):
        SentenceEncoder(place, device="nonsense").load()


def test_names_that_cannot_be_models_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"is no folder, and cannot be a hub id; expected a folder with config\.json"):
        find_model(str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"holds no config\.json"):
        find_model(str(tmp_path))


def test_offline_and_not_cached_is_said_at_once(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = (
        r"^--model org/none \(hub id\), revision main, is not in the local cache, and the hub is switched off "
        r"\(HF_HUB_OFFLINE\); expected a model that is there; fix: fetch it once with a network, or give the folder"
    )
    with pytest.raises(InputError, match=message):
        find_model("org/none")


def test_an_empty_folder_does_not_hide_a_hub_id(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("org/model").mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"--model org/model \(hub id\)"):
        find_model("org/model")


def test_the_hub_is_asked_for_the_commit(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked = []

    def model_info(self, name, *, revision, timeout):
        asked.append((name, revision, timeout))
        return SimpleNamespace(sha="c" * 40)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    place = find_model("org/model", "v2")
    assert place == ModelPlace("org/model", "hub id", "c" * 40, cached=False)
    assert asked == [("org/model", "v2", 10.0)]
    assert place.identity == "org/model@" + "c" * 40
    assert str(place) == "hub id org/model, revision cccccccccccc"


def test_a_hub_that_cannot_be_reached_leaves_the_cache(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(InputError, match=r"not in the local cache, and the hub cannot be reached \(ConnectionError\)"):
        find_model("org/model")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: "/cache/snapshots/" + "d" * 40)
    place = find_model("org/model")
    assert (place.revision, place.cached) == ("d" * 40, True)
    assert str(place).endswith("from the local cache")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not installed; fix: pip install 'sdo-toolkit\[encode\]', or --encoder lsa"):
        find_model("org/model")


def test_a_cached_hub_model_works_offline(folder, tmp_path):
    # The layout of the hub's cache; a process of its own, since its place is read when the package is imported.
    repo, commit = tmp_path / "hub" / "models--org--tiny", "e" * 40
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    source = tmp_path / "t.jsonl"
    source.write_text("".join(json.dumps({"q": text}) + "\n" for text in TEXTS[:3]))
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "SDO_CACHE": str(tmp_path / "c")}
    argv = [sys.executable, "-m", "sdo.cli.main", "embed", str(source), "--column", "q", "--out", tmp_path / "E.npy"]
    argv += ["--encoder", "sentence-transformers", "--model", "org/tiny", "--pooling", "cls", "--device", "cpu"]
    done = subprocess.run(list(map(str, argv)), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"model: hub id org/tiny, revision {commit[:12]}, from the local cache" in done.stdout
    np.testing.assert_allclose(np.load(tmp_path / "E.npy"), by_hand(folder, TEXTS[:3], "cls"), atol=1e-5)
    assert json.loads((tmp_path / "E.json").read_text())["model"] == f"org/tiny@{commit}"


def test_minilm_gives_the_published_rows(minilm, gsm8k):
    lines = (gsm8k / "train.jsonl").read_text(encoding="utf-8").splitlines()[:32]
    rows = SentenceEncoder(find_model(str(minilm)), device="cpu").encode(
        [json.loads(line)["question"] for line in lines]
    )
    known = np.load(gsm8k / "train_minilm.npy", mmap_mode="r")[:32].astype(np.float64)
    cosine = (rows * known).sum(axis=1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(known, axis=1)
    assert rows.shape == (32, 384)
    assert cosine.min() > 0.999
