"""Forecast rows and bytes against run folders that were really written."""

from __future__ import annotations

import pytest

from diagnostics.forecast import Shape, Stream, count_rows, forecast


@pytest.fixture(scope="module")
def forty(kit, tmp_path_factory):
    """Forty organised steps of two micro-batches, so that everything lies in one part."""
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
        "stored": {name: signal["stored"] for name, signal in recorded.info["signals"].items()},
        "evaluations": 0,
    }
    return Shape(**{**values, **changes})


def test_gradient_rows_are_those_of_the_run(forty, kit):
    counted = count_rows(shape_of(forty, kit))
    assert len(counted) == 8
    for (signal, kind), rows in counted.items():
        assert len(forty.rows(f"gradients/{signal}", kind=kind)) == rows


def test_bytes_are_those_of_the_run(forty, kit):
    found = forecast(shape_of(forty, kit), forty.handle.plan)
    sizes = {
        stream: sum(part.stat().st_size for part in (forty.folder / stream).rglob("*.parquet"))
        for stream in ("gradients/weight", "gradients/hidden", "gradients/head_only", "steps", "exposure")
    }
    for stream, size in sizes.items():
        parts = [entry for entry in found if entry.name.split(",")[0] == stream]
        assert sum(entry.bytes for entry in parts) == pytest.approx(size, rel=0.25)
    # Where sketches are what takes the space, the forecast is close.
    weight = sum(entry.bytes for entry in found if entry.name.startswith("gradients/weight"))
    assert weight == pytest.approx(sizes["gradients/weight"], rel=0.03)


def test_streams_that_a_run_does_not_have_are_left_out(forty, kit):
    names = [entry.name for entry in forecast(shape_of(forty, kit, sample_every=0, micro_batches=1), None)]
    assert names == ["gradients/weight, step", "gradients/hidden, step", "gradients/head_only, step", "steps"]


def test_bytes_grow_with_the_rows(forty, kit):
    few, many = (forecast(shape_of(forty, kit, steps=steps, evaluations=steps), None) for steps in (1_000, 1_000_000))
    for a, b in zip(few, many, strict=True):
        assert isinstance(a, Stream)
        assert b.rows == pytest.approx(1000 * a.rows, rel=0.01)
        assert b.bytes == pytest.approx(1000 * a.bytes, rel=0.5 if a.name == "evaluations" else 0.01)
