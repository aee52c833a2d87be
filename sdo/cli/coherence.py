"""``sdo coherence``: how well the gradients of recorded runs agree, between steps and within batches."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.errors import InputError
from sdo.files import write_atomically

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from analysis import BatchCoherence, Estimate, GradientRows, Run

WORDS = (
    "Step coherence: mean cosine between the gradients of two steps.\n"
    "Batch coherence: mean cosine between the gradients of one step's samples (or micro-batches).\n"
    "One run of each kind gives no verdict: whether a difference is more than chance takes several seeds."
)
_HEADINGS = (
    *("run", "signal", "steps", "undefined", "step coherence", "next step", "shared sample", "none shared"),
    *("batch coherence", "recorder", "sketch rmse", "within-batch cosine"),
)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "coherence",
        help="run folders -> step and batch coherence",
        description="Compare the recorded gradients of one or more runs. Writes coherence.json, the matrices "
        "(step-coherence-SIGNAL-RUN.npy) and pictures on one scale (step-coherence-SIGNAL.png, "
        "batch-coherence-SIGNAL.png).",
        epilog="example: sdo coherence runs/uniform runs/sdo --out coherence",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a recorded run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--signal", metavar="weight|hidden", help="one signal only (default: every signal that all runs have)"
    )
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="W",
        help="average the directions of the last W steps before the cosine, in matrix and picture only",
    )
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that holds files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything, then write what can be written.

    Returns
    -------
    int
        0, or 1 when a part of the output failed; it is named on standard error.
    """
    from analysis import Run

    if args.smooth is not None and args.smooth < 1:
        raise InputError(f"--smooth {args.smooth}: expected a number of steps of at least 1")
    runs = [Run.open(path) for path in args.runs]
    names = unique_names([one.path for one in runs])
    signals = _signals(runs, args.signal)
    for one in runs:
        one.check()
        for signal in signals:
            one.kinds(signal)
    _check_out(args.out, overwrite=args.overwrite)
    args.out.mkdir(parents=True, exist_ok=True)
    report = _Report(args.out, dict(zip(names, runs, strict=True)), signals, args.smooth)
    report.write()
    return 1 if report.failed else 0


def unique_names(paths: list[Path]) -> list[str]:
    """Return the shortest path suffix that tells each run from the others.

    Raises
    ------
    InputError
        The same folder came twice.
    """
    parts = [path.resolve().parts for path in paths]
    for i, one in enumerate(parts):
        if one in parts[:i]:
            raise InputError(f"{paths[i]} came twice; expected different run folders")
    names = []
    for one in parts:
        depth = next(n for n in range(1, len(one) + 1) if sum(other[-n:] == one[-n:] for other in parts) == 1)
        names.append("/".join(part.strip("/") for part in one[-depth:]))
    return names


def file_names(names: list[str]) -> dict[str, str]:
    """Return for each run name one that is safe in a file name, and different from the others'."""
    safe: dict[str, str] = {}
    for name in names:
        base = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:80] or "run"
        candidate, number = base, 1
        while candidate in safe.values():
            number += 1
            candidate = f"{base}-{number}"
        safe[name] = candidate
    return safe


def _signals(runs: list[Run], wanted: str | None) -> list[str]:
    if wanted is not None:
        return [wanted]
    common = [signal for signal in runs[0].signals if all(signal in one.signals for one in runs)]
    if not common:
        held = "; ".join(f"{one.path}: {', '.join(one.signals) or 'none'}" for one in runs)
        raise InputError(f"the runs have no signal in common ({held})")
    return common


def _check_out(out: Path, *, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; expected a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise InputError(f"--out {out} holds files; choose another folder or add --overwrite")


class _Report:
    """Computes part by part; a part that fails is named and the others go on."""

    def __init__(self, out: Path, runs: dict[str, Run], signals: list[str], smooth: int | None) -> None:
        self.out, self.runs, self.signals, self.smooth = out, runs, signals, smooth
        self.safe = file_names(list(runs))
        self.failed: list[str] = []
        self.files: list[str] = []

    def write(self) -> None:

        entries: dict[str, dict[str, Any]] = {}
        for name, one in self.runs.items():
            entries[name] = self._part(f"run {name}", partial(_run_entry, one)) or {}
            entries[name] = {"name": name, "path": str(one.path), **entries[name], "signals": {}}
        for signal in self.signals:
            self._signal(signal, entries)
        content = {
            "format": "sdo-coherence",
            "format_version": 1,
            "smooth": self.smooth,
            "smooth_applies_to": "matrices and pictures",
            "files": self.files,
            "failed": self.failed,
            "runs": list(entries.values()),
        }
        text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        write_atomically({self.out / "coherence.json": lambda file: file.write_text(text, encoding="utf-8")})
        print(_table(list(entries.values())))
        print(f"\n{WORDS}\nwritten to {self.out}: coherence.json, {', '.join(self.files)}")

    def _signal(self, signal: str, entries: dict[str, dict[str, Any]]) -> None:
        steps: dict[str, NDArray[np.int64]] = {}
        series: dict[str, BatchCoherence] = {}
        between: dict[str, str] = {}
        for name, one in self.runs.items():
            entry = _sketch_check(one, signal)
            entries[name]["signals"][signal] = entry

            def between_steps(one: Run = one, name: str = name, entry: dict[str, Any] = entry) -> None:
                entry["step_coherence"], steps[name] = self._between_steps(one, signal, name)

            def within_steps(one: Run = one, name: str = name, entry: dict[str, Any] = entry) -> None:
                entry["batch_coherence"], series[name] = _within_steps(one, signal)
                between[name] = entry["batch_coherence"]["between"] or "samples"

            for part, compute in (("step_coherence", between_steps), ("batch_coherence", within_steps)):
                self._part(f"{part} of {signal} in run {name}", compute)
                if part not in entry:
                    entry |= {part: None, f"{part}_reason": "it could not be computed"}
        self._part(f"step-coherence-{signal}.png", lambda: self._heat_maps(signal, steps))
        kinds = sorted(set(between.values()))
        if len(kinds) > 1:
            # Micro-batches agree more than samples do, whatever the data: the legend must tell them apart.
            series = {f"{name}, {between[name]}": one for name, one in series.items()}
        of = " or ".join(kinds)
        if any(one.defined.any() for one in series.values()) or not series:
            self._part(f"batch-coherence-{signal}.png", lambda: self._series(signal, series, of))
        else:
            print(
                f"no picture of batch coherence, {signal}: no step has two gradients to compare; rows of single "
                "samples exist for hidden alone, rows of micro-batches with accumulation above 1"
            )

    def _between_steps(self, one: Run, signal: str, name: str) -> tuple[dict[str, Any], NDArray[np.int64]]:
        """Summarise, and write the matrix: at most one of them is in memory."""
        import numpy as np

        from analysis import step_coherence, step_summary

        rows = one.gradients(signal, "step")
        summary = step_summary(rows)
        matrix = step_coherence(rows.sketch, rows.defined, smooth=self.smooth)

        def save(file: Path) -> None:
            with file.open("wb") as stream:
                np.save(stream, matrix, allow_pickle=False)

        matrix_file = self._matrix_file(signal, name)
        write_atomically({matrix_file: save})
        self.files.append(matrix_file.name)
        entry: dict[str, Any] = {
            "steps": summary.rows,
            "defined": summary.defined,
            "undefined": summary.rows - summary.defined,
        }
        for field in ("mean", "lag_one", "sharing", "disjoint"):
            entry |= _with_reason(field, getattr(summary, field), "pairs")
        return entry | {"matrix": matrix_file.name}, rows.step

    def _heat_maps(self, signal: str, steps: dict[str, NDArray[np.int64]]) -> None:
        import numpy as np

        from analysis import coherence_heat_maps

        if not steps:
            raise RuntimeError("no run has a matrix")
        matrices = {name: np.load(self._matrix_file(signal, name), mmap_mode="r") for name in steps}
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
        self.files.append(name)

    def _matrix_file(self, signal: str, name: str) -> Path:
        return self.out / f"step-coherence-{signal}-{self.safe[name]}.npy"

    def _part(self, what: str, compute: Callable[[], Any]) -> Any:
        try:
            return compute()
        except Exception as error:  # whatever it was, the other parts are still worth having
            self.failed.append(what)
            print(f"sdo coherence: {what} failed: {' '.join(str(error).split())}", file=sys.stderr)
            return None


def _run_entry(one: Run) -> dict[str, Any]:
    organizer = one.info.get("organizer")
    entry: dict[str, Any] = {
        "organizer": organizer.get("name") if organizer else None,
        "status": one.info.get("status"),
    }
    entry |= _with_reason("recorder_share", _recorder_share(one), "steps")
    entry |= _losses(one)
    return entry | _with_reason("within_batch_embedding_cosine", _embedding_cosine(one), "steps")


def _recorder_share(one: Run) -> Estimate:
    """Return the recorder's time as a share of all steps' time, its own included."""
    from analysis import Estimate

    table = one.steps()
    own, rest = (sum(x or 0.0 for x in table.column(n).to_pylist()) for n in ("recorder_seconds", "seconds"))
    if own + rest <= 0:
        return Estimate.undefined("no step has a time")
    return Estimate.of(own / (own + rest), table.num_rows)


def _losses(one: Run) -> dict[str, Any]:
    table = one.steps()
    pairs = zip(table.column("step").to_pylist(), table.column("loss").to_pylist(), strict=True)
    known = [(step, loss) for step, loss in pairs if loss is not None and math.isfinite(loss)]
    if not known:
        return {"loss": None, "loss_reason": "no step has a finite loss"}
    (first_step, first), (last_step, last) = known[0], known[-1]
    return {"loss": {"first_step": first_step, "first": first, "last_step": last_step, "last": last}}


def _embedding_cosine(one: Run) -> Estimate:
    """Return the mean over steps of the mean pairwise cosine of the embeddings in a batch."""
    import numpy as np

    from analysis import Estimate, mean_pairwise_cosine
    from sdo.embeddings import Embeddings

    noted = one.info.get("embeddings") or {}
    if not noted.get("path"):
        return Estimate.undefined("the run notes no embeddings file")
    candidates = [Path(noted["path"]), one.path / noted["path"]]
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        return Estimate.undefined(f"the embeddings file {noted['path']} is not there")
    try:
        embeddings = Embeddings.read(file)
    except InputError as error:
        return Estimate.undefined(str(error))
    if noted.get("fingerprint") not in (None, embeddings.fingerprint):
        return Estimate.undefined(f"{file} has changed since the run: its fingerprint differs")
    batches = [np.array(ids or [], dtype=np.int64) for ids in one.steps().column("sample_ids").to_pylist()]
    if any(np.any((ids < 0) | (ids >= len(embeddings))) for ids in batches):
        return Estimate.undefined("sample ids of the run are no rows of the embeddings")
    each = [mean_pairwise_cosine(embeddings.unit[ids]).value for ids in batches if len(ids)]
    defined = [value for value in each if value is not None]
    if not defined:
        return Estimate.undefined("no step has two samples with an embedding")
    return Estimate.of(float(np.mean(defined)), len(defined))


def _within_steps(one: Run, signal: str) -> tuple[dict[str, Any], BatchCoherence]:
    """Summarise batch coherence and, of samples, the measures of the Gram matrix of each step."""
    from analysis import batch_coherence, describe, gram_matrix, gram_measures

    recorded = one.kinds(signal)
    kind = next((kind for kind in ("sample", "micro_batch") if recorded.get(kind)), None)
    measures: list[dict[str, Estimate]] = []

    def groups() -> Iterator[GradientRows]:
        for rows in one.iter_steps(signal, kind) if kind else ():
            if kind == "sample":
                measures.append(gram_measures(gram_matrix(rows.sketch, rows.norm, rows.defined)))
            yield rows

    result = batch_coherence(groups())
    spread = dataclasses.asdict(result.spread())
    if kind is None:
        spread["reason"] = "the run recorded no sample and no micro-batch gradients"
    between = {"sample": "samples", "micro_batch": "micro-batches", None: None}[kind]
    entry: dict[str, Any] = {"between": between, "steps": spread.pop("count")}
    entry |= {"undefined_steps": int((~result.defined).sum())} | spread
    if spread["reason"] is None:
        del entry["reason"]
    if kind == "sample":
        entry["one_step_measures"] = {}
        for name in measures[0] if measures else ():
            values = [step[name].value for step in measures]
            known = [value for value in values if value is not None]
            described = dataclasses.asdict(describe(known, "it is undefined in every step"))
            described["undefined"] = len(values) - len(known)
            entry["one_step_measures"][name] = described
    return entry, result


def _sketch_check(one: Run, signal: str) -> dict[str, Any]:
    check = (one.info.get("sketch_check") or {}).get(signal)
    if check:
        return {"sketch_check": check}
    return {"sketch_check": None, "sketch_check_reason": "the run compared no sketches with exact gradients"}


def _with_reason(name: str, estimate: Estimate, unit: str) -> dict[str, Any]:
    entry: dict[str, Any] = {name: estimate.value, f"{name}_{unit}": estimate.count}
    return entry if estimate.reason is None else entry | {f"{name}_reason": estimate.reason}


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
            alike = number(entry.get("within_batch_embedding_cosine"))
            lines.append([entry["name"], signal, *counts, *coherence, number(batch.get("mean")), share, error, alike])
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADINGS))]
    # Texts to the left, numbers to the right.
    aligned = [
        [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in aligned)
