"""``sdo probe``: would SDO's neighbor batches change the gradients? Asked before anything is trained."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.atomic import write_atomically
from sdo.checks import whole_number
from sdo.cli import dpo, sft
from sdo.cli.common.outputs import Outputs, check_out_folder, json_writer, make_folder
from sdo.cli.common.probe_text import WORDS, table
from sdo.cli.training.build import prepare
from sdo.cli.training.config import RecorderOptions, apply_overrides, load_config
from sdo.cli.training.data import SFTColumns
from sdo.cli.training.run_file import add_training_parser
from sdo.errors import InputError

if TYPE_CHECKING:
    from analysis.probe.design import ProbeDesign
    from analysis.probe.study import SignalProbe
    from diagnostics.sample_gradients import Sampled

_METHODS = {"sft": sft.METHOD, "dpo": dpo.METHOD}
_KEYS = {"model": "model_name_or_path", "data": "dataset_name", "embeddings": "organizer.embeddings"}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = add_training_parser(
        subparsers,
        "probe",
        "sdo probe --model HuggingFaceTB/SmolLM2-135M-Instruct --data train.jsonl --embeddings E.npy --out probe\n"
        "    --prompt_column question --completion_column answer --organizer.k 4 --seed 617",
        SFTColumns,
        " Builds the trainer that sdo sft would build from the same options, takes the gradients of some samples, and "
        "compares SDO with uniform batches and with random locality: the curve of gradient cosine over embedding "
        "cosine, the coherence that it predicts for the plan, and what real batches of the plan show. Trains nothing. "
        "Writes probe.json and probe.png. Of recorder: weight, signals and sketch_size are used.",
    )
    add = parser.add_argument
    add("--model", metavar="M", help="folder or hub id; TRL's model_name_or_path")
    add("--data", metavar="D", help="file, folder or hub id; TRL's dataset_name")
    add("--embeddings", metavar="E.npy", help="one row a sample; the key organizer.embeddings")
    add("--batch-size", type=int, metavar="B", help="samples of one optimizer step (default: the run file's)")
    add("--samples", type=int, default=256, help="gradients to take, about (default: 256)")
    add("--steps", type=int, help="steps of the plan to look at (default: its first two organizer epochs)")
    add(
        "--smallest-change",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="change of 1 + (B - 1) coherence that counts (default: 0.05)",
    )
    add("--method", choices=list(_METHODS), default="sft", help="the command that would train (default: sft)")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    add("--overwrite", action="store_true", help="write into a folder that holds files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything, take the gradients, then write what can be written.

    Returns
    -------
    int
        0, or 1 when the picture failed; it is named on standard error.
    """
    _check(args)
    taken = _take(args)
    found = _analyze(args, taken)
    make_folder(args.out)
    return _write(args, taken, found)


@dataclass(frozen=True, eq=False)
class _Taken:
    """The gradients, and what they were taken of."""

    design: ProbeDesign
    sampled: Sampled
    unit: Any
    provenance: dict[str, Any]
    notes: list[str]


def _check(args: argparse.Namespace) -> None:
    """Refuse wrong options before anything is loaded, and turn the short ones into keys of the run file."""
    if not 0 < args.smallest_change < 1:
        raise InputError(f"--smallest-change is {args.smallest_change}; expected a share between 0 and 1")
    for name, value, least in (("batch-size", args.batch_size, 2), ("samples", args.samples, 16)):
        if value is not None:
            whole_number(f"--{name}", value, least)
    given = [(key, getattr(args, option)) for option, key in _KEYS.items()]
    if args.batch_size is not None:
        given += [("per_device_train_batch_size", args.batch_size), ("gradient_accumulation_steps", 1)]
    args.overrides += [f"--{key}={value}" for key, value in given if value is not None]
    merged = apply_overrides(load_config(args.config) if args.config else {}, args.overrides)
    embeddings = (merged.get("organizer") or {}).get("embeddings")
    if not embeddings:
        raise InputError(
            "--embeddings is missing; expected a matrix, one row a training sample; fix: sdo embed makes one"
        )
    named = (args.config, merged.get("model_name_or_path"), merged.get("dataset_name"), embeddings)
    read = [one for one in named if isinstance(one, str)]
    check_out_folder(args.out, overwrite=args.overwrite, sources=read, files=("probe.json",))


def _take(args: argparse.Namespace) -> _Taken:
    """Build the trainer and take the gradients."""
    with tempfile.TemporaryDirectory(prefix="sdo-probe-") as scratch:
        setup = prepare(_METHODS[args.method], args, scratch=scratch)
        for refusal in setup.refused or []:
            raise InputError(refusal)
        from analysis.probe.design import design_probe
        from diagnostics.sample_gradients import sample_gradients
        from sdo.trainers.attach import attach

        organizer, trainer = setup.organizer, setup.trainer
        assert organizer is not None  # noqa: S101 - there are embeddings, and nothing was refused
        assert setup.options.organizer is not None  # noqa: S101
        handle = attach(trainer, organizer, id_column=setup.options.organizer.id_column)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            design = design_probe(handle.plan, samples=args.samples, steps=args.steps)
        recorder = setup.options.recorder or RecorderOptions()
        ids = design.sample_ids
        sampled = sample_gradients(
            trainer,
            ids,
            signals=recorder.signals,
            weight=recorder.weight,
            sketch_size=recorder.sketch_size,
            progress=_progress(len(ids)),
        )
        assert organizer.embeddings is not None  # noqa: S101
        provenance = {
            "method": args.method,
            "model": trainer.model.config._name_or_path or None,
            "plan": handle.plan.describe(),
            "plan_fingerprint": handle.plan.fingerprint,
            "precision": _precision(trainer.args),
            "device": sampled.device,
        }
        return _Taken(
            design, sampled, organizer.embeddings.unit[ids], provenance, sorted({str(w.message) for w in caught})
        )


def _analyze(args: argparse.Namespace, taken: _Taken) -> dict[str, SignalProbe]:
    from analysis.probe.batches import ProbeRows
    from analysis.probe.study import probe_signal

    seed = int(taken.provenance["plan"]["options"]["seed"])
    found = {}
    for name, one in taken.sampled.signals.items():
        rows = ProbeRows(one.sample_ids, taken.unit, one.sketch, one.norm, one.defined)
        found[name] = probe_signal(taken.design, rows, smallest_change=args.smallest_change, seed=seed)
    return found


def _write(args: argparse.Namespace, taken: _Taken, found: dict[str, SignalProbe]) -> int:
    """Write the picture, then the record that names it, and print."""
    from analysis.probe.results import advice, design_entry, duration, more_samples, notes, rule, signal_entry

    design, sampled = taken.design, taken.sampled
    per_sample = sampled.seconds / len(design.sample_ids)
    first = next(iter(found))
    sentence = advice(first, found[first], design, per_sample)
    cost = more_samples(found[first], design, per_sample)
    said = notes(found, {name: one.reason for name, one in sampled.signals.items()}, design) + taken.notes
    outputs = _plot(found, design, args.out)
    content = {
        "format": "sdo-probe",
        "format_version": 1,
        "advice": {
            "outcome": found[first].verdict.outcome,
            "signal": first,
            "sentence": sentence,
            "rule": rule(args.smallest_change),
        },
        **taken.provenance,
        "design": design_entry(design),
        "seconds": sampled.seconds,
        "more_samples": cost,
        "signals": {name: _described(sampled.signals[name]) | signal_entry(one) for name, one in found.items()},
        "notes": said,
        "files": outputs.files,
        "failed": outputs.failed,
    }
    write_atomically({args.out / "probe.json": json_writer(content)})
    print(table(found, {name: one.parameter for name, one in sampled.signals.items()}, design))
    for note in said:
        print(f"note: {note}")
    print(f"\n{WORDS}\nadvice, {rule(args.smallest_change)}; it rests on {first}.")
    narrower = "."
    if cost["half_width"] is not None:
        narrower = (
            f", and the interval of within minus between would go from ±{cost['half_width']:.3f} to about "
            f"±{cost['half_width_then']:.3f}."
        )
    more = duration(cost["more_seconds"])
    print(f"cost: {per_sample:.2f} s a sample; {cost['samples']} samples would take {more} more{narrower}")
    print(f"written to {args.out}: {', '.join(['probe.json', *content['files']])}\n\n{sentence}")
    return 1 if outputs.failed else 0


def _plot(found: dict[str, SignalProbe], design: ProbeDesign, out: Path) -> Outputs:
    from analysis import save
    from analysis.probe.plots import probe_figure

    def picture() -> None:
        figure, _ = probe_figure(found, design, title=f"Probe before training, batches of {design.batch_size}")
        save(figure, out / "probe.png")
        outputs.files.append("probe.png")

    outputs = Outputs("probe")
    outputs.attempt("probe.png", picture)
    return outputs


def _described(one: Any) -> dict[str, Any]:
    """What is known of a signal beside the analysis."""
    return {
        "parameter": one.parameter,
        "sketch": one.stored,
        "sketch_check": one.check,
        "norm_state": one.norm_state,
        "tokens": int(one.tokens.sum()),
    }


def _precision(training: Any) -> str:
    if getattr(training, "bf16", False):
        return "bf16 autocast"
    return "fp16 autocast" if getattr(training, "fp16", False) else "as the weights"


def _progress(count: int) -> Callable[[int], None] | None:
    if not sys.stderr.isatty():
        return None

    def show(done: int) -> None:
        print(f"\r{done} of {count} samples", end="\n" if done == count else "", file=sys.stderr, flush=True)

    return show
