"""``sdo coherence``: how well the gradients of recorded runs agree, between steps and within batches."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.atomic import write_atomically
from sdo.checks import whole_number
from sdo.cli.commands import COMMANDS
from sdo.cli.common.outputs import (
    Outputs,
    aligned,
    array_writer,
    check_out_folder,
    file_names,
    json_writer,
    make_folder,
)
from sdo.cli.common.run_options import add_options, check_gradients, open_runs
from sdo.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from analysis import BatchCoherence, CoherenceBlocks, Run

WORDS = (
    "Step coherence: mean cosine between the gradients of two steps.\n"
    "Batch coherence: mean cosine between the gradients of one step's samples (or micro-batches).\n"
    "One run of each kind gives no verdict: whether a difference is more than chance takes several seeds."
)
MATRIX_STEPS = 16_384  # up to here the matrix of all pairs of steps, at most 1 GiB, is written
_HEADINGS = (
    *("run", "signal", "steps", "undefined", "step coherence", "next step", "shared sample", "none shared"),
    *("batch coherence", "between", "steps of it", "recorder", "sketch rmse", "within-batch cosine"),
)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "coherence",
        help=COMMANDS["coherence"],
        description="Compare the recorded gradients of one or more runs. Writes coherence.json, the matrices "
        "(step-coherence-SIGNAL-RUN.npy; above 16,384 steps means over blocks of steps) and pictures on one scale "
        "(step-coherence-SIGNAL.png, batch-coherence-SIGNAL.png).",
        epilog="example: sdo coherence runs/uniform runs/sdo --out coherence",
    )
    add_options(parser, signals="every signal that all runs have")
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="W",
        help="average the directions of the last W steps, at most all, before the cosine, in matrix and picture only",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything, then write what can be written.

    Returns
    -------
    int
        0, or 1 when a part of the output failed; it is named on standard error.
    """
    if args.smooth is not None:
        whole_number("--smooth", args.smooth, 1)
    runs = open_runs(args.runs)
    signals = _signals(list(runs.values()), args.signal)
    for one in runs.values():
        check_gradients(one, signals)
        _check_smooth(args.smooth, one)
    check_out_folder(args.out, overwrite=args.overwrite, sources=args.runs)
    make_folder(args.out)
    output = _CoherenceOutput(args.out, runs, signals, args.smooth)
    output.write()
    return 1 if output.outputs.failed else 0


def _check_smooth(smooth: int | None, run: Run) -> None:
    """Refuse a window that is longer than the run: every cell would be a mean over all steps before it."""
    if smooth is not None and smooth > max(1, steps := run.steps().num_rows):
        raise InputError(
            f"--smooth {smooth}: {run.path} has {steps} steps; expected at most as many, and far fewer to see anything"
        )


def _signals(runs: list[Run], wanted: str | None) -> list[str]:
    if wanted is not None:
        return [wanted]
    common = [signal for signal in runs[0].signals if all(signal in one.signals for one in runs)]
    if not common:
        held = "; ".join(f"{one.path}: {', '.join(one.signals) or 'none'}" for one in runs)
        raise InputError(f"the runs have no signal in common ({held})")
    return common


class _CoherenceOutput:
    """Computes part by part."""

    def __init__(self, out: Path, runs: dict[str, Run], signals: list[str], smooth: int | None) -> None:
        self.out, self.runs, self.signals, self.smooth = out, runs, signals, smooth
        self.safe = file_names(list(runs))
        self.outputs = Outputs("coherence")
        self.blocks: dict[tuple[str, str], CoherenceBlocks] = {}  # of the runs whose matrix would be too large

    def write(self) -> None:
        from analysis.run_folder.overview import run_overview

        entries: dict[str, dict[str, Any]] = {}
        for name, one in self.runs.items():
            entries[name] = self.outputs.attempt(f"run {name}", partial(run_overview, one)) or {}
            entries[name] = {"name": name, "path": str(one.path), **entries[name], "signals": {}}
        for signal in self.signals:
            self._signal(signal, entries)
        content = {
            "format": "sdo-coherence",
            "format_version": 1,
            "smooth": self.smooth,
            "smooth_applies_to": "matrices and pictures",
            "files": self.outputs.files,
            "failed": self.outputs.failed,
            "runs": list(entries.values()),
        }
        write_atomically({self.out / "coherence.json": json_writer(content)})
        print(_table(list(entries.values())))
        print(f"\n{WORDS}\nwritten to {self.out}: coherence.json, {', '.join(self.outputs.files)}")

    def _signal(self, signal: str, entries: dict[str, dict[str, Any]]) -> None:
        from analysis.coherence.study import sketch_check, within_steps

        steps: dict[str, NDArray[np.int64]] = {}
        series: dict[str, BatchCoherence] = {}
        between: dict[str, str] = {}
        for name, one in self.runs.items():
            entry = sketch_check(one, signal)
            entries[name]["signals"][signal] = entry

            def step_part(one: Run = one, name: str = name, entry: dict[str, Any] = entry) -> None:
                entry["step_coherence"], steps[name] = self._between_steps(one, signal, name)

            def batch_part(one: Run = one, name: str = name, entry: dict[str, Any] = entry) -> None:
                found = within_steps(one, signal)
                entry["batch_coherence"], series[name] = found.to_dict(), found.series
                if found.between is not None:
                    between[name] = found.between

            for part, compute in (("step_coherence", step_part), ("batch_coherence", batch_part)):
                self.outputs.attempt(f"{part} of {signal} in run {name}", compute)
                if part not in entry:
                    entry |= {part: None, f"{part}_reason": "it could not be computed"}
        drawn = {name: step for name, step in steps.items() if len(step)}
        if drawn or not steps:
            self.outputs.attempt(f"step-coherence-{signal}.png", lambda: self._heat_maps(signal, drawn))
        else:
            print(f"no picture of step coherence, {signal}: it has rows of single samples, none of a step")
        kinds = sorted(set(between.values()))
        if len(kinds) > 1:
            # Micro-batches agree more than samples do, whatever the data: the legend must tell them apart.
            series = {f"{name}, {between[name]}": one for name, one in series.items() if name in between}
        of = " or ".join(kinds)
        most = max((int(one.defined.sum()) for one in series.values()), default=0)
        if most == 1:
            print(
                f"no picture of batch coherence, {signal}: it is known at one step alone; the recorder's "
                "sample_every=N records single samples at every N-th step (10 by default)"
            )
        elif most or not series:
            self.outputs.attempt(f"batch-coherence-{signal}.png", lambda: self._series(signal, series, of))
        else:
            print(
                f"no picture of batch coherence, {signal}: no step has two gradients to compare; rows of single "
                "samples exist for all signals but weight, rows of micro-batches with accumulation above 1"
            )

    def _between_steps(self, one: Run, signal: str, name: str) -> tuple[dict[str, Any], NDArray[np.int64]]:
        """Compute, and write the matrix: at most one of them is in memory."""
        import numpy as np

        from analysis.coherence.study import between_steps

        found = between_steps(one, signal, smooth=self.smooth, matrix_steps=MATRIX_STEPS)
        matrix, block = found.matrix, 1
        if found.blocks is not None:
            self.blocks[signal, name] = found.blocks
            matrix, block = found.blocks.cells.astype(np.float32), found.blocks.block
            print(
                f"{name}, {signal}: {len(found.step):,} steps; the matrix of all pairs would take "
                f"{4 * len(found.step) ** 2 / 2**30:.0f} GiB, so its means over blocks of {block} steps are written"
            )
        if matrix is None:
            reason = "the run has no row of a step for this signal"
            return found.to_dict() | {"matrix": None, "matrix_reason": reason}, found.step
        matrix_file = self._matrix_file(signal, name)
        write_atomically({matrix_file: array_writer(np.asarray(matrix))})
        self.outputs.files.append(matrix_file.name)
        return found.to_dict() | {"matrix": matrix_file.name, "matrix_block": block}, found.step

    def _heat_maps(self, signal: str, steps: dict[str, NDArray[np.int64]]) -> None:
        import numpy as np

        from analysis import coherence_heat_maps

        if not steps:
            raise RuntimeError("no run has a matrix")
        matrices = {
            name: self.blocks.get((signal, name), np.load(self._matrix_file(signal, name), mmap_mode="r"))
            for name in steps
        }
        smoothed = f", mean of the last {self.smooth} steps" if self.smooth and self.smooth > 1 else ""
        figure, _ = coherence_heat_maps(matrices, steps=steps, title=f"Step coherence, {signal}{smoothed}")
        self._save(figure, f"step-coherence-{signal}.png")

    def _series(self, signal: str, series: dict[str, BatchCoherence], of: str) -> None:
        from analysis import batch_coherence_series

        if not series:
            raise RuntimeError("no run has a series")
        figure, _ = batch_coherence_series(series, of=of, title=f"Batch coherence, {signal}")
        self._save(figure, f"batch-coherence-{signal}.png")

    def _save(self, figure: Any, name: str) -> None:
        from analysis import save

        save(figure, self.out / name)
        self.outputs.files.append(name)

    def _matrix_file(self, signal: str, name: str) -> Path:
        return self.out / f"step-coherence-{signal}-{self.safe[name]}.npy"


def _table(entries: list[dict[str, Any]]) -> str:
    """Return an aligned table; a dash stands where nothing is defined (the JSON file says why)."""

    def number(value: float | None, pattern: str = "{:+.3f}") -> str:
        return "-" if value is None else pattern.format(value)

    lines = [list(_HEADINGS)]
    for entry in entries:
        for signal, values in entry["signals"].items():
            steps, batch = values["step_coherence"] or {}, values["batch_coherence"] or {}
            coherence = [number(steps.get(key)) for key in ("mean", "lag_one", "sharing", "disjoint")]
            counts = [number(steps.get(key), "{}") for key in ("steps", "undefined")]
            share = number(entry.get("recorder_share"), "{:.1%}")
            error = number((values["sketch_check"] or {}).get("rmse"), "{:.4f}")
            alike = number(entry.get("within_batch_cosine"))
            within = [number(batch.get("mean")), batch.get("between") or "-", number(batch.get("steps"), "{}")]
            lines.append([entry["name"], signal, *counts, *coherence, *within, share, error, alike])
    return aligned(lines, texts=2)
