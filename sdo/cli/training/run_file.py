"""What the training commands share: the parser, the run file and the organizer that it describes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdo.cli.commands import COMMANDS
from sdo.cli.training.config import (
    OrganizerSection,
    RecorderOptions,
    apply_overrides,
    load_config,
    organizer_schema,
    parse_organizer,
    parse_section,
    split_trl,
)
from sdo.cli.training.data import Rows
from sdo.embeddings.belonging import match_texts, misplaced, other_texts, read_record
from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError, error_line
from sdo.organizers.plan import Organizer
from sdo.organizers.registry import OrganizerInputs, make_organizer, organizer_spec, registered_organizers
from sdo.trainers.checkpoints import checkpoint_damage, last_checkpoint, later_damaged

# What TRL, transformers and torch refuse late, with a traceback, or take without sense.
_RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "from 1": (
        lambda value: value >= 1,
        (
            *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("eval_accumulation_steps", "max_length", "max_prompt_length", "max_completion_length"),
            *("num_generations", "num_iterations", "steps_per_generation", "generation_batch_size"),
        ),
    ),
    "from 0": (
        lambda value: value >= 0,
        (
            "dataloader_num_workers",
            "learning_rate",
            "adam_epsilon",
            "weight_decay",
            "num_train_epochs",
            "seed",
            "top_k",
        ),
    ),
    "above 0": (lambda value: value > 0, ("temperature", "repetition_penalty")),
    "from 0 to 1": (
        lambda value: 0 <= value <= 1,
        ("top_p", "min_p", "top_entropy_quantile", "label_smoothing_factor"),
    ),
    "from 0 and below 1": (lambda value: 0 <= value < 1, ("adam_beta1", "adam_beta2")),
}


@dataclass
class Options:
    """Everything a training command was told.

    Attributes
    ----------
    organizer, recorder
        The sections, or None where they were not given.
    trl
        Instances of TRL's dataclasses and of the method's own columns, by class.
    """

    organizer: OrganizerSection | None
    recorder: RecorderOptions | None
    trl: dict[type, Any]


def read_options(config: str | None, overrides: Sequence[str], classes: tuple[type, ...]) -> Options:
    """Merge a run file with the command line and check every key.

    Parameters
    ----------
    config
        Path of the YAML run file, or None.
    overrides
        Arguments such as ``--learning_rate 1e-5 --organizer.k 8``.
    classes
        Dataclasses that take the top-level keys.

    Raises
    ------
    InputError
        For an unreadable file, an unknown key or a value of the wrong type.
    """
    merged = apply_overrides(load_config(config) if config else {}, overrides)
    organizer, left_out = parse_organizer(merged["organizer"]) if "organizer" in merged else (None, [])
    if organizer is not None and left_out:
        print(
            f"note: organizer {organizer.name} has no option {', '.join(left_out)}: what is given for another one is "
            "left out",
            file=sys.stderr,
        )
    recorder = parse_section("recorder", merged["recorder"], RecorderOptions) if "recorder" in merged else None
    values = split_trl(merged, classes)
    _check_numbers(values)
    if not sys.stderr.isatty():
        values.setdefault("disable_tqdm", True)
    if recorder is not None:
        # The total gradient norm reaches callbacks only through the trainer's log.
        values.setdefault("logging_steps", 1)
    return Options(organizer=organizer, recorder=recorder, trl={c: _build(c, values) for c in classes})


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Refuse numbers that no training can have."""
    for expected, (fits, names) in _RANGES.items():
        for name in names:
            value = values.get(name)
            if isinstance(value, int | float) and not fits(value):
                raise InputError(f"{name} is {value}; expected a number {expected}; fix: leave it out for its default")


def _build(cls: type, values: Mapping[str, Any]) -> Any:
    names = {f.name for f in dataclasses.fields(cls) if f.init}
    try:
        return cls(**{name: value for name, value in values.items() if name in names})
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(f"{cls.__name__}: {error}") from error


def build_organizer(options: OrganizerSection, rows: Rows, training_seed: int) -> Organizer:
    """Build the organizer of a run file's section.

    Parameters
    ----------
    options
        The section.
    rows
        The training rows, with their ids.
    training_seed
        Serves where the section has no seed.

    Raises
    ------
    InputError
        If embeddings are missing, cannot be used, or do not fit the rows.
    """
    seed = training_seed if options.seed is None else options.seed
    embeddings = None if options.embeddings is None else _read_embeddings(options, options.embeddings, rows)
    if embeddings is None and "embeddings" in organizer_spec(options.name).needs:
        raise InputError(
            "organizer.embeddings is missing; expected the path of a matrix, one row a training sample; "
            "fix: sdo embed makes one"
        )
    n_samples = _count_samples(options, rows) if embeddings is None else len(embeddings)
    organizer = make_organizer(options.name, OrganizerInputs(n_samples, embeddings), {**options.options, "seed": seed})
    if organizer.embeddings is not None and rows.whole not in (None, organizer.n_samples):
        n_rows = len(rows.dataset)
        if organizer.n_samples != n_rows or rows.dataset[0][options.id_column] != 0:
            raise InputError(
                f"embeddings {options.embeddings} have {organizer.n_samples} rows, the dataset has {rows.whole}, of "
                f"which {n_rows} are trained on; expected one embedding row for each dataset row; "
                f"fix: embed the same data, or give the data a column {options.id_column!r} that names the rows"
            )
    if options.embeddings is not None:
        _check_texts(Path(options.embeddings), rows, options.id_column)
    return organizer


def _check_texts(path: Path, rows: Rows, id_column: str) -> None:
    """Hold the data against the record beside the embeddings: refuse ids that name other rows, warn of other texts."""
    record = read_record(path)
    if record is None:
        return
    own = rows.whole is None
    found = match_texts(record, rows.dataset, rows.dataset[id_column] if own else None)
    if own and found == "by position":
        raise InputError(misplaced(path, record["column"], id_column))
    if found == "no":
        print(f"warning: {other_texts(path, record['column'])}", file=sys.stderr)


def _read_embeddings(options: OrganizerSection, path: str, rows: Rows) -> Embeddings:
    """The matrix of the section; its ids are set aside where the rows have no column that could name them."""
    embeddings = Embeddings.read(path)
    if embeddings.ids is None or rows.whole is None:
        return embeddings
    print(
        f"note: embeddings {path} bring ids, the data have no column {options.id_column!r}: row i of the "
        "data is taken to be row i of the embeddings; organizer.id_column names another column",
        file=sys.stderr,
    )
    return dataclasses.replace(embeddings, ids=None)


def _count_samples(options: OrganizerSection, rows: Rows) -> int:
    """How many samples the ids of the data reach over, where no embeddings say so."""
    ids: list[Any] = list(rows.dataset[options.id_column])
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise InputError(
            f"column {options.id_column!r} holds other things than row numbers, and organizer.embeddings is missing; "
            "expected integers from 0, or embeddings with these ids; fix: name the matrix or another id_column"
        )
    return 1 + int(max(ids))


def resume_from(value: object, output_dir: str) -> str | None:
    """Return the checkpoint to resume from, before anything is loaded.

    Parameters
    ----------
    value
        ``resume_from_checkpoint``: a path, true for the last whole one in ``output_dir``, false or None.
    output_dir
        Where checkpoints are written.

    Raises
    ------
    InputError
        If there is no such checkpoint.
    """
    if value is None or str(value).lower() in ("false", "none", ""):
        return None
    if str(value).lower() == "true":
        last = last_checkpoint(output_dir)
        damaged = later_damaged(Path(output_dir), last)
        if last is None:
            passed = f": {'; '.join(damaged)}" if damaged else ""
            raise InputError(
                f"{output_dir} holds no whole checkpoint to resume from; expected checkpoint-N in it{passed}"
            )
        for line in damaged:
            print(f"note: passed over a checkpoint that is not whole, {line}", file=sys.stderr)
        return str(last)
    damage = checkpoint_damage(Path(str(value)))
    if damage is not None:
        raise InputError(
            f"resume_from_checkpoint is {value}, which is no whole checkpoint: {damage}; expected its folder, or true "
            "for the last whole one"
        )
    return str(value)


def check_before_loading(options: Options, resume: bool) -> None:
    """Refuse a recorder's folder that holds another run, before anything is loaded."""
    if options.recorder is not None:
        if options.recorder.out is None:
            raise InputError("recorder.out is missing; expected the path of the run folder")
        if not resume:
            from diagnostics.run_folder.writer import check_free

            check_free(options.recorder.out)


def _known_keys(columns: type) -> str:
    """List the keys that are ours, with their defaults."""
    lines = []
    organizers = [(f"organizer, {spec.name}:", organizer_schema(spec)) for spec in registered_organizers()]
    schemas: list[tuple[str, Any]] = [*organizers, ("recorder:", RecorderOptions), ("top level:", columns)]
    for title, schema in schemas:
        built = schema()
        pairs = [f"{f.name} ({getattr(built, f.name)})" for f in dataclasses.fields(schema)]
        lines.append(textwrap.fill(f"{title} {', '.join(pairs)}", 100, subsequent_indent="  "))
    return "keys beside TRL's own, with their defaults:\n" + "\n".join(lines)


def add_training_parser(
    subparsers: argparse._SubParsersAction[Any], name: str, example: str, columns: type, more: str = ""
) -> argparse.ArgumentParser:
    """Add a training command: ``--config`` and whatever TRL's dataclasses take; ``more`` ends its description."""
    line = COMMANDS[name]
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=line,
        description=textwrap.fill(
            f"{line[0].upper()}{line[1:]}. Takes TRL's own arguments, on the command line or in a YAML run "
            "file, with two more sections: organizer (what each batch holds) and recorder (what is written down). "
            f"Sections are overridden with dots, as in --organizer.k 8.{more}",
            100,
        ),
        epilog=f"example: {example}\n\n{_known_keys(columns)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="RUN.yaml", help="run file with TRL's keys, organizer: and recorder:")
    parser.set_defaults(takes_overrides=True)
    return parser


@contextlib.contextmanager
def plain_errors(model: str | None) -> Any:
    """Turn the error of a model or a tokenizer that is not there, or broken, into one line."""
    try:
        yield
    except Exception as error:  # transformers, tokenizers, safetensors and the hub raise many kinds
        if is_ours(error):
            raise
        said = error_line(error, named=not isinstance(error, OSError))
        raise InputError(f"model {model}: {said}; expected the folder of a whole model, or a hub id") from error


def is_ours(error: BaseException) -> bool:
    """Whether an error was raised in this toolkit's own code: a mistake of ours, or a refusal that is said already."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("sdo", "diagnostics", "analysis")
