"""``sdo embed``: embed one column of a source and say beside the matrix how it was made."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdo.atomic import write_atomically
from sdo.cli.commands import COMMANDS
from sdo.cli.common.outputs import check_outputs, make_folder
from sdo.embeddings.cache import EmbeddingCache, cache_folder, cache_key
from sdo.embeddings.files import SUFFIXES, normalize_ids, write_matrix_file
from sdo.embeddings.lsa import LSA_MAX_CHARACTERS, lsa, zero_rows
from sdo.embeddings.sentence import POOLINGS, SentenceEncoder, find_model
from sdo.embeddings.sources import Selection, Source, Survey, open_source, survey
from sdo.embeddings.streaming import ResumableMatrix, encode_to_disk, remove_work_files, work_files
from sdo.errors import InputError, counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LISTED = 10  # zero rows named on the terminal; the JSON file names all
_BATCHES = 16  # forward passes between two records of progress
_ONLY: dict[str, dict[str, Any]] = {
    "lsa": {"dim": 256, "seed": 0},
    "sentence-transformers": {
        "model": None,
        "revision": None,
        "pooling": "own",
        "prompt": None,
        "batch_size": 64,
        "device": "auto",
        "max_length": None,
        "trust_remote_code": False,
    },
}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "embed",
        help=COMMANDS["embed"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Embed one column of a source: one row a text, float32, in the source's order. Beside the matrix\n"
        "goes a JSON file that says how it was made. Rows made before from the same texts, model and options are\n"
        "taken from a cache ($SDO_CACHE, or ~/.cache/sdo-toolkit/embeddings). With sentence-transformers the texts\n"
        "are streamed, and a run that was killed continues when the same command is given again. The shortest form:\n"
        "sdo embed train.jsonl --column question --out E.npy",
        epilog="example: sdo embed train.parquet --column messages --role user --id-column uid --out E.npz\n"
        "    --encoder sentence-transformers --model sentence-transformers/all-MiniLM-L6-v2",
    )
    add = parser.add_argument
    add(
        "source", metavar="SOURCE", help="a .jsonl, .csv or .parquet file, a dataset folder, or a hub id; in this order"
    )
    add("--split", help="of a folder or hub dataset, train[:1000] included (default: train)")
    add("--config", help="configuration of a hub dataset")
    add("--column", required=True, help="column of texts, or of chats (lists of role and content)")
    add("--role", help="of chats: all messages of this role, joined by blank lines (default: user)")
    add("--id-column", metavar="COLUMN", help="ids to keep with the rows; needs .npz or .safetensors")
    add("--strip-think", action="store_true", help="leave out <think> blocks")
    add("--limit", type=int, metavar="N", help="take the first N rows only")
    add("--encoder", choices=list(_ONLY), default="lsa", help="lsa needs no model and no network (default: lsa)")
    group = parser.add_argument_group("lsa")
    group.add_argument("--dim", type=int, help="columns of the matrix at most (default: 256)")
    group.add_argument("--seed", type=int, help="seed of the randomised decomposition (default: 0)")
    group = parser.add_argument_group("sentence-transformers")
    group.add_argument("--model", metavar="ID_OR_FOLDER", help="a folder with config.json comes before a hub id")
    group.add_argument("--revision", help="branch, tag or commit of a hub model (default: main)")
    group.add_argument("--pooling", choices=POOLINGS, help="own: as the model has it (default)")
    group.add_argument("--prompt", metavar="TEXT", help="put before each text (default: the model's own, if any)")
    group.add_argument("--batch-size", type=int, help="texts per forward pass (default: 64)")
    group.add_argument("--device", help="auto, cpu, cuda, cuda:1, … (default: auto)")
    group.add_argument("--max-length", type=int, metavar="TOKENS", help="cut texts to it (default: the model's own)")
    group.add_argument("--trust-remote-code", action="store_true", default=None, help="run code of the model's makers")
    add("--no-cache", action="store_true", help="neither look into the cache nor add to it")
    add("--out", type=Path, required=True, metavar="E.npy", help="or .npz, .safetensors; E.json goes beside it")
    add("--overwrite", action="store_true", help="replace the files of an earlier run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Embed, write both files and print what was used; warnings go to standard error.

    Returns
    -------
    int
        0; every failure is an :class:`InputError`.
    """
    out: Path = args.out
    record_path = check_outputs(out, SUFFIXES, overwrite=args.overwrite, sources=(args.source, args.model))
    options = _options_of(args)
    if args.id_column is not None and out.suffix == ".npy":
        raise InputError(f"--id-column: {out} cannot hold ids; expected --out with .npz or .safetensors")
    encoder = None if args.encoder == "lsa" else _sentence_encoder(options)
    source = open_source(args.source, split=args.split, config=args.config)
    selection = Selection(args.column, args.role, args.id_column, args.strip_think)
    found = survey(source, selection, limit=args.limit)
    ids = None if found.ids is None else normalize_ids(found.ids, found.rows, f"column {args.id_column!r}")
    print(f"sdo embed: source: {source.name}, {counted(found.rows, 'text')}")
    made_from = {"encoder": "lsa", "options": options} if encoder is None else encoder.describe()
    key = cache_key({**made_from, "texts_sha256": found.texts_sha256, "rows": found.rows})
    make_folder(out.parent)
    work, cache = work_files(out)[0], None if args.no_cache else EmbeddingCache(cache_folder())
    how = _from_cache(cache, key, out)
    if how is None:
        if encoder is None:
            how = _by_lsa(source, selection, args.limit, found, options, work)
        else:
            how = _by_model(encoder, source, selection, args.limit, found, out, key)
        _to_cache(cache, key, work, {**made_from, **how})
    record = {
        **made_from,
        **how,
        "model_name": None if encoder is None else encoder.place.name,
        "source": Path(args.source).name if source.path is not None else args.source,
        "split": args.split,
        "limit": args.limit,
        **asdict(selection),
        "texts_sha256": found.texts_sha256,
        "cache_key": key,
        "ids": None if ids is None else "strings" if ids.dtype.kind == "U" else "integers",
    }
    rows, dim, zero = _publish(work, out, record_path, ids, record)
    for note in how["notes"]:
        print(f"sdo embed: warning: {note}", file=sys.stderr)
    if zero:
        more = f" and {len(zero) - _LISTED} more" if len(zero) > _LISTED else ""
        named = ", ".join(map(str, zero[:_LISTED]))
        print(f"sdo embed: warning: zero rows: {named}{more} (all are in {record_path.name})", file=sys.stderr)
    shape = f"{counted(rows, 'row')} x {counted(dim, 'column')}, {len(zero)} zero"
    print(f"sdo embed: wrote {shape}, to {out}; how it was made: {record_path}")
    return 0


def _options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The encoder's options with their defaults; those of another encoder are refused."""
    for encoder, defaults in _ONLY.items():
        given = [name for name in defaults if getattr(args, name) is not None]
        if given and encoder != args.encoder:
            flag = "--" + given[0].replace("_", "-")
            raise InputError(
                f"{flag} belongs to --encoder {encoder}, and --encoder is {args.encoder}; fix: leave it out"
            )
    defaults = _ONLY[args.encoder]
    return {name: default if getattr(args, name) is None else getattr(args, name) for name, default in defaults.items()}


def _sentence_encoder(options: dict[str, Any]) -> SentenceEncoder:
    if options["model"] is None:
        raise InputError(
            "--model is missing; expected a folder or a hub id, such as sentence-transformers/all-MiniLM-L6-v2"
        )
    rest = {name: value for name, value in options.items() if name not in ("model", "revision")}
    encoder = SentenceEncoder(find_model(options["model"], options["revision"]), **rest)
    print(f"sdo embed: model: {encoder.place}")
    return encoder


def _from_cache(cache: EmbeddingCache | None, key: str, out: Path) -> dict[str, Any] | None:
    """Bring the rows from the cache into the work file; how they were made, or None."""
    if cache is None:
        print("sdo embed: cache: not used")
        return None
    fetched = work_files(out)[0].with_suffix(".fetched")  # an unfinished matrix stays until the rows are there
    try:
        how = cache.fetch(key, fetched)
        if how is not None:
            remove_work_files(out)
            fetched.replace(work_files(out)[0])
    finally:
        fetched.unlink(missing_ok=True)
    print(f"sdo embed: cache: {'miss' if how is None else 'hit'}, key {key[:12]} in {cache.folder}")
    names = ("made_with", "notes", "versions")
    return None if how is None else {name: how[name] for name in names}


def _to_cache(cache: EmbeddingCache | None, key: str, work: Path, record: dict[str, Any]) -> None:
    """Keep the rows; a cache that cannot be written costs a warning, not the result."""
    if cache is None:
        return
    try:
        cache.store(key, work, record)
    except OSError as error:
        print(f"sdo embed: warning: not kept in the cache {cache.folder}: {error.strerror}", file=sys.stderr)


def _by_lsa(
    source: Source, selection: Selection, limit: int | None, found: Survey, options: dict[str, Any], work: Path
) -> dict[str, Any]:
    """LSA needs all texts at once: above a stated size it is refused."""
    if found.characters > LSA_MAX_CHARACTERS:
        raise InputError(
            f"{found.characters:,} characters of text; LSA fits on all of it in memory and takes "
            f"{LSA_MAX_CHARACTERS:,} at most; fix: --encoder sentence-transformers streams any size, or --limit"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = lsa([text for _, text in source.texts(selection, limit=limit)], **options)
    write_atomically({work: lambda path: write_matrix_file(path, rows, None, suffix=".npy")})
    notes = [str(entry.message) for entry in caught]
    return {"made_with": {}, "notes": notes, "versions": _versions("scipy", "scikit-learn")}


def _by_model(
    encoder: SentenceEncoder,
    source: Source,
    selection: Selection,
    limit: int | None,
    found: Survey,
    out: Path,
    key: str,
) -> dict[str, Any]:
    """Stream the texts through the model into the work file, from where an earlier run stopped."""
    from tqdm import tqdm

    made_with = encoder.load()
    said = ", ".join(
        f"{name} {value!r}" if name == "prompt" else f"{name} {value}" for name, value in made_with.items()
    )
    print(f"sdo embed: {said}, device {encoder.device}")
    versions = _versions("sentence-transformers", "transformers", "tokenizers", "torch")
    dim = encoder.encode(["how many columns?"]).shape[1]
    # Other versions may give other bits: they would not be continued but begun anew.
    matrix = ResumableMatrix(out, cache_key({"rows": key, "versions": versions}), found.rows, dim)
    if matrix.discarded:
        print("sdo embed: an unfinished run for this file had other texts, model or options: begun anew")
    if matrix.done:
        print(f"sdo embed: continues at row {matrix.done} of {found.rows}")
    with tqdm(total=found.rows, initial=matrix.done, unit="text", disable=not sys.stderr.isatty()) as bar:
        encode_to_disk(
            (text for _, text in source.texts(selection, limit=limit)),
            found,
            encoder.encode,
            matrix,
            chunk=_BATCHES * encoder.batch_size,
            report=bar.update,
        )
    return {"made_with": made_with, "notes": [], "versions": versions}


def _publish(
    work: Path, out: Path, record_path: Path, ids: NDArray[Any] | None, record: dict[str, Any]
) -> tuple[int, int, list[int]]:
    """Give the finished matrix its form and its name, and write the record; rows, columns and zero rows."""
    matrix = np.load(work, mmap_mode="r", allow_pickle=False)
    rows, dim = matrix.shape
    zero = zero_rows(matrix).tolist()
    text = json.dumps({**record, "rows": rows, "dim": dim, "zero_rows": zero}, indent=2) + "\n"

    def write(path: Path) -> None:
        if out.suffix == ".npy":
            work.replace(path)
        else:
            write_matrix_file(path, matrix, ids, suffix=out.suffix)

    try:
        # The record first: what can fail for want of space fails before the matrix has moved.
        write_atomically({record_path: lambda path: path.write_text(text, encoding="utf-8"), out: write})
    except BaseException:
        if record["encoder"] == "lsa":  # quickly made again, and not continued
            remove_work_files(out)
        raise
    remove_work_files(out)
    return rows, dim, zero


def _versions(*packages: str) -> dict[str, str]:
    """Return the versions on which the matrix depends."""
    versions = {"python": platform.python_version()}
    for package in ("sdo-toolkit", "numpy", *packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            versions[package] = "not installed"
    return versions
