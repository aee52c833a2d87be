"""What a recorder has to know of a training, whoever trains: a trainer of transformers, or a loop of your own.

Torch alone. What transformers, TRL and accelerate need stands in ``transformers_adapter``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import nn

from sdo.trainers.processes import Processes
from sdo.trainers.trainer_types import TrainerKind

if TYPE_CHECKING:
    from sdo.trainers.session import TrainingSession


@dataclass(frozen=True)
class RunSettings:
    """What a training was set to, as run.json keeps it; None where nobody says.

    Attributes
    ----------
    micro_batch
        Samples of one forward pass of one process.
    accumulation
        Micro-batches of one process before an update.
    processes
        Number of processes.
    max_steps
        Updates of the whole run.
    max_grad_norm
        Norm to which gradients are clipped; 0 for never.
    learning_rate
        The largest one.
    seed
        Of the training.
    precision
        What forward passes compute in.
    extra
        Further settings by name, plain values.
    """

    micro_batch: int | None = None
    accumulation: int | None = None
    processes: int = 1
    max_steps: int | None = None
    max_grad_norm: float | None = None
    learning_rate: float | None = None
    seed: int | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    extra: Mapping[str, Any] = field(default_factory=dict)


class TrainerAdapter(Protocol):
    """One training that is about to begin.

    Attributes
    ----------
    kind
        What a sample, a loss and a token are in it.
    model
        The model in training, without what several processes wrap it in.
    dataset
        The training dataset; None where there is none to look at.
    settings, processes
        As their names say.
    first_step
        Updates that were made before.
    owner
        Whose training it is: that of another owner ends where this one begins.
    logits
        ``sequences``, ``temperature`` and ``full_precision``, see :meth:`TrainerKind.logits`.
    filters_losses
        Whether the trainer's log replaces a loss that is not finite.
    resumed_runs
        The recorded runs that its checkpoint belongs to; none where nothing is resumed.
    """

    @property
    def kind(self) -> TrainerKind: ...  # noqa: D102 - above
    @property
    def model(self) -> nn.Module: ...  # noqa: D102
    @property
    def dataset(self) -> Any: ...  # noqa: D102
    @property
    def settings(self) -> RunSettings: ...  # noqa: D102
    @property
    def processes(self) -> Processes: ...  # noqa: D102
    @property
    def first_step(self) -> int: ...  # noqa: D102
    @property
    def owner(self) -> object: ...  # noqa: D102
    @property
    def logits(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def filters_losses(self) -> bool: ...  # noqa: D102
    @property
    def resumed_runs(self) -> tuple[str, ...]: ...  # noqa: D102

    def require(self) -> None:
        """Refuse, with an InputError, a training that cannot be recorded."""

    def require_schedule(self, session: TrainingSession) -> None:
        """Refuse one that does not fit the plan that the session's schedule holds."""

    def carry_ids(self, session: TrainingSession) -> None:
        """See to it that the session hears which samples each micro-batch holds."""
