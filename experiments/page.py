"""The results page: docs/results.md with its pictures, made from the committed figures of finished cells alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.drawing import save
from experiments.cell import RESULTS, finished, result_file, start_of
from experiments.claims import sections
from experiments.figures import Result, balance, mean_score, score
from experiments.pictures import curves, forest
from experiments.published import balance_section
from experiments.settings import FOLDER, SCALES, Setting, load
from experiments.tables import markdown
from sdo.atomic import write_atomically
from sdo.errors import InputError

DOCS = Path(__file__).resolve().parents[1] / "docs"
_INTRO = """# Does it hold?

Made by `python -m experiments page` from the figures of finished cells in `experiments/results`; nothing here
is written by hand but the words. A cell is one training; how each was made, and how to make the ones that are missing,
is in [experiments/settings](../experiments/settings).

How to read it: a difference is between two arms with the same seed, paired; in brackets its 95 % interval (Student's t
over seeds) and the number of seeds. A verdict is read off that interval: *as claimed*, *the other way*, or
*undetermined*. So is what stands beside it: how much in the claim's direction is unlikely to be exceeded; whether the
published difference lies outside, that is, does not hold for this model and scale; and where it lies inside, how many
seeds would tell it from 0 in four of five trials. Seeds change the order of the data only (under GRPO also the
completions that are drawn): the model starts from the same weights and is scored on the same held-out rows, so the
intervals do not speak of other data or other models. All arms are compared after the same number of optimizer steps of
the same batch size; SDO repeats samples within an epoch, so it has then seen fewer different ones: the tables give
both.

Words: *held-out loss* is the mean over held-out questions of the mean over an answer's tokens, so that each question
counts alike; what a trainer prints is the mean over all tokens. *Batch coherence* and *step coherence* are mean
cosines between gradients, of one batch's samples (of `weight` its micro-batches) and of different steps; *locality,
series r* correlates a batch's likeness in embeddings with its batch coherence over the steps, *matrix r* the likeness
of two batches with the cosine of their steps' gradients ([locality.md](locality.md)); over families, *B-20%* is the
mean accuracy of the worst fifth, *gap* that of the best minus the worst, *CV* and *Gini* their inequality, *latent
spread* the standard deviation of the underlying accuracies ([balance.md](balance.md)).
"""


def settings() -> list[Setting]:
    """Return all settings at all their scales."""
    found = []
    for path in sorted(FOLDER.glob("*.yaml")):
        for scale in SCALES:
            try:
                found.append(load(path.stem, scale))
            except InputError:
                continue
    return found


def write(docs: Path = DOCS, results: Path = RESULTS) -> list[Path]:
    """Write the page and its pictures; return the files.

    Parameters
    ----------
    docs
        Folder of the page.
    results
        Folder of the figures.
    """
    every = settings()
    cells = {one.label: finished(one, results) for one in every}
    parts = [_INTRO, "## Claim by claim"]
    parts.append(sections(cells))
    parts.append(balance_section())
    pictures: list[Path] = []
    parts.append("## What was measured")
    for setting in every:
        found = cells[setting.label]
        if found:
            text, files = _measured(setting, found, docs)
            parts.append(text)
            pictures += files
    parts.append(_status(every, results))
    page = docs / "results.md"
    text = "\n\n".join(part.rstrip() for part in parts) + "\n"
    write_atomically({page: lambda path: path.write_text(text, encoding="utf-8")})
    return [page, *pictures]


def _measured(setting: Setting, cells: Sequence[Result], docs: Path) -> tuple[str, list[Path]]:
    """Return a setting's part of the page, and the pictures that it shows."""
    run, pictures = setting.run, []
    present = [arm for arms in setting.arms.values() for arm in arms]
    main = [arm for group in list(setting.arms)[:2] for arm in setting.arms[group]]
    curve = docs / f"results-{setting.label}.png"
    save(curves(setting, cells, main), curve)
    pictures.append(curve)
    shown = [f"![Held-out score over the steps]({curve.name})"]
    if setting.material.get("make") == "families":
        measures = [
            mean_score("eval_loss", "held-out loss, mean", "lower"),
            score("eval_correct", -1, "accuracy, last", "higher"),
            balance("spread", "latent spread", "lower"),
        ]
        differences = docs / f"results-{setting.label}-arms.png"
        save(forest(setting, cells, present, measures), differences)
        pictures.append(differences)
        shown.append(f"![Differences of all arms to uniform]({differences.name})")
    about = cells[0]["material"]
    hours = sum(cell["training_seconds"] for cell in cells) / 3600
    least = "at least " if any(cell.get("resumed") for cell in cells) else ""  # a cell's last stretch alone is known
    batch = int(run["per_device_train_batch_size"]) * int(run.get("gradient_accumulation_steps", 1))
    per_sample = int(run.get("num_generations", 1))
    facts = (
        f"{about['train']:,} samples to train on, {about['held_out']:,} held out; {run['max_steps']} steps of "
        f"{batch // per_sample} samples"
        + (f" with {per_sample} completions each" if per_sample > 1 else "")
        + f"; learning rate {run['learning_rate']:g}; embeddings: {about['encoder']}. "
        f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}, {least}{hours:.1f} hours of "
        "training, evaluations included."
    )
    if any(cell.get("answers_alone") for cell in cells):
        facts += " TRL's head scored the trained positions alone, as it does on a GPU."
    told = [f"{setting.title}. {facts}", *([setting.note] if setting.note else []), origin(setting, cells)]
    return "\n\n".join([f"### {setting.label}", *told, *shown, markdown(setting, cells)]), pictures


def origin(setting: Setting, cells: Sequence[Result]) -> str:
    """Return what is known of the weights and embeddings that the cells began with, and whether cells can be added."""
    about, named = cells[0]["material"], setting.material.get("digests", {})
    start = start_of(setting, cells[0])
    text = f"Start: weights `{start}`" if start else "Start: the digest of the weights was not recorded"
    if start and start not in about.values():
        text += ", the digest that the setting names; these cells recorded none"
    begun = {"start": ("weights", start), "embeddings.npy": ("embeddings", about.get("embeddings.npy"))}
    lost = {words: named[key] for key, (words, found) in begun.items() if key in named and found != named[key]}
    if not lost:
        return f"{text}."
    kept = " and ".join(f"{words} `{digest}`" for words, digest in lost.items())
    return (
        f"{text}. Their {' and '.join(lost)} were not kept, and could not be made again: the same recipe gives other "
        f"last digits on another processor. New cells begin with what `experiments/start` keeps, {kept}, and are "
        "not put beside these."
    )


def _status(every: Sequence[Setting], results: Path) -> str:
    """Return the table of what is measured and what is still to run."""
    lines = ["## Measured, and still to run", "", "| setting | group | arms | measured | to run |"]
    lines.append("|---|---|---|---:|---:|")
    for setting in every:
        for group, arms in setting.arms.items():
            cells = list(setting.cells((group,)))
            if cells:
                done = sum(result_file(setting, cell, results).is_file() for cell in cells)
                lines.append(f"| {setting.label} | {group} | {', '.join(arms)} | {done} | {len(cells) - done} |")
    lines += ["", "`paper` needs the hub and one GPU: `python -m experiments run SETTING --scale paper`. Its run "]
    lines[-1] += (
        "files are checked by `check`, and its code by a tiny model in the tests; none of its cells is measured."
    )
    return "\n".join(lines)
