"""What an organizer and a recorder of one model share while it is in training.

There is one session a model; whoever comes first opens it. Each part of it has one writer: who follows a plan sets the
:class:`Schedule`, a recorder enters itself among the recordings, who follows completions is the follower.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from torch import nn

from sdo.trainers.ids import IdChannel, Listener
from sdo.trainers.loss_scaling import CurrentUpdate

if TYPE_CHECKING:
    from sdo.organizers.plan import Plan
    from sdo.trainers.completions import CompletionFollower
    from sdo.trainers.selection import BatchSelection

# A session lives in its hook on the model. Were it held here, its listeners' trainers would keep the model for ever.
_sessions: WeakKeyDictionary[nn.Module, weakref.ref[TrainingSession]] = WeakKeyDictionary()


class StepFigures:
    """Figures of the steps since the trainer last logged, from whoever knows them.

    Examples
    --------
    >>> figures = StepFigures()
    >>> for value in (0.2, 0.4):
    ...     figures.add("within_batch_cosine", value)
    ...     figures.put("coverage", value)
    >>> figures.take()
    {'within_batch_cosine': 0.30000000000000004, 'coverage': 0.4}
    >>> figures.take()
    {}
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._states: dict[str, float] = {}

    def add(self, name: str, value: float) -> None:
        """Note a step's value of which the mean is wanted."""
        total_and_count = self._values.setdefault(name, [0.0, 0.0])
        total_and_count[0] += value
        total_and_count[1] += 1

    def put(self, name: str, value: float) -> None:
        """Note a state of which the latest value is wanted."""
        self._states[name] = value

    def take(self) -> dict[str, float]:
        """Return the figures and begin anew."""
        figures = {name: total / count for name, (total, count) in self._values.items()} | self._states
        self.clear()
        return figures

    def clear(self) -> None:
        """Begin anew."""
        self._values, self._states = {}, {}


@dataclass(frozen=True, eq=False)
class Schedule:
    """The plan that a training follows. ``attach`` sets it as one piece, and ``detach`` takes it away.

    Attributes
    ----------
    plan
        What each step is to train.
    trained
        The trained ledger, shape ``(n,)``, aligned with ``plan.ids``; whoever set the schedule counts in it.
    owner
        Returns whose training it is now: a trainer's state.
    check
        Refuses arguments, state and loader of a training that do not fit the plan any more.
    release
        Makes the organizer leave the model to another trainer.
    steps_per_batch
        Optimizer steps that train on one batch of the plan; more than 1 only where completions are used again.
    selection
        What of each step is trained; None for all of it.
    """

    plan: Plan
    trained: NDArray[np.int64]
    owner: Callable[[], object]
    check: Callable[[Any, Any, Any], None]
    release: Callable[[], None]
    steps_per_batch: int = 1
    selection: BatchSelection | None = None


class TrainingSession:
    """What is known of one model in training. Open it by :meth:`of`.

    Attributes
    ----------
    ids
        Which samples are being trained on.
    update
        The loss scale of the update under way, and whether it was skipped.
    figures
        Numbers of the latest steps, for :func:`diagnostics.log_scalars`.
    schedule
        The plan that the trainer follows, or None.
    follower
        Who follows the trainer's completions; None where it generates none.
    recordings
        Those that are under way: the owner of each one, and what ends it early.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ids = IdChannel()
        self.figures = StepFigures()
        self.update = CurrentUpdate()
        self.schedule: Schedule | None = None
        self.follower: CompletionFollower | None = None
        self.recordings: list[tuple[object, Callable[[], None]]] = []
        self._hook = model.register_forward_pre_hook(self._on_forward, prepend=True, with_kwargs=True)

    @classmethod
    def of(cls, model: nn.Module) -> TrainingSession:
        """Return the model's session; the first call opens it."""
        session = cls.peek(model)
        if session is None:
            session = cls(model)
            _sessions[model] = weakref.ref(session)
        return session

    @classmethod
    def peek(cls, model: nn.Module) -> TrainingSession | None:
        """Return the model's session where one is open."""
        found = _sessions.get(model)
        return None if found is None else found()

    @classmethod
    def taken_by(cls, model: nn.Module, owner: object) -> TrainingSession:
        """Return the model's session for the training of an owner: a trainer's state, since arguments may be shared.

        First another one's organizer leaves, and recordings end that an interrupted training has left behind.
        """
        cls.end_recordings(model, owner)
        earlier = cls.peek(model)
        if earlier is not None and earlier.schedule is not None and earlier.is_of_another(owner):
            earlier.schedule.release()
        return cls.of(model)

    @classmethod
    def end_recordings(cls, model: nn.Module, owner: object) -> None:
        """End the recordings of other trainings of a model: they were interrupted, since this one begins."""
        session = cls.peek(model)
        for other, end in [] if session is None else list(session.recordings):
            if other is not owner:
                end()

    def is_of_another(self, owner: object) -> bool:
        """Whether an organizer has the model, and not that of this owner."""
        return self.schedule is not None and self.schedule.owner() is not owner

    @property
    def plan(self) -> Plan | None:
        """The plan that the trainer follows, or None."""
        return None if self.schedule is None else self.schedule.plan

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that train on one batch of the plan; 1 without one."""
        return 1 if self.schedule is None else self.schedule.steps_per_batch

    def install(self, loader: Any) -> None:
        """Make a training loader's batches carry their ids, see :meth:`IdChannel.install`."""
        self.ids.install(loader, items=self.follower is not None)

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` with each micro-batch that is about to be trained on."""
        self.ids.subscribe(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Stop calling a listener; the last one to leave closes the session, unless completions are followed."""
        self.ids.unsubscribe(listener)
        self.close_if_unused()

    def close_if_unused(self) -> None:
        """Close the session where nobody listens any more."""
        if not self.ids.unheard or self.follower is not None:
            return
        self._hook.remove()
        for model in [model for model, session in _sessions.items() if session() is self]:
            del _sessions[model]

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.ids.take(module, args, kwargs)
