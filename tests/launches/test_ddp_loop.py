"""A plain loop under DDP: two gloo processes against one, row for row."""

import json

import numpy as np
import pytest

pytest.importorskip("trl")

from loop import SIGNALS, STEPS, train
from training import organizer

from analysis import Run

TOLERANCE = 2e-5  # as of test_ddp
NAMES = [signal.partition(":")[0] for signal in SIGNALS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, torchrun):
    out = tmp_path_factory.mktemp("loop")
    torchrun("loop.py", out)
    trained = train(out / "one", 4)
    (out / "trained.json").write_text(json.dumps(trained))
    return out


@pytest.fixture(scope="module")
def runs(folder):
    return Run.open(folder / "one"), Run.open(folder / "two")


def test_steps_of_two_processes_are_those_of_one(runs, folder):
    one, two = (run.steps().to_pydict() for run in runs)
    plan = organizer().plan(8)
    assert one["sample_ids"] == two["sample_ids"] == plan.batches(0, STEPS).tolist()
    for column in ("step", "organizer_epoch", "clipped", "tokens"):
        assert one[column] == two[column], column
    assert all(one["clipped"])
    for column in ("loss", "grad_norm", "learning_rate"):
        assert two[column] == pytest.approx(one[column], rel=TOLERANCE), column
    trained = json.loads((folder / "trained.json").read_text())
    assert [json.loads((folder / f"loop-r{rank}.json").read_text()) for rank in range(2)] == [trained] * 2
    assert trained == plan.counts(STEPS).tolist()
    assert runs[0].exposure().equals(runs[1].exposure())
    assert runs[1].info["trainer"]["processes"] == 2


@pytest.mark.parametrize(
    ("signal", "kind"),
    [
        (signal, kind)
        for signal in NAMES
        for kind in ("step", "micro_batch", "sample")
        if (signal == "weight") <= (kind != "sample") and (signal == "samples") <= (kind == "sample")
    ],
)
def test_gradients_of_two_processes_are_those_of_one(runs, signal, kind):
    one, two = (run.gradients(signal, kind) for run in runs)
    assert len(one) == len(two) > 0

    def order(rows):
        return sorted(range(len(rows)), key=lambda at: (rows.step[at], rows.sample_ids[at].tolist()))

    one, two = one.take(np.array(order(one))), two.take(np.array(order(two)))
    assert [ids.tolist() for ids in one.sample_ids] == [ids.tolist() for ids in two.sample_ids]
    assert one.micro_batch.tolist() == two.micro_batch.tolist()
    error = np.linalg.norm(one.sketch - two.sketch, axis=1) / np.linalg.norm(one.sketch, axis=1)
    assert error.max() < TOLERANCE
    assert two.norm == pytest.approx(one.norm, rel=TOLERANCE)
