"""Shared by all tests: no network, no display, and the GSM8K files where they are."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import pytest

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, derandomize=True, database=None)
hypothesis.settings.load_profile("default")

GSM8K = Path(os.environ.get("SDO_GSM8K", Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"))


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """Folder with train.jsonl, test.jsonl and their MiniLM embeddings."""
    if not (GSM8K / "train_minilm.npy").is_file():
        pytest.skip("the GSM8K files are not here; set SDO_GSM8K to their folder")
    return GSM8K
