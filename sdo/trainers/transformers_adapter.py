"""A training of transformers or TRL, as its callbacks see it."""

from __future__ import annotations

from typing import Any

from torch import nn

from sdo.trainers.adapter import RunSettings
from sdo.trainers.processes import Processes
from sdo.trainers.requirements import check_launch, require_positions
from sdo.trainers.session import TrainingSession
from sdo.trainers.trainer_types import TrainerKind, kind_of
from sdo.trainers.versions import checkpointing_name

_GENERATION = (
    "num_generations",
    "steps_per_generation",
    "num_iterations",
    "generation_batch_size",
    "max_completion_length",
    "temperature",
    "beta",
    "loss_type",
    "scale_rewards",
)


class TransformersAdapter:
    """A training of transformers or TRL that is about to begin; see :class:`sdo.trainers.adapter.TrainerAdapter`.

    Parameters
    ----------
    args, state
        The trainer's arguments and state.
    model
        The model in training.
    loader
        Its training data loader.
    recorder
        Name under which checkpoints keep the state of recorders.
    """

    def __init__(self, args: Any, state: Any, model: nn.Module, loader: Any, *, recorder: str) -> None:
        self.model = model
        self.processes = Processes.of(args)
        self.first_step: int = state.global_step
        self.owner = state
        self.filters_losses = bool(getattr(args, "logging_nan_inf_filter", False))
        self._args, self._state, self._loader, self._recorder = args, state, loader, recorder

    @property
    def kind(self) -> TrainerKind:
        """As TRL's class of arguments tells, which is all that a callback sees."""
        return kind_of(type(self._args))

    @property
    def dataset(self) -> Any:
        """What the loader draws from."""
        dataset = getattr(self._loader, "dataset", None)
        return getattr(dataset, "inner", dataset)

    @property
    def logits(self) -> dict[str, Any]:
        """How they are made from the model's output."""
        return self.kind.logits(self._args)

    @property
    def settings(self) -> RunSettings:
        """The arguments that decide what a step is."""
        args, kind = self._args, self.kind
        generation = {name: getattr(args, name) for name in _GENERATION if kind.generates and hasattr(args, name)}
        return RunSettings(
            micro_batch=args.train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            processes=args.world_size,
            max_steps=self._state.max_steps,
            max_grad_norm=args.max_grad_norm,
            learning_rate=args.learning_rate,
            seed=args.seed,
            precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
            extra={
                **generation,
                "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
                "gradient_checkpointing": bool(getattr(args, checkpointing_name(args))),
                "data_seed": args.data_seed,
            },
        )

    @property
    def resumed_runs(self) -> tuple[str, ...]:
        """As the trainer's recorders stored them in the checkpoint, under their class's name.

        transformers keeps a list where a trainer has several, and lets it grow at each save (transformers#33875).
        """
        if not self.first_step:
            return ()
        entries = self._state.stateful_callbacks.get(self._recorder) or []
        entries = entries if isinstance(entries, list) else [entries]
        found = [entry.get("attributes", {}).get("run_id") for entry in entries if isinstance(entry, dict)]
        return tuple(dict.fromkeys(run for run in found if run is not None))

    def require(self) -> None:
        """Refuse launches that cannot be followed, and iterable datasets."""
        check_launch(type(self._args), self._args)
        require_positions(getattr(self._loader, "dataset", None))

    def require_schedule(self, session: TrainingSession) -> None:
        """Ask the organizer's own check."""
        if session.schedule is not None:
            session.schedule.check(self._args, self._state, self._loader)

    def carry_ids(self, session: TrainingSession) -> None:
        """Let them travel with the loader's batches."""
        session.install(self._loader)
