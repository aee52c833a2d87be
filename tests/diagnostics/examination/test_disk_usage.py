"""Forecast rows and bytes against run folders that were really written."""

from __future__ import annotations

import numpy as np
import pytest

from diagnostics.examination import disk_usage as module
from diagnostics.examination.disk_usage import Shape, Stream, count_epochs, count_rows, forecast
from sdo import SDO, Uniform


@pytest.fixture(scope="module")
def forty(kit, tmp_path_factory):
    """Forty organized steps of two micro-batches, so that everything lies in one part."""
    case = kit.Case(batch=2, accumulation=2, max_steps=40, sample_every=3, sketch_size=512, organizer=True)
    return kit.Recorded(tmp_path_factory.mktemp("forty"), case).train()


def shape_of(recorded, kit, **changes):
    case = recorded.case
    values = {
        "steps": case.max_steps,
        "step_samples": case.batch * case.accumulation,
        "micro_batches": case.accumulation,
        "samples": kit.ROWS,
        "sample_every": case.sample_every,
        "signals": {s.name: (recorded.info["signals"][s.name]["stored"], s.kinds) for s in recorded.recorder.signals},
        "evaluations": 0,
    }
    return Shape(**{**values, **changes})


def test_gradient_rows_are_those_of_the_run(forty, kit):
    counted = count_rows(shape_of(forty, kit))
    assert len(counted) == 5 + 3 * kit.FUSED
    for (signal, kind), rows in counted.items():
        assert len(forty.rows(f"gradients/{signal}", kind=kind)) == rows


def test_bytes_are_those_of_the_run(forty, kit):
    found = forecast(shape_of(forty, kit), forty.handle.plan)
    sizes = {
        stream: sum(part.stat().st_size for part in (forty.folder / stream).rglob("*.parquet"))
        for stream in ("gradients/weight", "gradients/hidden", "steps", "exposure")
    }
    for stream, size in sizes.items():
        parts = [entry for entry in found if entry.name.split(",")[0] == stream]
        assert sum(entry.bytes for entry in parts) == pytest.approx(size, rel=0.25)
    # Where sketches are what takes the space, the forecast is close.
    weight = sum(entry.bytes for entry in found if entry.name.startswith("gradients/weight"))
    assert weight == pytest.approx(sizes["gradients/weight"], rel=0.03)


def test_rows_of_exposure_are_those_of_the_run(forty, kit):
    """SDO's later epochs are shorter than its first; each that is begun is written."""
    (found,) = (one for one in forecast(shape_of(forty, kit), forty.handle.plan) if one.name == "exposure")
    assert found.rows == len(forty.rows("exposure"))
    twice = forecast(shape_of(forty, kit, steps=80, steps_per_batch=2), forty.handle.plan)
    assert [one.rows for one in twice if one.name == "exposure"] == [found.rows]


def test_epochs_are_the_plans_own():
    matrix = np.random.default_rng(0).standard_normal((200, 8))
    for plan in (SDO(matrix, k=4, seed=1).plan(8), Uniform(200, seed=1).plan(8)):
        for batches in (1, len(plan.epoch(0).steps), len(plan.epoch(0).steps) + 1, 399, 400):
            fresh = plan.redraw(1)
            assert count_epochs(fresh, batches) == plan.epoch_of(batches - 1).organizer_epoch + 1


def test_epochs_of_a_long_run_are_estimated_without_making_them(monkeypatch):
    matrix = np.random.default_rng(0).standard_normal((200, 8))
    plan = SDO(matrix, k=4, seed=1).plan(8)
    exact = plan.redraw(1).epoch_of(1999).organizer_epoch + 1
    monkeypatch.setattr(module, "_PLANNED", 200 * 5)
    assert count_epochs(plan, 2000) == pytest.approx(exact, rel=0.2)
    assert "5 epochs made" in repr(plan)


def test_streams_that_a_run_does_not_have_are_left_out(forty, kit):
    names = [entry.name for entry in forecast(shape_of(forty, kit, sample_every=0, micro_batches=1), None)]
    signals = ("weight", "hidden", "head_only")[: 2 + kit.FUSED]
    assert names == [*(f"gradients/{signal}, step" for signal in signals), "steps"]


def test_bytes_grow_with_the_rows(forty, kit):
    few, many = (forecast(shape_of(forty, kit, steps=steps, evaluations=steps), None) for steps in (1_000, 1_000_000))
    for a, b in zip(few, many, strict=True):
        assert isinstance(a, Stream)
        assert b.rows == pytest.approx(1000 * a.rows, rel=0.01)
        assert b.bytes == pytest.approx(1000 * a.bytes, rel=0.5 if a.name == "evaluations" else 0.01)
