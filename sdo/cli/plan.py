"""``sdo plan``: a dry run of an organizer: its schedule and its figures, without model, GPU or network."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdo.atomic import write_atomically
from sdo.checks import whole_number
from sdo.cli.commands import COMMANDS
from sdo.cli.common.outputs import check_outputs, make_folder
from sdo.cli.training.config import apply_overrides, parse_section
from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError, suggest
from sdo.organizers.epoch_figures import epoch_figures
from sdo.organizers.plan import Organizer
from sdo.organizers.registry import OrganizerInputs, make_organizer, option_help, organizer_spec, registered_organizers

if TYPE_CHECKING:
    from sdo.organizers.steps import EpochPlan


_COMMON = ("--embeddings", "--samples", "--batch-size", "--epochs", "--organizer", "--seed", "--out", "--overwrite")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "plan",
        help=COMMANDS["plan"],
        description="Write the batches of the first organizer epochs as Parquet (organizer_epoch, step, slot,\n"
        "sample_id), their figures as JSON beside it, and print the figures as a table.",
        epilog="example: sdo plan --embeddings E.npy --batch-size 8 --epochs 4 --k 4 --delta-tau 2 --retain 0.2 "
        f"--seed 617 --out PLAN.parquet\n\n{_organizer_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--embeddings",
        metavar="E.npy",
        help="matrix (N, d), one row a sample: .npy, .npz or .safetensors",
    )
    parser.add_argument("--samples", type=int, metavar="N", help="number of samples, where there are no embeddings")
    parser.add_argument("--batch-size", required=True, type=int, metavar="B", help="samples per optimizer step")
    parser.add_argument("--epochs", type=int, default=4, help="organizer epochs to plan (default: 4)")
    parser.add_argument("--organizer", default="sdo", metavar="NAME", help="see below (default: sdo)")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the plan (default: 0; sdo sft takes the trainer's seed where organizer.seed is missing)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="PLAN.parquet", help="PLAN.json goes beside it")
    parser.add_argument("--overwrite", action="store_true", help="replace the files of an earlier plan")
    parser.set_defaults(run=run, takes_overrides=True)


def _organizer_help() -> str:
    """The options of each organizer, as they are written on the command line."""
    lines = []
    for spec in registered_organizers():
        lines.append(f"organizer {spec.name}:" + ("" if spec.option_names else " no options of its own"))
        lines += [f"  {_option(name):<16} {text}" for name, text in option_help(spec)]
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Plan, write both files and print the table.

    Returns
    -------
    int
        0; every failure is an :class:`InputError`.
    """
    whole_number("--epochs", args.epochs, 1)
    sources = () if args.embeddings is None else (args.embeddings,)
    record = check_outputs(args.out, ".parquet", overwrite=args.overwrite, sources=sources)
    plan = _organizer(args).plan(args.batch_size)
    make_folder(args.out.parent)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epochs = [plan.epoch(e) for e in range(args.epochs)]
    notes = sorted({str(entry.message) for entry in caught})
    figures = epoch_figures(plan, uniform_seed=args.seed, epochs=args.epochs)
    described = {
        **plan.describe(),
        "fingerprint": plan.fingerprint,
        "embeddings_path": args.embeddings,
        "epochs": figures,
        "notes": notes,
    }
    text = json.dumps(described, indent=1, allow_nan=False) + "\n"
    write_atomically(
        {
            args.out: lambda path: _write_parquet(epochs, path),
            record: lambda path: path.write_text(text, encoding="utf-8"),
        }
    )
    own = tuple(dict.fromkeys(name for epoch in epochs for name in epoch.figures))
    _print_table(figures, own)
    explained = (
        "cold, hot: samples below the exposure threshold after the epoch, and the rest; " if "cold" in own else ""
    )
    print(
        f"{explained}cosine: mean pairwise cosine of embeddings within a batch; uniform: the same of as many uniform "
        "batches"
    )
    for note in notes:
        print(f"note: {note}")
    if plan.organizer.options.get("locality") == "shuffle" and all(
        epoch.figures.get("hot", 0) < args.batch_size for epoch in epochs
    ):
        print("note: none but those that filled a last batch turned hot, so this plan is uniform shuffling")
    print(f"{args.out} ({sum(f['steps'] for f in figures)} steps), {record}")
    return 0


def _organizer(args: argparse.Namespace) -> Organizer:
    """Make the organizer from its own options, which the parser left over."""
    try:
        spec = organizer_spec(args.organizer)
    except InputError as error:
        raise InputError(f"--organizer: {error}") from error
    given = apply_overrides({}, args.overrides)
    own = [_option(name) for name in spec.option_names]
    for name in given:
        if name not in spec.option_names:
            close = suggest(_option(name), [*_COMMON, *own])
            raise InputError(
                f"unexpected argument '{_option(name)}'; {close}its options are {', '.join(_COMMON)}; organizer "
                f"{spec.name} has {', '.join(own) or 'no options of its own'}; see sdo plan --help"
            )
    options = vars(parse_section("", given, spec.options))
    embeddings = None if args.embeddings is None else Embeddings.read(args.embeddings)
    if embeddings is None and "embeddings" in spec.needs:
        raise InputError(f"organizer {spec.name} needs --embeddings; expected a matrix, one row a sample")
    if embeddings is None and args.samples is None:
        raise InputError(
            "--embeddings and --samples are missing; expected one of them, to know how many samples there are"
        )
    if embeddings is not None and args.samples not in (None, len(embeddings)):
        raise InputError(
            f"--samples is {args.samples}, but {args.embeddings} has {len(embeddings)} rows; expected as many"
        )
    n_samples = args.samples if embeddings is None else len(embeddings)
    return make_organizer(spec.name, OrganizerInputs(n_samples, embeddings), {**options, "seed": args.seed})


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _write_parquet(epochs: list[EpochPlan], out: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sizes = np.concatenate([epoch.steps.sizes for epoch in epochs])
    ends = np.cumsum(sizes)
    columns = {
        "organizer_epoch": np.repeat(
            [epoch.organizer_epoch for epoch in epochs], [len(epoch.steps.ids) for epoch in epochs]
        ),
        "step": np.repeat(np.arange(len(sizes)), sizes),
        "slot": np.arange(ends[-1]) - np.repeat(ends - sizes, sizes),
        "sample_id": np.concatenate([epoch.steps.ids for epoch in epochs]),
    }
    for name in ("micro_batch", "weight", "group"):
        found = [getattr(epoch.steps, name) for epoch in epochs]
        if all(one is not None for one in found):
            columns[name] = np.concatenate(found)
    pq.write_table(pa.table(columns), out)


def _print_table(figures: list[dict[str, Any]], own: tuple[str, ...]) -> None:
    header = ("epoch", "steps", "pool", *own, "exposure min/mean/max", "cosine", "uniform")
    rows = [
        (
            str(f["organizer_epoch"]),
            str(f["steps"]),
            str(f["pool"]),
            *("–" if f.get(name) is None else f"{f[name]:.6g}" for name in own),
            f"{f['exposure_min']} / {f['exposure_mean']:.2f} / {f['exposure_max']}",
            *(
                "–" if f[name] is None else f"{f[name]:.3f}"
                for name in ("within_batch_cosine", "uniform_within_batch_cosine")
            ),
        )
        for f in figures
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
