"""GRPO in several processes, a script under torchrun; each writes ``<name>-r<rank>.json`` and ``.npy``: what it saw."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import datasets
import numpy as np
from leave import leave
from transformers import TrainerCallback

from diagnostics import GradientRecorder
from sdo import SDO, attach
from sdo.demo.tiny_model import build
from tests.generation import MATRIX, Watch, make
from tests.trainings import SIGNALS

# (per device, accumulation, generations, steps per generation, iterations), see tests/generation.py. Under the first a
# group of two is divided among the processes: three completions each, of three prompts.
GRIDS = {"divided": (3, 1, 2, 1, 2), "cut": (2, 2, 2, 4, 1)}
STEPS = 6


def organizer():
    return SDO(MATRIX, k=2, seed=1)


def odd_letters_tie(prompts, completions, **kwargs):
    return [1.0 if ord(p[0]) % 2 else float(len(c) % 2) for p, c in zip(prompts, completions, strict=True)]


class Gradients(TrainerCallback):
    """The reduced gradient of the head, as the optimizer is given it."""

    def __init__(self, head):
        self.head, self.steps = head, []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.steps.append(self.head.weight.grad.flatten().numpy().copy())


def train(folder, name, organize):
    tokenizer = build(["ab 12"], seed=0, hidden=16, layers=1, vocab=300)[1]
    trainer = make(tokenizer, folder / name, GRIDS[name], steps=STEPS, reward=odd_letters_tie, max_grad_norm=0.0)
    handle = attach(trainer, organizer()) if organize else None
    watch, gradients = Watch(trainer, tokenizer), Gradients(trainer.model.lm_head)
    trainer.add_callback(gradients)
    out = folder / (name if organize else f"{name} alone") / "run"
    trainer.add_callback(
        GradientRecorder(out, signals=SIGNALS, sample_every=1, sketch_size=16384, trainer=None if organize else trainer)
    )
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    trained = [] if handle is None else handle.trained.tolist()
    seen = {"steps": [ids for _, ids in watch.steps], "trained": trained, "losses": losses}
    return seen, np.stack(gradients.steps)


def main(folder):
    datasets.disable_progress_bars()
    rank = os.environ["RANK"]
    for name, organize in [*((name, True) for name in GRIDS), ("divided", False)]:
        seen, gradients = train(folder, name, organize)
        file = folder / f"{name if organize else name + ' alone'}-r{rank}"
        file.with_suffix(".json").write_text(json.dumps(seen))
        np.save(file.with_suffix(".npy"), gradients)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
