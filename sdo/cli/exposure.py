"""``sdo exposure``: how often each sample is seen, how unequally, and how soon all were."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.atomic import write_atomically
from sdo.cli.commands import COMMANDS
from sdo.cli.common.outputs import aligned, check_out_folder, json_writer, make_folder
from sdo.cli.common.run_options import unique_names

if TYPE_CHECKING:
    from analysis import Exposure

_HEADINGS = (
    *("name", "counted", "steps", "samples", "never", "min", "mean", "max", "Gini"),
    *("coverage", "half seen at", "90 % seen at"),
)
_OUTPUTS = ("exposure.json", "exposure.png", "coverage.png")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "exposure",
        help=COMMANDS["exposure"],
        description="Count how often each sample was trained in a run, or is planned in a plan of sdo plan: "
        "histogram, Gini index, coverage over the steps, pool sizes. Prints a table; with --out writes exposure.json "
        "and pictures (exposure.png, coverage.png).",
        epilog="example: sdo exposure runs/uniform runs/sdo PLAN.parquet --out exposure",
    )
    parser.add_argument("sources", metavar="RUN|PLAN", nargs="+", type=Path, help="run folder, or PLAN.parquet")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results (default: print only)")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that holds files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Count, print and write.

    Returns
    -------
    int
        0; every failure is an :class:`InputError`.
    """
    from analysis import Run, exposure_entry, plan_exposure, run_exposure

    names = unique_names(args.sources)
    found = {}
    for name, path in zip(names, args.sources, strict=True):
        if path.is_dir():
            recorded = Run.open(path)
            recorded.check()
            found[name] = run_exposure(recorded)
        else:
            found[name] = plan_exposure(path)
    if args.out is not None:
        check_out_folder(args.out, overwrite=args.overwrite, sources=args.sources, files=_OUTPUTS)
        make_folder(args.out)
    entries = [{"name": name, **exposure_entry(one)} for name, one in found.items()]
    print(_table(entries))
    for entry in entries:
        if entry["pools"]:
            sizes = ", ".join(f"{pool['size']}" for pool in entry["pools"])
            print(f"{entry['name']}: pool of organizer epoch 0, 1, …: {sizes}")
        for note in entry["notes"]:
            print(f"note: {entry['name']}: {note}")
    if len({one["steps"] for one in entries}) > 1:
        print("note: the step counts differ; exposures are of each one's own steps")
    if args.out is not None:
        _write(args.out, entries, found)
    return 0


def _write(out: Path, entries: list[dict[str, Any]], found: dict[str, Exposure]) -> None:
    from analysis import coverage_curves, exposure_histogram, save

    content = {"format": "sdo-exposure", "format_version": 1, "entries": entries}
    record, histogram, curves = (out / name for name in _OUTPUTS)
    write_atomically({record: json_writer(content)})
    save(exposure_histogram(found, title="How often samples were seen")[0], histogram)
    save(coverage_curves(found, title="Samples seen at least once")[0], curves)
    print(f"written to {out}: {', '.join(_OUTPUTS)}")


def _table(entries: list[dict[str, Any]]) -> str:
    lines = [list(_HEADINGS)]
    for entry in entries:
        reached = ["-" if entry[key] is None else str(entry[key]) for key in ("half_seen_at", "90_percent_seen_at")]
        index = "-" if entry["gini"] is None else f"{entry['gini']:.3f}"
        counts = [str(entry[key]) for key in ("steps", "samples", "never", "min")]
        lines.append(
            [
                *(entry["name"], entry["counted"], *counts, f"{entry['mean']:.2f}", str(entry["max"]), index),
                *(f"{entry['coverage']:.1%}", *reached),
            ]
        )
    return aligned(lines, texts=2)
