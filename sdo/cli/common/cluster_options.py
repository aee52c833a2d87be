"""What ``sdo balance`` and ``sdo report`` share: options on predictions and clusters, and reading them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.checks import whole_number
from sdo.cli.common.run_options import real, run_name, shortest_suffix
from sdo.embeddings.row_files import whole_numbers
from sdo.errors import InputError, counted
from sdo.random_keys import MAX_SEED

if TYPE_CHECKING:
    from analysis import BalanceSummary, Clustering, Predictions, Prompts
    from sdo.embeddings.matrix import Embeddings


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options on clusters, prompts and resampling."""
    add = parser.add_argument
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
    group.add_argument("--metric", help="default: exact_match, acc, acc_norm or the first in [0, 1] in all files")
    group.add_argument("--filter", help="default: the first that all files have")
    group = parser.add_argument_group("run folders")
    group.add_argument("--evaluation", metavar="NAME", help="default: correct, or the only one in [0, 1] in all")
    group.add_argument("--step", type=int, help="default: the latest that all have")


def sources_of(args: argparse.Namespace) -> list[Path | str | None]:
    """Return what is read, which results must not replace."""
    return [*(_named(one)[1] for one in args.predictions), args.embeddings, args.labels, args.prompts]


@dataclass(frozen=True, eq=False)
class BalanceInput:
    """Predictions, clusters and prompts as they were read."""

    runs: list[Predictions]
    clustering: Clustering
    embeddings: Embeddings | None
    prompts: Prompts | None
    options: dict[str, Any]

    def summarize(self) -> BalanceSummary:
        """Compute the balance of the runs and their comparisons."""
        from analysis import summarize_balance

        return summarize_balance(
            self.runs, self.clustering, embeddings=self.embeddings, prompts=self.prompts, **self.options
        )


def read_input(args: argparse.Namespace) -> BalanceInput:
    """Read what checked options name.

    Raises
    ------
    InputError
        If something cannot be read, or does not fit together.
    """
    runs = _read_runs(args)
    embeddings, clustering = _read_clusters(args)
    prompts = _read_prompts(args, len(clustering.labels), embeddings)
    options = {"baseline": args.baseline, "resamples": args.resamples, "seed": args.seed}
    if args.near_duplicate is not None:
        options["near_duplicate"] = args.near_duplicate
    return BalanceInput(runs, clustering, embeddings, prompts, options)


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before anything is read."""
    if args.labels is None and args.embeddings is None:
        raise InputError("no clusters: expected --embeddings E.npy --clusters K, or --labels L.npy")
    if args.labels is None and args.clusters is None:
        raise InputError("--clusters is missing; expected how many clusters k-means should make of the embeddings")
    if args.labels is not None and args.clusters is not None:
        raise InputError(
            "--labels and --clusters came; expected one of them; fix: leave --clusters out for given labels"
        )
    if (args.prompts is None) != (args.column is None):
        raise InputError(
            "--prompts and --column belong together: the source of the questions, and the column they are in"
        )
    whole_number("--seed", args.seed, 0, MAX_SEED)
    if args.resamples < 99:
        raise InputError(
            f"--resamples {args.resamples}: expected at least 99, or no p could be below 0.05 with any power"
        )
    if args.near_duplicate is not None and not 0 < args.near_duplicate <= 2:
        raise InputError(
            f"--near-duplicate {args.near_duplicate}: expected a cosine above 0; above 1 for exact ones only"
        )


def _read_runs(args: argparse.Namespace) -> list[Predictions]:
    from analysis import read_all_predictions

    given = [_named(one) for one in args.predictions]
    for i, (_, path) in enumerate(given):
        if any(real(path) == real(other) for _, other in given[:i]):
            raise InputError(f"{path} came twice; expected different predictions")
    names = _names(given)
    if args.baseline is not None:
        args.baseline = run_name(args.baseline)
    if args.baseline is not None and args.baseline not in names:
        raise InputError(f"--baseline {args.baseline!r} is no run; expected one of {', '.join(names)}")
    return read_all_predictions(
        [path for _, path in given],
        names=names,
        metric=args.metric,
        filter=args.filter,
        evaluation=args.evaluation,
        step=args.step,
    )


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
            names.append(run_name(name))
            continue
        others = [real(other) for j, (_, other) in enumerate(given) if j != i]
        whole = real(path)
        short = whole if whole.is_dir() else whole.with_suffix("")
        apart = [other if other.is_dir() else other.with_suffix("") for other in others]
        parts, rest = short.parts, [other.parts for other in apart]
        if parts in rest:
            parts, rest = whole.parts, [other.parts for other in others]
        names.append(shortest_suffix(parts, rest))
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two runs are called {twice!r}; expected different names; fix: NAME=PATH")
    return names


def _read_clusters(args: argparse.Namespace) -> tuple[Embeddings | None, Clustering]:
    from analysis import cluster, read_labels
    from sdo.embeddings.matrix import Embeddings

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
    from sdo.embeddings.files import normalize_ids
    from sdo.embeddings.sources import Selection, open_source

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
            f"--prompts {args.prompts} holds {counted(len(prompts.texts), 'text')}, embeddings or labels "
            f"{counted(rows, 'row')}; expected one text a row, in the same order"
        )
    if args.id_column is None:
        return prompts
    if Path(args.prompts).suffix.lower() == ".csv":
        ids = whole_numbers(ids)
    keys = normalize_ids(ids, rows, f"column {args.id_column!r} of {args.prompts}")
    order = Predictions(f"--prompts {args.prompts}", keys, np.zeros(rows)).rows(rows, embeddings)
    return prompts.take(np.argsort(order))
