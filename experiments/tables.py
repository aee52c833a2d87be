"""Tables of one setting: outcomes, what the batches did to the gradients, and the curve over the checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.seeds.differences import PairedComparison
from experiments.figures import (
    Level,
    Measure,
    Result,
    balance,
    by_seed,
    difference,
    inside,
    level,
    mean_score,
    score,
    seen,
    series_r,
    training_reward,
)
from experiments.settings import Setting

MAIN_SCORE = {"sft": "eval_loss", "dpo": "eval_rewards/margins", "grpo": "eval_reward"}
SCORE_LABEL = {"sft": "held-out loss", "dpo": "held-out reward margin", "grpo": "held-out reward"}
SCORE_BETTER = {"sft": "lower", "dpo": "higher", "grpo": "higher"}


def outcomes(setting: Setting) -> list[Measure]:
    """Return how well an arm did."""
    name, label, better = MAIN_SCORE[setting.method], SCORE_LABEL[setting.method], SCORE_BETTER[setting.method]
    found = [score(name, -1, f"{label}, last", better), mean_score(name, f"{label}, mean of checkpoints", better)]
    if setting.method == "grpo":
        found.append(training_reward())
    if setting.material.get("make") == "families":
        found += [
            score("eval_correct", -1, "accuracy, last", "higher"),
            balance("b20", "B-20%", "higher"),
            balance("cv", "CV", "lower"),
            balance("gini", "Gini", "lower"),
            balance("gap", "gap", "lower"),
            balance("spread", "latent spread", "lower"),
        ]
    return found


def dynamics(signals: Sequence[str] = ("weight", "hidden")) -> list[Measure]:
    """Return what the batches held, and what they did to the gradients."""
    found = [inside("within_batch_cosine", label="within-batch cosine")]
    for signal in signals:
        path = ("signals", signal)
        found += [
            inside(*path, "batch_coherence", label=f"batch coherence, {signal}"),
            inside(*path, "step_coherence", "mean", label=f"step coherence, {signal}", digits=4),
            inside(*path, "step_coherence", "disjoint", label=f"…, steps without a common sample, {signal}", digits=4),
            series_r(signal),
            inside("locality", signal, "matrix", "value", label=f"locality, matrix r, {signal}"),
            inside("locality", signal, "slope", label=f"locality, slope of pairs, {signal}"),
        ]
    return [
        *found,
        seen("distinct", "distinct samples"),
        seen("samples", "samples"),
        seen("tokens", "tokens"),
        inside("exposure", "gini", label="Gini of exposure"),
        inside("organizer_epochs", label="organizer epochs", digits=1),
        inside("updates", "clipped", label="share of updates clipped"),
        inside("updates", "grad_norm", label="gradient norm before clipping", digits=2),
    ]


def markdown(setting: Setting, cells: Sequence[Result]) -> str:
    """Return the tables of a setting's finished cells."""
    if not cells:
        return f"{setting.label}: no cell is measured yet."
    parts = []
    for group, arms in setting.arms.items():
        present = [arm for arm in arms if by_seed(cells, arm)]
        if not present:
            continue
        names = [setting.baseline, *(arm for arm in present if arm != setting.baseline)]
        if group != next(iter(setting.arms)) and "sdo" not in names:
            names.insert(1, "sdo")
        parts.append(f"**{group}: outcomes**\n\n{comparison_table(cells, names, outcomes(setting), setting.baseline)}")
        parts.append(f"**{group}: batches and gradients**\n\n{level_table(cells, names, dynamics())}")
    parts.append(f"**over the checkpoints**\n\n{checkpoint_table(setting, cells)}")
    return "\n\n".join(parts)


def comparison_table(cells: Sequence[Result], arms: Sequence[str], measures: Sequence[Measure], baseline: str) -> str:
    """Return a row a measure: the baseline's mean, and each arm's paired difference to it with its interval."""
    known = [one for one in measures if any(level(cells, arm, one) for arm in arms)]
    others = [arm for arm in arms if arm != baseline]
    lines = [_row(["", f"{baseline} (n)", *(f"{arm} − {baseline}" for arm in others)])]
    lines.append(_row(["---", *["---:"] * (1 + len(others))]))
    for measure in known:
        row = [measure.label, shown(level(cells, baseline, measure), measure)]
        row += [shown_difference(difference(cells, baseline, arm, measure), measure) for arm in others]
        lines.append(_row(row))
    return "\n".join(lines)


def level_table(cells: Sequence[Result], arms: Sequence[str], measures: Sequence[Measure]) -> str:
    """Return a row a measure with the mean of each arm and its interval."""
    known = [one for one in measures if any(level(cells, arm, one) for arm in arms)]
    lines = [_row(["", *arms]), _row(["---", *["---:"] * len(arms)])]
    lines += [_row([one.label, *(shown(level(cells, arm, one), one) for arm in arms)]) for one in known]
    return "\n".join(lines)


def checkpoint_table(setting: Setting, cells: Sequence[Result]) -> str:
    """Return a row a checkpoint: the baseline's score, SDO's difference to it, and what either had seen."""
    name, label, better = MAIN_SCORE[setting.method], SCORE_LABEL[setting.method], SCORE_BETTER[setting.method]
    steps = [point["step"] for point in cells[0]["checkpoints"]]
    head = ["step", f"{label}, {setting.baseline}", f"sdo − {setting.baseline}", "distinct samples", "tokens"]
    lines = [_row(head), _row(["---:"] * len(head))]
    for number, step in enumerate(steps):
        measure = score(name, number, label, better)
        row = [str(step), shown(level(cells, setting.baseline, measure), measure)]
        row.append(shown_difference(difference(cells, setting.baseline, "sdo", measure), measure))
        for key in ("distinct", "tokens"):
            both = [_mean_seen(cells, arm, number, key) for arm in (setting.baseline, "sdo")]
            row.append(" / ".join("–" if one is None else f"{one:,.0f}" for one in both))
        lines.append(_row(row))
    return "\n".join(lines) + f"\n\nDistinct samples and tokens: {setting.baseline} / sdo, means over seeds."


def _mean_seen(cells: Sequence[Result], arm: str, number: int, key: str) -> float | None:
    each = [cell["checkpoints"][number][key] for cell in by_seed(cells, arm).values()]
    return sum(each) / len(each) if each else None


def shown(one: Level | None, measure: Measure) -> str:
    """Return a level as text."""
    if one is None:
        return "–"
    text = f"{one.mean:,.{measure.digits}f}"
    reach = "" if one.reach is None else f" ± {one.reach:,.{measure.digits}f}"
    return f"{text}{reach} ({one.n})"


def shown_difference(one: PairedComparison | float | None, measure: Measure) -> str:
    """Return a paired difference as text, in bold where its interval leaves 0 out."""
    if one is None:
        return "–"
    digits = max(measure.digits, 1)
    if isinstance(one, float):
        return f"{one:+.{digits}f} (one seed)"
    if one.low is None or one.high is None:
        return f"{one.mean:+.{digits}f} (all equal, n {one.n})"
    text = f"{one.mean:+.{digits}f} [{one.low:+.{digits}f}, {one.high:+.{digits}f}] ({one.n})"
    return f"**{text}**" if one.low > 0 or one.high < 0 else text


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
