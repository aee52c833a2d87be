"""``sdo demo``: train a small model with and without SDO, and explain what happened; no download, no GPU."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdo.checks import whole_number
from sdo.cli.commands import COMMANDS
from sdo.cli.common.run_options import open_runs
from sdo.demo.families import families_section
from sdo.demo.folder import MANIFEST, NAMES, DemoFolder
from sdo.demo.word_problems import Problem, generate
from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError, counted
from sdo.organizers.plan import Organizer
from sdo.organizers.sdo import SDO
from sdo.organizers.uniform import Uniform

if TYPE_CHECKING:
    from analysis.report import SectionSpec

_SPOKEN = {"uniform": "uniform", "sdo": "SDO's"}
MICRO_BATCH, MICRO_BATCHES = 4, 2
BATCH = MICRO_BATCH * MICRO_BATCHES  # samples of one optimizer step, B
K = 4
EMBEDDING_DIM = 64
# Short: after a long warm-up only the digits of the answers are left to learn, on which no two samples agree.
WARM_UP_PART, WARM_UP_BATCH, WARM_UP_RATE = 4, 16, 2e-3
RATE = 1e-3
SAMPLE_EVERY = 2
EVALUATIONS = 5  # after the one at the start
_MAX_SEED = 2**32 - 1


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "demo",
        help=COMMANDS["demo"],
        description="Train a small model on made-up word problems, once with uniform batches and once with SDO's, "
        "record both and compare their gradients. Needs no download and no GPU; one to two minutes on two cores. "
        "Writes the data, both run folders (uniform, sdo), pictures and numbers (coherence) and report.html, the "
        "page to look at.",
        epilog="example: sdo demo --out demo",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for everything")
    parser.add_argument(
        "--steps",
        type=int,
        default=240,
        metavar="N",
        help="steps of each training; a quarter as many warm the model up (default: 240)",
    )
    parser.add_argument(
        "--problems",
        type=int,
        default=512,
        metavar="N",
        help="word problems to train on; a quarter as many are held out (default: 512)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of problems, model and batches (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier demo in DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train twice, compare, and say in plain words what came out.

    Returns
    -------
    int
        0, or 1 when a part of the comparison failed; it is named on standard error.

    Raises
    ------
    InputError
        For options out of range, packages that are missing, or a folder that holds other files; nothing has been
        written or removed then.
    """
    _check_options(args)
    folder = DemoFolder(args.out)
    folder.check(overwrite=args.overwrite)
    if args.overwrite and (args.out / MANIFEST).exists():
        print(f"replacing the earlier demo in {args.out}", flush=True)
    data = _DemoData.make(args.problems, args.seed)
    say = _Clock()
    say("loading torch and TRL")
    _require_training()
    with folder.claimed(), _quiet(), _one_thread():
        return _demo(args, data, say)


def _demo(args: argparse.Namespace, data: _DemoData, say: _Clock) -> int:
    """Do the work of :func:`run` in a folder that is free."""
    out: Path = args.out
    say(f"writing {len(data.train)} word problems to train on and their embeddings")
    embeddings = data.write(out, args.seed)
    warm_up = max(2, args.steps // WARM_UP_PART)
    say(f"warming the model up on other problems: {warm_up} steps, not recorded")
    model, tokenizer = data.build(args.seed)
    _train(model, tokenizer, data.warm_up, steps=warm_up, seed=args.seed)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    organizers: dict[str, Organizer] = {
        "uniform": Uniform(embeddings, seed=args.seed),
        "sdo": SDO(embeddings, k=K, seed=args.seed),
    }
    for name, organizer in organizers.items():
        say(f"training with {_SPOKEN[name]} batches: {counted(args.steps, 'step')}, recorded in {out / name}")
        model, tokenizer = data.build(args.seed)
        model.load_state_dict(weights)
        recording = _Recording(organizer, data.held_out, out / name)
        _train(model, tokenizer, data.train, steps=args.steps, seed=args.seed, recording=recording)
    say(f"comparing the gradients of both runs, in {out / 'coherence'}")
    compared, table = _compare(out)
    say(f"writing the report, {out / 'report.html'}")
    setting = _setting(args, data, embeddings.dim, warm_up, model.num_parameters())
    reported, first = _report(args, families_section(data.families, setting))
    say("done")
    print(f"\n{table}\n{first}\n{_where(out, args.seed)}")
    return max(compared, reported)


def _check_options(args: argparse.Namespace) -> None:
    limits = (
        ("--steps", args.steps, 2, 100_000),
        ("--problems", args.problems, 2 * BATCH, 2_000),
        ("--seed", args.seed, 0, _MAX_SEED),
    )
    for name, value, low, high in limits:
        whole_number(name, value, low, high)


def _require_training() -> None:
    """Load what training needs, so that a missing package is said before anything is written."""
    try:
        import datasets  # noqa: F401 - loaded to see whether it is there
        import trl  # noqa: F401
        from transformers import Trainer  # noqa: F401
    except ImportError as error:
        raise InputError(f"training needs {error.name}; fix: pip install 'sdo-toolkit[train]'") from error


class _Clock:
    """Prints one line a stage, with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self, what: str) -> None:
        print(f"[{time.perf_counter() - self._start:4.0f} s] {what}", flush=True)


# ---------------------------------------------------------------------- the material


@dataclass(frozen=True)
class _DemoData:
    """Word problems in three parts that share no prompt."""

    train: list[Problem]
    held_out: list[Problem]
    warm_up: list[Problem]

    @classmethod
    def make(cls, n: int, seed: int) -> _DemoData:
        """Draw all at once: a prompt comes only once, so the parts cannot overlap."""
        held_out = n // 4
        problems = generate(n + held_out + 2 * n, seed=seed)
        return cls(problems[:n], problems[n : n + held_out], problems[n + held_out :])

    @property
    def families(self) -> list[str]:
        """The family of each problem to train on, by sample id."""
        return [problem.family for problem in self.train]

    def write(self, out: Path, seed: int) -> Embeddings:
        """Write the problems and the embeddings of those to train on; row i belongs to line i."""
        from sdo.embeddings.lsa import lsa

        for name, problems in (("train.jsonl", self.train), ("held_out.jsonl", self.held_out)):
            lines = [json.dumps({"sample_id": i, **vars(problem)}) for i, problem in enumerate(problems)]
            (out / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        # With as many columns as problems, LSA would compress nothing.
        rows = lsa([p.prompt for p in self.train], dim=min(EMBEDDING_DIM, len(self.train) // 2), seed=seed)
        file = (out / "embeddings.npy").resolve()
        np.save(file, rows, allow_pickle=False)
        return Embeddings.read(file)

    def build(self, seed: int) -> tuple[Any, Any]:
        """Return the small model, with the same random weights at every call, and its tokenizer."""
        from sdo.demo.tiny_model import build

        texts = [p.prompt + p.completion for p in (*self.train, *self.warm_up)]
        return build(texts, seed=seed)


# ---------------------------------------------------------------------- training


@dataclass(frozen=True)
class _Recording:
    """What makes a training an organized and recorded one."""

    organizer: Organizer
    held_out: list[Problem]
    out: Path


def _train(
    model: Any,
    tokenizer: Any,
    problems: list[Problem],
    *,
    steps: int,
    seed: int,
    recording: _Recording | None = None,
) -> None:
    """Train with TRL's SFTTrainer on the CPU; recorded, evaluated and organized where asked for."""
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    from diagnostics import GradientRecorder
    from sdo.trainers.attach import attach

    recorded = recording is not None
    with tempfile.TemporaryDirectory(prefix="sdo-demo-") as scratch:
        settings = SFTConfig(
            output_dir=scratch,
            max_steps=steps,
            learning_rate=RATE if recorded else WARM_UP_RATE,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=min(10, steps // 2),
            per_device_train_batch_size=MICRO_BATCH if recorded else WARM_UP_BATCH,
            gradient_accumulation_steps=MICRO_BATCHES if recorded else 1,
            per_device_eval_batch_size=32,
            eval_strategy="steps" if recorded else "no",
            eval_steps=-(-steps // EVALUATIONS),
            eval_on_start=recorded,
            logging_steps=1,  # the recorder takes the total gradient norm from the trainer's log
            seed=seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model=model,
            args=settings,
            train_dataset=_dataset(problems),
            eval_dataset=_dataset(recording.held_out) if recording is not None else None,
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        if recording is None:
            trainer.train()
            return
        handle = attach(trainer, recording.organizer)
        trainer.add_callback(GradientRecorder(recording.out, sample_every=SAMPLE_EVERY))
        trainer.train()
        handle.detach()


def _dataset(problems: Sequence[Problem]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(
        {
            "prompt": [problem.prompt for problem in problems],
            "completion": [problem.completion for problem in problems],
            "sample_id": list(range(len(problems))),
        }
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute on one thread: so small a model gains little from more, and on a busy machine they wait."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars of datasets, and one notice on an option that TRL sets by itself."""
    import datasets

    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`gradient_checkpointing` is deprecated", category=FutureWarning)
            yield
    finally:
        if bars:
            datasets.enable_progress_bars()


# ---------------------------------------------------------------------- comparing


def _compare(out: Path) -> tuple[int, str]:
    """Run ``sdo coherence`` on both runs; its status, and what it prints."""
    from sdo.cli import coherence

    args = argparse.Namespace(
        runs=[out / name for name in NAMES], out=out / "coherence", signal=None, smooth=None, overwrite=False
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = coherence.run(args)
    return status, printed.getvalue()


def _report(args: argparse.Namespace, section: SectionSpec) -> tuple[int, str]:
    """Write the report on both runs; the status of ``sdo report``, and what stands first on the page."""
    from analysis.report import SECTIONS, build_report

    out: Path = args.out
    report = build_report(
        open_runs([out / name for name in NAMES]),
        title="Uniform and SDO batches",
        command=["sdo", "demo", *(f"--{name}={vars(args)[name]}" for name in ("out", "steps", "problems", "seed"))],
        sections=[section, *SECTIONS],
    )
    report.write(out / "report.html")
    for title in report.failed:
        print(f"sdo demo: the section {title!r} of the report failed; the page shows why", file=sys.stderr)
    said = [*(finding["words"] for finding in report.numbers["verdict"]), *report.numbers["alerts"]]
    lines = [textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  ") for text in said]
    return int(bool(report.failed)), "\n".join(["What stands first in the report:", *lines, ""])


def _where(out: Path, seed: int) -> str:
    """Say where to look, and which commands lead on."""
    folder, other = shlex.quote(str(out)), shlex.quote(f"{out}-seed-{seed + 1}")
    return "\n".join(
        (
            "All of it on one page, for a browser:",
            f"    {out / 'report.html'}",
            "Does it hold for another seed?",
            f"    sdo demo --out {other} --seed {seed + 1}",
            "The pictures with less noise:",
            f"    sdo coherence {folder}/uniform {folder}/sdo --smooth 10 --out {folder}/smooth",
            "Which batches SDO makes, without training:",
            f"    sdo plan --embeddings {folder}/embeddings.npy --batch-size {BATCH} --out {folder}/plan.parquet",
        )
    )


def _setting(args: argparse.Namespace, data: _DemoData, dim: int, warm_up: int, parameters: int) -> str:
    """Say what was trained, in one paragraph."""
    return (
        f"A language model with {parameters / 1e6:.1f} million parameters, made on the spot, was warmed up for "
        f"{warm_up} steps and then trained twice from the same weights, with the same hyperparameters and the same "
        f"seed ({args.seed}), for {args.steps} steps of {BATCH} samples: once with uniform batches (random "
        f"permutations), once with SDO's (batches of neighbors in embedding, k = {K}). The data are "
        f"{len(data.train)} made-up word problems of {len(set(data.families))} known families, embedded by "
        f"LSA ({dim} columns), which does not see the families; {len(data.held_out)} other problems are held out."
    )
