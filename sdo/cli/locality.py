"""``sdo locality``: whether gradients follow embeddings, beyond what drift and repetition explain."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.atomic import write_atomically
from sdo.checks import whole_number
from sdo.cli.commands import COMMANDS
from sdo.cli.common.outputs import Outputs, aligned, check_out_folder, file_names, json_writer, make_folder
from sdo.cli.common.run_options import add_options, check_gradients, open_runs
from sdo.errors import InputError, printable

if TYPE_CHECKING:
    from analysis import Run, RunLocality

WORDS = (
    "series: within-batch cosine (of the embeddings) with batch coherence, drift and exposure removed; matrix: cosine "
    "of batch centroids with step coherence, pairs of steps that share a sample left out; pairs: change of the "
    "gradients' cosine per unit of the embeddings' cosine, between samples of one step, with its 95 % interval.\n"
    "p: of as strong an association if gradients did not follow embeddings, from re-draws of the run's own plan. It "
    "speaks of this one run; p-values that take steps or pairs for independent are not given, since they are wrong.\n"
    "One seed gives no verdict: whether another run would show it too takes several."
)
_HEADINGS = ("run", "signal", "part", "steps", "value", "p", "re-draws", "lambda", "95 % interval")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "locality",
        help=COMMANDS["locality"],
        description="Associate embeddings with the recorded gradients of one or more runs, and compare each run with "
        "re-draws of its own plan. Writes locality.json, the cloud of each signal with its binned mean "
        "(locality-SIGNAL-RUN.png) and the series over the steps (series-RUN.png).",
        epilog="example: sdo locality runs/uniform runs/sdo --out locality",
    )
    add_options(parser)
    parser.add_argument(
        "--embeddings",
        type=Path,
        metavar="E.npy",
        help="the runs' embeddings, where they are no longer where run.json says",
    )
    parser.add_argument(
        "--redraws", type=int, default=999, metavar="R", help="plans drawn anew; no p is below 1/(R + 1) (default: 999)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything, then write what can be written.

    Returns
    -------
    int
        0, or 1 when a part of the output failed; it is named on standard error.
    """
    from analysis.locality.redraw import find_embeddings

    whole_number("--redraws", args.redraws, 0)
    runs = open_runs(args.runs)
    for one in runs.values():
        check_gradients(one, one.signals if args.signal is None else [args.signal])
        if not one.signals:
            raise InputError(f"{one.path}: the run recorded no gradients; was GradientRecorder added to the trainer?")
        try:
            find_embeddings(one, args.embeddings)
        except InputError as error:
            raise InputError(f"{one.path}: {error}") from error
    sources = (*args.runs, args.embeddings)
    check_out_folder(args.out, overwrite=args.overwrite, sources=sources, files=("locality.json",))
    make_folder(args.out)
    output = _LocalityOutput(args, runs)
    output.write()
    return 1 if output.outputs.failed else 0


class _LocalityOutput:
    """Computes run by run."""

    def __init__(self, args: argparse.Namespace, runs: dict[str, Run]) -> None:
        self.args, self.out, self.runs = args, args.out, runs
        self.safe = file_names(list(runs))
        self.outputs = Outputs("locality")

    def write(self) -> None:
        entries = []
        for name, one in self.runs.items():
            entry: dict[str, Any] = {"name": name, "path": str(one.path)}
            entry |= self.outputs.attempt(f"run {name}", partial(self._run, name, one)) or {
                "signals": None,
                "signals_reason": "it could not be computed",
            }
            entries.append(entry)
        content = {
            "format": "sdo-locality",
            "format_version": 1,
            "verdict": None,
            "verdict_reason": "one seed gives no verdict; p-values speak of one run each",
            "files": self.outputs.files,
            "failed": self.outputs.failed,
            "runs": entries,
        }
        write_atomically({self.out / "locality.json": json_writer(content)})
        print(_table(entries))
        for note in dict.fromkeys(_notes(entries)):
            print(f"note: {printable(note)}")
        print(f"\n{WORDS}\nwritten to {self.out}: {', '.join(['locality.json', *self.outputs.files])}")

    def _run(self, name: str, one: Run) -> dict[str, Any]:
        from analysis.locality.redraw_tests import worker_count
        from analysis.locality.study import locality_entry, run_locality

        with warnings.catch_warnings():
            # The plan said it when it was made; here it would be said with each re-draw.
            warnings.filterwarnings("ignore", message="k = ")
            found = run_locality(
                one,
                embeddings=self.args.embeddings,
                signals=None if self.args.signal is None else [self.args.signal],
                redraws=self.args.redraws,
                workers=worker_count(),
                progress=_progress(name, self.args.redraws),
            )
        entry = locality_entry(found)
        for signal in found.signals:
            file = f"locality-{signal}-{self.safe[name]}.png"
            self.outputs.attempt(file, partial(self._clouds, found, signal, name, file))
        file = f"series-{self.safe[name]}.png"
        self.outputs.attempt(file, partial(self._series, found, name, file))
        return entry

    def _clouds(self, found: RunLocality, signal: str, name: str, file: str) -> None:
        from analysis import save, signal_clouds

        figure, _ = signal_clouds(found.signals[signal], title=f"Locality of {signal}, {name}")
        save(figure, self.out / file)
        self.outputs.files.append(file)

    def _series(self, found: RunLocality, name: str, file: str) -> None:
        from analysis import locality_series, save

        series: dict[str, tuple[Any, Any]] = {"within-batch cosine": (found.step, found.cosine)}
        for signal, one in found.signals.items():
            if len(one.step):
                series[f"coherence, {signal} ({one.between})"] = (one.step, one.coherence)
        figure, _ = locality_series(series, title=f"Embeddings and gradients within batches, {name}")
        save(figure, self.out / file)
        self.outputs.files.append(file)


def _progress(name: str, count: int) -> Callable[[int], None] | None:
    if not sys.stderr.isatty():
        return None

    def show(done: int) -> None:
        end = "\n" if done == count else ""
        print(f"\r{name}: {done} of {count} re-draws", end=end, file=sys.stderr, flush=True)

    return show


def _table(entries: list[dict[str, Any]]) -> str:
    """Return an aligned table; a dash stands where nothing is defined (the notes and the JSON file say why)."""

    def number(value: float | None, pattern: str) -> str:
        return "-" if value is None else pattern.format(value)

    lines: list[list[str]] = [list(_HEADINGS)]
    for entry in entries:
        for signal, parts in (entry["signals"] or {}).items():
            for part in ("series", "matrix", "pairs"):
                one = parts[part] or {}
                interval = "-" if one.get("low") is None else f"{one['low']:+.3f} to {one['high']:+.3f}"
                lines.append(
                    [
                        *(entry["name"], signal, part),
                        number(one.get("steps"), "{}"),
                        number(one.get("value"), "{:+.4f}"),
                        number(one.get("p"), "{:.3g}"),
                        number(one.get("redraws") or None, "{}"),
                        number(one.get("inflation"), "{:.2f}"),
                        interval,
                    ]
                )
    return aligned(lines, texts=3)


def _notes(entries: list[dict[str, Any]]) -> list[str]:
    notes = []
    for entry in entries:
        if entry.get("redraws_reason"):
            notes.append(f"{entry['name']}: no p-values: {entry['redraws_reason']}")
        for signal, parts in (entry["signals"] or {}).items():
            for part in ("series", "matrix", "pairs"):
                reason = parts.get(f"{part}_reason") or (parts[part] or {}).get("reason")
                if reason and reason != entry.get("redraws_reason"):
                    notes.append(f"{entry['name']}, {signal}, {part}: {reason}")
    return notes
