"""How GRPO and RLOO draw their prompts: generation batches, drawn once for every micro-step that trains on them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdo.errors import InputError
from sdo.organizers.plan import Plan
from sdo.trainers.sampler import OrganizedSampler


@dataclass(frozen=True)
class GenerationLayout:
    """What a generation batch is and how long it serves; the names are TRL's.

    Attributes
    ----------
    prompts
        Distinct prompts of a generation batch over all processes: ``generation_batch_size // num_generations``.
    num_generations
        Completions of each prompt: one group, whose rewards are compared.
    steps_per_generation
        Micro-batches that a generation batch is cut into.
    num_iterations
        How often it is gone through.
    gradient_accumulation_steps
        Micro-batches of one optimizer step.

    Examples
    --------
    >>> layout = GenerationLayout(prompts=4, num_generations=2, steps_per_generation=2, num_iterations=3,
    ...                           gradient_accumulation_steps=2)
    >>> layout.micro_steps, layout.optimizer_steps
    (6, 3)
    """

    prompts: int
    num_generations: int
    steps_per_generation: int
    num_iterations: int
    gradient_accumulation_steps: int

    @classmethod
    def of(cls, args: Any) -> GenerationLayout | None:
        """Read the layout off a trainer's arguments; None where they are not those of GRPO or RLOO."""
        if not hasattr(args, "steps_per_generation") or not hasattr(args, "num_generations"):
            return None
        return cls(
            prompts=int(args.generation_batch_size) // int(args.num_generations),
            num_generations=int(args.num_generations),
            steps_per_generation=int(args.steps_per_generation),
            num_iterations=int(args.num_iterations),
            gradient_accumulation_steps=int(args.gradient_accumulation_steps),
        )

    @property
    def micro_steps(self) -> int:
        """Micro-steps that train on one generation batch: the loader draws it once for each, TRL uses the first."""
        return self.steps_per_generation * self.num_iterations

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps that train on one generation batch.

        Raises
        ------
        InputError
            If it is not a whole number from 1: a step would then train parts of two batches of the plan.
        """
        steps, rest = divmod(self.micro_steps, self.gradient_accumulation_steps)
        if rest:
            raise InputError(
                f"a generation batch serves steps_per_generation * num_iterations = {self.micro_steps} micro-steps, "
                f"gradient_accumulation_steps is {self.gradient_accumulation_steps}: optimizer steps would mix "
                "generation batches; expected a multiple; fix: leave steps_per_generation and generation_batch_size "
                f"out, or set steps_per_generation to a multiple of {self.gradient_accumulation_steps}"
            )
        return steps


class GenerationSampler(OrganizedSampler):
    """Yields a plan's batches of prompts in the layout of TRL's ``RepeatSampler``.

    Parameters
    ----------
    plan, positions, trainer_epoch
        As in :class:`~sdo.OrganizedSampler`; a batch of the plan is the prompts of one generation batch.
    layout
        How often each prompt and each batch is repeated.

    Notes
    -----
    Each prompt comes ``num_generations`` times in a row, and each generation batch
    ``steps_per_generation * num_iterations`` times, once for every micro-step. Where ``RepeatSampler`` drops the last
    incomplete batch of an epoch, a plan has none.

    Examples
    --------
    >>> from sdo import Uniform
    >>> layout = GenerationLayout(prompts=2, num_generations=2, steps_per_generation=1, num_iterations=2,
    ...                           gradient_accumulation_steps=1)
    >>> list(GenerationSampler(Uniform(3, seed=1).plan(batch_size=2), layout=layout))
    [0, 0, 2, 2, 0, 0, 2, 2, 1, 1, 2, 2, 1, 1, 2, 2]
    """

    def __init__(
        self,
        plan: Plan,
        positions: NDArray[np.int64] | None = None,
        *,
        layout: GenerationLayout,
        trainer_epoch: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(plan, positions, trainer_epoch=trainer_epoch)
        self.layout = layout

    def __len__(self) -> int:
        return super().__len__() * self.layout.num_generations * self.layout.micro_steps

    def _stream(self) -> Iterator[int]:
        for prompts in self.steps():
            for _ in range(self.layout.micro_steps):
                yield from np.repeat(prompts, self.layout.num_generations).tolist()


class CompletionCount:
    """Compares the completions that were trained with the generation batches that were planned."""

    def __init__(self, layout: GenerationLayout) -> None:
        self._layout = layout
        self._counts: Counter[int] = Counter()
        self._steps = 0

    def check(self, step: int, sample_ids: Sequence[int], prompts: Sequence[int]) -> None:
        """Check one optimizer step.

        Parameters
        ----------
        step
            From 0.
        sample_ids
            The prompt of each completion that it trained.
        prompts
            Those of the generation batch that was planned for it.

        Raises
        ------
        RuntimeError
            If it trained other prompts, or the whole generation batch did not train each completion
            ``num_iterations`` times.
        """
        layout = self._layout
        others = sorted(set(sample_ids) - set(prompts))
        if others:
            raise RuntimeError(
                f"step {step} trained completions of the samples {others}, which are not in the planned generation "
                f"batch {sorted(prompts)}; something else changed the data loader of this trainer"
            )
        if step % layout.optimizer_steps == 0:
            self._counts, self._steps = Counter(), 0
        self._counts.update(sample_ids)
        self._steps += 1
        # A generation batch that a resumed run entered half way is made of new completions, some of which never train.
        if step % layout.optimizer_steps == layout.optimizer_steps - 1 and self._steps == layout.optimizer_steps:
            expected = layout.num_generations * layout.num_iterations
            wrong = sorted(prompt for prompt in prompts if self._counts[prompt] != expected)
            if wrong:
                raise RuntimeError(
                    f"the generation batch that ended at step {step} trained {self._counts[wrong[0]]} completions of "
                    f"sample {wrong[0]}; expected {expected}; something else changed the data loader of this trainer"
                )


def continue_generation(trainer: Any, layout: GenerationLayout) -> None:
    """Let a trainer generate where the data loader begins a new batch, whatever step it starts from.

    TRL counts micro-steps from 0 in each process, so that a resumed run would cut generation batches in the wrong
    places, and trains from what is left of an earlier ``train()`` call.

    Parameters
    ----------
    trainer
        At the beginning of training, its state loaded.
    layout
        Of its arguments.
    """
    step = int(trainer.state.global_step)
    trainer._step = step * layout.gradient_accumulation_steps
    trainer._buffered_inputs = None
    inside = step % layout.optimizer_steps
    if inside:
        first = step - inside
        warnings.warn(
            f"step {step} lies inside a generation batch (steps {first} to {first + layout.optimizer_steps - 1}), "
            "whose completions are not in the checkpoint: they are generated anew from the same prompts, so that "
            "losses and weights will differ from those of an uninterrupted run; fix: save at multiples of "
            f"{layout.optimizer_steps} steps",
            stacklevel=2,
        )
