"""Tiny GRPO and RLOO trainers, and what they were trained on, read off their embedding layer.

Prompt i begins with letter i and no other prompt does, so that neither our ids nor our wrappers take part in proving
what they claim. A grid is (per device, accumulation, generations, steps per generation, iterations).
"""

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig

from tests.llama import tiny_llama

N = 11
LETTERS = [chr(ord("A") + i) for i in range(N)]
MATRIX = np.random.default_rng(0).standard_normal((N, 6))


def dataset(ids=range(N), **columns):
    ids = list(ids)
    prompts = [LETTERS[i] + " x" * (1 + i % 3) for i in ids]
    return Dataset.from_dict({"prompt": prompts, "sample_id": ids, **columns})


def odd_length(completions, **kwargs):
    return [float(len(text) % 2) for text in completions]


def make(
    tokenizer, tmp_path, grid, *, steps=6, rows=None, eval_rows=None, cls=GRPOTrainer, reward=odd_length, **options
):
    per_device, accumulation, generations, per_generation, iterations = grid
    config = GRPOConfig if cls is GRPOTrainer else RLOOConfig
    options = {"save_strategy": "no", "beta": 0.0, **options}
    args = config(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_generations=generations,
        steps_per_generation=per_generation,
        num_iterations=iterations,
        max_completion_length=3,
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    return cls(
        model=tiny_llama(),
        reward_funcs=reward,
        args=args,
        train_dataset=dataset() if rows is None else rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
    )


class Watch(TrainerCallback):
    """The prompts of each optimizer step's completions, by the first token of each trained row."""

    def __init__(self, trainer, tokenizer):
        self.steps, self._now = [], []
        self._letters = {tokenizer(letter)["input_ids"][0]: i for i, letter in enumerate(LETTERS)}
        trainer.model.get_input_embeddings().register_forward_pre_hook(self._look)
        trainer.add_callback(self)

    def _look(self, module, args):
        if torch.is_grad_enabled():
            for row in args[0].tolist():
                first = next(token for token in row if token != 0)
                self._now.append(self._letters[first])

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append((state.global_step - 1, self._now))
        self._now = []
