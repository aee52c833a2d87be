"""``sdo embed``: embed one column of a JSON Lines file and say beside the matrix how it was made."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdo.cli.outputs import check_outputs, make_folder
from sdo.encode import lsa, read_texts, zero_rows
from sdo.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_LISTED = 10  # zero rows named on the terminal; the JSON file names all


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "embed",
        help="text -> embeddings",
        description="Embed one column of a JSON Lines file. Writes the matrix (float32, one row a text, in "
        "file order) and, beside it, a JSON file that says how it was made.",
        epilog="example: sdo embed train.jsonl --column question --out E.npy",
    )
    parser.add_argument("source", metavar="SOURCE.jsonl", type=Path, help="one JSON object a line")
    parser.add_argument("--column", required=True, help="key of the texts")
    parser.add_argument("--encoder", choices=["lsa"], default="lsa", help="how texts are embedded (default: lsa)")
    parser.add_argument("--dim", type=int, default=256, help="columns of the matrix at most (default: 256)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the randomised decomposition (default: 0)")
    parser.add_argument("--limit", type=int, metavar="N", help="take the first N rows only")
    parser.add_argument("--out", type=Path, required=True, metavar="E.npy", help="the matrix; E.json goes beside it")
    parser.add_argument("--overwrite", action="store_true", help="replace the files of an earlier run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Embed, write both files and print one line; warnings go to standard error.

    Returns
    -------
    int
        0; every failure is an :class:`InputError`.
    """
    out: Path = args.out
    record_path = check_outputs(out, ".npy", overwrite=args.overwrite, sources=(args.source,))
    texts = read_texts(args.source, args.column, limit=args.limit)
    make_folder(out.parent)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = lsa(texts, dim=args.dim, seed=args.seed)
    zero = zero_rows(rows).tolist()
    for entry in caught:
        print(f"sdo embed: warning: {entry.message}", file=sys.stderr)
    if zero:
        more = f" and {len(zero) - _LISTED} more" if len(zero) > _LISTED else ""
        named = ", ".join(map(str, zero[:_LISTED]))
        print(f"sdo embed: warning: zero rows: {named}{more} (all are in {record_path.name})", file=sys.stderr)
    record = {
        "encoder": args.encoder,
        "options": {"dim": args.dim, "seed": args.seed, "limit": args.limit},
        "source": args.source.name,
        "column": args.column,
        "texts_sha256": texts_sha256(texts),
        "rows": rows.shape[0],
        "dim": rows.shape[1],
        "zero_rows": zero,
        "versions": _versions(),
    }
    text = json.dumps(record, indent=2) + "\n"
    write_atomically(
        {
            out: lambda path: _save(path, rows),
            record_path: lambda path: path.write_text(text, encoding="utf-8"),
        }
    )
    shape = f"{rows.shape[0]} rows x {rows.shape[1]} columns, {len(zero)} zero"
    print(f"sdo embed: wrote {shape}, to {out}; how it was made: {record_path}")
    return 0


def texts_sha256(texts: Sequence[str]) -> str:
    """Return the SHA-256 of the texts as a JSON array, ASCII only (``json.dumps(texts)``), in hexadecimal."""
    return hashlib.sha256(json.dumps(list(texts)).encode("ascii")).hexdigest()


def _save(path: Path, rows: NDArray[np.float32]) -> None:
    with path.open("wb") as file:  # given a name, numpy.save would add .npy to it
        np.save(file, rows, allow_pickle=False)


def _versions() -> dict[str, str]:
    """Return the versions on which the matrix depends."""
    versions = {"python": platform.python_version()}
    for package in ("sdo-toolkit", "numpy", "scipy", "scikit-learn"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            versions[package] = "not installed"
    return versions
