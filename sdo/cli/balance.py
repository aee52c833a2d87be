"""``sdo balance``: how evenly runs do over clusters of questions, and what of it is more than chance."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.atomic import write_atomically
from sdo.cli.commands import COMMANDS
from sdo.cli.common.balance_text import describe, explained
from sdo.cli.common.cluster_options import add_options, check_options, read_input, sources_of
from sdo.cli.common.outputs import Outputs, array_writer, check_out_folder, file_names, json_writer, make_folder

if TYPE_CHECKING:
    from analysis import BalanceSummary


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "balance",
        help=COMMANDS["balance"],
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
    read = sources_of(args)
    check_out_folder(args.out, overwrite=args.overwrite, sources=read, files=("balance.json", "labels.npy"))
    given = read_input(args)
    summary = given.summarize()
    make_folder(args.out)
    outputs = _plot(summary, args.out)
    content = {**summary.content, "files": ["labels.npy", *outputs.files], "failed": outputs.failed}
    labels = array_writer(given.clustering.labels)
    write_atomically({args.out / "labels.npy": labels, args.out / "balance.json": json_writer(content)})
    print(describe(summary))
    print(f"\n{explained()}\nwritten to {args.out}: balance.json, labels.npy, {', '.join(outputs.files)}")
    return 1 if outputs.failed else 0


def _plot(summary: BalanceSummary, out: Path) -> Outputs:
    """Plot all pictures."""
    from analysis import save
    from analysis.balance.plots import cluster_sizes, dumbbell, lorenz, ranked_clusters

    safe = file_names(list(summary.balances))
    words = summary.keywords or None
    outputs = Outputs("balance")

    def picture(name: str, plot: Callable[[], tuple[Any, Any]]) -> None:
        def save_picture() -> None:
            save(plot()[0], out / name)
            outputs.files.append(name)

        outputs.attempt(name, save_picture)

    for name, one in summary.balances.items():
        title = f"Accuracy by cluster, {name}"
        picture(f"clusters-{safe[name]}.png", partial(ranked_clusters, one, keywords=words, title=title))
    picture("lorenz.png", lambda: lorenz(summary.balances, title="Lorenz curves of cluster accuracies"))
    sizes = [entry["n"] for entry in summary.content["per_cluster"]]
    picture("sizes.png", lambda: cluster_sizes(sizes, title="Questions in each cluster"))
    base = summary.baseline
    for name, compared in summary.comparisons.items():
        title = f"{name} against {base}, clusters ordered by the mean of both"
        plot = partial(dumbbell, compared, baseline=base, run=name, keywords=words, title=title)
        picture(f"against-{safe[base]}-{safe[name]}.png", plot)
    return outputs
