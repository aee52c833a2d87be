"""A training run small enough to be launched, killed and launched again; a script under torchrun, a module elsewhere.

As a script it takes a folder with ``jobs.json``: a list of keyword arguments for :func:`train`. Each process trains the
jobs one after the other and writes what it saw of each to ``<job>-r<rank>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import datasets
import numpy as np
import torch
import trl.trainer.utils
from datasets import Dataset
from leave import leave
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from diagnostics import GradientRecorder
from diagnostics.signals.registry import DEFAULT_SIGNALS
from sdo import SDO, RandomSelect, attach
from sdo.demo.tiny_model import build
from tests.llama import tiny_llama
from tests.trainings import SIGNALS

N, FIRST = 22, 20
# Before its fused head TRL's losses hid what head_only needs.
RECORDED = SIGNALS if hasattr(trl.trainer.utils, "add_fused_lm_head") else DEFAULT_SIGNALS
ASKED = (*RECORDED, "samples:*.down_proj.weight")
ROWS = [[FIRST + i] + [5 + (3 * i + j) % 11 for j in range(2 + i % 4)] for i in range(N)]
ORDER = np.random.default_rng(5).permutation(N).tolist()
MATRIX = np.random.default_rng(0).standard_normal((N, 6))


def organizer(**options):
    return SDO(MATRIX, **{"k": 2, "seed": 617, **options})


def dataset(ids=ORDER, masked=()):
    labels = [[-100] * len(ROWS[i]) if i in masked else ROWS[i] for i in ids]
    return Dataset.from_dict({"input_ids": [ROWS[i] for i in ids], "labels": labels, "sample_id": list(ids)})


class Probe(TrainerCallback):
    """Which samples the embedding layer saw, by optimizer step and micro-batch: sample i begins with FIRST + i."""

    def __init__(self, watched):
        self.steps, self._micro = [], []
        watched.get_input_embeddings().register_forward_pre_hook(self._note)

    def _note(self, module, inputs):
        if module.training and torch.is_grad_enabled():
            self._micro.append([int(i) - FIRST for i in inputs[0][:, 0]])

    def on_step_begin(self, args, state, control, **kwargs):
        self._micro = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(self._micro)


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


class Skip(TrainerCallback):
    """Does what accelerate's optimizer does when a gradient overflowed; the CPU has no scaler of its own."""

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        optimizer._is_overflow = state.global_step == 2


def make_trainer(out, per_device, accumulation, *, evaluate=0, ids=ORDER, model_seed=0, **changes):
    defaults = {
        "output_dir": str(out / "trainer"),
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "max_steps": 8,
        "per_device_train_batch_size": per_device,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": accumulation,
    }
    if evaluate:
        defaults |= {"eval_strategy": "steps", "eval_steps": evaluate}
    return SFTTrainer(
        model=tiny_llama(model_seed),
        args=SFTConfig(**{**defaults, **changes}),
        train_dataset=dataset(ids),
        eval_dataset=dataset(range(7)) if evaluate else None,
        processing_class=build(["ab 12"], seed=0, hidden=16, layers=1, vocab=300)[1],
    )


def train(
    out,
    per_device,
    accumulation,
    *,
    organize=True,
    options=None,
    record=True,
    stop=None,
    skip=False,
    resume=None,
    fails=False,
    keep=None,
    **changes,
):
    """Train, and return what was seen; of a job that ``fails`` the error."""
    out = Path(out)
    rank = int(os.environ.get("RANK", "0"))
    try:
        trainer = make_trainer(out, per_device, accumulation, **changes)
        probe = Probe(trainer.model)
        trainer.add_callback(probe)
        handle = None
        if organize:
            of_rank = (options or {}).get(str(rank), options or {})
            selector = None if keep is None else RandomSelect(keep, seed=3)
            handle = attach(
                trainer, organizer(**{k: v for k, v in of_rank.items() if not k.isdigit()}), selector=selector
            )
        if skip:
            trainer.add_callback(Skip())
        if stop:
            trainer.add_callback(StopAt(stop))
        if record:
            trainer.add_callback(GradientRecorder(out / "run", signals=ASKED, sample_every=2, sketch_size=512))
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        if not fails:  # torchrun ends the other processes
            raise
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "processes": trainer.args.world_size,
        "wrapped": type(trainer.model_wrapped).__name__,
        "steps": probe.steps,
        "trained": None if handle is None else handle.trained.tolist(),
        "global_step": trainer.state.global_step,
    }


def main(folder):
    datasets.disable_progress_bars()
    rank = os.environ.get("RANK", "0")
    for job in json.loads((folder / "jobs.json").read_text()):
        name = job.pop("name")
        found = train(job.pop("out", folder / name), **job)
        (folder / f"{name}-r{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
