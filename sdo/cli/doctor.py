"""``sdo doctor``: what a training command would record of a run and what it would refuse; nothing is trained."""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

from sdo.cli import dpo, grpo, sft
from sdo.cli.training.build import prepare
from sdo.cli.training.data import SFTColumns
from sdo.cli.training.run_file import add_training_parser
from sdo.errors import InputError

_METHODS = {"sft": sft.METHOD, "dpo": dpo.METHOD, "grpo": grpo.METHOD}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = add_training_parser(
        subparsers,
        "doctor",
        "sdo doctor --config run.yaml --recorder.weight lm_head.weight",
        SFTColumns,
        " Builds the trainer that sdo sft would build from the same options, or with --method another command, and "
        "runs one forward and backward pass of two rows; trains nothing and writes into no folder of the run. Exit "
        "status: 0 when all is well; 1 when something would be refused, which the report says with its remedy; 2 for "
        "wrong input.",
    )
    parser.add_argument("--method", choices=list(_METHODS), default="sft", help="the command looked at (default: sft)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build the trainer, look at it and print the report.

    Returns
    -------
    int
        0 when all is well, 1 when the run would be refused.
    """
    with tempfile.TemporaryDirectory(prefix="sdo-doctor-") as scratch:
        setup = prepare(_METHODS[args.method], args, scratch=scratch)
        if setup.options.recorder is not None and setup.options.recorder.out is None:
            raise InputError("recorder.out is missing; expected the path of the run folder")
        setup.equip()
        from diagnostics import doctor

        diagnosis = doctor(setup.trainer, resume=bool(setup.resume)).refuse([*setup.places, *(setup.refused or [])])
    print(json.dumps(diagnosis.to_dict(), indent=1, allow_nan=False) if args.json else diagnosis)
    return 0 if diagnosis.ok else 1
