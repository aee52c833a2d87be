"""``sdo plan``: a dry run of an organizer: its schedule and its figures, without model, GPU or network."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from sdo.cli.outputs import check_outputs, make_folder
from sdo.embeddings import Embeddings
from sdo.errors import InputError
from sdo.figures import epoch_figures
from sdo.files import write_atomically
from sdo.organizer import SDO, Graph, Locality, OnInvalid, Organizer, Uniform, Visit

if TYPE_CHECKING:
    from sdo.plan import EpochPlan


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "plan",
        help="dry run: the batches and exposures that an organizer would give",
        description="Write the batches of the first organizer epochs as Parquet (organizer_epoch, step, slot, "
        "sample_id), their figures as JSON beside it, and print the figures as a table.",
        epilog="example: sdo plan --embeddings E.npy --batch-size 8 --epochs 4 --k 4 --delta-tau 2 --retain 0.2 "
        "--seed 617 --out PLAN.parquet",
    )
    parser.add_argument(
        "--embeddings",
        required=True,
        metavar="E.npy",
        help="matrix (N, d), one row a sample: .npy, .npz or .safetensors",
    )
    parser.add_argument("--batch-size", required=True, type=int, metavar="B", help="samples per optimizer step")
    parser.add_argument("--epochs", type=int, default=4, help="organizer epochs to plan (default: 4)")
    parser.add_argument("--organizer", choices=["sdo", "uniform"], default="sdo", help="(default: sdo)")
    parser.add_argument("--k", type=int, default=4, help="neighbours per anchor (default: 4)")
    parser.add_argument("--delta-tau", type=float, default=2, help="rise of the exposure threshold (default: 2)")
    parser.add_argument("--retain", type=float, default=0.2, help="share of hot samples kept (default: 0.2)")
    parser.add_argument(
        "--visit",
        choices=get_args(Visit),
        default="cover",
        help="whether brought neighbours still anchor: no (cover), yes (anchor)",
    )
    parser.add_argument(
        "--graph",
        choices=get_args(Graph),
        default="dynamic",
        help="neighbours in the pool, or over all",
    )
    parser.add_argument(
        "--locality",
        choices=get_args(Locality),
        default="knn",
        help="real neighbours, random ones, none",
    )
    parser.add_argument("--no-exposure", action="store_true", help="keep every sample in the pool")
    parser.add_argument("--on-invalid", choices=get_args(OnInvalid), default="raise", help="rows with NaN or zero")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the plan (default: 0; sdo sft takes the trainer's seed where organizer.seed is missing)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="PLAN.parquet", help="PLAN.json goes beside it")
    parser.add_argument("--overwrite", action="store_true", help="replace the files of an earlier plan")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan, write both files and print the table.

    Returns
    -------
    int
        0; every failure is an :class:`InputError`.
    """
    if args.epochs < 1:
        raise InputError(f"--epochs is {args.epochs}; expected a whole number from 1")
    record = check_outputs(args.out, ".parquet", overwrite=args.overwrite, sources=(args.embeddings,))
    embeddings = Embeddings.read(args.embeddings)
    organizer = _organizer(args, embeddings)
    plan = organizer.plan(args.batch_size)
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
    _print_table(figures)
    print(
        "cold, hot: samples below the exposure threshold after the epoch, and the rest; cosine: mean pairwise cosine "
        "of embeddings within a batch; uniform: the same of as many uniform batches"
    )
    for note in notes:
        print(f"note: {note}")
    if (
        args.organizer == "sdo"
        and args.locality == "shuffle"
        and all(f["hot"] is None or f["hot"] < args.batch_size for f in figures)
    ):
        print("note: none but those that filled a last batch turned hot, so this plan is uniform shuffling")
    print(f"{args.out} ({sum(f['steps'] for f in figures)} steps), {record}")
    return 0


def _organizer(args: argparse.Namespace, embeddings: Embeddings) -> Organizer:
    if args.organizer == "uniform":
        return Uniform(embeddings, seed=args.seed)
    return SDO(
        embeddings,
        k=args.k,
        delta_tau=args.delta_tau,
        retain=args.retain,
        visit=args.visit,
        graph=args.graph,
        locality=args.locality,
        exposure=not args.no_exposure,
        on_invalid=args.on_invalid,
        seed=args.seed,
    )


def _write_parquet(epochs: list[EpochPlan], out: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = epochs[0].batches.shape[1]
    ids = np.concatenate([epoch.batches.ravel() for epoch in epochs])
    steps = sum(epoch.steps for epoch in epochs)
    table = pa.table(
        {
            "organizer_epoch": np.repeat(
                [epoch.organizer_epoch for epoch in epochs], [epoch.steps * size for epoch in epochs]
            ),
            "step": np.repeat(np.arange(steps), size),
            "slot": np.tile(np.arange(size), steps),
            "sample_id": ids,
        }
    )
    pq.write_table(table, out)


def _print_table(figures: list[dict[str, Any]]) -> None:
    header = ("epoch", "steps", "pool", "cold", "hot", "exposure min/mean/max", "cosine", "uniform")
    rows = [
        (
            str(f["organizer_epoch"]),
            str(f["steps"]),
            str(f["pool"]),
            "–" if f["cold"] is None else str(f["cold"]),
            "–" if f["hot"] is None else str(f["hot"]),
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
