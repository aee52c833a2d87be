"""What came of the samples: losses and held-out scores, read off forward passes, and the rewards of completions."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from diagnostics.recording.current_step import CurrentStep
from diagnostics.recording.evaluations import HeldOut
from diagnostics.recording.step_total import StepTotal
from diagnostics.run_folder.writer import RunLog
from diagnostics.signals.losses import LossReader
from sdo.trainers.adapter import TrainerAdapter
from sdo.trainers.completions import Rewards
from sdo.trainers.requirements import nothing_trained


class Outcomes:
    """Reads the outcomes of one training.

    Parameters
    ----------
    training
        Whose they are.
    reader
        Reads losses off the training's forward passes.
    current
        The step under way.
    log
        The run folder.
    evaluations
        Whether scores of evaluations, or rewards, are written.

    Attributes
    ----------
    losses
        Of the step's micro-batches, as the trainer adds them up; None where losses are read off forward passes.
    loss_is_given
        Whether a loop told the loss of the step, since no forward pass did.
    """

    def __init__(
        self, training: TrainerAdapter, reader: LossReader, current: CurrentStep, log: RunLog, *, evaluations: bool
    ) -> None:
        self._kind = training.kind
        self._reader, self._current, self._log, self._evaluations = reader, current, log, evaluations
        self._held_out = HeldOut(self._kind, training.processes, LossReader(training.model, self._kind))
        self.losses: list[torch.Tensor] | None = [] if self._kind.loss_from == "step" else None
        self.loss_is_given = False

    def begin_step(self) -> None:
        """Forget the losses of the step before."""
        if self.losses is not None:
            self.losses = []

    def after_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Read a forward pass, as a hook on the model."""
        with self._current.clock():
            if self._kind.generates:
                return  # its tokens came with the ids, and an evaluation's completions are not rows of its dataset
            micros = self._current.micro_batches
            if module.training and micros and self._kind.loss_from == "forward":
                # A loss of the user's own trains on logits without labels; TRL then reads its metrics off a second
                # forward pass without gradients, which has them.
                if torch.is_grad_enabled() or micros[-1].losses is None:
                    found = self._reader.read(output, kwargs, exact=False)
                    micros[-1].losses = found or micros[-1].losses
            elif not module.training and not torch.is_grad_enabled() and self._evaluations:
                self._held_out.hold(output, kwargs)

    def look_at_first(self, total: StepTotal) -> None:
        """After the first step it is known what losses and tokens are; say so where there are none."""
        if self._kind.loss_from == "forward":
            self._describe_numbers()
            if total.loss is None and self._reader.reason is not None:
                warnings.warn(f"the losses of the steps are not recorded: {self._reader.reason}", stacklevel=4)
            micros = self._current.micro_batches
            known = any(micro.losses is not None or micro.ids.tokens is not None for micro in micros)
            if known and not total.tokens:
                warnings.warn(nothing_trained(f"the {len(total.sample_ids)} sample(s) of the first step"), stacklevel=4)

    def _describe_numbers(self) -> None:
        """Let run.json say what the forward passes showed of the numbers' meaning."""
        found = self._kind.describe() | self._reader.meaning()
        if self._kind.score_from == "loss":
            scored = self._held_out.reader.meaning()
            found |= {name: value for name, value in scored.items() if name.startswith("score")}
            if scored.get("score"):
                found.pop("score_reason", None)
        if self.loss_is_given:
            found = {name: words for name, words in found.items() if name != "loss_reason"}
            found["loss"] = "as the loop gave it"
        if found != self._log.info.get("meaning"):
            self._log.update_info(meaning=found)

    def note_loss(self, loss: torch.Tensor) -> None:
        """Take the loss of a micro-batch, as the trainer adds it up."""
        if self.losses is not None:
            self.losses.append(loss.detach())

    def note_rewards(self, rewards: Rewards) -> None:
        """Write the reward of each completion, and that of each function where there are several."""
        if not self._evaluations:
            return
        with self._current.clock():
            columns = [("reward", rewards.total)]
            if len(rewards.names) > 1:
                columns += [(f"reward/{name}", rewards.parts[:, n]) for n, name in enumerate(rewards.names)]
            ids = np.array(rewards.sample_ids, np.int64)
            for name, values in columns:
                self._log.add_evaluation(rewards.step, name, ids, values.double().numpy())

    def end_evaluation(self, step: int, name: str, loader: Any) -> None:
        """Write the held-out scores that were read off an evaluation's forward passes.

        Parameters
        ----------
        step
            Number of updates the model had had.
        name
            The trainer's name of the loss, such as ``eval_loss``.
        loader
            The evaluation's data loader.
        """
        if not self._evaluations:
            return
        with self._current.clock():
            scores = self._held_out.end(loader)
            if self._kind.loss_from == "forward":
                self._describe_numbers()
            if scores:
                ids, values = np.array(list(scores), np.int64), np.array(list(scores.values()), np.float64)
                self._log.add_evaluation(step, name.removesuffix("loss") + self._kind.score_name, ids, values)

    def forget_evaluation(self) -> None:
        """Drop what was read off forward passes since the last evaluation, a prediction's for instance."""
        self._held_out.forget()
