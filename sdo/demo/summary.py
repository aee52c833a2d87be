"""What a demo's two runs came to, in a table and in plain words."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis import Run

NAMES = ("uniform", "sdo")
SIGNALS = ("hidden", "weight")


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one run came to; None where a number is not defined.

    Attributes
    ----------
    entry
        The run's part of ``coherence.json``.
    steps
        Steps trained.
    seen
        Shape ``(N,)``, how often each sample was trained on.
    same_family
        Mean over the batches of the share of pairs that are of one family.
    quarters
        Batch coherence of ``hidden``: means of the first and of the last quarter of the steps that hold it.
    held_out
        Loss in nats a token, mean over the held-out problems, at the first and at the last evaluation.
    """

    entry: dict[str, Any]
    steps: int
    seen: NDArray[np.int64]
    same_family: float
    quarters: tuple[float | None, float | None]
    held_out: tuple[float | None, float | None]

    @classmethod
    def read(cls, run: Run, entry: dict[str, Any], families: Sequence[str]) -> Outcome:
        """Take the numbers from a run folder and from its part of ``coherence.json``."""
        from analysis.coherence.study import within_steps

        batches = run.steps().column("sample_ids").to_pylist()
        series = within_steps(run, "hidden").series
        values = series.value[series.defined]
        quarter = max(1, len(values) // 4)
        return cls(
            entry=entry,
            steps=len(batches),
            seen=np.bincount(np.concatenate(batches), minlength=len(families)),
            same_family=float(np.mean([same_family_share(ids, families) for ids in batches])),
            quarters=(_mean(values[:quarter]), _mean(values[-quarter:])),
            held_out=_held_out(run),
        )

    @property
    def cosine(self) -> float | None:
        """Mean over the batches of the mean cosine between two samples' embeddings."""
        value: float | None = self.entry["within_batch_cosine"]
        return value

    @property
    def times(self) -> str:
        """How often a sample was trained on, least and most."""
        low, high = self.seen.min(), self.seen.max()
        return str(low) if low == high else f"{low} to {high}"

    def step(self, signal: str, key: str = "mean") -> float | None:
        """Step coherence; the key names the pairs of steps: mean (all), lag_one, sharing, disjoint."""
        return (self.entry["signals"][signal]["step_coherence"] or {}).get(key)

    def batch(self, signal: str) -> float | None:
        """Mean batch coherence."""
        return (self.entry["signals"][signal]["batch_coherence"] or {}).get("mean")

    @property
    def cells(self) -> list[str]:
        """The run's column in the table; see :func:`_table`."""
        check = self.entry["signals"]["weight"]["sketch_check"] or {}
        share = self.entry["recorder_share"]
        return [
            str(self.steps),
            str(np.count_nonzero(self.seen)),
            self.times,
            _number(self.cosine),
            f"{self.same_family:.1%}",
            *(_number(self.step(signal, key)) for signal in SIGNALS for key in ("mean", "lag_one")),
            *(_number(self.batch(signal)) for signal in SIGNALS),
            " -> ".join(map(_number, self.held_out)),
            f"{_number(check.get('rmse'))}, {_number(check.get('max_abs_error'))}",
            "-" if share is None else f"{share:.1%}",
        ]


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None


def _held_out(run: Run) -> tuple[float | None, float | None]:
    table = run.evaluations()
    steps, scores = table.column("step").to_numpy(), table.column("score").to_numpy()
    if not len(steps):
        return None, None
    return _mean(scores[steps == steps[0]]), _mean(scores[steps == steps[-1]])


def same_family_share(sample_ids: Sequence[int], families: Sequence[str]) -> float:
    """Return the share of the pairs of samples that are of one family.

    Parameters
    ----------
    sample_ids
        At least two distinct samples.
    families
        The family of each sample.
    """
    counts = np.unique([families[i] for i in sample_ids], return_counts=True)[1]
    n = len(sample_ids)
    return float((counts * (counts - 1)).sum() / (n * (n - 1)))


def summarise(out: Path, families: Sequence[str], setting: str) -> str:
    """Say in plain words what a demo's folder holds.

    Parameters
    ----------
    out
        The folder, with both runs and their comparison.
    families
        The family of each sample.
    setting
        What was trained, in words.

    Returns
    -------
    str
        Markdown. Every number is read from the folder, and every comparison follows from the numbers.
    """
    from analysis import Run

    content = json.loads((out / "coherence" / "coherence.json").read_text(encoding="utf-8"))
    entries = {entry["name"]: entry for entry in content["runs"]}
    runs = {name: Run.open(out / name) for name in NAMES}
    uniform, sdo = (Outcome.read(runs[name], entries[name], families) for name in NAMES)
    parameter = runs["sdo"].info["signals"]["weight"]["parameter"]
    failed = [f"Parts of the comparison failed: {', '.join(content['failed'])}."] if content["failed"] else []
    sections = [
        "# Uniform batches and SDO's: two short trainings",
        *map(_fill, [setting, *failed]),
        _table(uniform, sdo),
        _fill(
            "Step coherence is the mean cosine between the gradients of two steps, batch coherence that between the "
            "gradients of one step's samples or micro-batches: 1 is the same direction, 0 unrelated, -1 opposite. Two "
            "gradients are followed: hidden, at the output of the last layer, and weight, of the parameter "
            f"{parameter}. Held-out loss is in nats a token, mean over the held-out problems."
        ),
        "## What the numbers and pictures show",
        *map(_fill, _findings(uniform, sdo, families)),
        "## What one short run cannot show",
        "\n".join(_fill(text, bullet=True) for text in _limits(uniform, sdo)),
        "## Where to look, and what to try next",
        _where(out, content["files"], runs["sdo"].info),
    ]
    return "\n\n".join(sections) + "\n"


def _table(uniform: Outcome, sdo: Outcome) -> str:
    """Return an aligned Markdown table; a dash stands where nothing is defined."""
    labels = [
        "steps",
        f"distinct samples seen, of {len(sdo.seen)}",
        "times a sample was seen",
        "within-batch cosine of embeddings",
        "pairs of one family within a batch",
        *(f"step coherence, {signal}{which}" for signal in SIGNALS for which in ("", ", next step")),
        "batch coherence, hidden (samples)",
        "batch coherence, weight (micro-batches)",
        "held-out loss, start -> end",
        "error of a sketched cosine, weight: rms, largest",
        "recorder's share of step time",
    ]
    rows = [("", *NAMES), *zip(labels, uniform.cells, sdo.cells, strict=True)]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [
        " | ".join([f"| {row[0]:<{first}}", *(f"{cell:>{n}}" for cell, n in zip(row[1:], others, strict=True))]) + " |"
        for row in rows
    ]
    rule = f"|{'-' * (first + 2)}|" + "".join(f"{'-' * (n + 1)}:|" for n in others)
    return "\n".join([lines[0], rule, *lines[1:]])


def _findings(uniform: Outcome, sdo: Outcome, families: Sequence[str]) -> list[str]:
    """Return sentences that follow from the numbers, whichever way they point."""
    chance = same_family_share(range(len(families)), families)
    alike = _compared(uniform.cosine, sdo.cosine, "more alike", "less alike", "as alike")
    samples, halves = (
        _compared(uniform.batch(signal), sdo.batch(signal), "more", "less", "as much") for signal in SIGNALS
    )
    steps = _compared(uniform.step("hidden"), sdo.step("hidden"), "more", "less", "as much")
    end = _compared(uniform.held_out[1], sdo.held_out[1], "higher", "lower", "the same", "not comparable")

    def course(pair: tuple[float | None, float | None]) -> str:
        return f"from {_number(pair[0])} to {_number(pair[1])}"

    def pairs(key: str) -> str:
        return _against(sdo.step("hidden", key), uniform.step("hidden", key))

    return [
        f"In the batches: SDO's are {alike} in embedding (mean cosine {_against(sdo.cosine, uniform.cosine)}). Of the "
        f"pairs in a batch {sdo.same_family:.1%} are of one family, against {uniform.same_family:.1%}; chance gives "
        f"{chance:.1%}.",
        "Within a step (batch-coherence-hidden.png): under SDO the gradients of a batch's samples agree "
        f"{samples} (batch coherence {_against(sdo.batch('hidden'), uniform.batch('hidden'))}). Between the first and "
        f"the last quarter of the run it went {course(sdo.quarters)} under SDO and {course(uniform.quarters)} under "
        f"uniform. The two micro-batches of a step agree {halves} under SDO (batch-coherence-weight.png: "
        f"{_against(sdo.batch('weight'), uniform.batch('weight'))}).",
        "Between steps (step-coherence-hidden.png; red: same direction, blue: opposite): under SDO the gradients of "
        f"two steps agree {steps} on average ({pairs('mean')}). Pairs of steps that share a sample have a mean cosine "
        f"of {pairs('sharing')}, pairs that share none of {pairs('disjoint')}.",
        f"On held-out problems: the loss went {course(sdo.held_out)} under SDO and {course(uniform.held_out)} under "
        f"uniform; at the end SDO's is {end}.",
    ]


def _limits(uniform: Outcome, sdo: Outcome) -> list[str]:
    def seen(one: Outcome) -> str:
        return f"{one.times} times ({np.count_nonzero(one.seen)} distinct samples)"

    return [
        "There is one seed of each kind, so none of this is a verdict: another seed may turn any difference round.",
        "The data are few, made up from templates, and the model is tiny: real data and real models may differ.",
        "The steps of a run are not independent: all the cells of a picture come from one trajectory, and no p-value "
        "is given.",
        f"As many steps are not the same data: a sample was seen {seen(sdo)} under SDO and {seen(uniform)} under "
        "uniform, which alone moves losses and gradients.",
    ]


def _where(out: Path, files: Sequence[str], info: dict[str, Any]) -> str:
    """List the pictures, and commands that lead on."""
    seed, batch_size = int(info["seeds"]["seed"]), info["organizer"]["batch_size"]
    folder, other = shlex.quote(str(out)), shlex.quote(f"{out}-seed-{seed + 1}")
    parts = {
        "All of it on one page, for a browser:": [str(out / "report.html")],
        "Pictures:": [str(out / "coherence" / name) for name in files if name.endswith(".png")],
        "Numbers, and this text:": [str(out / "coherence" / "coherence.json"), str(out / "summary.md")],
        "Next: does it hold for another seed?": [f"sdo demo --out {other} --seed {seed + 1}"],
        "The same pictures with less noise:": [
            f"sdo coherence {folder}/uniform {folder}/sdo --smooth 10 --out {folder}/smooth"
        ],
        "Which batches SDO makes, without training:": [
            f"sdo plan --embeddings {folder}/embeddings.npy --batch-size {batch_size} --out {folder}/plan.parquet"
        ],
    }
    return "\n\n".join(title + "\n\n" + "\n".join(f"    {line}" for line in lines) for title, lines in parts.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:z.3f}"


def _against(sdo: float | None, uniform: float | None) -> str:
    return f"{_number(sdo)} against {_number(uniform)} under uniform"


def _compared(
    uniform: float | None,
    sdo: float | None,
    more: str,
    less: str,
    same: str,
    unknown: str = "to an unknown degree",
) -> str:
    """Choose the word for SDO's value; values that are printed alike count as the same."""
    if uniform is None or sdo is None:
        return unknown
    if _number(uniform) == _number(sdo):
        return same
    return more if sdo > uniform else less


def _fill(text: str, *, bullet: bool = False) -> str:
    first, rest = ("- ", "  ") if bullet else ("", "")
    return textwrap.fill(
        text, 100, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )
