"""The run folder: what is written is read back, survives a kill at any moment and can be resumed."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import Run
from diagnostics.run_folder import writer as runlog
from diagnostics.run_folder.rows import GradientRow, StepRow
from diagnostics.run_folder.writer import RunLog, check_free
from sdo.errors import InputError

K = 6
INFO = {"signals": {"weight": {"stored": K}, "model.norm-x": {"stored": 2}}, "organizer": {"name": "SDO"}}


def step_row(step, epoch=0, **changes):
    values = {
        "step": step,
        "organizer_epoch": epoch,
        "trainer_epoch": step / 10,
        "loss": 2.0 - step / 100,
        "learning_rate": 1e-5,
        "grad_norm": 1.5,
        "clipped": step % 2 == 0,
        "loss_scale": 1.0,
        "skipped": False,
        "tokens": 64,
        "seconds": 0.5,
        "recorder_seconds": 0.01,
        "sample_ids": [step, step + 1],
    }
    return StepRow(**{**values, **changes})


def gradient_row(step, kind="step", micro_batch=None, norm=1.0, reason=None):
    return GradientRow(step, kind, micro_batch, [step, step + 1], 64, norm, "raw, unscaled", reason)


def sketch_of(step, micro=0, k=K):
    return np.arange(k, dtype=np.float32) + 100 * step + 10 * micro


def record(log, step, epoch=0):
    """One step as the recorder writes it."""
    for micro in range(2):
        log.add_gradient("weight", gradient_row(step, "micro_batch", micro), sketch_of(step, micro))
    log.add_gradient("weight", gradient_row(step), sketch_of(step))
    log.add_gradient("model.norm-x", gradient_row(step), sketch_of(step, k=2))
    log.add_step(step_row(step, epoch))
    log.maybe_flush()


def parts(folder):
    """Every part of a folder, found without our reader."""
    return sorted(path for path in Path(folder).glob("*.parquet") if not path.name.startswith("."))


def read(folder):
    paths = parts(folder)
    tables = [pq.ParquetFile(path).read() for path in paths]
    return pa.concat_tables(tables).sort_by("step") if tables else None


def steps_of(folder):
    table = read(folder)
    return [] if table is None else table["step"].to_pylist()


def info_of(folder):
    return json.loads((Path(folder) / "run.json").read_text("utf-8"))


def snapshot(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


# --- writing and reading back ---


def test_round_trip(tmp_path):
    run = tmp_path / "deep" / "run"
    log = RunLog.create(run, INFO)
    info = info_of(run)
    assert (info["format"], info["format_version"], info["status"]) == ("sdo-run", 1, "running")
    assert info["created"].endswith("+00:00")
    assert info["organizer"] == {"name": "SDO"}
    for step in range(3):
        record(log, step)
    log.add_exposure(0, [5, 6, 7], [1, 2, 0], [1, 1, 0], [True, True, False])
    log.add_evaluation(3, "held-out loss", [1, 2, 3], [0.5, math.nan, 1.5])
    log.close()
    assert info_of(run)["status"] == "finished"
    assert sorted(str(path.relative_to(run)) for path in snapshot(run)) == [
        "evaluations/part-00000003-00000003.parquet",
        "exposure/part-00000.parquet",
        "gradients/model.norm-x/part-r0-00000000-00000002.parquet",
        "gradients/weight/part-r0-00000000-00000002.parquet",
        "run.json",
        "steps/part-00000000-00000002.parquet",
    ]

    steps = read(run / "steps")
    assert " ".join(str(field.type) for field in steps.schema) == (
        "int64 int64 double double double double bool double bool int64 double double list<element: int64>"
    )
    expected = step_row(2)
    assert steps.to_pylist()[2] == {name: getattr(expected, name) for name in StepRow.__slots__}

    gradients = read(run / "gradients/weight")
    assert gradients.schema.field("sketch").type == pa.list_(pa.field("element", pa.float32()), K)
    assert not gradients.schema.field("sketch").nullable
    assert gradients["kind"].to_pylist() == ["micro_batch", "micro_batch", "step"] * 3
    assert gradients["micro_batch"].to_pylist() == [0, 1, None] * 3
    assert gradients["sketch"].to_pylist()[4] == sketch_of(1, 1).tolist()
    assert set(gradients["norm_state"].to_pylist()) == {"raw, unscaled"}

    frame = pd.read_parquet(run / "gradients/weight")
    np.testing.assert_array_equal(np.stack(frame["sketch"])[8], sketch_of(2))
    assert pd.read_parquet(run / "steps")["loss"].tolist() == [2.0, 1.99, 1.98]
    exposure = pd.read_parquet(run / "exposure")
    assert exposure.to_dict("list") == {
        "organizer_epoch": [0, 0, 0],
        "sample_id": [5, 6, 7],
        "planned": [1, 2, 0],
        "trained": [1, 1, 0],
        "in_pool": [True, True, False],
    }
    assert read(run / "evaluations")["score"].to_pylist() == [0.5, None, 1.5]


def test_unknown_and_non_finite_values_are_null(tmp_path):
    log = RunLog.create(tmp_path / "run", INFO)
    log.add_step(step_row(0, None, loss=math.nan, grad_norm=np.float32(math.inf), learning_rate=None, clipped=None))
    log.flush()
    row = read(tmp_path / "run/steps").to_pylist()[0]
    names = ("organizer_epoch", "loss", "grad_norm", "learning_rate", "clipped")
    assert [row[name] for name in names] == [None] * 5


def test_numpy_values_are_taken(tmp_path):
    log = RunLog.create(tmp_path / "run", INFO)
    log.add_step(
        step_row(np.int64(3), np.int64(0), loss=np.float32(0.5), clipped=np.bool_(True), sample_ids=np.arange(3))
    )
    log.flush()
    row = read(tmp_path / "run/steps").to_pylist()[0]
    assert (row["step"], row["loss"], row["clipped"], row["sample_ids"]) == (3, 0.5, True, [0, 1, 2])


@pytest.mark.parametrize(
    ("norm", "first", "given_reason", "stored_norm", "reason"),
    [
        (1.0, 5.0, None, 1.0, None),
        (0.0, 0.0, None, 0.0, "zero gradient"),
        (math.inf, 5.0, None, None, "non-finite gradient"),
        (math.nan, math.nan, None, None, "non-finite gradient"),
        (1e300, math.inf, None, 1e300, "non-finite sketch"),
        (None, 5.0, "did not fire", None, "did not fire"),
        (math.inf, 5.0, "overflow", None, "overflow"),
    ],
)
def test_a_row_without_a_gradient_has_zeros_and_a_reason(tmp_path, norm, first, given_reason, stored_norm, reason):
    log = RunLog.create(tmp_path / "run", INFO)
    sketch = np.full(K, first, np.float32)
    log.add_gradient("weight", gradient_row(0, norm=norm, reason=given_reason), sketch)
    sketch[:] = 9.0  # the caller may reuse its buffer
    log.flush()
    row = read(tmp_path / "run/gradients/weight").to_pylist()[0]
    assert (row["norm"], row["reason"]) == (stored_norm, reason)
    assert row["sketch"] == [first if reason is None else 0.0] * K


def test_gradients_are_validated(tmp_path):
    log = RunLog.create(tmp_path / "run", INFO)
    good = sketch_of(0)
    with pytest.raises(ValueError, match="unknown signal 'head'"):
        log.add_gradient("head", gradient_row(0), good)
    for bad in (good[:3], good[None], good.astype(np.float64)):
        with pytest.raises(ValueError, match=r"expected float32 \(6,\)"):
            log.add_gradient("weight", gradient_row(0), bad)
    with pytest.raises(ValueError, match="kind is 'token'"):
        log.add_gradient("weight", gradient_row(0, "token"), good)
    with pytest.raises(ValueError, match="no norm and no reason"):
        log.add_gradient("weight", gradient_row(0, norm=None), good)
    log.flush()
    assert list(snapshot(tmp_path / "run")) == [tmp_path / "run/run.json"]


def test_flush_by_steps_keeps_steps_whole(tmp_path):
    log = RunLog.create(tmp_path / "run", INFO, clock=Clock())
    for step in range(120):
        record(log, step)
    assert [path.name for path in parts(tmp_path / "run/steps")] == [
        "part-00000000-00000049.parquet",
        "part-00000050-00000099.parquet",
    ]
    for path in parts(tmp_path / "run/gradients/weight"):
        table = pq.ParquetFile(path).read()
        assert pc.value_counts(table["step"]).field("counts").to_pylist() == [3] * 50
    log.flush()
    assert steps_of(tmp_path / "run/steps") == list(range(120))
    before = snapshot(tmp_path / "run")
    log.flush()  # nothing buffered, nothing written
    assert snapshot(tmp_path / "run") == before


def test_flush_by_time(tmp_path):
    clock = Clock()
    log = RunLog.create(tmp_path / "run", INFO, clock=clock)
    for step, now in enumerate([30.0, 59.9, 60.0, 100.0, 119.9, 120.0]):
        clock.now = now
        record(log, step)
    names = [path.name for path in parts(tmp_path / "run/steps")]
    assert names == ["part-00000000-00000002.parquet", "part-00000003-00000005.parquet"]


def test_rows_of_one_step_flushed_apart_are_all_kept(tmp_path):
    log = RunLog.create(tmp_path / "run", INFO)
    log.add_gradient("weight", gradient_row(0, "micro_batch", 0), sketch_of(0))
    for name in ("loss", "accuracy"):
        log.add_evaluation(10, name, [1, 2], [0.0, 1.0])
        log.flush()
    log.add_gradient("weight", gradient_row(0), sketch_of(0))
    log.flush()
    assert read(tmp_path / "run/evaluations")["name"].to_pylist() == ["loss", "loss", "accuracy", "accuracy"]
    assert read(tmp_path / "run/gradients/weight").num_rows == 2


def test_exposure_of_an_epoch_is_replaced(tmp_path):
    log = RunLog.create(tmp_path / "run", INFO)
    log.add_exposure(0, [1, 2], [2, 2], [1, 1], [True, True])
    log.add_exposure(1, [1], [3], [2], [True])
    log.flush()
    log.add_exposure(0, [1, 2, 3], [2, 2, 2], [2, 2, 2], [True, True, False])
    log.flush()
    frame = pd.read_parquet(tmp_path / "run/exposure").sort_values(["organizer_epoch", "sample_id"])
    assert frame["trained"].tolist() == [2, 2, 2, 2]
    assert frame["organizer_epoch"].tolist() == [0, 0, 0, 1]


def test_info_is_updated_whole_or_not_at_all(tmp_path):
    log = RunLog.create(tmp_path / "run", INFO)
    log.update_info(sketch_check={"rmse": 0.01})
    before = snapshot(tmp_path / "run")
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.update_info(sketch_check={"rmse": math.nan})
    with pytest.raises(TypeError):
        log.update_info(model=object())
    with pytest.raises(ValueError, match="'created' is fixed"):
        log.update_info(created="now")
    with pytest.raises(ValueError, match="status is 'done'"):
        log.close("done")
    assert snapshot(tmp_path / "run") == before
    assert log.info["sketch_check"] == {"rmse": 0.01}
    log.close("failed")
    assert info_of(tmp_path / "run")["status"] == "failed"


def test_other_ranks_write_their_gradients_only(tmp_path):
    main = RunLog.create(tmp_path / "run", INFO)
    other = RunLog.create(tmp_path / "run", INFO, rank=1)
    before = snapshot(tmp_path / "run")
    for step in range(60):
        record(main, step)
        record(other, step)
        other.add_exposure(0, [1], [1], [1], [True])
        other.add_evaluation(step, "loss", [1], [1.0])
    other.close()
    assert {str(path.relative_to(tmp_path / "run")) for path in snapshot(tmp_path / "run") if "r1" in path.name} == {
        f"gradients/{signal}/part-r1-{span}.parquet"
        for signal in INFO["signals"]
        for span in ("00000000-00000049", "00000050-00000059")
    }
    assert not (tmp_path / "run/evaluations").exists()
    assert info_of(tmp_path / "run")["status"] == "running"
    main.flush()
    RunLog.resume(tmp_path / "run", 55)  # rank 0 cuts every rank's gradients
    RunLog.resume(tmp_path / "run", 55, rank=1)
    assert set(before) <= set(snapshot(tmp_path / "run"))
    assert steps_of(tmp_path / "run/gradients/model.norm-x") == sorted([*range(55), *range(55)])


# --- refusals ---


def test_a_free_path(tmp_path):
    check_free(tmp_path / "missing")
    check_free(tmp_path)
    (tmp_path / ".run.json.tmp").write_text("{")  # a run that died before its first file
    check_free(tmp_path)
    RunLog.create(tmp_path, INFO)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_another_run_is_left_alone(tmp_path):
    run = tmp_path / "run"
    log = RunLog.create(run, INFO)
    for step in range(3):
        record(log, step)
    log.close()
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match=r"holds another run \(3 steps, created 20.*choose another folder or resume"):
        RunLog.create(run, INFO)
    assert snapshot(tmp_path) == before
    (run / "run.json").write_text("[]")
    with pytest.raises(InputError, match=r"another run \(damaged\)"):
        check_free(run)


def test_a_nul_character_is_no_name(tmp_path):
    with pytest.raises(InputError, match="holds a NUL character"):
        RunLog.create(f"{tmp_path}/a\0b", INFO)


def test_foreign_files_are_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match=r"holds other files \(thesis.txt"):
        RunLog.create(tmp_path, INFO)
    with pytest.raises(InputError, match="is a file"):
        RunLog.create(tmp_path / "thesis.txt", INFO)
    with pytest.raises(InputError, match=r"run.json is missing"):
        RunLog.resume(tmp_path, 0)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["../x", "a/b", "a\\b", "", ".", "..", ".hidden", "a b", "x" * 101, "a\n"])
def test_signal_names_stay_inside_the_folder(tmp_path, name):
    with pytest.raises(InputError, match="cannot name a folder"):
        RunLog.create(tmp_path / "run", {"signals": {name: {"stored": 3}}})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stored", [0, -1, 2.5, None])
def test_signals_need_a_length(tmp_path, stored):
    with pytest.raises(InputError, match=r"stored of signal .*; expected a whole number from 1"):
        RunLog.create(tmp_path / "run", {"signals": {"weight": {"stored": stored}}})


def test_info_that_cannot_be_written_makes_no_folder(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        RunLog.create(tmp_path / "run", {**INFO, "loss": math.inf})
    assert not (tmp_path / "run").exists()


# --- resuming ---


def test_resume_refuses_what_it_cannot_continue(tmp_path):
    run = tmp_path / "run"
    log = RunLog.create(run, INFO)
    for step in range(5):
        record(log, step)
    log.flush()
    before = snapshot(run)
    with pytest.raises(InputError, match=r"lacks 3 of the steps before 8: 5 to 7"):
        RunLog.resume(run, 8)
    with pytest.raises(InputError, match="step -1"):
        RunLog.resume(run, -1)
    other = {"signals": {**INFO["signals"], "weight": {"stored": 5}}}
    with pytest.raises(InputError, match=r"recorded with weight\.stored = 6, which is now 5"):
        RunLog.resume(run, 5, other)
    assert snapshot(run) == before
    RunLog.resume(run, 5, INFO)
    for text, message in [
        ("{", "cannot be read as JSON"),
        ("[]", "does not describe a run"),
        (
            json.dumps({**INFO, "format": "sdo-run", "format_version": 2}),
            "version 2; expected 'sdo-run', version 1",
        ),
    ]:
        (run / "run.json").write_text(text)
        with pytest.raises(InputError, match=message):
            RunLog.resume(run, 5)


def test_resume_refuses_damaged_parts(tmp_path):
    log = RunLog.create(tmp_path / "run", INFO)
    record(log, 0)
    log.flush()
    (tmp_path / "run/steps/part-00000000-00000000.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="cannot be read"):
        RunLog.resume(tmp_path / "run", 1)


def test_resume_writes_what_happened(tmp_path):
    log = RunLog.create(tmp_path / "run", INFO)
    for step in range(5):
        record(log, step)
    log.close()
    log = RunLog.resume(tmp_path / "run", 4)
    assert log.info["status"] == "running"
    record(log, 4)
    log.close()
    RunLog.resume(tmp_path / "run", 2)
    assert info_of(tmp_path / "run")["resumed_at"] == [4, 2]
    assert steps_of(tmp_path / "run/steps") == [0, 1]


def test_recording_may_begin_late(tmp_path):
    log = RunLog.create(tmp_path / "run", {**INFO, "first_step": 100})
    RunLog.resume(tmp_path / "run", 100)
    for step in range(100, 110):
        record(log, step)
    log.flush()
    with pytest.raises(InputError, match="lacks 2 of the steps before 112"):
        RunLog.resume(tmp_path / "run", 112)
    RunLog.resume(tmp_path / "run", 105)
    log = RunLog.resume(tmp_path / "run", 90)  # before recording began: all is dropped
    assert steps_of(tmp_path / "run/steps") == []
    record(log, 90)
    log.flush()
    RunLog.resume(tmp_path / "run", 91)
    assert steps_of(tmp_path / "run/steps") == [90]


def test_resume_leaves_foreign_files_and_removes_our_leftovers(tmp_path):
    run = tmp_path / "run"
    log = RunLog.create(run, INFO)
    for step in range(4):
        record(log, step)
    log.flush()
    foreign = [
        run / "notes.txt",
        run / "steps/part-x.parquet",
        run / "steps/.other.tmp",
        run / "exposure/readme",
    ]
    ours = [
        run / ".run.json.tmp",
        run / "steps/.part-00000004-00000005.parquet.tmp",
        run / "gradients/weight/.part-r0-00000004-00000005.parquet.tmp",
    ]
    (run / "exposure").mkdir()
    for path in foreign + ours:
        path.write_text("x")
    RunLog.resume(run, 2)
    assert all(path.exists() for path in foreign)
    assert not any(path.exists() for path in ours)


def test_resume_of_evaluations(tmp_path):
    run = tmp_path / "run"
    log = RunLog.create(run, INFO)
    for step in range(8):
        record(log, step)
        if step % 2:
            log.add_evaluation(step + 1, "loss", [1, 2], [step, step])
            if step == 3:
                log.flush()
    log.flush()
    RunLog.resume(run, 6)  # evaluated at 6 before the checkpoint of 6 was saved
    assert steps_of(run / "evaluations") == [2, 2, 4, 4, 6, 6]
    RunLog.resume(run, 5)
    assert steps_of(run / "evaluations") == [2, 2, 4, 4]
    RunLog.resume(run, 1)
    assert parts(run / "evaluations") == []


def test_resume_does_not_merge_a_cut_part_into_another(tmp_path):
    log = RunLog.create(tmp_path / "run", INFO)
    for name, step in [("a", 0), ("b", 0), ("b", 4)]:
        log.add_evaluation(step, name, [1], [1.0])
        if name == "a":
            log.flush()
    log.flush()
    for _ in range(2):
        RunLog.resume(tmp_path / "run", 0)
        assert sorted(read(tmp_path / "run/evaluations")["name"].to_pylist()) == ["a", "b"]


# Organizer epochs of 4 steps; exposure is written at each end and, for the partial one, after training.
@pytest.mark.parametrize(
    ("resume_at", "kept"),
    [
        (0, []),
        (3, []),
        (4, [0]),  # the epoch ended with the step before
        (7, [0]),
        (8, [0, 1]),
        (9, [0, 1]),
        (10, [0, 1, 2]),  # the partial epoch's counts are those at step 10
    ],
)
def test_resume_of_exposure(tmp_path, resume_at, kept):
    run = tmp_path / "run"
    log = RunLog.create(run, INFO)
    for step in range(10):
        record(log, step, step // 4)
        if step in (4, 8):  # noticed when the next epoch has begun
            log.add_exposure(step // 4 - 1, [1, 2], [1, 1], [1, 1], [True, True])
    log.add_exposure(2, [1, 2], [1, 1], [1, 0], [True, True])
    log.close()
    log = RunLog.resume(run, resume_at)
    assert [int(path.stem[5:]) for path in parts(run / "exposure")] == kept
    for step in range(resume_at, 12):
        record(log, step, step // 4)
    log.add_exposure(2, [1, 2], [1, 1], [1, 1], [True, True])
    log.close()
    frame = pd.read_parquet(run / "exposure")
    assert frame[frame["organizer_epoch"] == 2]["trained"].tolist() == [1, 1]


def test_a_stale_partial_exposure_is_dropped(tmp_path):
    run = tmp_path / "run"
    log = RunLog.create(run, INFO)
    for step in range(4):
        record(log, step)
    log.add_exposure(0, [1], [2], [1], [True])
    log.close()
    log = RunLog.resume(run, 4)
    for step in range(4, 8):
        record(log, step)
    log.flush()  # and a crash: the file still counts four steps
    RunLog.resume(run, 6)
    assert parts(run / "exposure") == []


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_resume_keeps_exactly_the_rows_before(data):
    sizes = data.draw(st.lists(st.integers(1, 7), max_size=5), label="steps a part")
    total = sum(sizes)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        log = RunLog.create(run, INFO, clock=Clock())
        step = 0
        for size in sizes:
            for _ in range(size):
                record(log, step)
                step += 1
            log.flush()
        for _ in range(data.draw(st.integers(1, 3), label="resumes")):
            n = data.draw(st.integers(0, total), label="step")
            log = RunLog.resume(run, n)
            assert steps_of(run / "steps") == list(range(n))
            assert steps_of(run / "gradients/weight") == [s for s in range(n) for _ in range(3)]
            for step in range(n, total):
                record(log, step)
            log.flush()
        assert steps_of(run / "steps") == list(range(total))
        if total:
            table = read(run / "gradients/weight")
            expected = [sketch_of(s, m).tolist() for s in range(total) for m in (0, 1, 0)]
            assert table["sketch"].to_pylist() == expected
        for path in parts(run / "steps") + parts(run / "gradients/weight"):
            held = pq.ParquetFile(path).read()["step"].to_pylist()
            assert path.stem[-17:] == f"{min(held):08d}-{max(held):08d}"


# --- kills ---


class KilledError(BaseException):
    """Stands for SIGKILL: the code under test has no clean-up that could catch it."""


def kill_at(patch, when, what):
    """Die before or after the when-th change to the folder: a sync, a rename or a removal."""
    calls = 0

    def dying(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == when and what == "before":
                raise KilledError
            real(*args, **kwargs)
            if calls == when:
                raise KilledError

        return call

    for name in ("fsync", "replace", "unlink", "rename"):
        patch.setattr(os, name, dying(getattr(os, name)))


def write_run(run):
    log = RunLog.create(run, INFO, clock=Clock())
    for step in range(30):
        record(log, step)
        if step % 10 == 9:
            log.add_exposure(step // 10, [1], [1], [1], [True])
            log.add_evaluation(step + 1, "loss", [1], [1.0])
            log.flush()


@pytest.mark.parametrize("what", ["before", "after"])
@pytest.mark.parametrize("when", range(1, 47))
def test_killed_while_writing(tmp_path, monkeypatch, when, what):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, when, what)
        with pytest.raises(KilledError):
            write_run(run)
    if not (run / "run.json").exists():
        check_free(run)  # nothing had begun
        return
    stored = steps_of(run / "steps")
    assert stored == list(range(len(stored)))
    assert len(stored) % 10 == 0
    assert set(stored) <= set(steps_of(run / "gradients/weight"))  # a stored step has its gradients
    log = RunLog.resume(run, len(stored))
    assert list(run.rglob(".*")) == []
    for step in range(len(stored), 30):
        record(log, step)
    log.close()
    assert steps_of(run / "steps") == list(range(30))
    assert steps_of(run / "gradients/weight") == [step for step in range(30) for _ in range(3)]


@pytest.mark.parametrize("what", ["before", "after"])
def test_killed_while_resuming(tmp_path, monkeypatch, what):
    write_run(tmp_path / "whole")
    for when in range(1, 100):
        run = tmp_path / f"run{when}"
        shutil.copytree(tmp_path / "whole", run)
        with monkeypatch.context() as patch:
            kill_at(patch, when, what)
            try:
                RunLog.resume(run, 15)
                break
            except KilledError:
                pass
        for folder, repeats in (("steps", 1), ("gradients/weight", 3)):
            stored = steps_of(run / folder)
            assert stored[: 15 * repeats] == [step for step in range(15) for _ in range(repeats)]
            assert len(stored) == len(set(stored)) * repeats  # never a row twice
        RunLog.resume(run, 15)
        assert steps_of(run / "steps") == list(range(15))
        assert steps_of(run / "gradients/weight") == [step for step in range(15) for _ in range(3)]
        assert steps_of(run / "evaluations") == [10]
        assert list(run.rglob(".*")) == []
    assert when > 15  # the matrix was walked to its end


SCRIPT = """
import os, sys
from diagnostics.run_folder.rows import StepRow
from diagnostics.run_folder.writer import RunLog
log = RunLog.create(sys.argv[1], {})
for step in range(3):
    log.add_step(StepRow(step, None, 0.0, None, None, None, None, 1.0, False, 1, 0.1, 0.0, [step]))
    if step == 2:
        os.replace = lambda *names: os._exit(9)
    log.flush()
"""


def test_a_process_that_dies_hard(tmp_path):
    root = Path(runlog.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (9, "")
    assert steps_of(tmp_path / "run/steps") == [0, 1]
    assert pd.read_parquet(tmp_path / "run/steps")["step"].tolist() == [0, 1]
    assert len(list(tmp_path.rglob(".*.tmp"))) == 1
    RunLog.resume(tmp_path / "run", 2)
    assert list(tmp_path.rglob(".*.tmp")) == []


# ---------------------------------------------------------------------- what a folder lacks, or holds twice


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A finished run of nine steps in parts of three, two organizer epochs, one evaluation."""
    monkeypatch.setattr(runlog, "FLUSH_STEPS", 3)
    signals = {name: {**one, "sketch": {"kind": "identity"}} for name, one in INFO["signals"].items()}
    log = RunLog.create(tmp_path / "run", {**INFO, "signals": signals, "first_step": 0})
    for step in range(9):
        record(log, step, epoch=step // 5)
        if step == 4:
            log.add_exposure(0, [0, 1], [1, 1], [1, 1], [True, True])
    log.add_evaluation(6, "loss", [0, 1], [0.5, 0.25])
    log.add_exposure(1, [0, 1], [2, 2], [2, 2], [True, True])
    log.close()
    Run.open(log.path).check()
    return log.path


def copy_part(run, stream, number, name):
    shutil.copy(parts(run / stream)[number], run / stream / name)


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


BREAKS = {
    "an early part is gone": (
        lambda run: parts(run / "gradients/weight")[0].unlink(),
        "weight holds 18 rows, run.json counts 27",
    ),
    "one in the middle": (lambda run: parts(run / "gradients/model.norm-x")[1].unlink(), "norm-x holds 6 rows"),
    "a part of steps is gone": (lambda run: parts(run / "steps")[1].unlink(), "lacks .*3 to 5"),
    "a part was copied": (
        lambda run: copy_part(run, "steps", 0, "part-00000001-00000002.parquet"),
        "holds step 1 in two parts",
    ),
    "gradients were copied": (
        lambda run: copy_part(run, "gradients/weight", 1, "part-r0-00000002-00000003.parquet"),
        "holds step 2 in two parts",
    ),
    "exposure is gone": (lambda run: shutil.rmtree(run / "exposure"), "exposure holds 0 rows, run.json counts 4"),
    "evaluations are gone": (lambda run: shutil.rmtree(run / "evaluations"), "evaluations holds 0 rows"),
    "steps are gone": (lambda run: shutil.rmtree(run / "steps"), "steps"),
    "an early part is cut off": (lambda run: cut(parts(run / "gradients/weight")[0]), "cannot be read"),
    "a copy beside": (
        lambda run: copy_part(run, "evaluations", 0, "part-00000007-00000007.parquet"),
        "evaluations holds 4 rows, run.json counts 2: a part was copied in",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_readers_and_resuming_hold_a_folder_to_the_same_contract(closed, name):
    damage, message = BREAKS[name]
    damage(closed)
    with pytest.raises(InputError, match=message):
        Run.open(closed).check()
    if name != "a copy beside":  # a run that goes on may hold more than it counted, if it died in between
        before = snapshot(closed)
        with pytest.raises(InputError, match=message if name != "steps are gone" else "lacks 7 of the steps before 7"):
            RunLog.resume(closed, 7)
        assert snapshot(closed) == before


def test_run_json_counts_the_rows_on_disk(closed):
    counted = {"steps": 9, "exposure": 4, "evaluations": 2, "gradients/weight": 27, "gradients/model.norm-x": 9}
    assert info_of(closed)["rows"] == counted | {"selection": 0}
    on_disk = {name: sum(pq.read_metadata(part).num_rows for part in parts(closed / name)) for name in counted}
    assert on_disk == counted


def test_a_resumed_run_counts_what_it_kept(closed):
    log = RunLog.resume(closed, 7)
    kept = {"steps": 7, "exposure": 2, "evaluations": 2, "gradients/weight": 21, "gradients/model.norm-x": 7}
    assert info_of(closed)["rows"] == kept | {"selection": 0}
    for step in (7, 8):
        record(log, step, epoch=1)
    log.close()
    assert info_of(closed)["rows"]["steps"] == 9
    Run.open(closed).check()


def test_a_killed_run_that_wrote_more_than_it_counted_is_whole(closed):
    info = info_of(closed)
    info["rows"]["steps"], info["status"] = 6, "running"
    (closed / "run.json").write_text(json.dumps(info))
    Run.open(closed).check()
    assert RunLog.resume(closed, 8).info["rows"]["steps"] == 8


def test_a_folder_of_an_earlier_version_counts_nothing_and_is_read(closed):
    info = info_of(closed)
    del info["rows"]
    (closed / "run.json").write_text(json.dumps(info))
    Run.open(closed).check()
    gone = parts(closed / "gradients/weight")[0]
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(InputError, match="weight lacks the steps 0 to 2"):
        Run.open(closed).check()
    with pytest.raises(InputError, match="weight lacks the steps 0 to 2"):
        RunLog.resume(closed, 6)
    gone.write_bytes(content)
    assert RunLog.resume(closed, 6).info["rows"]["steps"] == 6


def test_a_signal_that_is_silent_at_the_edge_of_a_part_is_no_gap(tmp_path, monkeypatch):
    monkeypatch.setattr(runlog, "FLUSH_STEPS", 3)
    log = RunLog.create(tmp_path / "run", {**INFO, "first_step": 0})
    for step in range(9):
        log.add_gradient("weight", gradient_row(step), sketch_of(step))
        if step not in (3, 5):
            log.add_gradient("model.norm-x", gradient_row(step), sketch_of(step, k=2))
        log.add_step(step_row(step))
        log.maybe_flush()
    log.close()
    Run.open(log.path).check()
    assert RunLog.resume(log.path, 6).info["rows"]["gradients/model.norm-x"] == 4
