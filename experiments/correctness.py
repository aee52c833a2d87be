"""Whether a model answers a held-out question right, token by token, without generating."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from diagnostics import GradientRecorder

NAME = "eval_correct"
_IGNORED = -100
_BATCH = 64


class Correctness(TrainerCallback):  # type: ignore[misc]
    """Scores each held-out answer at every evaluation: 1 where greedy decoding would give exactly it, else 0.

    Greedy decoding yields the reference answer, its end included, exactly if each of its tokens is the likeliest one
    after those before it; so one forward pass tells what generating would. Written through the recorder.

    Parameters
    ----------
    trainer
        An SFTTrainer with an ``eval_dataset``.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Score the answers and hand them to the recorder."""
        recorders = (c for c in self._trainer.callback_handler.callbacks if isinstance(c, GradientRecorder))
        recorder = next(recorders, None)
        if recorder is None:
            return
        correct = answers_right(self._trainer.model, self._trainer.data_collator, self._trainer.eval_dataset)
        recorder.log_evaluation(NAME, state.global_step, np.arange(len(correct)), correct)


def answers_right(model: Any, collate: Any, rows: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return (n,) float64, 1 where each token of a row's answer is the likeliest after those before it.

    Parameters
    ----------
    model
        A causal language model; its mode is restored.
    collate
        Makes ``input_ids``, ``attention_mask`` and ``labels`` of some rows.
    rows
        n tokenized rows with ``input_ids``.
    """
    was_training = model.training
    model.eval()
    found = np.zeros(len(rows))
    # By length, so that little of a batch is padding.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
    with torch.no_grad():
        for start in range(0, len(rows), _BATCH):
            chosen = order[start : start + _BATCH]
            batch = collate([rows[i] for i in chosen])
            inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
            guess = model(**inputs).logits[:, :-1].argmax(dim=-1).cpu()
            target = batch["labels"][:, 1:].cpu()
            found[chosen] = ((guess == target) | (target == _IGNORED)).all(dim=1).double().numpy()
    model.train(was_training)
    return found
