"""``sdo dpo``: direct preference optimization with TRL, organized and recorded; a pair is one sample."""

from __future__ import annotations

import argparse
from typing import Any

from sdo.cli.training.build import Method, prepare, train
from sdo.cli.training.data import DPOColumns, as_pairs
from sdo.cli.training.run_file import add_training_parser

METHOD = Method(trainer="DPOTrainer", config="DPOConfig", columns=DPOColumns, shape=as_pairs)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = add_training_parser(
        subparsers,
        "dpo",
        "sdo dpo --config pairs.yaml --beta 0.2 --organizer.k 8 --recorder.out runs/k8",
        METHOD.columns,
        " A sample is a pair: a prompt with its chosen and its rejected answer, and has one embedding.",
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
