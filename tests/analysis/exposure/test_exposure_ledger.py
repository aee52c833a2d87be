import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import Run, gini, plan_exposure, run_exposure
from sdo import SDO, Embeddings, InputError


def slow_gini(values):
    n, mean = len(values), sum(values) / len(values)
    return sum(abs(a - b) for a in values for b in values) / (2 * n * n * mean)


@pytest.mark.parametrize("values", [[1, 1, 1], [0, 0, 5], [3, 1, 4, 1, 5, 9], [2]])
def test_gini_equals_the_double_sum(values):
    found = gini(values)
    assert found.value == pytest.approx(slow_gini(values))
    assert found.count == len(values)


def test_gini_of_nothing_has_a_reason():
    assert gini([0, 0]).value is None
    assert gini([0, 0]).reason == "no sample was seen"
    assert gini([]).value is None
    for wrong in ([1.0, -1.0], [np.nan, 1.0]):
        with pytest.raises(ValueError, match="finite values from 0 on"):
            gini(wrong)


BATCHES = [[0, 1], [2, 1], [3, 0], [1, 0]]


def write_ledger(run, ids, trained, epoch=0, pool=None):
    folder = run.path / "exposure"
    folder.mkdir(exist_ok=True)
    n = len(ids)
    columns = {"organizer_epoch": [epoch] * n, "sample_id": ids, "planned": trained, "trained": trained}
    table = pa.table({**columns, "in_pool": [True] * n if pool is None else pool})
    pq.write_table(table, folder / f"part-{epoch:05d}.parquet")


def test_exposure_of_a_run(make_run):
    writer = make_run()
    writer.steps(0, 3, BATCHES)
    write_ledger(writer, [0, 1, 2, 3, 5, 6], [3, 3, 1, 1, 0, 0], pool=[True] * 5 + [False])
    found = run_exposure(Run.open(writer.path))
    assert found.times.tolist() == [3, 3, 1, 1, 0, 0]
    assert found.distinct.tolist() == [2, 3, 4, 4]
    assert found.coverage == pytest.approx([2 / 6, 3 / 6, 4 / 6, 4 / 6])
    assert found.histogram() == {0: 2, 1: 2, 2: 0, 3: 2}
    assert found.gini().value == pytest.approx(slow_gini([3, 3, 1, 1, 0, 0]))
    assert found.pools == {0: 5}
    assert (found.source, found.notes) == ("trained", ())


def test_a_ledger_that_differs_is_said(make_run):
    writer = make_run()
    writer.steps(0, 3, BATCHES)
    write_ledger(writer, [0, 1, 2, 3], [2, 3, 1, 1])
    (note,) = run_exposure(Run.open(writer.path)).notes
    assert "counts 1 exposures fewer" in note


def test_exposure_without_an_organizer(make_run):
    writer = make_run().info(dataset={"rows": 8})
    writer.steps(0, 3, BATCHES)
    found = run_exposure(Run.open(writer.path))
    assert len(found.times) == 8
    assert "no organizer" in found.notes[0]
    writer.info(dataset={})
    found = run_exposure(Run.open(writer.path))
    assert found.coverage[-1] == 1.0
    assert "not known" in found.notes[0]


def test_runs_without_sample_ids_or_with_strange_ones_are_refused(make_run):
    writer = make_run()
    with pytest.raises(InputError, match="no recorded step"):
        run_exposure(Run.open(writer.path))
    writer.steps(0, 3, BATCHES)
    write_ledger(writer, [0, 1, 2], [3, 3, 1])
    with pytest.raises(InputError, match="sample 3 was seen, but is none of the 3"):
        run_exposure(Run.open(writer.path))


def test_exposure_of_a_plan_equals_its_ledger(tmp_path):
    from sdo.cli.main import main

    matrix = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    np.save(tmp_path / "E.npy", matrix)
    out = tmp_path / "PLAN.parquet"
    arguments = ["plan", "--embeddings", str(tmp_path / "E.npy"), "--batch-size", "4", "--epochs", "3"]
    assert main([*arguments, "--out", str(out)]) == 0
    plan = SDO(Embeddings.from_array(matrix)).plan(4)
    epochs = [plan.epoch(e) for e in range(3)]
    found = plan_exposure(out)
    assert found.times.tolist() == epochs[-1].exposure.tolist()
    assert found.pools == {e: len(epoch.pool) for e, epoch in enumerate(epochs)}
    seen = set()
    for step, distinct in zip(found.step, found.distinct, strict=True):
        seen |= set(plan.batch(int(step)).tolist())
        assert distinct == len(seen)
    assert found.source == "planned"
    out.with_suffix(".json").write_text("{}")
    assert "does not say how many samples" in plan_exposure(out).notes[0]
    out.with_suffix(".json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        plan_exposure(out)


def test_what_is_no_plan_is_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        plan_exposure(tmp_path / "gone.parquet")
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(InputError, match="is no plan"):
        plan_exposure(tmp_path / "text.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(InputError, match="is no plan"):
        plan_exposure(tmp_path / "other.parquet")
    empty = {name: pa.array([], pa.int64()) for name in ("organizer_epoch", "step", "sample_id")}
    pq.write_table(pa.table(empty), tmp_path / "empty.parquet")
    with pytest.raises(InputError, match="holds no steps"):
        plan_exposure(tmp_path / "empty.parquet")
    (tmp_path / "list.json").write_text(json.dumps([1]))
    pq.write_table(pa.table({n: [0, 1] for n in empty}), tmp_path / "list.parquet")
    assert plan_exposure(tmp_path / "list.parquet").pools == {}
