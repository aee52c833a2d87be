"""Recorders of one training run behind one face: this library's, bergson's Trainer callback, dattri-llm's hooks.

Only what a peer exports or documents is used. What a recorder does not hold is ``None`` here.
"""
# ruff: noqa: D102 - `Arm` says what each method is

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
MATRIX = "model.layers.29.mlp.down_proj"  # the last matrix of SmolLM2-135M's body, 576 x 1,536


def folder_bytes(folder: Path) -> int:
    """Return the size of all files under a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class Arm:
    """A trainer that nothing records, and the face of those that something does.

    Parameters
    ----------
    out
        Where the recorder writes.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.trainer: Any = None

    def attach(self, trainer: Any) -> None:
        """Add the recorder to a trainer."""
        self.trainer = trainer

    def train(self) -> None:
        """Train under the recorder."""
        self.trainer.train()

    def steps(self, first: int, batch: int) -> Rows | None:
        """Return one row a step from step `first` on, of `batch` samples each: the gradient of `MATRIX`."""
        return None

    def samples(self, first: int, batch: int) -> Rows | None:
        """Return one row a sample: its share of the gradient of `MATRIX`."""
        return None

    def all_matrices(self, first: int, batch: int) -> Rows | None:
        """Return one row for each sample of step `first`: its share of the gradients of all matrices of the body."""
        return None

    def hidden(self, first: int, batch: int) -> Rows | None:
        """Return one row a sample: the gradient at the final norm's output, summed over positions."""
        return None

    def step_bytes(self, first: int, steps: int) -> float:
        """Return the bytes of a step from step `first` on, of `steps` in all; here all steps take the same."""
        return folder_bytes(self.out) / steps

    def held(self) -> dict[str, Any]:
        """Count what the store holds."""
        return {"bytes": folder_bytes(self.out)}


class Recorder(Arm):
    """Our :class:`diagnostics.GradientRecorder`."""

    def __init__(self, out: Path, **options: Any) -> None:
        super().__init__(out)
        self.options = options

    def attach(self, trainer: Any) -> None:
        from diagnostics import GradientRecorder

        super().attach(trainer)
        trainer.add_callback(GradientRecorder(self.out, **self.options))

    def _rows(self, signal: str, kind: str, first: int) -> Any:
        from analysis import Run

        rows = Run.open(self.out).gradients(signal, kind)
        return rows.sketch[rows.step >= first]

    def steps(self, first: int, batch: int) -> Rows | None:
        return self._rows("weight", "step", first)

    def samples(self, first: int, batch: int) -> Rows | None:
        return self._rows("samples", "sample", first)

    def hidden(self, first: int, batch: int) -> Rows | None:
        return self._rows("hidden", "sample", first)

    def held(self) -> dict[str, Any]:
        from analysis import Run

        run = Run.open(self.out)
        steps = run.steps().to_pylist()
        return {
            **super().held(),
            "steps": len(steps),
            "samples": sum(len(step["sample_ids"]) for step in steps),
            "losses": sum(step["loss"] is not None for step in steps),
            "rows": {signal: run.kinds(signal) for signal in run.signals},
        }


class Bergson(Arm):
    """bergson's ``GradientCollectorCallback``: each sample's share of every matrix of the body, projected on two sides.

    Parameters
    ----------
    out
        Where it writes.
    projection_dim
        p: what is stored of a matrix is p x p. 16 is its own default.
    track_order
        Whether it writes which samples were trained at which step.
    """

    def __init__(self, out: Path, projection_dim: int = 16, track_order: bool = True) -> None:
        super().__init__(out)
        self.projection_dim, self.track_order = projection_dim, track_order

    def attach(self, trainer: Any) -> None:
        from bergson.huggingface import GradientCollectorCallback, prepare_for_gradient_collection

        prepare_for_gradient_collection(trainer)
        super().attach(trainer)
        # Raw gradients, as the others store them; the default divides by Adam's second moment.
        raw = {"use_optimizer_state": False, "track_order": self.track_order}
        trainer.add_callback(GradientCollectorCallback(self.out, projection_dim=self.projection_dim, **raw))

    def _store(self) -> Any:
        from bergson import load_module_gradients

        return load_module_gradients(self.out / "train" / "epoch_0")

    def steps(self, first: int, batch: int) -> Rows | None:
        samples = self.samples(first, batch)
        return None if samples is None else samples.reshape(-1, batch, samples.shape[1]).sum(axis=1)

    def samples(self, first: int, batch: int) -> Rows | None:
        # Row i is the dataset's i-th sample; training is sequential.
        rows: Rows = np.asarray(self._store()[MATRIX.removeprefix("model.")][first * batch :], np.float32)
        return rows

    def all_matrices(self, first: int, batch: int) -> Rows | None:
        store = self._store()
        here = slice(first * batch, (first + 1) * batch)
        return np.concatenate([np.asarray(store[name][here], np.float32) for name in store], axis=1)

    def held(self) -> dict[str, Any]:
        store = self._store()
        some = np.asarray(store[next(iter(store))])
        found = {**super().held(), "samples": int(np.any(some != 0, axis=1).sum()), "matrices": len(store.keys())}
        if self.track_order:
            from datasets import load_from_disk

            order = load_from_disk(str(self.out / "order.hf"))
            found |= {"order_rows": len(order), "order_columns": order.column_names}
        return found


class DattriLLM(Arm):
    """dattri-llm's hooks, written to its own store.

    Parameters
    ----------
    out
        Where it writes.
    config
        Options of its ``HookManagerConfig``; ``"all"`` selects every layer.
    kind
        ``"per_sample"``, or ``"per_batch"`` where no sample is told apart.
    accumulation
        Micro-batches a step.
    """

    def __init__(self, out: Path, config: dict[str, Any], kind: str = "per_sample", accumulation: int = 1) -> None:
        super().__init__(out)
        self.config, self.kind, self.accumulation = config, kind, accumulation
        self.manager: Any = None

    def attach(self, trainer: Any) -> None:
        from dattri_llm import GradientStorageManager, HookManager, HookManagerConfig, OffloadCallback

        super().attach(trainer)
        store = GradientStorageManager(str(self.out))
        self.out.mkdir(exist_ok=True)
        write = OffloadCallback(1, store, recording_type=self.kind, gradient_accumulation_steps=self.accumulation)
        self.manager = HookManager(trainer.model, config=HookManagerConfig(**self.config), callbacks=[write])

    def train(self) -> None:
        with self.manager.collect(deregister_on_exit=True):
            self.trainer.train()

    def _records(self, first: int, last: int | None = None) -> list[Any]:
        """Return the records of steps `first` to `last`, in order of step and sample."""
        from dattri_llm import GradientStorageManager

        store = GradientStorageManager(str(self.out))
        steps = [step for step in store.available_steps() if step >= first and (last is None or step <= last)]
        found = []
        for step in steps:
            for file, places in store.iter_steps(step):
                records = store.load_records(file)
                found += [records[i] for i in places[step]]
        return found

    def _rows(self, choose: Callable[[str], bool], first: int, last: int | None = None) -> Rows | None:
        records = self._records(first, last)
        rows = []
        for record in records:
            data = record.gradient.materialize().data
            chosen = [data[name] for name in sorted(data) if choose(name)]
            if not chosen:
                return None
            per_batch = self.kind == "per_batch"
            rows += [
                np.concatenate([one.float().reshape(1 if per_batch else len(one), -1).numpy() for one in chosen], 1)
            ]
        return np.concatenate(rows) if rows else None

    def step_bytes(self, first: int, steps: int) -> float:
        from dattri_llm import GradientStorageManager

        # What is not projected is stored token by token, so that a step's size is that of its texts.
        counted = list(range(first, steps))
        handles = [self.out / file for file, _ in GradientStorageManager(str(self.out)).iter_steps(counted)]
        files = [file for handle in handles for file in handle.parent.glob(handle.name + "*")]
        return sum(file.stat().st_size for file in files) / len(counted)

    def steps(self, first: int, batch: int) -> Rows | None:
        rows = self._rows(lambda name: name.startswith(MATRIX), first)
        if rows is None or self.kind == "per_batch":
            return rows
        return rows.reshape(-1, batch, rows.shape[1]).sum(axis=1)

    def samples(self, first: int, batch: int) -> Rows | None:
        return None if self.kind == "per_batch" else self._rows(lambda name: name.startswith(MATRIX), first)

    def all_matrices(self, first: int, batch: int) -> Rows | None:
        if "linear_io" not in self.config:
            return None
        return self._rows(lambda name: True, first, first)

    def held(self) -> dict[str, Any]:
        records = self._records(0)
        hashes = [one.input_hash if isinstance(one.input_hash, list) else [one.input_hash] for one in records]
        return {
            **super().held(),
            "steps": len({one.step for one in records}),
            "samples": sum(map(len, hashes)),
            "layers": sorted({name for one in records for name in one.gradient.layer_names})[:3],
            "layer_count": len({name for one in records for name in one.gradient.layer_names}),
            "example_id": hashes[0][0] if hashes else None,
        }
