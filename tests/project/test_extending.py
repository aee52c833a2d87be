"""The blocks of docs/extending.md, run in their order by somebody who has embeddings and a recorded run."""

import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("trl", reason="needs the extra train")

from transformers import Trainer, TrainingArguments

from analysis import Run
from diagnostics.signals import registry as signals
from diagnostics.signals.registry import signals_of
from sdo import SDO
from sdo.cli.main import main
from sdo.organizers import registry
from sdo.selectors import Candidates
from sdo.selectors.selector import choose
from tests import trainings
from tests.run_folders import write_training

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
MATRIX = np.random.default_rng(0).standard_normal((40, 4))


def run_exp(folder, callbacks):
    """What a framework does: it builds a trainer of its own and trains."""
    rows = trainings.tokenized(trainings.make_rows(40, seed=1))
    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": 5}
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=8, **options)
    collator = functools.partial(trainings.pad, side="right")
    model = trainings.make_model()
    Trainer(model, arguments, train_dataset=rows, data_collator=collator, callbacks=callbacks).train()


def test_the_blocks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    monkeypatch.setattr(signals, "_known", dict(signals._known))
    np.save("E.npy", MATRIX)
    write_training(tmp_path / "runs" / "sdo")
    names = {"arguments": tmp_path / "framework", "run_exp": run_exp}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        exec(compile(block, "extending.md", "exec"), names)  # noqa: S102 - the page's own code
    made = names["Windows"](SDO(MATRIX).embeddings, seed=3).plan(8)
    assert made.epoch(0).figures == {"windows": 5}
    assert made.redraw(4).batches(0, 9).tolist() != made.batches(0, 9).tolist()
    plan = SDO(MATRIX, k=2, seed=617).plan(8)
    assert [a + b for a, b in zip(names["seen"][::2], names["seen"][1::2], strict=True)] == plan.batches(0, 5).tolist()
    assert names["state"]["step"] == 5
    assert signals_of(["embedded", "weight"])[1] == names["Embedded"]()
    selector = names["LeastSeen"](0.5)
    offered = Candidates(0, np.arange(4), np.zeros(4, np.int64), np.ones(4, np.int64))
    for wanted in ([0, 1], [2, 3], [0, 1]):
        kept, _ = choose(selector, offered)
        assert np.flatnonzero(kept).tolist() == wanted
        selector.chosen(offered, kept)
    other = names["LeastSeen"](0.5)
    other.load(json.loads(json.dumps(selector.state())))
    assert other.seen == selector.seen
    assert len(Run.open(tmp_path / "runs" / "inside").steps()) == 5
    recorded = Run.open(tmp_path / "runs" / "loop").steps().to_pydict()
    assert recorded["sample_ids"] == plan.batches(0, 5).tolist()
    assert names["checkpoint"]["recorder"]["step"] == 5
    assert names["report"].numbers["sections"]["longest"]["state"] == "shown"
    assert not names["report"].failed
    argv = ["plan", "--embeddings", "E.npy", "--batch-size", "8", "--organizer", "windows", "--descending"]
    assert main([*argv, "--epochs", "1", "--out", "P.parquet"]) == 0
    assert "windows" in capsys.readouterr().out
