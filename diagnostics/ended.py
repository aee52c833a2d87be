"""A training that is resumed where it had ended already: the next step would be one too many."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any


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
    if not 0 < state.max_steps <= state.global_step:
        return False
    inner = getattr(loader, "base_dataloader", loader)
    if not isinstance(getattr(inner, "batch_sampler", None), _NoBatches):
        # DataLoader forbids to exchange it, since its length may be known to others: here nothing will be drawn.
        object.__setattr__(inner, "batch_sampler", _NoBatches(getattr(inner.batch_sampler, "batch_size", None)))
        warnings.warn(
            f"this run had ended at step {state.global_step} of {state.max_steps}: nothing was trained; "
            "fix: a larger max_steps or num_train_epochs, or start a new run",
            stacklevel=3,
        )
    return True


def stop_at_once(control: Any) -> None:
    """Ask the trainer to stop without another log, evaluation or checkpoint."""
    control.should_training_stop = True
    control.should_log = control.should_evaluate = control.should_save = False
