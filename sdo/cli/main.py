"""The ``sdo`` command: finds the sub-command, runs it and turns its outcome into an exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from sdo import __version__
from sdo.cli.commands import COMMANDS
from sdo.cli.common.terminal import STDOUT, plain_streams
from sdo.errors import InputError, error_line, suggest


class _Parser(argparse.ArgumentParser):
    """Says wrong arguments in one line, as every other wrong input, and takes no abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> None:  # type: ignore[override]
        raise InputError(f"{message}; see {self.prog} --help")


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``sdo``: the options of one command, and of the others their line.

    Each command's module has ``add_parser(subparsers)``, which sets `run` as default. Only the module of `command` is
    imported, and even it loads heavy packages only when it runs.
    """
    parser = _Parser(
        prog="sdo",
        description="Structure-aware mini-batches for LLM post-training: organize, record, explain.",
        epilog="example: sdo plan --embeddings E.npy --batch-size 8 --epochs 4 --out PLAN.parquet",
    )
    parser.add_argument("--version", action="version", version=f"sdo {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, line in COMMANDS.items():
        if name == command:
            importlib.import_module(f"sdo.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=line)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv
        Arguments without the program's name; ``sys.argv[1:]`` by default.

    Returns
    -------
    int
        0 when all worked, 1 when a part of the output failed, 2 for wrong input or what the machine refuses.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    prefix = f"sdo {words[0]}" if words and words[0] in COMMANDS else "sdo"
    try:
        parser = build_parser(next((word for word in words if not word.startswith("-")), None))
        args, rest = parser.parse_known_args(words)
        if args.command is None:
            if rest:
                raise InputError(f"unexpected argument {rest[0]!r}; expected a command: {', '.join(COMMANDS)}")
            parser.print_help()
            return 2
        prefix = f"sdo {args.command}"
        # Training commands hand what they do not know to TRL's own options, which check it.
        if rest and not getattr(args, "takes_overrides", False):
            known = _options(parser, args.command)
            raise InputError(
                f"unexpected argument {rest[0]!r}; {suggest(rest[0], known)}its options are {', '.join(known)}; "
                f"see sdo {args.command} --help"
            )
        args.overrides = rest
        with plain_streams():
            status: int = args.run(args)
            sys.stdout.flush()
    except InputError as error:
        return _refused(prefix, str(error))
    except (OSError, MemoryError, RecursionError) as error:
        return _refused(prefix, _words(error))
    except KeyboardInterrupt:
        print(f"{prefix}: interrupted", file=sys.stderr)
        return 130
    return status


def _refused(prefix: str, message: str) -> int:
    """Say in one line what was wrong."""
    with plain_streams(), contextlib.suppress(OSError):  # a standard error that takes nothing cannot be told so
        print(f"{prefix}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _words(error: OSError | MemoryError | RecursionError) -> str:
    """Say what the machine refused, of which file, and what to do."""
    if isinstance(error, RecursionError):
        return f"{error_line(error)}; expected less deeply nested input; fix: look for a file of many brackets"
    if isinstance(error, MemoryError):
        said = f": {error}" if str(error) else ""
        return f"not enough memory{said}; expected input that fits; fix: less of it, or more memory"
    if error.filename == STDOUT:  # else Python would stumble over it once more at its end
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    where = "".join(f"{name}: " for name in (error.filename, error.filename2) if name is not None)
    said = error.strerror or error_line(error)
    return f"{where}{said}; expected files that can be read and folders with room that can be written"


def _options(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """The long options of a command."""
    found = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    strings = found.choices[command]._option_string_actions
    return [option for option in strings if option.startswith("--") and option != "--help"]


if __name__ == "__main__":
    sys.exit(main())
