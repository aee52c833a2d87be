"""How large a run folder will become: rows are counted, and their size is that of rows written for the purpose."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diagnostics.run_folder.rows import GradientRow, StepRow
from diagnostics.run_folder.writer import FLUSH_STEPS, RunLog
from sdo.organizers.plan import Plan

_SAMPLE_BYTES = 32 << 20  # sketches written to measure one signal
# Samples times epochs that the plan may make here, which training would make too. Each takes 2 to 7 microseconds and
# some 30 bytes, which the plan keeps: at most about 15 s and 60 MB.
_PLANNED = 1 << 21


@dataclass(frozen=True)
class Shape:
    """What decides how many rows a run folder gets.

    Attributes
    ----------
    steps
        Optimizer steps of the run.
    step_samples, micro_batches
        Samples and micro-batches of one step.
    samples
        Rows of the training dataset, n.
    sample_every
        Rows of single samples at every so many steps; 0 for never.
    signals
        By name: numbers in a row, and the kinds of row that there are.
    evaluations
        Samples scored over the whole run.
    steps_per_batch
        Optimizer steps of one batch of the plan.
    """

    steps: int
    step_samples: int
    micro_batches: int
    samples: int
    sample_every: int
    signals: dict[str, tuple[int, tuple[str, ...]]]
    evaluations: int
    steps_per_batch: int = 1


@dataclass(frozen=True)
class Stream:
    """One stream of a run folder: its rows over the whole run and their bytes on disk."""

    name: str
    rows: int
    bytes: int


def count_rows(shape: Shape) -> dict[tuple[str, str], int]:
    """Return the gradient rows of a whole run by (signal, kind).

    Examples
    --------
    >>> hidden = {"hidden": (8, ("step", "micro_batch", "sample"))}
    >>> shape = Shape(steps=10, step_samples=4, micro_batches=2, samples=9, sample_every=5, signals=hidden,
    ...               evaluations=0)
    >>> count_rows(shape)
    {('hidden', 'step'): 10, ('hidden', 'micro_batch'): 20, ('hidden', 'sample'): 8}
    """
    rows: dict[tuple[str, str], int] = {}
    for signal, (_, kinds) in shape.signals.items():
        if "step" in kinds:
            rows[signal, "step"] = shape.steps
        if "micro_batch" in kinds and shape.micro_batches > 1:
            rows[signal, "micro_batch"] = shape.steps * shape.micro_batches
        if "sample" in kinds and shape.sample_every:
            rows[signal, "sample"] = math.ceil(shape.steps / shape.sample_every) * shape.step_samples
    return rows


def forecast(shape: Shape, plan: Plan | None) -> list[Stream]:
    """Measure what a run's rows take on disk and multiply.

    Parameters
    ----------
    shape
        The run.
    plan
        The organizer's plan, for the exposure of its epochs.

    Returns
    -------
    list of Stream
        Gradients by signal and kind, then steps, exposure and evaluations, where the run has any. Bytes are those of
        parts of 50 steps; a run whose steps take more than a second writes smaller ones, and a little more.
    """
    counts = count_rows(shape)
    streams = [
        Stream(f"gradients/{signal}, {kind}", rows, round(rows * _gradient_bytes(shape, signal, kind)))
        for (signal, kind), rows in counts.items()
    ]
    streams.append(Stream("steps", shape.steps, round(shape.steps * _step_bytes(shape))))
    if plan is not None and shape.steps:
        epochs = count_epochs(plan, math.ceil(shape.steps / shape.steps_per_batch))
        streams.append(Stream("exposure", epochs * len(plan.ids), round(epochs * _exposure_bytes(plan))))
    if shape.evaluations:
        rows = shape.evaluations
        streams.append(Stream("evaluations", rows, round(rows * _evaluation_bytes(rows))))
    return streams


def count_epochs(plan: Plan, batches: int) -> int:
    """Return how many organizer epochs a plan's first batches reach into.

    Parameters
    ----------
    plan
        The organizer's plan. Epochs are made up to 2,097,152 samples in all; beyond, the rest is estimated from their
        mean length, since to make them could take minutes: SDO's first epoch is longer than later ones.
    batches
        From 1.

    Examples
    --------
    >>> from sdo import Uniform
    >>> count_epochs(Uniform(10).plan(4), 6), Uniform(10).plan(4).epoch_of(5).organizer_epoch
    (3, 2)
    """
    epoch = plan.epoch(0)
    while (stop := epoch.stop) < batches:
        if (epoch.organizer_epoch + 2) * len(plan.ids) > _PLANNED:
            return math.ceil(batches * (epoch.organizer_epoch + 1) / stop)
        epoch = plan.epoch(epoch.organizer_epoch + 1)
    return plan.epoch_of(batches - 1).organizer_epoch + 1


def _gradient_bytes(shape: Shape, signal: str, kind: str) -> float:
    """Bytes of one row, from up to 50 steps of them."""
    stored, _ = shape.signals[signal]
    per_step = {"step": 1, "micro_batch": shape.micro_batches, "sample": shape.step_samples}[kind]
    samples = {"step": shape.step_samples, "micro_batch": shape.step_samples // shape.micro_batches, "sample": 1}[kind]
    steps = max(1, min(FLUSH_STEPS, shape.steps, _SAMPLE_BYTES // (4 * stored * per_step)))
    random = np.random.default_rng(0)
    sketch = random.standard_normal(stored, dtype=np.float32)  # stored plain, so that its values do not matter

    def write(log: RunLog) -> None:
        for step in range(steps):
            for number in range(per_step):
                row = GradientRow(
                    step=step,
                    kind=kind,
                    micro_batch=None if kind == "step" else number % shape.micro_batches,
                    sample_ids=random.integers(shape.samples, size=samples).tolist(),
                    tokens=int(random.integers(1000)),
                    norm=float(random.random()),
                    norm_state="raw",
                )
                log.add_gradient(signal, row, sketch)

    return _measure(write, {signal: {"stored": stored}}, f"gradients/{signal}") / (steps * per_step)


def _step_bytes(shape: Shape) -> float:
    random = np.random.default_rng(0)
    steps = max(1, min(FLUSH_STEPS, shape.steps))

    def write(log: RunLog) -> None:
        for step in range(steps):
            values = random.random(6).tolist()
            row = StepRow(
                step=step,
                organizer_epoch=0,
                trainer_epoch=values[0],
                loss=values[1],
                learning_rate=values[2],
                grad_norm=values[3],
                clipped=False,
                loss_scale=1.0,
                skipped=False,
                tokens=int(random.integers(10_000)),
                seconds=values[4],
                recorder_seconds=values[5],
                sample_ids=random.integers(shape.samples, size=shape.step_samples).tolist(),
            )
            log.add_step(row)

    return _measure(write, {}, "steps") / steps


def _exposure_bytes(plan: Plan) -> float:
    epoch = plan.epoch(0)

    def write(log: RunLog) -> None:
        log.add_exposure(0, plan.ids, epoch.exposure, epoch.exposure, np.isin(plan.ids, epoch.pool))

    return _measure(write, {}, "exposure")


def _evaluation_bytes(rows: int) -> float:
    count = min(rows, 10_000)
    scores = np.random.default_rng(0).random(count)
    return _measure(lambda log: log.add_evaluation(0, "eval_loss", np.arange(count), scores), {}, "evaluations") / count


def _measure(write: Any, signals: dict[str, Any], stream: str) -> float:
    """Write rows with the real writer into a folder of the system's, and return the bytes of one stream."""
    with tempfile.TemporaryDirectory(prefix="sdo-doctor-") as folder:
        log = RunLog.create(Path(folder) / "run", {"signals": signals})
        write(log)
        log.flush()
        return float(sum(part.stat().st_size for part in (Path(folder) / "run" / stream).glob("*.parquet")))
