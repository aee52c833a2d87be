import errno
import json
import mmap

import numpy as np
import pyarrow.parquet as pq
import pytest

from analysis import Run, step_coherence, step_summary
from sdo.errors import InputError


def step_row(step, sketch, **more):
    return {"step": step, "kind": "step", "sketch": sketch, **more}


def test_rows_come_sorted_by_step_whatever_the_parts(make_run):
    writer = make_run()
    rng = np.random.default_rng(0)
    sketches = rng.normal(size=(30, 6)).astype(np.float32)
    order = rng.permutation(30)
    for first, last in ((20, 29), (0, 9), (10, 19)):
        rows = [step_row(t, sketches[t], sample_ids=[t, t + 1], tokens=t) for t in order if first <= t <= last]
        rows += [{"step": first, "kind": "sample", "sample_ids": [3], "sketch": np.ones(6)}]
        writer.gradients("hidden", rows, first, last)
    rows = Run.open(writer.path).gradients("hidden")
    assert rows.step.tolist() == list(range(30))
    np.testing.assert_array_equal(rows.sketch, sketches)
    np.testing.assert_allclose(rows.norm, np.linalg.norm(sketches.astype(float), axis=1))
    assert [ids.tolist() for ids in rows.sample_ids] == [[t, t + 1] for t in range(30)]
    assert rows.tokens.tolist() == list(range(30))
    assert rows.sketch.dtype == np.float32
    assert rows.defined.all()
    assert Run.open(writer.path).kinds("hidden") == {"step": 30, "sample": 3}


def test_undefined_rows_keep_their_reason(make_run):
    writer = make_run()
    rows = [step_row(0, np.ones(6)), step_row(1, np.zeros(6)), step_row(2, np.ones(6), reason="overflow")]
    rows += [step_row(3, np.ones(6), norm=float("inf")), step_row(4, np.ones(6), norm=None)]
    writer.gradients("hidden", rows, 0, 4)
    rows = Run.open(writer.path).gradients("hidden")
    assert rows.defined.tolist() == [True, False, False, False, False]
    assert rows.reason == (None, "zero gradient", "overflow", None, None)


@pytest.mark.parametrize("kind", ["sample", "micro_batch"])
def test_iter_steps_gives_the_rows_of_gradients_step_by_step(make_run, kind):
    writer = make_run()
    rng = np.random.default_rng(1)
    for rank in (0, 1, 10):
        for first in (0, 4):
            steps = np.repeat(np.arange(first, first + 4), 3)
            rows = [
                {"step": int(t), "kind": kind, "micro_batch": i % 3, "sketch": rng.normal(size=6)}
                for i, t in enumerate(steps)
            ]
            writer.gradients("hidden", [*rows, step_row(first, np.ones(6))], first, first + 3, rank=rank)
    run = Run.open(writer.path)
    whole = run.gradients("hidden", kind)
    groups = list(run.iter_steps("hidden", kind))
    assert [int(group.step[0]) for group in groups] == list(range(8))
    for group, other in zip(groups, whole.by_step(), strict=True):
        np.testing.assert_array_equal(group.sketch, other.sketch)
        np.testing.assert_array_equal(group.rank, other.rank)
        np.testing.assert_array_equal(group.micro_batch, other.micro_batch)
        assert np.unique(group.step).size == 1
        assert len(group) == 9


def test_more_rows_than_one_read(make_run, monkeypatch):
    monkeypatch.setattr("analysis.run_folder.run._READ_ROWS", 3)
    writer = make_run()
    sketches = np.arange(60, dtype=np.float32).reshape(10, 6)
    rows = [step_row(t, sketches[t]) for t in range(10)]
    rows.insert(4, {"step": 3, "kind": "sample", "sketch": np.ones(6)})
    writer.gradients("hidden", rows, 0, 9)
    run = Run.open(writer.path)
    np.testing.assert_array_equal(run.gradients("hidden").sketch, sketches)
    np.testing.assert_array_equal(np.concatenate([g.sketch for g in run.iter_steps("hidden", "step")]), sketches)


def test_step_rows_of_several_ranks_are_averaged(make_run):
    writer = make_run()
    writer.gradients("hidden", [step_row(0, [3, 0, 0, 0, 0, 0], sample_ids=[1], tokens=5)], 0, 0, rank=0)
    writer.gradients("hidden", [step_row(0, [0, 4, 0, 0, 0, 0], sample_ids=[2], tokens=6)], 0, 0, rank=1)
    rows = Run.open(writer.path).gradients("hidden")
    assert rows.step.tolist() == [0]
    np.testing.assert_array_equal(rows.sketch, [[1.5, 2, 0, 0, 0, 0]])
    assert rows.norm.tolist() == [2.5]
    assert rows.sample_ids[0].tolist() == [1, 2]
    assert rows.tokens.tolist() == [11]


def test_step_rows_of_ranks_that_all_saw_the_reduced_gradient_stay_as_they_are(make_run):
    writer = make_run()
    for rank in (0, 1):
        row = step_row(0, np.ones(6), norm=7.0, sample_ids=[1, 2], tokens=9)
        writer.gradients("hidden", [row], 0, 0, rank=rank)
    rows = Run.open(writer.path).gradients("hidden")
    assert rows.norm.tolist() == [7.0]
    assert rows.tokens.tolist() == [9]
    assert rows.sample_ids[0].tolist() == [1, 2]


def test_ranks_that_differ_in_some_steps_are_averaged_there(make_run):
    """Averages are taken in place: a mean must not stand in the way of the rows behind it."""
    writer = make_run()
    for rank in (0, 1):
        steps = range(4) if rank == 0 else (1, 3)
        rows = [step_row(t, np.full(6, 10.0 * t + 1 + rank), sample_ids=[t]) for t in steps]
        writer.gradients("hidden", rows, 0, 3, rank=rank)
    rows = Run.open(writer.path).gradients("hidden")
    assert rows.step.tolist() == [0, 1, 2, 3]
    assert rows.sketch[:, 0].tolist() == [1.0, 11.5, 21.0, 31.5]


def test_large_matrices_are_mapped_from_a_file_that_is_gone(make_run, monkeypatch, tmp_path):
    writer = make_run()
    sketches = np.random.default_rng(0).normal(size=(30, 6)).astype(np.float32)
    writer.gradients("hidden", [step_row(t, sketches[t]) for t in range(20)], 0, 19)
    writer.gradients("hidden", [step_row(t, sketches[t]) for t in range(20, 30)], 20, 29)
    run = Run.open(writer.path)
    expected, summary = run.gradients("hidden"), step_summary(run.gradients("hidden"))
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr("analysis.run_folder.mapped.IN_MEMORY_BYTES", 0)
    rows = run.gradients("hidden")
    assert isinstance(_owner(rows.sketch), mmap.mmap)
    assert not isinstance(_owner(expected.sketch), mmap.mmap)
    assert list(folder.iterdir()) == []
    np.testing.assert_array_equal(rows.sketch, sketches)
    assert step_summary(rows) == summary
    np.testing.assert_array_equal(step_coherence(rows.sketch), step_coherence(sketches))
    np.testing.assert_array_equal(rows.sketch, sketches)  # pages that were let go of are read again


def test_a_full_disk_is_named(make_run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = make_run()
    writer.gradients("hidden", [step_row(0, np.ones(6))], 0, 0)
    monkeypatch.setattr("analysis.run_folder.mapped.IN_MEMORY_BYTES", 0)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(InputError, match=r"do not fit into .*No space left.*TMPDIR"):
        Run.open(writer.path).gradients("hidden")


def _owner(array):
    while isinstance(array, np.ndarray):
        array = array.base
    return array.obj if isinstance(array, memoryview) else array


def test_a_step_recorded_twice_by_one_rank_is_refused(make_run):
    writer = make_run()
    writer.gradients("hidden", [step_row(0, np.ones(6)), step_row(1, np.ones(6))], 0, 1)
    writer.gradients("hidden", [step_row(1, np.ones(6))], 1, 1)
    with pytest.raises(InputError, match="step 1 of 'hidden' twice"):
        Run.open(writer.path).gradients("hidden")


def test_tables_are_whole_sorted_and_typed_even_when_empty(make_run):
    writer = make_run()
    run = Run.open(writer.path)
    assert run.steps().num_rows == run.exposure().num_rows == run.evaluations().num_rows == 0
    writer.steps(3, 4, [[1, 2], [3, 4]], losses=[0.5, None])
    writer.steps(0, 2, [[1], [2], []])
    (writer.path / "steps" / "part-00000005-00000009.parquet.tmp").write_bytes(b"half")
    table = run.steps()
    assert table.column("step").to_pylist() == [0, 1, 2, 3, 4]
    assert table.column("loss").to_pylist()[-1] is None
    assert table.column("sample_ids").to_pylist()[3] == [1, 2]
    run.check()


def test_wrong_folders_are_refused(tmp_path, make_run):
    with pytest.raises(InputError, match="is not a folder"):
        Run.open(tmp_path / "missing")
    (tmp_path / "uniform").mkdir()
    (tmp_path / "uniformity").write_text("not a folder")
    with pytest.raises(InputError, match=r"unifrm is not a folder; did you mean \S+/uniform\?"):
        Run.open(tmp_path / "unifrm")
    with pytest.raises(InputError, match="is not a folder; expected a run folder"):
        Run.open(tmp_path / "nowhere" / "unifrm")
    with pytest.raises(InputError, match=r"no run\.json"):
        Run.open(tmp_path)
    writer = make_run()
    (writer.path / "run.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        Run.open(writer.path)
    (writer.path / "run.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        Run.open(writer.path)
    for change, message in (
        ({"format": "other"}, '"format": "sdo-run"'),
        ({"format_version": 2}, "format version 2"),
        ({"signals": [1]}, "must map names"),
        ({"signals": {"a": 1}}, "must map names"),
        ({"signals": {"../a": {}}}, "no name of a signal"),
    ):
        writer.info(**change)
        with pytest.raises(InputError, match=message):
            Run.open(writer.path)
    writer.info(signals={"hidden": {}})
    with pytest.raises(InputError, match=r"signals\.\w+\.stored is .*; expected a whole number from 1"):
        Run.open(writer.path).check()


def test_not_a_number_in_run_json_is_read_as_null(make_run):
    writer = make_run()
    content = json.loads((writer.path / "run.json").read_text())
    (writer.path / "run.json").write_text(json.dumps({**content, "recorder": {"seconds": float("nan")}}))
    run = Run.open(writer.path)
    assert run.info["recorder"] == {"seconds": None}
    assert run.name == "run"
    assert run.signals == ("hidden",)


def test_missing_gradients_are_explained(make_run):
    writer = make_run(signals={"hidden": 6, "weight": 6})
    run = Run.open(writer.path)
    with pytest.raises(InputError, match="recorded no gradients; was GradientRecorder added"):
        run.gradients("hidden")
    writer.gradients("hidden", [step_row(0, np.ones(6))], 0, 0)
    with pytest.raises(InputError, match="no signal 'head'; it has hidden, weight"):
        run.kinds("head")
    with pytest.raises(InputError, match="no gradients of signal 'weight'"):
        run.gradients("weight")
    with pytest.raises(InputError, match="unknown kind 'epoch'"):
        run.gradients("hidden", "epoch")
    empty = run.gradients("hidden", "sample")
    assert len(empty) == 0
    assert empty.sketch.shape == (0, 6)
    assert list(run.iter_steps("hidden", "sample")) == []


def test_a_part_cut_off_in_writing_is_named(make_run):
    writer = make_run()
    file = writer.gradients("hidden", [step_row(t, np.ones(6)) for t in range(9)], 0, 8)
    file.write_bytes(file.read_bytes()[:-20])
    run = Run.open(writer.path)
    for read in (run.check, lambda: run.gradients("hidden"), lambda: list(run.iter_steps("hidden", "step"))):
        with pytest.raises(InputError, match=file.name):
            read()


def test_parts_of_another_shape_are_named(make_run):
    writer = make_run()
    file = writer.gradients("hidden", [step_row(0, np.ones(6))], 0, 0)
    writer.info(signals={"hidden": {"stored": 5}})
    with pytest.raises(InputError, match=r"must have 5 entries"):
        Run.open(writer.path).gradients("hidden")
    pq.write_table(pq.read_table(file).drop_columns(["norm"]), file)
    with pytest.raises(InputError, match="lacks the column 'norm'"):
        Run.open(writer.path).gradients("hidden")
    file.unlink()
    file = writer.gradients("hidden", [step_row(0, np.ones(6))], 0, 0)
    file.rename(file.with_name("part-1.parquet"))
    with pytest.raises(InputError, match="expected a name like"):
        Run.open(writer.path).gradients("hidden")
