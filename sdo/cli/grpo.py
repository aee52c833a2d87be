"""``sdo grpo``: reinforcement learning with TRL's GRPOTrainer, organized and recorded; a prompt is one sample."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from sdo.cli.training.build import Method, prepare, train
from sdo.cli.training.data import require_named_columns
from sdo.cli.training.run_file import add_training_parser
from sdo.errors import InputError
from sdo.trainers.rewards import READY, check_answers, load_reward


@dataclass
class GRPOColumns:
    """Top-level keys of ``sdo grpo`` beside TRL's: how rows become prompts, and what rewards their completions.

    Parameters
    ----------
    reward
        Ready rewards, or functions of the user's own as ``module:function``.
    answer_column
        Column of the reference answers, for the ready rewards.
    prompt_column
        Column to use as prompt; None stands for TRL's own name.
    system_prompt
        A first message of each chat.
    chat
        Whether to wrap plain prompts in the tokenizer's chat template; None does so where there is one. Has an effect
        only where a column or a system prompt is named.
    """

    reward: list[str] = field(default_factory=list)
    answer_column: str = "answer"
    prompt_column: str | None = None
    system_prompt: str | None = None
    chat: bool | None = None


def as_prompts(dataset: Any, options: GRPOColumns, tokenizer: Any, *, id_column: str, what: str) -> Any:
    """Make the column ``prompt`` as TRL expects it, in chat form where asked for; all columns reach the rewards.

    Parameters
    ----------
    dataset, options, tokenizer, id_column, what
        As for :func:`sdo.cli.training.data.as_completions`.
    """
    ready = [name for name in options.reward if name in READY]
    column = options.prompt_column or "prompt"
    require_named_columns(dataset, {"prompt": options.prompt_column}, id_column, what)
    if column not in dataset.column_names:
        raise InputError(
            f"{what} has the columns {', '.join(c for c in dataset.column_names if c != id_column)}; expected prompt; "
            "fix: name yours with prompt_column"
        )
    if ready:
        require_named_columns(dataset, {"answer": options.answer_column}, id_column, what)
        answers = list(dataset[options.answer_column])
        if None in answers:
            row, column = answers.index(None), options.answer_column
            raise InputError(
                f"{what}: row {row}, column {column!r} is null; expected the answer that a reward looks for"
            )
        if "gsm8k" in ready:
            check_answers(answers, options.answer_column)
    if options.prompt_column is None and options.system_prompt is None:
        return dataset
    chat = bool(getattr(tokenizer, "chat_template", None)) if options.chat is None else options.chat
    if options.system_prompt is not None and not chat:
        raise InputError("system_prompt is set, but prompts are no chats; expected a tokenizer with a chat template")

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row[column]
        if not chat:
            return {"prompt": prompt}
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if options.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": options.system_prompt})
        return {"prompt": messages}

    # The old column goes first: a text cannot become a chat in its place.
    return dataset.map(convert, remove_columns=["prompt"] if column == "prompt" else None)


def rewards(options: GRPOColumns) -> dict[str, Any]:
    """Return what TRL's trainer takes beside model, data and arguments: the reward functions.

    Raises
    ------
    InputError
        If there is none, or one cannot be found.
    """
    if not options.reward:
        raise InputError(f"reward is missing; expected {', '.join(READY)} or module:function, or several of them")
    return {"reward_funcs": [load_reward(name, options.answer_column) for name in options.reward]}


METHOD = Method(trainer="GRPOTrainer", config="GRPOConfig", columns=GRPOColumns, shape=as_prompts, more=rewards)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = add_training_parser(
        subparsers,
        "grpo",
        "sdo grpo --config run.yaml --reward gsm8k --num_generations 8 --organizer.k 8 --recorder.out runs/k8",
        METHOD.columns,
        " A sample is a prompt; a batch of the organizer is the distinct prompts of one generation batch. Rewards: "
        f"{', '.join(READY)}, or a function of your own as module:function, imported from the current folder too.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train as the run file says.

    Returns
    -------
    int
        0; every failure before training is an :class:`~sdo.errors.InputError`.
    """
    return train(prepare(METHOD, args))
