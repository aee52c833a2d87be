"""The kinds of trainer that are supported, and what differs between them; the rest is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
    loss
        What ``loss`` in steps/ is, in words.
    tokens
        What ``tokens`` counts, in words.
    score
        What an evaluation says of each sample, in words; None where nothing is read off.
    sequences
        Sequences that a sample has in one forward pass. They stand in blocks: the first sequences of all samples, then
        the second ones, and so on.
    positions
        Positions of a sample that carry a loss, where they are not counted in the batch.
    loss_from
        ``"forward"``: read off the model's output; ``"log"``: the trainer computes it from several passes, so that it
        is known where the trainer logs the step; ``"step"``: what the trainer's own ``training_step`` returned.
    score_from
        How an evaluation's scores are read off the model's output: see ``diagnostics.signals.losses``.
    lacks
        Why a signal does not exist for it, by signal.
    temperature
        Name of the argument by which the trainer divides the logits; None where it does not.
    score_name
        What stands in the place of ``loss`` in the trainer's name of an evaluation.
    generates
        Whether it trains on completions that it generates itself, several of each sample.
    """

    trainer: str
    config: str
    sample: str
    loss: str
    tokens: str = "tokens with a label"
    score: str | None = None
    sequences: int = 1
    positions: int | None = None
    loss_from: Literal["forward", "log", "step"] = "forward"
    score_from: Literal["loss", "log_probs", "logits"] | None = None
    score_name: str = "loss"
    generates: bool = False
    temperature: str | None = None
    lacks: Mapping[str, str] = field(default_factory=dict)

    def require(self, signals: Collection[str]) -> None:
        """Refuse signals that do not exist for this kind of trainer.

        Raises
        ------
        InputError
            Naming the first of them, why, and which are left.
        """
        for signal in signals:
            if signal in self.lacks:
                left = [name for name in ("weight", "hidden", "head_only") if name not in self.lacks]
                raise InputError(
                    f"signal {signal!r} does not exist for a {self.trainer}: {self.lacks[signal]}; fix: signals={left}"
                )

    def logits(self, args: Any) -> dict[str, Any]:
        """Return ``sequences``, ``temperature`` and ``full_precision`` of the logits under a trainer's arguments."""
        return {
            "sequences": self.sequences,
            "temperature": 1.0 if self.temperature is None else float(getattr(args, self.temperature)),
            "full_precision": bool(getattr(args, "cast_lm_head_to_fp32", False)),
        }

    def describe(self) -> dict[str, Any]:
        """Return what run.json says: which trainer, and what the numbers of its run mean."""
        return {
            "trainer": self.trainer,
            **{name: getattr(self, name) for name in ("sample", "loss", "tokens", "score")},
        }


PLAIN = TrainerKind(
    trainer="Trainer",
    config="TrainingArguments",
    sample="a row of the training dataset",
    loss="mean negative log-likelihood per trained token, nats",
    score="mean negative log-likelihood per token, nats",
    score_from="loss",
)
_PAIR = "a prompt with its chosen and its rejected answer"
_LOGGED = (
    "as the trainer logs it: the mean over the step's micro-batches; null for steps that it does not log, and where a "
    "loss was not finite"
)

# One entry for each class of TRL; descendants of a user's own follow the first class of TRL in their lineage.
SUPPORTED = (
    replace(PLAIN, trainer="SFTTrainer", config="SFTConfig"),
    TrainerKind(
        trainer="DPOTrainer",
        config="DPOConfig",
        sample=_PAIR,
        loss=f"DPO's loss of its loss_type, mean over a micro-batch's pairs, {_LOGGED}",
        tokens="completion tokens of both answers",
        score="log p(chosen) - log p(rejected) under the trained model, summed over completion tokens, nats",
        sequences=2,
        loss_from="log",
        score_from="log_probs",
        score_name="logp_margin",
    ),
    TrainerKind(
        trainer="KTOTrainer",
        config="KTOConfig",
        sample="a prompt with one answer and whether it is desirable",
        loss=f"KTO's loss of its loss_type, mean over a micro-batch's samples, {_LOGGED}",
        tokens="completion tokens",
        loss_from="log",
    ),
    TrainerKind(
        trainer="RewardTrainer",
        config="RewardConfig",
        sample=_PAIR,
        loss=f"-log sigmoid(reward of chosen - reward of rejected), mean over a micro-batch's pairs, {_LOGGED}",
        tokens="positions that are rewarded, one for each answer",
        score="reward of chosen - reward of rejected",
        sequences=2,
        positions=2,
        loss_from="log",
        score_from="logits",
        score_name="reward_margin",
        lacks={
            # -s w at the chosen answer's last position and s w at the rejected one's, with w the weight of the score.
            "hidden": "the gradients of a pair's two answers at the final norm's output are opposite and cancel",
            "head_only": "its model has no language-model head",
        },
    ),
    *(
        TrainerKind(
            trainer=f"{name}Trainer",
            config=f"{name}Config",
            sample="a prompt; a sample row is one of its completions",
            loss=f"{name}'s loss as the trainer computes it, summed over a step's micro-batches, mean over processes",
            tokens="completion tokens",
            score="a completion's reward, weighted over the reward functions; sample_id is its prompt's",
            loss_from="step",
            temperature="temperature",
            generates=True,
        )
        for name in ("GRPO", "RLOO")
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
        raise InputError(f"got a {name}; this version supports {names} and transformers.Trainer; fix: use one of them")
    return kind
