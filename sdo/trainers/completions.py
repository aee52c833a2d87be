"""How sample ids travel through GRPO and RLOO: from the prompts that are drawn to the completions that are trained.

TRL generates completions for a whole generation batch, shuffles them and hands them out micro-batch by micro-batch.
Nothing that a callback sees tells which prompt a completion came from; so four methods of the trainer object are
wrapped, and the ids go through TRL's own shuffling beside its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sdo.errors import InputError
from sdo.trainers.ids import BATCH_KEY, BatchIds
from sdo.trainers.processes import Processes
from sdo.trainers.session import TrainingSession
from sdo.trainers.versions import OLDEST_TRL

_TIED = "sdo_tied"
# Rewards closer than this, relative to their size, differ by rounding alone: float32 keeps 6e-8.
_SAME = 1e-6


@dataclass(frozen=True, eq=False)
class Rewards:
    """What the completions of one generation batch were given.

    Attributes
    ----------
    step
        Number of updates that the model had had.
    sample_ids
        The prompt of each of the n completions, over all processes.
    names
        The F reward functions.
    total
        Shape ``(n,)``, float32: the weighted sum, as TRL forms it; NaN where no function gave a reward.
    parts
        Shape ``(n, F)``, float32; NaN where a function gave none.
    """

    step: int
    sample_ids: Sequence[int]
    names: Sequence[str]
    total: torch.Tensor
    parts: torch.Tensor


class CompletionListener(Protocol):
    """Who wants to know more than which samples are trained."""

    def note_rewards(self, rewards: Rewards) -> None:
        """Take the rewards of a generation batch."""

    def note_loss(self, loss: torch.Tensor) -> None:
        """Take the loss of a micro-batch, as the trainer adds it up over a step."""


def follow_completions(trainer: Any) -> CompletionFollower:
    """Follow a trainer's completions; a second call for one trainer returns the same follower.

    Parameters
    ----------
    trainer
        A ``GRPOTrainer`` or ``RLOOTrainer``. Only this object changes; :meth:`CompletionFollower.detach` undoes it.

    Raises
    ------
    InputError
        If the trainer's samples cannot be followed.
    """
    present = getattr(vars(trainer).get("compute_loss"), "__self__", None)
    if isinstance(present, CompletionFollower):
        return present.share()
    for refusal in unfollowed(trainer):
        raise InputError(refusal)
    return CompletionFollower(trainer)


def unfollowed(trainer: Any) -> list[str]:
    """Return why a trainer's completions could not be followed, with the remedy; empty where they can.

    Parameters
    ----------
    trainer
        A ``GRPOTrainer`` or ``RLOOTrainer``.
    """
    found = []
    if getattr(trainer, "environment_factories", None) is not None:
        found.append(
            "environment_factory is set: the environment and not the dataset decides the prompt, so that nobody can "
            "say which sample was trained; fix: put the prompts into train_dataset, with tools and reward_funcs"
        )
    missing = [name for name in _WRAPPED if not callable(getattr(trainer, name, None))]
    if missing:
        found.append(
            f"{type(trainer).__name__} has no method {missing[0]}; expected a GRPOTrainer or RLOOTrainer of a TRL "
            f"release from {OLDEST_TRL}; fix: pip install 'trl>={OLDEST_TRL}'"
        )
    return found


def trainer_needed() -> str:
    """Return the words for a recorder that has neither an organizer nor the trainer to follow completions with."""
    return (
        "GRPO and RLOO shuffle their completions out of a callback's sight, so that nobody could say which prompt a "
        "gradient belongs to; expected the trainer; fix: GradientRecorder(..., trainer=trainer)"
    )


class CompletionFollower:
    """Stands between one trainer and four of its methods; made by :func:`follow_completions`.

    The items of a batch arrive with their ids (see :mod:`sdo.trainers.ids`). They are taken out before TRL sees
    the items, put beside the tensors of the generated batch, and read again where a micro-batch is trained.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._session = TrainingSession.of(trainer.model)
        self._session.follower = self
        self._users = 1
        self._listeners: list[CompletionListener] = []
        self._parts: torch.Tensor | None = None
        self._own = {name: vars(trainer)[name] for name in _WRAPPED if name in vars(trainer)}
        self._inner: dict[str, Callable[..., Any]] = {name: getattr(trainer, name) for name in _WRAPPED}
        for name, wrapper in _WRAPPED.items():
            setattr(trainer, name, getattr(self, wrapper))

    def subscribe(self, listener: CompletionListener) -> None:
        """Tell a listener of rewards and losses from now on."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: CompletionListener) -> None:
        """Tell it no more."""
        self._listeners = [other for other in self._listeners if other is not listener]

    def share(self) -> CompletionFollower:
        """Count one more user, who will call :meth:`detach`."""
        self._users += 1
        return self

    def detach(self) -> None:
        """Give the trainer its own methods back once the last user is gone."""
        self._users -= 1
        if self._users != 0:
            return
        for name in _WRAPPED:
            # Whoever wrapped a method after us keeps one that works.
            if getattr(vars(self._trainer).get(name), "__self__", None) is not self:
                continue
            if name in self._own:
                setattr(self._trainer, name, self._own[name])
            else:
                delattr(self._trainer, name)
        self._session.follower = None
        self._session.close_if_unused()

    # ------------------------------------------------------------------ the trainer's methods

    def _generate(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        ids = [item.get(BATCH_KEY) for item in inputs]
        known = [int(i) for i in ids if i is not None]
        items = [{key: value for key, value in item.items() if key != BATCH_KEY} for item in inputs]
        self._parts = None
        output: dict[str, Any] = self._inner["_generate_and_score_completions"](items)
        if len(known) < len(ids):  # an evaluation's items carry no ids
            return output
        if len(output["completion_ids"]) != len(known):
            raise RuntimeError(
                f"{len(known)} prompts became {len(output['completion_ids'])} completions; expected one for each, "
                "since nothing else tells which prompt a completion belongs to"
            )
        output[BATCH_KEY] = torch.tensor(known)
        parts = self._rewards_of_batch()
        if parts is not None:
            tied = self._note_rewards(known, parts)
            first = int(self._trainer.accelerator.process_index) * len(known)
            advantages = output["advantages"].detach().float().cpu().reshape(len(known), -1)
            # A subclass may have advantages of its own; rounding alone stays well below a tenth.
            output[_TIED] = tied[first : first + len(known)] & (advantages.abs() < 0.1).all(dim=1)
        return output

    def _score(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        parts: torch.Tensor = self._inner["_calculate_rewards"](*args, **kwargs)
        self._parts = parts
        return parts

    def _compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ids = inputs.get(BATCH_KEY)
        if ids is not None and model.training and torch.is_grad_enabled():
            tied = inputs.get(_TIED)
            self._session.ids.announce(
                BatchIds(
                    sample_ids=tuple(ids.tolist()),
                    tokens=_completion_tokens(inputs),
                    tied=None if tied is None else tuple(tied.tolist()),
                )
            )
        return self._inner["compute_loss"](model, inputs, *args, **kwargs)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._inner["training_step"](*args, **kwargs)
        for listener in self._listeners:
            listener.note_loss(loss)
        return loss

    # ------------------------------------------------------------------ helpers

    def _rewards_of_batch(self) -> torch.Tensor | None:
        """What the reward functions gave since generating began, shape ``(n, F)``."""
        return None if self._parts is None else self._parts.detach().float().cpu()

    def _note_rewards(self, local_ids: list[int], parts: torch.Tensor) -> torch.Tensor:
        """Tell the listeners, and return which completions no reward speaks for or against, shape ``(n,)``."""
        trainer = self._trainer
        # TRL has gathered the rewards of all processes, in their order.
        ids = [one for part in Processes.of(trainer.args).lists(local_ids) for one in part]
        weights = torch.as_tensor(trainer.reward_weights, dtype=torch.float32).cpu()
        total = (parts * weights).nansum(dim=1)
        total[torch.isnan(parts).all(dim=1)] = torch.nan
        rewards = Rewards(int(trainer.state.global_step), ids, list(trainer.reward_func_names), total, parts)
        for listener in self._listeners:
            listener.note_rewards(rewards)
        if not _reward_is_all(trainer):
            return torch.zeros(len(total), dtype=torch.bool)
        apart = getattr(trainer, "multi_objective_aggregation", None) == "normalize_then_sum"
        return tied_rewards(parts if apart else total[:, None], int(trainer.num_generations))


def tied_rewards(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Say which completions belong to a group whose rewards are all the same, so that their advantage is zero.

    Parameters
    ----------
    rewards
        Shape ``(n, F)``, group by group; NaN for none, which is left out.
    num_generations
        Completions of a group.

    Returns
    -------
    torch.Tensor
        Shape ``(n,)``, bool. Rewards that differ by rounding alone are the same: TRL's advantages are then rounding
        too.

    Examples
    --------
    >>> tied_rewards(torch.tensor([[1.0], [1.0], [0.0], [1.0]]), 2).tolist()
    [True, True, False, False]
    """
    groups = rewards.double().view(-1, num_generations, rewards.shape[1])
    known = ~torch.isnan(groups)
    high = groups.masked_fill(~known, -torch.inf).amax(dim=1)
    low = groups.masked_fill(~known, torch.inf).amin(dim=1)
    size = groups.masked_fill(~known, 0.0).abs().amax(dim=1)
    same = (high - low <= _SAME * size) | ~known.any(dim=1)
    return same.all(dim=1).repeat_interleave(num_generations)


def _reward_is_all(trainer: Any) -> bool:
    """Whether nothing but the advantage moves the model: no KL penalty, no entropy bonus, no router loss."""
    apart = ("beta", "entropy_coef", "use_adaptive_entropy", "aux_loss_enabled")
    return not any(getattr(trainer, name, 0) for name in apart)


def _completion_tokens(inputs: dict[str, Any]) -> tuple[int, ...]:
    """Tokens of each completion that carry a loss: generated, not those that a tool gave, nor truncated ones."""
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    counts: list[int] = mask.sum(dim=1).tolist()
    return tuple(counts)


_WRAPPED = {
    "_generate_and_score_completions": "_generate",
    "_calculate_rewards": "_score",
    "compute_loss": "_compute_loss",
    "training_step": "_training_step",
}
