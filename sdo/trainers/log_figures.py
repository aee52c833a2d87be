"""Figures about a run's steps that ride on the trainer's own log, as ``sdo/…``, so that every logger gets them."""

from __future__ import annotations

from typing import Any

from sdo.trainers.session import TrainingSession

PREFIX = "sdo/"


def log_scalars(trainer: Any) -> ScalarLog:
    """Let a trainer's log carry ``sdo/…`` figures: TensorBoard, wandb, trackio and ``log_history`` all get them.

    :func:`sdo.attach` does this by itself. A recorder without an organizer knows no trainer; this is the line for it.

    Parameters
    ----------
    trainer
        A transformers or TRL trainer. Only this object changes: its method ``log`` is wrapped.

    Returns
    -------
    ScalarLog
        :meth:`ScalarLog.detach` undoes it. Where the trainer's log carries them already, that one is returned.

    Notes
    -----
    Figures appear in the logs of training steps, those with ``loss``, and like the trainer's loss they are means over
    the steps since the last log, so that their values do not depend on where a window ends:

    - ``sdo/within_batch_cosine``: mean pairwise embedding cosine of a step's batch (with an organizer that has
      embeddings);
    - ``sdo/batch_coherence``: mean pairwise cosine of the samples' ``hidden`` gradients within a step (with a recorder,
      over the steps whose samples were recorded; missing from a log whose window has none);
    - ``sdo/coverage``: share of the samples that were trained at least once (with an organizer). A state and no mean:
      the value after the latest step.

    A method is wrapped because callbacks of loggers run before those that a user adds, and would never see figures
    that a callback adds.
    """
    present = vars(trainer).get("log")
    return present.share() if isinstance(present, ScalarLog) else ScalarLog(trainer)


class ScalarLog:
    """Stands in the place of one trainer's method ``log``; made by :func:`log_scalars`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._was_own = "log" in vars(trainer)
        self._inner = trainer.log
        self._users = 1
        trainer.log = self

    def __call__(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """Add the figures to the log of a training step, then log as before."""
        session = TrainingSession.peek(self._trainer.model)
        if self._users and session is not None and "loss" in logs:
            logs.update({PREFIX + name: value for name, value in session.figures.take().items()})
        return self._inner(logs, *args, **kwargs)

    def share(self) -> ScalarLog:
        """Count one more user, who will call :meth:`detach`."""
        self._users += 1
        return self

    def detach(self) -> None:
        """Give the trainer its own ``log`` back once the last user is gone; further calls change nothing."""
        if not self._users:
            return
        self._users -= 1
        # Whoever wrapped it after us keeps a log that works, and that adds nothing.
        if not self._users and vars(self._trainer).get("log") is self:
            if self._was_own:
                self._trainer.log = self._inner
            else:
                del self._trainer.log
