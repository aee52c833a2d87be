"""One contract: every kind of row that the writer writes is what the reader reads."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import Run
from diagnostics.run_folder.rows import GradientRow, StepRow
from diagnostics.run_folder.writer import RunLog
from sdo import run_format
from sdo.errors import InputError
from sdo.run_format import EXPOSURE, GRADIENT_KINDS, GRADIENTS, STEPS, Column, Stream, streams_of
from sdo.run_schema import schema_of

FULL = StepRow(3, 1, 0.5, 2.25, 1e-5, 1.5, True, 2.0, False, 64, 0.5, 0.01, [7, 2])
BARE = StepRow(4, None, None, None, None, None, None, None, None, 0, None, None, [])


def folder_of(path):
    """A folder with every kind of row, written in two parts."""
    log = RunLog.create(path, {"signals": {"hidden": {"stored": 4}}, "first_step": 3})
    for row in (FULL, BARE):
        for n, kind in enumerate(GRADIENT_KINDS):
            micro_batch = None if kind == "step" else n
            gradient = GradientRow(row.step, kind, micro_batch, [7, 2][:n], 5, 1.5 + n, "raw, unscaled")
            log.add_gradient("hidden", gradient, np.arange(4, dtype=np.float32) + n)
        log.add_step(row)
        log.add_evaluation(row.step, "loss", [0, 1], [0.5, np.nan])
        log.add_exposure(row.step - 3, [2, 7], [1, 0], [1, 0], [True, False])
        log.flush()
    log.close()
    return path


def test_every_kind_of_row_is_read_as_it_was_written(tmp_path):
    run = Run.open(folder_of(tmp_path / "run"))
    run.check()
    assert run.steps().to_pylist() == [asdict(FULL), asdict(BARE)]
    assert run.evaluations().to_pylist() == [
        {"step": step, "name": "loss", "sample_id": i, "score": (0.5, None)[i]} for step in (3, 4) for i in (0, 1)
    ]
    ledger = [(2, 1, 1, True), (7, 0, 0, False)]
    assert run.exposure().to_pylist() == [
        dict(zip(EXPOSURE.names, (epoch, *row), strict=True)) for epoch in (0, 1) for row in ledger
    ]
    for n, kind in enumerate(GRADIENT_KINDS):
        rows = run.gradients("hidden", kind)
        assert rows.step.tolist() == [3, 4]
        assert rows.micro_batch.tolist() == [-1 if kind == "step" else n] * 2
        assert [ids.tolist() for ids in rows.sample_ids] == [[7, 2][:n]] * 2
        assert (rows.tokens.tolist(), rows.norm.tolist()) == ([5, 5], [1.5 + n] * 2)
        assert (rows.norm_state, rows.reason) == (("raw, unscaled",) * 2, (None,) * 2)
        np.testing.assert_array_equal(rows.sketch, [np.arange(4) + n] * 2)


def test_files_have_the_columns_and_types_of_the_contract(tmp_path):
    path = folder_of(tmp_path / "run")
    for name, stream in streams_of(["hidden"]).items():
        for file in (path / name).glob("part-*.parquet"):
            assert pq.read_schema(file).equals(schema_of(stream, 4), check_metadata=False)
    assert tuple(field.name for field in fields(StepRow)) == STEPS.names
    assert tuple(field.name for field in fields(GradientRow)) == GRADIENTS.names[:-1]


def test_a_folder_of_the_version_before_is_read(tmp_path):
    """Its steps lack what came later, and its run.json counts no rows."""
    path = folder_of(tmp_path / "run")
    later = [column.name for column in STEPS.columns if column.later]
    for file in (path / "steps").glob("part-*.parquet"):
        pq.write_table(pq.ParquetFile(file).read().drop_columns(later), file)
    run = Run.open(path)
    del run.info["rows"]
    run.check()
    assert run.steps().to_pylist() == [{**asdict(row), **dict.fromkeys(later)} for row in (FULL, BARE)]


def test_what_is_not_of_the_contract_is_refused(tmp_path):
    path = folder_of(tmp_path / "run")
    file = next((path / "evaluations").iterdir())
    written = pq.ParquetFile(file).read()
    for name, column, message in (
        ("step", pa.nulls(len(written), pa.int64()), "null"),
        ("score", pa.array(["high"] * len(written)), "high"),
    ):
        pq.write_table(written.drop_columns(name).append_column(name, column), file)
        with pytest.raises(InputError, match=rf"{file.name}: .*{message}.*expected the columns of evaluations/"):
            Run.open(path).evaluations()


def test_a_new_stream_is_one_entry(tmp_path, monkeypatch):
    """Written, counted, cut on resuming, checked and read."""
    words = Stream(
        "words",
        "one word",
        (Column("step", "int64", "global_step"), Column("word", "string", "it", nullable=True), *STEPS.columns[-1:]),
        keys=("step",),
    )
    monkeypatch.setattr(run_format, "STREAMS", (*run_format.STREAMS, words))
    log = RunLog.create(tmp_path / "run", {"signals": {"hidden": {"stored": 4}}})
    for step in range(4):
        log.add_rows("words", {"step": [step], "word": [None if step else "first"], "sample_ids": [[step]]})
        log.add_step(replace(BARE, step=step))
        if step == 1:
            log.flush()
    log.close()
    assert log.info["rows"]["words"] == 4
    log = RunLog.resume(tmp_path / "run", 3)
    log.close()
    run = Run.open(tmp_path / "run")
    run.check()
    assert run.table(words)["word"].to_pylist() == ["first", None, None]
    next((run.path / "words").iterdir()).unlink()
    with pytest.raises(InputError, match=r"words holds . rows, run.json counts 3"):
        run.check()
