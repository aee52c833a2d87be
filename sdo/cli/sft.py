"""``sdo sft``: supervised fine-tuning with TRL, organized and recorded."""

from __future__ import annotations

import argparse
from typing import Any

from sdo.cli.training.build import Method, prepare, train
from sdo.cli.training.data import SFTColumns, as_completions
from sdo.cli.training.run_file import add_training_parser

METHOD = Method(trainer="SFTTrainer", config="SFTConfig", columns=SFTColumns, shape=as_completions)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = add_training_parser(
        subparsers,
        "sft",
        "sdo sft --config run.yaml --learning_rate 1e-5 --organizer.k 8 --recorder.out runs/k8",
        METHOD.columns,
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
