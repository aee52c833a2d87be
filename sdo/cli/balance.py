"""``sdo balance``: how evenly runs do over clusters of questions, and what of it is more than chance."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.cli.balance_text import WORDS, describe
from sdo.cli.coherence import file_names
from sdo.cli.outputs import make_folder
from sdo.errors import InputError
from sdo.files import write_atomically
from sdo.keys import MAX_SEED
from sdo.rowfiles import whole_numbers

if TYPE_CHECKING:
    from analysis import BalanceSummary, Clustering, Predictions, Prompts
    from sdo.embeddings import Embeddings


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
    add = parser.add_argument
    add("predictions", metavar="PREDICTIONS", nargs="+", help="one file or run folder a run")
    add("--embeddings", type=Path, metavar="E.npy", help="of the questions, one row each; clustered by k-means")
    add("--clusters", type=int, metavar="K", help="how many")
    add("--labels", type=Path, metavar="L.npy", help="given clusters instead: one integer a row, -1 for noise")
    add("--seed", type=int, default=0, help="of k-means and of all resampling (default: 0)")
    add("--baseline", metavar="NAME", help="the run that others are compared with (default: the first)")
    add(
        "--prompts",
        metavar="SOURCE",
        help="the questions: .jsonl, .csv, .parquet, a folder or a hub id, in the same order",
    )
    add("--column", help="column of their texts or chats")
    add("--id-column", metavar="COLUMN", help="column of their sample ids, where the order is another")
    add("--split", help="of a folder or hub dataset (default: train)")
    add("--config", help="configuration of a hub dataset")
    add("--near-duplicate", type=float, metavar="COSINE", help="from it on questions count as one (default: 0.95)")
    add("--resamples", type=int, default=999, help="permutations, swaps and bootstrap draws (default: 999)")
    group = parser.add_argument_group("sample logs of lm-evaluation-harness")
    group.add_argument("--metric", help="default: exact_match, acc, acc_norm or the first there")
    group.add_argument("--filter", help="default: the first in the file")
    group = parser.add_argument_group("run folders")
    group.add_argument("--evaluation", metavar="NAME", help="default: correct, or the only one in [0, 1]")
    group.add_argument("--step", type=int, help="default: the last evaluated")
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
    _check_options(args)
    from analysis import summarise_balance

    _check_out(args.out, overwrite=args.overwrite)
    runs = _read_runs(args)
    embeddings, clustering = _read_clusters(args)
    prompts = _read_prompts(args, len(clustering.labels), embeddings)
    options = {} if args.near_duplicate is None else {"near_duplicate": args.near_duplicate}
    summary = summarise_balance(
        runs,
        clustering,
        embeddings=embeddings,
        prompts=prompts,
        baseline=args.baseline,
        resamples=args.resamples,
        seed=args.seed,
        **options,
    )
    make_folder(args.out)
    failed, files = _draw(summary, args.out)
    _write(summary, clustering, args.out, files, failed)
    print(describe(summary))
    print(f"\n{WORDS}\nwritten to {args.out}: balance.json, labels.npy, {', '.join(files)}")
    return 1 if failed else 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before anything is read."""
    if args.labels is None and args.embeddings is None:
        raise InputError("no clusters: expected --embeddings E.npy --clusters K, or --labels L.npy")
    if args.labels is None and args.clusters is None:
        raise InputError("--clusters is missing; expected how many clusters k-means should make of the embeddings")
    if args.labels is not None and args.clusters is not None:
        raise InputError(
            "--labels and --clusters came; expected one of them; mend: leave --clusters out for given labels"
        )
    if (args.prompts is None) != (args.column is None):
        raise InputError(
            "--prompts and --column belong together: the source of the questions, and the column they are in"
        )
    if not 0 <= args.seed <= MAX_SEED:
        raise InputError(f"--seed {args.seed}: expected 0 to 2**64 - 1")
    if args.resamples < 99:
        raise InputError(
            f"--resamples {args.resamples}: expected at least 99, or no p could be below 0.05 with any power"
        )
    if args.near_duplicate is not None and not 0 < args.near_duplicate <= 2:
        raise InputError(
            f"--near-duplicate {args.near_duplicate}: expected a cosine above 0; above 1 for exact ones only"
        )


def _check_out(out: Path, *, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; expected a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise InputError(f"--out {out} holds files; choose another folder or add --overwrite")


def _read_runs(args: argparse.Namespace) -> list[Predictions]:
    from analysis import read_predictions

    given = [_named(one) for one in args.predictions]
    for i, (_, path) in enumerate(given):
        if any(path.resolve() == other.resolve() for _, other in given[:i]):
            raise InputError(f"{path} came twice; expected different predictions")
    names = _names(given)
    if args.baseline is not None and args.baseline not in names:
        raise InputError(f"--baseline {args.baseline!r} is no run; expected one of {', '.join(names)}")
    return [
        read_predictions(
            path,
            name=name,
            metric=args.metric,
            filter=args.filter,
            evaluation=args.evaluation,
            step=args.step,
        )
        for name, (_, path) in zip(names, given, strict=True)
    ]


def _named(text: str) -> tuple[str | None, Path]:
    """Split NAME=PATH; a path that exists as it stands is one, whatever signs it holds."""
    name, sign, path = text.partition("=")
    if not sign or not name or "/" in name or Path(text).exists():
        return None, Path(text)
    return name, Path(path)


def _names(given: Sequence[tuple[str | None, Path]]) -> list[str]:
    """Return given names, or the shortest path suffixes that tell runs apart, without the file's ending if they do."""
    names = []
    for i, (name, path) in enumerate(given):
        if name is not None:
            names.append(name)
            continue
        others = [other.resolve() for j, (_, other) in enumerate(given) if j != i]
        whole = path.resolve()
        short = whole if whole.is_dir() else whole.with_suffix("")
        apart = [other if other.is_dir() else other.with_suffix("") for other in others]
        parts, rest = short.parts, [other.parts for other in apart]
        if parts in rest:
            parts, rest = whole.parts, [other.parts for other in others]
        depth = next(n for n in range(1, len(parts) + 1) if all(other[-n:] != parts[-n:] for other in rest))
        names.append("/".join(part.strip("/") for part in parts[-depth:]))
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two runs are called {twice!r}; expected different names; mend: NAME=PATH")
    return names


def _read_clusters(args: argparse.Namespace) -> tuple[Embeddings | None, Clustering]:
    from analysis import cluster, read_labels
    from sdo.embeddings import Embeddings

    embeddings = None if args.embeddings is None else Embeddings.read(args.embeddings)
    if args.labels is not None:
        return embeddings, read_labels(args.labels)
    assert embeddings is not None  # noqa: S101 - _check_options saw to it
    if not 1 <= args.clusters <= len(embeddings):
        raise InputError(f"--clusters {args.clusters}: expected 1 to {len(embeddings)}, the rows of {args.embeddings}")
    return embeddings, cluster(embeddings, args.clusters, seed=args.seed)


def _read_prompts(args: argparse.Namespace, rows: int, embeddings: Embeddings | None) -> Prompts | None:
    import numpy as np

    from analysis import Predictions, Prompts
    from sdo.matrixfile import normalise_ids
    from sdo.sources import Selection, open_source

    if args.prompts is None:
        return None
    source = open_source(args.prompts, split=args.split, config=args.config)
    ids: list[Any] = []

    def texts() -> Iterator[str]:
        for key, text in source.texts(Selection(args.column, id_column=args.id_column)):
            ids.append(key)
            yield text

    prompts = Prompts.of(texts())
    if len(prompts.texts) != rows:
        raise InputError(
            f"--prompts {args.prompts} holds {len(prompts.texts)} texts, embeddings or labels {rows} rows; "
            "expected one text a row, in the same order"
        )
    if args.id_column is None:
        return prompts
    if Path(args.prompts).suffix.lower() == ".csv":
        ids = whole_numbers(ids)
    keys = normalise_ids(ids, rows, f"column {args.id_column!r} of {args.prompts}")
    order = Predictions(f"--prompts {args.prompts}", keys, np.zeros(rows)).rows(rows, embeddings)
    return prompts.take(np.argsort(order))


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
