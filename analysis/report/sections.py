"""The sections about runs: how training went, and coherence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.coherence.plots import batch_coherence_series, coherence_heat_maps
from analysis.coherence.study import run_coherence
from analysis.drawing import MANY_RUNS
from analysis.report.content import Absent, Cell, Picture, Section, Table, join, number, signed, some
from analysis.report.material import ReportMaterial
from analysis.report.settings import arms_of, not_plotted, plotted_runs
from analysis.run_folder.curves import (
    Evaluation,
    Training,
    evaluation_curves,
    loss_curves,
    loss_label,
    reward_curves,
)
from analysis.run_folder.recorded import generates, score_meaning
from analysis.run_folder.run import Run

_NO_REWARD = "no step has a reward"

_HEAT_MAPS = 6  # runs whose heat maps are plotted; noise does not compress, and a page has to be sent
_CELLS, _FEW = 256, 2  # cells a side of them, up to so many
_SHARED_CELLS = 235**2  # cells of all of them together where there are more


# ---------------------------------------------------------------------- how training went


def training_section(material: ReportMaterial) -> Section | Absent:
    """Loss, held-out scores, and the data that each run had seen."""
    if not material.runs:
        return Absent("No run folder was given: sdo report RUN… shows how training went.")
    went = {name: material.training(name) for name in material.runs}
    if not any(len(one.step) for one in went.values()):
        return Absent("No run has a complete step.")
    rows, data = [], {}
    for name, one in went.items():
        end = _end_of_training(one)
        rows.append(
            (
                Cell(name),
                Cell(_organizer(material.runs[name])),
                number(len(one.step), "{:d}"),
                number(end["samples"], "{:d}", "no step"),
                number(end["distinct"], "{:d}", "no step"),
                number(end["tokens"], "{:,}", "no step"),
                number(end["first_loss"], "{:.3f}", "no step has a loss"),
                number(end["last_loss"], "{:.3f}", "no step has a loss"),
            )
        )
        data[name] = {"steps": len(one.step), **end}
    head = ("run", "organizer", "steps", "samples", "distinct", "tokens", "loss, first tenth", "loss, last tenth")
    notes = ("Losses are means over a tenth of the steps, each over other samples; held-out scores compare runs.",)
    figure, _ = loss_curves(went)
    label = loss_label(one for one in went.values() if np.isfinite(one.loss).any())
    caption = f"{label[0].upper()}{label[1:]}."
    pictures = [Picture.of(figure, alt="Training loss over the steps, a line a run.", caption=caption)]
    tables = [Table(head, tuple(rows), "What each run trained on", texts=2, notes=notes)]
    measures = sorted({measure for name in material.runs for measure in material.evaluations(name)})
    for measure in measures:
        table, picture, entry = _evaluation(material, measure)
        tables.append(table)
        pictures.append(picture)
        for name, values in entry.items():
            data[name].setdefault("evaluations", {})[measure] = values
    for reward in sorted({reward for name in material.runs for reward in material.rewards(name)}):
        table, picture, entry = _reward(material, reward)
        tables.append(table)
        pictures.append(picture)
        for name, ends in entry.items():
            data[name].setdefault("rewards", {})[reward] = ends
    words = [_repetition(went), _different_losses(went)]
    if not measures:
        remedy = "an eval_dataset gives losses that can be compared"
        if any(map(generates, material.runs.values())):
            remedy = "scores of your own, by recorder.log_evaluation, can be compared"
        words.append(f"No run was evaluated on held-out samples; {remedy}.")
    return Section(tuple(w for w in words if w), tuple(tables), tuple(pictures), data={"runs": data})


def _end_of_training(one: Training) -> dict[str, Any]:
    """Return the last counts, and the mean loss over the first and the last tenth of the steps."""
    if not len(one.step):
        return {"samples": 0, "distinct": 0, "tokens": 0, **_losses(None, None)}
    tenth = max(1, len(one.step) // 10)

    def mean(values: Any) -> float | None:
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else None

    return {
        "samples": int(one.samples[-1]),
        "distinct": int(one.distinct[-1]),
        "tokens": int(one.tokens[-1]),
        **_losses(mean(one.loss[:tenth]), mean(one.loss[-tenth:])),
    }


def _losses(first: float | None, last: float | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"first_loss": first, "last_loss": last}
    for name in [name for name, value in entry.items() if value is None]:
        entry[f"{name}_reason"] = "no step there has a loss"
    return entry


def _repetition(went: Mapping[str, Training]) -> str:
    seen = {name: (int(one.distinct[-1]), int(one.samples[-1])) for name, one in went.items() if len(one.step)}
    if len(seen) < 2:
        return ""
    most, fewest = max(seen, key=lambda n: seen[n][0]), min(seen, key=lambda n: seen[n][0])
    if seen[most][0] == seen[fewest][0]:
        return f"All runs saw {seen[most][0]} different samples."
    return (
        f"{fewest} saw {seen[fewest][0]} different samples, {most} {seen[most][0]}: at equal steps they had different "
        "amounts of different data, which belongs beside every comparison of their losses."
    )


def _different_losses(went: Mapping[str, Training]) -> str:
    """Say what the runs' losses are where they are not the same thing."""
    kinds: dict[str, list[str]] = {}
    for name, one in went.items():
        if np.isfinite(one.loss).any():
            kinds.setdefault(one.meaning or "a loss that run.json does not describe", []).append(name)
    if len(kinds) < 2:
        return ""
    named = "; ".join(f"in {join(names)} {words}" for words, names in kinds.items())
    return f"The runs' training losses are different things and cannot be compared: {named}."


def _reward(material: ReportMaterial, reward: str) -> tuple[Table, Picture, dict[str, Any]]:
    """Show a reward of the completions that were trained on: over the first and the last tenth of the steps."""
    every = {name: material.rewards(name) for name in material.runs}
    held = {name: rewards[reward] for name, rewards in every.items() if reward in rewards}
    rows, data = [], dict[str, Any]()
    for name, one in held.items():
        known = one.mean[one.count > 0]
        tenth = max(1, len(known) // 10)
        first, last = (float(part.mean()) if len(part) else None for part in (known[:tenth], known[-tenth:]))
        reason = {} if len(known) else {"reason": _NO_REWARD}
        data[name] = {"steps": len(known), "first": first, "last": last, **reason}
        ends = (number(value, "{:.3f}", _NO_REWARD) for value in (first, last))
        rows.append((Cell(name), number(len(known), "{:d}"), *ends))
    head = ("run", "steps with a reward", "mean, first tenth", "mean, last tenth")
    notes = ("Rewards of the completions that were trained on, other prompts at every step: no held-out score.",)
    figure, _ = reward_curves(held, reward)
    caption = f"{reward} in training: a dot a step, a line for the running mean."
    picture = Picture.of(figure, alt=f"{reward} in training over the steps, a line a run.", caption=caption)
    return Table(head, tuple(rows), f"{reward} in training", notes=notes), picture, data


def _evaluation(material: ReportMaterial, measure: str) -> tuple[Table, Picture, dict[str, Any]]:
    every = {name: material.evaluations(name) for name in material.runs}
    held = {name: measures[measure] for name, measures in every.items() if measure in measures}
    rows, data = [], {}
    for name, one in held.items():
        values = [None if np.isnan(m) else float(m) for m in one.mean]
        data[name] = {"step": one.step.tolist(), "mean": values, "samples": one.count.tolist()}
        if (own := score_meaning(material.runs[name], measure)) is not None:
            data[name]["meaning"] = own
        if None in values:
            data[name]["mean_reason"] = "no sample has a score there"
        first, last = number(values[0], "{:.4g}", "no score"), number(values[-1], "{:.4g}", "no score")
        known = [v for v in values if v is not None]
        low, high = (min(known), max(known)) if known else (None, None)
        samples = number(int(one.count.max()), "{:d}")
        rows.append(
            (
                Cell(name),
                number(len(values), "{:d}"),
                samples,
                first,
                number(low, "{:.4g}", "no score"),
                number(high, "{:.4g}", "no score"),
                last,
            )
        )
    head = ("run", "evaluations", "samples", "first", "lowest", "highest", "last")
    meaning = material.score_meaning(measure)
    said = f"{measure}, {meaning}" if meaning else measure
    figure, _ = evaluation_curves(held, measure, meaning=meaning)
    caption = f"{said}: mean over the samples of each evaluation. One seed gives no verdict on a difference."
    picture = Picture.of(figure, alt=f"{measure} over the steps, a line a run.", caption=caption)
    return Table(head, tuple(rows), said, notes=_other_steps(held)), picture, data


def _other_steps(held: Mapping[str, Evaluation]) -> tuple[str, ...]:
    """Say where first and last are not the same steps in all runs: a later step is no better run."""
    notes = []
    for which, place in (("first", 0), ("last", -1)):
        steps = {name: int(one.step[place]) for name, one in held.items()}
        if len(set(steps.values())) > 1:
            at = {step: [name for name in steps if steps[name] == step] for step in sorted(set(steps.values()))}
            named = join([f"{step} of {some(names)}" for step, names in at.items()])
            notes.append(f"{which.capitalize()} is not the same step in all runs, so it compares none: {named}.")
    return tuple(notes)


# ---------------------------------------------------------------------- coherence


def coherence_section(material: ReportMaterial) -> Section | Absent:
    """Step and batch coherence of every signal that all runs recorded."""
    if not material.runs:
        return Absent("No run folder was given: coherence is computed from recorded gradients.")
    if not material.signals:
        return Absent("The runs hold gradients of no signal in common; a GradientRecorder records them.")
    tables, pictures, data = [], [], {}
    words = []
    for signal in material.signals:
        table, plotted, entry, sentence = _coherence_of(material, signal)
        tables.append(table)
        pictures += plotted
        data[signal] = entry
        words.append(sentence)
    return Section(tuple(words), tuple(tables), tuple(pictures), more=_COHERENCE_WORDS, data={"signals": data})


def _coherence_of(material: ReportMaterial, signal: str) -> tuple[Table, list[Picture], dict[str, Any], str]:
    rows, matrices, steps, series, data = [], {}, {}, {}, {}
    plotted = plotted_runs(list(material.runs), material.runs, _HEAT_MAPS)
    cells = _CELLS if len(plotted) <= _FEW else math.isqrt(_SHARED_CELLS // len(plotted))
    for name, run in material.runs.items():
        found = run_coherence(run, [signal], cells=cells if name in plotted else 0)[signal]
        if found.between_steps.blocks is not None:
            matrices[name], steps[name] = found.between_steps.blocks, found.between_steps.step
        if found.within_steps.series.defined.any():
            series[f"{name}, {found.within_steps.between}"] = found.within_steps.series
        data[name] = found.to_dict()
        between, within, check = data[name]["step_coherence"], data[name]["batch_coherence"], data[name]
        rows.append(
            (
                Cell(name),
                number(between["steps"], "{:d}"),
                number(between["undefined"], "{:d}"),
                *(
                    number(between[key], "{:+.3f}", between.get(f"{key}_reason"))
                    for key in ("mean", "lag_one", "sharing", "disjoint")
                ),
                number(within["mean"], "{:+.3f}", within.get("reason")),
                number(within["steps"], "{:d}"),
                number((check["sketch_check"] or {}).get("rmse"), "{:.4f}", check.get("sketch_check_reason")),
            )
        )
    head = (
        *("run", "steps", "undefined", "all pairs", "next step", "sharing a sample", "sharing none"),
        *("within batches", "steps of it", "sketch rmse"),
    )
    caption = f"Signal {signal}: mean cosine between the gradients of two steps, and within batches{_within_of(data)}"
    pictures = []
    if matrices:
        figure, _ = coherence_heat_maps(matrices, steps=steps)
        picture = Picture.of(
            figure,
            alt=f"Heat maps of the cosine between the gradients of all pairs of steps, {signal}, on one scale.",
            caption=f"Step coherence, {signal}. Red agrees, blue opposes; one scale for all runs."
            + not_plotted(plotted, list(material.runs), "sdo coherence RUN… --out DIR"),
            dpi=80,  # noise does not compress
        )
        pictures.append(picture)
    if series:
        figure, _ = batch_coherence_series(series, of=" or ".join(_compared(data)))
        alt = f"Batch coherence of {signal} over the steps, a color a run."
        caption_of = f"Batch coherence, {signal}{_within_of(data)}: dots are steps."
        pictures.append(Picture.of(figure, alt=alt, caption=caption_of))
    return Table(head, tuple(rows), caption), pictures, data, _coherence_sentence(signal, data, material.runs)


def _coherence_sentence(signal: str, data: Mapping[str, Any], runs: Mapping[str, Run]) -> str:
    between = {name: entry["step_coherence"]["mean"] for name, entry in data.items()}
    parts = []
    told = [("two steps", between)]
    for of, names in _compared(data).items():
        told.append((f"{of} of one batch", {name: data[name]["batch_coherence"]["mean"] for name in names}))
    for words, values in told:
        known = {name: value for name, value in values.items() if value is not None}
        if known:
            parts.append(f"gradients of {words} have a mean cosine of {join(_in_words(known, runs))}")
    return f"{signal}: {'; '.join(parts)}." if parts else ""


def _compared(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return whose gradients batch coherence compares, samples or micro-batches, and in which runs."""
    compared: dict[str, list[str]] = {}
    for name, entry in data.items():
        if (of := entry["batch_coherence"]["between"]) is not None:
            compared.setdefault(of, []).append(name)
    return dict(sorted(compared.items(), reverse=True))


def _within_of(data: Mapping[str, Any]) -> str:
    """Say whose gradients are compared within batches: micro-batches agree more than samples, whatever the data."""
    compared = _compared(data)
    if len(compared) < 2:
        return "".join(f" (between {of})" for of in compared)
    return f" ({', '.join(f'between {of} in {some(names)}' for of, names in compared.items())})"


def _in_words(values: Mapping[str, float], runs: Mapping[str, Run]) -> list[str]:
    """Return each run's value, or of many runs how far those of each arm reach: the table has them all."""
    if len(values) <= MANY_RUNS:
        return [f"{signed(value, '{:+.3f}')} in {name}" for name, value in values.items()]
    told = []
    for arm, names in arms_of({name: runs[name] for name in values}).items():
        low, high = (signed(end(values[name] for name in names), "{:+.3f}") for end in (min, max))
        reach = low if low == high else f"{low} to {high}"
        told.append(f"{reach} in {len(names)} run{'s' if len(names) > 1 else ''} of {arm}")
    return told


_COHERENCE_WORDS = (
    "Step coherence is the cosine between the gradients of two steps; batch coherence the mean cosine between the "
    "gradients of the samples (or micro-batches) of one step. Locality can raise the second and lower the first.",
    "Steps that hold the same sample agree for that reason alone, so pairs that share a sample stand apart. Gradients "
    "that are zero or not finite have no direction and are left out.",
    "weight is the gradient of one parameter, hidden that at the final norm's output, summed over positions. Long "
    "gradients are kept as sketches; the sketch's rmse is how far their cosines were from the exact ones.",
)


def _organizer(run: Run) -> str:
    organizer = run.info.get("organizer")
    return str(organizer.get("name")) if organizer else "none"
