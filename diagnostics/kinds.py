"""The kinds of trainer that are supported, and what differs between them; the rest is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sdo.errors import InputError


@dataclass(frozen=True)
class TrainerKind:
    """What has to be known of one class of trainers.

    Attributes
    ----------
    trainer, config
        Names of TRL's class and of the class of its arguments, which is all that a callback sees.
    sample
        What one sample is, in words.
    sequences
        Sequences that a sample has in one forward pass. They stand in blocks: the first sequences of all samples, then
        the second ones, and so on.
    loss
        What ``loss`` in steps/ is, in words.
    loss_from
        ``"forward"``: read off the model's output; ``"log"``: the trainer computes it from several passes, so that it
        is known where the trainer logs the step.
    score
        What an evaluation says of each sample, in words; None where nothing is read off.
    """

    trainer: str
    config: str
    sample: str
    loss: str
    sequences: int = 1
    loss_from: Literal["forward", "log"] = "forward"
    score: str | None = None


PLAIN = TrainerKind(
    trainer="Trainer",
    config="TrainingArguments",
    sample="a row of the training dataset",
    loss="mean negative log-likelihood per trained token, nats",
    score="mean negative log-likelihood per token, nats",
)

# One entry for each class of TRL; descendants of a user's own follow the first class of TRL in their lineage.
SUPPORTED = (
    TrainerKind(
        trainer="SFTTrainer",
        config="SFTConfig",
        sample=PLAIN.sample,
        loss=PLAIN.loss,
        score=PLAIN.score,
    ),
)


def kind_of(cls: type) -> TrainerKind:
    """Return what has to be known of a trainer's class, or of the class of its arguments.

    Parameters
    ----------
    cls
        A trainer's class, or that of its arguments; a user's own descendants count as what they descend from.

    Raises
    ------
    InputError
        If it descends from a class of TRL that is not supported.
    """
    lineage = [c for c in cls.__mro__ if c.__module__.startswith("trl.") and not c.__name__.startswith("_")]
    if not lineage:
        return PLAIN
    # The first one: TRL's own descendants of SFTTrainer make their data themselves.
    name = lineage[0].__name__
    kind = next((k for k in SUPPORTED if name in (k.trainer, k.config)), None)
    if kind is None:
        names = ", ".join(k.trainer for k in SUPPORTED)
        raise InputError(f"got a {name}; this version supports {names} and transformers.Trainer; mend: use one of them")
    return kind
