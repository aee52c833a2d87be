"""``sdo balance``: how evenly runs do over clusters of questions, and what of it is more than chance."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.cli.balance_options import add_options, check_options, read_material
from sdo.cli.balance_text import WORDS, describe
from sdo.cli.coherence import file_names
from sdo.cli.outputs import check_out_folder, make_folder
from sdo.files import write_atomically

if TYPE_CHECKING:
    from analysis import BalanceSummary, Clustering


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "balance",
        help="predictions -> balance over clusters",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compare accuracy over clusters of questions, within and between runs. Writes balance.json,\n"
        "labels.npy and pictures: clusters-RUN.png, lorenz.png, sizes.png, against-BASELINE-RUN.png.\n\n"
        "PREDICTIONS are .jsonl, .csv or .parquet files with the columns sample_id and correct (0, 1, true, false or\n"
        "a score in [0, 1]), sample logs of lm-evaluation-harness, or run folders with evaluations. NAME=PATH names a\n"
        "run.",
        epilog="example: sdo balance uniform.jsonl sdo.jsonl --embeddings E.npy --clusters 164 --seed 617\n"
        "    --prompts test.jsonl --column question --out balance",
    )
    parser.add_argument("predictions", metavar="PREDICTIONS", nargs="+", help="one file or run folder a run")
    add_options(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    add("--overwrite", action="store_true", help="write into a folder that holds files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything, compute, then write what can be written.

    Returns
    -------
    int
        0, or 1 when a picture failed; it is named on standard error.
    """
    check_options(args)
    check_out_folder(args.out, overwrite=args.overwrite)
    material = read_material(args)
    summary = material.summarise()
    make_folder(args.out)
    failed, files = _draw(summary, args.out)
    _write(summary, material.clustering, args.out, files, failed)
    print(describe(summary))
    print(f"\n{WORDS}\nwritten to {args.out}: balance.json, labels.npy, {', '.join(files)}")
    return 1 if failed else 0


def _draw(summary: BalanceSummary, out: Path) -> tuple[list[str], list[str]]:
    """Draw all pictures; what failed, and the files written."""
    from analysis import save
    from analysis.balance_plots import cluster_sizes, dumbbell, lorenz, ranked_clusters

    safe = file_names(list(summary.balances))
    words = summary.keywords or None
    failed: list[str] = []
    files: list[str] = []

    def part(name: str, draw: Callable[[], tuple[Any, Any]]) -> None:
        try:
            save(draw()[0], out / name)
        except Exception as error:  # whatever it was, the numbers are still worth having
            failed.append(name)
            print(f"sdo balance: {name} failed: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            files.append(name)

    for name, one in summary.balances.items():
        title = f"Accuracy by cluster, {name}"
        part(f"clusters-{safe[name]}.png", partial(ranked_clusters, one, keywords=words, title=title))
    part("lorenz.png", lambda: lorenz(summary.balances, title="Lorenz curves of cluster accuracies"))
    sizes = [entry["n"] for entry in summary.content["per_cluster"]]
    part("sizes.png", lambda: cluster_sizes(sizes, title="Questions in each cluster"))
    base = summary.baseline
    for name, compared in summary.comparisons.items():
        title = f"{name} against {base}, clusters ordered by the mean of both"
        drawn = partial(dumbbell, compared, baseline=base, run=name, keywords=words, title=title)
        part(f"against-{safe[base]}-{safe[name]}.png", drawn)
    return failed, files


def _write(summary: BalanceSummary, clustering: Clustering, out: Path, files: list[str], failed: list[str]) -> None:
    import numpy as np

    content = {**summary.content, "files": ["labels.npy", *files], "failed": failed}
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def save_labels(file: Path) -> None:
        with file.open("wb") as stream:
            np.save(stream, clustering.labels, allow_pickle=False)

    def save_text(file: Path) -> None:
        file.write_text(text, encoding="utf-8")

    write_atomically({out / "labels.npy": save_labels, out / "balance.json": save_text})
