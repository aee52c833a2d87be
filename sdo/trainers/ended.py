"""A training that is resumed where it had ended already: the next step would be one too many."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback


class _NoBatches:
    """A batch sampler that has none, with what accelerate asks of one."""

    sampler: tuple[int, ...] = ()
    drop_last = False

    def __init__(self, batch_size: int | None) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(())

    def __len__(self) -> int:
        return 0


def why_ended(state: Any) -> str | None:
    """Say why a training that is about to begin has no step left; None where it has.

    Parameters
    ----------
    state
        The trainer's state, with what the checkpoint kept of its callbacks. Of these, early stopping alone tells that
        its patience was used up; a stop of another kind, on a signal for instance, is not the end of a run.
    """
    if 0 < state.max_steps <= state.global_step:
        return f"this run had ended at step {state.global_step} of {state.max_steps}"
    entry = state.stateful_callbacks.get("EarlyStoppingCallback") if state.global_step > 0 else None
    if not isinstance(entry, dict):
        return None
    patience = entry.get("args", {}).get("early_stopping_patience")
    waited = entry.get("attributes", {}).get("early_stopping_patience_counter")
    if isinstance(patience, int) and isinstance(waited, int) and waited >= patience:
        return f"early stopping had ended this run at step {state.global_step} of {state.max_steps}"
    return None


def end_before_the_first_step(state: Any, loader: Any) -> bool:
    """Let a training without a step left train none, and say so once.

    transformers looks at ``max_steps`` after each step only, so that a run resumed from its last checkpoint would train
    one step more, each time. The loader of this call gives no batch then.

    Parameters
    ----------
    state
        The trainer's state, at the beginning of training.
    loader
        Its training data loader.

    Returns
    -------
    bool
        Whether nothing is left; the caller's ``on_epoch_begin`` then asks the trainer to stop.

    Warns
    -----
    UserWarning
        If so.
    """
    reason = why_ended(state)
    if reason is None:
        return False
    inner = getattr(loader, "base_dataloader", loader)
    if not isinstance(getattr(inner, "batch_sampler", None), _NoBatches):
        # DataLoader forbids to exchange it, since its length may be known to others: here nothing will be drawn.
        object.__setattr__(inner, "batch_sampler", _NoBatches(getattr(inner.batch_sampler, "batch_size", None)))
        warnings.warn(
            f"{reason}: nothing was trained; fix: a larger max_steps or num_train_epochs, or start a new run",
            stacklevel=3,
        )
    return True


def stop_at_once(control: Any) -> None:
    """Ask the trainer to stop without another log, evaluation or checkpoint."""
    control.should_training_stop = True
    control.should_log = control.should_evaluate = control.should_save = False


class EndsInTime(TrainerCallback):
    """Ends a training that has no step left, where neither an organizer nor a recorder does."""

    def __init__(self) -> None:
        self._ended = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look whether a step is left."""
        self._ended = end_before_the_first_step(state, kwargs["train_dataloader"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop, if none is."""
        if self._ended:
            stop_at_once(control)
