"""Gradients of FSDP2: sketched in parts, where they are, and equal to the sketch of the whole.

Raw ``fully_shard`` in two gloo processes. Trainer shards only on accelerators: on a CPU it falls back to DDP, so that
nothing here goes through it.
"""

import json

import numpy as np
import pytest

pytest.importorskip("trl")

from fsdp2 import SHAPES, arguments, record

from analysis import Run
from tests.llama import tiny_llama

TOLERANCE = 2e-5  # as of test_ddp
LOCAL = {
    "even": [[30, 40], [30, 40]],
    "odd": [[31, 40], [30, 40]],
    "vector": [[3], [2]],
    "single row": [[1, 40], [0, 40]],
}
OFFSETS = {"even": [0, 30], "odd": [0, 31], "vector": [0, 3], "single row": [0, 1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, torchrun):
    out = tmp_path_factory.mktemp("fsdp2")
    torchrun("fsdp2.py", out)
    for name, clip in (("one clipped", 0.5), ("one", 1e9)):
        record(out / name, arguments(out), tiny_llama(), clip)
    return out


@pytest.fixture(scope="module")
def found(folder):
    return [json.loads((folder / f"fsdp2-r{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("mesh", ["sketches", "copies"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_sketches_of_shards_add_up_to_that_of_the_whole(found, mesh, name):
    for rank in found:
        seen = rank[mesh][name]
        assert (seen["parameter"], seen["gradient"]) == ("DTensor", "DTensor")
        assert seen["tensor_hooks"] == 0  # FSDP2 never calls them: what was sketched came from the accumulated gradient
        assert seen["error"] < 1e-6
        assert seen["cosine"] == pytest.approx(1, abs=1e-9)
        assert seen["norm"] == pytest.approx(1, abs=1e-6)
        assert seen["mean"] < 1e-4
    if mesh == "sketches":
        assert [rank[mesh][name]["local"] for rank in found] == LOCAL[name]
        assert [rank[mesh][name]["offset"] for rank in found] == OFFSETS[name]


def test_the_shapes_hold_sketches_and_identities(found):
    assert {found[0]["sketches"][name]["kind"] for name in SHAPES} == {"identity", "count"}


@pytest.mark.parametrize(("sharded", "single"), [("sharded", "one clipped"), ("copied", "one")])
def test_a_recorded_run_of_shards_is_that_of_one_process(folder, found, sharded, single):
    assert [rank["seen"] for rank in found] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    two, one = Run.open(folder / sharded), Run.open(folder / single)
    for signal, kind in (("weight", "step"), ("hidden", "step"), ("hidden", "sample")):
        mine, other = two.gradients(signal, kind), one.gradients(signal, kind)
        assert len(mine) == len(other) > 0
        assert [ids.tolist() for ids in mine.sample_ids] == [ids.tolist() for ids in other.sample_ids]
        error = np.linalg.norm(mine.sketch - other.sketch, axis=1) / np.linalg.norm(other.sketch, axis=1)
        assert error.max() < TOLERANCE
        assert np.abs(mine.norm / other.norm - 1).max() < TOLERANCE
        assert mine.defined.all()
    first, second = one.steps().to_pydict(), two.steps().to_pydict()
    for column in ("step", "tokens", "sample_ids", "clipped"):
        assert first[column] == second[column]
    assert set(second["clipped"]) == {sharded == "sharded"}
    assert first["loss"] == pytest.approx(second["loss"], rel=TOLERANCE)
    # Only the reduced gradient of a sharded parameter exists, no micro-batch has one of its own.
    assert two.kinds("weight") == {"step": 3}
    assert two.kinds("hidden") == {"step": 3, "micro_batch": 6, "sample": 12}
