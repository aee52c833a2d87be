"""A writer of synthetic run folders, in the format of diagnostics."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sdo.run_format import EVALUATIONS, GRADIENTS, STEPS
from sdo.run_schema import schema_of


def gradient_table(rows, k):
    """Build a part's table from dicts with step, kind, sketch and what else differs from the defaults."""
    filled = []
    for row in rows:
        sketch = np.asarray(row["sketch"], dtype=np.float32)
        norm = float(np.linalg.norm(sketch.astype(float)))
        given = {"micro_batch": None, "sample_ids": [], "tokens": 10, "norm": norm, "norm_state": "raw"}
        given["reason"] = None if norm > 0 else "zero gradient"
        filled.append({**given, **row, "sketch": sketch.tolist()})
    return pa.Table.from_pylist(filled, schema=schema_of(GRADIENTS, k))


@dataclass
class RunWriter:
    """Writes the files of one run folder."""

    path: Path
    signals: dict = field(default_factory=lambda: {"hidden": 6})

    def info(self, **changes):
        self.path.mkdir(parents=True, exist_ok=True)
        content = {
            "format": "sdo-run",
            "format_version": 1,
            "created": "2026-11-29T12:00:00+00:00",
            "status": "finished",
            "organizer": None,
            "embeddings": None,
            "signals": {
                name: {"parameter": None, "shape": [k], "stored": k, "sketch": {"kind": "identity"}}
                for name, k in self.signals.items()
            },
            "sketch_check": {},
            "model": {},
            "dataset": {},
            "versions": {},
        }
        (self.path / "run.json").write_text(json.dumps({**content, **changes}))
        return self

    def gradients(self, signal, rows, first, last, rank=0):
        folder = self.path / "gradients" / signal
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"part-r{rank}-{first:08d}-{last:08d}.parquet"
        pq.write_table(gradient_table(rows, self.signals[signal]), file)
        return file

    def steps(self, first, last, batches, losses=None):
        folder = self.path / "steps"
        folder.mkdir(parents=True, exist_ok=True)
        steps = range(first, last + 1)
        losses = [2.0 / (1 + step) for step in steps] if losses is None else losses
        rows = [
            {
                "step": step,
                "organizer_epoch": 0,
                "trainer_epoch": step / 10,
                "loss": loss,
                "learning_rate": 1e-4,
                "grad_norm": 1.0,
                "clipped": False,
                "loss_scale": 1.0,
                "skipped": False,
                "tokens": 80,
                "seconds": 0.5,
                "recorder_seconds": 0.01,
                "sample_ids": list(map(int, batch)),
            }
            for step, loss, batch in zip(steps, losses, batches, strict=True)
        ]
        file = folder / f"part-{first:08d}-{last:08d}.parquet"
        pq.write_table(pa.Table.from_pylist(rows, schema=schema_of(STEPS)), file)
        return file

    def evaluations(self, name, scores):
        """Write {step: scores of samples 0, 1, …}."""
        folder = self.path / "evaluations"
        folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {"step": step, "name": name, "sample_id": i, "score": None if score is None else float(score)}
            for step, values in scores.items()
            for i, score in enumerate(values)
        ]
        table = pa.Table.from_pylist(rows, schema=schema_of(EVALUATIONS))
        pq.write_table(table, folder / f"part-{min(scores):08d}-{max(scores):08d}.parquet")
        return self


def write_training(
    path, *, steps=60, samples=40, batch=4, k=16, pull=1.0, seed=0, signals=("hidden",), batches=None, **info
):
    """Write a whole run: step and sample rows that share a common direction of strength `pull`."""
    rng = np.random.default_rng(seed)
    writer = RunWriter(Path(path), dict.fromkeys(signals, k)).info(**info)
    own = rng.normal(size=(samples, k))
    common = pull * rng.normal(size=k)
    if batches is None:
        batches = [rng.choice(samples, size=batch, replace=False) for _ in range(steps)]
    for first in range(0, steps, 25):
        last = min(first + 25, steps) - 1
        writer.steps(first, last, batches[first : last + 1])
        for signal in signals:
            rows = []
            for step in range(first, last + 1):
                each = common + own[batches[step]] + 0.3 * rng.normal(size=(batch, k))
                ids = batches[step].tolist()
                rows.append({"step": step, "kind": "step", "sample_ids": ids, "sketch": each.mean(axis=0)})
                rows += [
                    {"step": step, "kind": "sample", "sample_ids": [i], "sketch": g}
                    for i, g in zip(ids, each, strict=True)
                ]
            writer.gradients(signal, rows, first, last)
    return writer


def write_planned(path, plan, *, steps, effect=0.0, k=12, seed=0, sample_every=2, embeddings_path=None, **info):
    """Write a run that trained the first batches of a plan; gradients follow embeddings with strength `effect`."""
    rng = np.random.default_rng(seed)
    embeddings = plan.organizer.embeddings
    described = {"organizer": {**plan.describe(), "fingerprint": plan.fingerprint}}
    described["embeddings"] = {"path": str(embeddings_path or embeddings.path), "fingerprint": embeddings.fingerprint}
    writer = RunWriter(Path(path), {"hidden": k}).info(**{**described, "seeds": {"seed": seed}, **info})
    turn = rng.normal(size=(embeddings.dim, k))
    batches = plan.batches(0, steps)
    writer.steps(0, steps - 1, batches)
    rows = []
    for step, batch in enumerate(batches):
        each = effect * embeddings.unit[batch] @ turn + rng.normal(size=(len(batch), k))
        ids = batch.tolist()
        rows.append({"step": step, "kind": "step", "sample_ids": ids, "sketch": each.mean(axis=0)})
        if step % sample_every == 0:
            rows += [
                {"step": step, "kind": "sample", "sample_ids": [i], "sketch": g} for i, g in zip(ids, each, strict=True)
            ]
    writer.gradients("hidden", rows, 0, steps - 1)
    return writer


def write_generated(path, plan, *, steps, each, generations=3, iterations=1, effect=0.0, k=12, seed=0, **info):
    """Write a GRPO run of a plan: a batch of prompts serves `each` optimizer steps, which train its completions.

    Its completions are shuffled and gone through `iterations` times; `exposure/` counts a prompt once a batch.
    """
    rng = np.random.default_rng(seed)
    embeddings = plan.organizer.embeddings
    trainer = {"steps_per_batch": each, "num_generations": generations, "num_iterations": iterations}
    trainer |= {"steps_per_generation": each // iterations, "gradient_accumulation_steps": 1}
    described = {"organizer": {**plan.describe(), "fingerprint": plan.fingerprint}, "trainer": trainer}
    described["embeddings"] = {"path": str(embeddings.path), "fingerprint": embeddings.fingerprint}
    writer = RunWriter(Path(path), {"hidden": k}).info(**{**described, **info})
    turn = rng.normal(size=(embeddings.dim, k))
    parts = each // iterations
    trained = []
    for batch in range(-(-steps // each)):
        completions = rng.permutation(np.repeat(plan.batch(batch), generations))
        trained += [part for _ in range(iterations) for part in np.array_split(completions, parts)]
    writer.steps(0, steps - 1, trained[:steps])
    rows = []
    for step, ids in enumerate(trained[:steps]):
        every = effect * embeddings.unit[ids] @ turn + rng.normal(size=(len(ids), k))
        rows.append({"step": step, "kind": "step", "sample_ids": ids.tolist(), "sketch": every.mean(axis=0)})
        rows += [
            {"step": step, "kind": "sample", "sample_ids": [i], "sketch": g}
            for i, g in zip(ids.tolist(), every, strict=True)
        ]
    writer.gradients("hidden", rows, 0, steps - 1)
    counts = plan.counts(-(-steps // each)).tolist()
    n = len(counts)
    columns = {"organizer_epoch": [0] * n, "sample_id": plan.ids.tolist(), "planned": counts, "trained": counts}
    (writer.path / "exposure").mkdir()
    pq.write_table(pa.table({**columns, "in_pool": [True] * n}), writer.path / "exposure" / "part-00000.parquet")
    return writer
