"""``sdo report``: run folders and predictions -> one HTML file to send."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.checks import whole_number
from sdo.cli.commands import COMMANDS
from sdo.cli.common.cluster_options import add_options, check_options, read_input, sources_of
from sdo.cli.common.outputs import check_outputs, make_folder
from sdo.cli.common.run_options import open_runs
from sdo.errors import InputError
from sdo.imports import imported

if TYPE_CHECKING:
    from analysis.report import SectionSpec

_FOR_PREDICTIONS = (
    *("embeddings", "clusters", "labels", "baseline", "prompts", "column", "id_column", "split", "config"),
    *("near_duplicate", "metric", "filter", "evaluation", "step"),
)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "report",
        help=COMMANDS["report"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Put verdict, alerts, balance, training, coherence, locality, exposure, weakest clusters and\n"
        "provenance of runs and predictions into one HTML file without scripts, and the same numbers into a JSON file\n"
        "beside it. Runs or predictions may be left out.",
        epilog="example: sdo report runs/uniform runs/sdo --predictions uniform.jsonl sdo.jsonl --embeddings E.npy\n"
        "    --clusters 164 --seed 617 --prompts test.jsonl --column question --out report.html",
    )
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="*", type=Path, help="folder of a recorded run")
    add("--out", type=Path, required=True, metavar="FILE.html", help="the page; FILE.json beside it")
    add("--title", default="SDO report", help="heading of the page")
    add("--run-embeddings", type=Path, metavar="E.npy", help="of the runs, if no longer where run.json says")
    add("--redraws", type=int, default=199, help="plans drawn anew for each test of locality (default: 199)")
    add("--overwrite", action="store_true", help="replace existing files")
    add("--section", metavar="MODULE:NAME", action="append", default=[], help="a section of your own, at the end")
    add("--predictions", metavar="PREDICTIONS", nargs="+", default=[], help="for balance: one file or folder a run")
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything, then write the page and its numbers.

    Returns
    -------
    int
        0, or 1 when a section failed; it is named on standard error and shown as failed in the page.
    """
    from analysis.report import SECTIONS, build_report

    if not args.runs and not args.predictions:
        raise InputError("neither run folders nor --predictions came; fix: sdo report RUN --out report.html")
    whole_number("--redraws", args.redraws, 0)
    sources = (*args.runs, *sources_of(args), args.run_embeddings)
    check_outputs(args.out, ".html", overwrite=args.overwrite, sources=sources)
    if args.predictions:
        check_options(args)
    elif any(getattr(args, name) is not None for name in _FOR_PREDICTIONS):
        given = next(name for name in _FOR_PREDICTIONS if getattr(args, name) is not None)
        raise InputError(f"--{given.replace('_', '-')} came without --predictions, which it belongs to")
    sections = [*SECTIONS, *map(_section, args.section)]
    runs = open_runs(args.runs)
    summary = read_input(args).summarize() if args.predictions else None
    make_folder(args.out.parent)
    report = build_report(
        runs,
        balance=summary,
        embeddings=args.run_embeddings,
        redraws=args.redraws,
        title=args.title,
        command=["sdo", *sys.argv[1:]],
        sections=sections,
    )
    record = report.write(args.out)
    print(f"written: {args.out} ({args.out.stat().st_size / 1000:.0f} kB), {record}")
    for title in report.failed:
        print(f"sdo report: the section {title!r} failed; the page shows why", file=sys.stderr)
    return 1 if report.failed else 0


def _section(place: str) -> SectionSpec:
    """Return a user's section: a SectionSpec, or a function, whose first line of documentation is the heading."""
    from analysis.report import SectionSpec

    found = imported(place, "--section")
    if isinstance(found, SectionSpec):
        return found
    if not callable(found):
        raise InputError(f"--section {place} is {type(found).__name__}; expected a SectionSpec or a function")
    name = place.partition(":")[2]
    heading = (getattr(found, "__doc__", None) or name.replace("_", " ")).strip().splitlines()[0].rstrip(".")
    return SectionSpec(name, heading, found)
