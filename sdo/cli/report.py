"""``sdo report``: run folders and predictions -> one HTML file to send."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sdo.errors import InputError


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "report",
        help="run folders, predictions -> one HTML file",
        description="Put verdict, alerts, coherence, training, provenance and pictures of one or more runs into one "
        "HTML file without scripts, and the same numbers into a JSON file beside it.",
        epilog="example: sdo report runs/uniform runs/sdo --out report.html",
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", type=Path, help="folder of a recorded run")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.html", help="the page; FILE.json beside it")
    parser.add_argument("--title", default="SDO report", help="heading of the page")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything, then write the page and its numbers.

    Returns
    -------
    int
        0, or 1 when a section failed; it is named on standard error and shown as failed in the page.
    """
    from analysis import Run
    from analysis.report import build_report
    from sdo.cli.coherence import unique_names
    from sdo.cli.outputs import check_outputs, make_folder

    if not args.runs:
        raise InputError("no run folder came; expected at least one; mend: sdo report RUN --out report.html")
    check_outputs(args.out, ".html", overwrite=args.overwrite)
    runs = [Run.open(path) for path in args.runs]
    names = unique_names([one.path for one in runs])
    make_folder(args.out.parent)
    report = build_report(dict(zip(names, runs, strict=True)), title=args.title, command=["sdo", *sys.argv[1:]])
    record = report.write(args.out)
    print(f"written: {args.out} ({args.out.stat().st_size / 1000:.0f} kB), {record}")
    for title in report.failed:
        print(f"sdo report: the section {title!r} failed; the page shows why", file=sys.stderr)
    return 1 if report.failed else 0
