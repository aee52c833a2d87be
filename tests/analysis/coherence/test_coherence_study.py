"""Everything that a run's gradients say about coherence, against the pieces that it is made of."""

import numpy as np
import pytest

from analysis import Run, run_coherence, step_coherence, step_coherence_blocks, step_summary
from analysis.coherence.study import between_steps, sketch_check, within_steps


def test_batch_coherence_is_of_samples_where_there_are_some(make_training, make_run):
    found = run_coherence(Run.open(make_training().path), ["hidden"])["hidden"].within_steps
    entry, series = found.to_dict(), found.series
    assert (entry["between"], entry["steps"]) == ("samples", 60)
    assert entry["mean"] == pytest.approx(series.value.mean())
    assert entry["one_step_measures"]["gradient_diversity"]["count"] == 60

    writer = make_run("micro")
    rows = [{"step": 0, "kind": "micro_batch", "micro_batch": m, "sketch": np.eye(6)[m]} for m in range(2)]
    writer.gradients("hidden", [{"step": 0, "kind": "step", "sketch": np.ones(6)}, *rows], 0, 0)
    entry = run_coherence(Run.open(writer.path), ["hidden"])["hidden"].to_dict()["batch_coherence"]
    assert (entry["between"], entry["mean"]) == ("micro-batches", pytest.approx(0.0))


def test_no_rows_within_a_step_leave_a_reason(make_run):
    writer = make_run()
    writer.gradients("hidden", [{"step": 0, "kind": "step", "sketch": np.ones(6)}], 0, 0)
    found = within_steps(Run.open(writer.path), "hidden")
    entry, series = found.to_dict(), found.series
    assert entry["mean"] is None
    assert "no sample and no micro-batch" in entry["reason"]
    assert len(series.step) == 0


def test_step_coherence_says_what_is_undefined(make_run):
    writer = make_run()
    rows = [{"step": s, "kind": "step", "sample_ids": [s], "sketch": np.ones(6) * (s > 0)} for s in range(3)]
    writer.gradients("hidden", rows, 0, 2)
    entry = between_steps(Run.open(writer.path), "hidden").to_dict()
    assert (entry["steps"], entry["defined"], entry["undefined"]) == (3, 2, 1)
    assert entry["mean"] == pytest.approx(1.0)
    assert entry["sharing"] is None
    assert "no two steps have a sample in common" in entry["sharing_reason"]


def test_a_run_without_a_sketch_check_says_so(make_training):
    assert "compared no sketches" in sketch_check(Run.open(make_training().path), "hidden")["sketch_check_reason"]
    checked = make_training("checked", sketch_check={"hidden": {"rmse": 0.0}})
    assert sketch_check(Run.open(checked.path), "hidden") == {"sketch_check": {"rmse": 0.0}}


def test_all_signals_at_once_are_their_parts(make_training):
    run = Run.open(make_training().path)
    found = run_coherence(run, smooth=3, matrix_steps=10_000)
    assert list(found) == list(run.signals)
    for signal, one in found.items():
        rows = run.gradients(signal, "step")
        assert one.between_steps.step.tolist() == rows.step.tolist()
        assert one.between_steps.summary == step_summary(rows)
        expected = step_coherence(rows.sketch, rows.defined, smooth=3)
        np.testing.assert_array_equal(one.between_steps.matrix, expected)
        assert one.between_steps.blocks is None
        assert set(one.to_dict()) - {"sketch_check_reason"} == {"sketch_check", "step_coherence", "batch_coherence"}


def test_beyond_the_longest_matrix_blocks_stand_for_it(make_training):
    run = Run.open(make_training().path)
    rows = run.gradients("hidden", "step")
    assert between_steps(run, "hidden").matrix is between_steps(run, "hidden").blocks is None
    found = between_steps(run, "hidden", matrix_steps=len(rows) - 1)
    assert found.matrix is None
    assert found.blocks.block == 1
    blocks = between_steps(run, "hidden", cells=4).blocks
    np.testing.assert_array_equal(blocks.cells, step_coherence_blocks(rows.sketch, rows.defined, size=4).cells)
