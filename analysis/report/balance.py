"""The report's sections on balance over clusters: the metrics, comparisons, and the weakest clusters."""

from __future__ import annotations

from typing import Any

from analysis.balance.metrics import METRICS, MOVES_WITH_MEAN
from analysis.balance.plots import cluster_sizes, dumbbell, lorenz, ranked_clusters
from analysis.balance.results import Balance, Difference, Interval
from analysis.balance.summary import BalanceSummary
from analysis.balance.words import ACCURACY, CAVEAT, NAMES, WORDS
from analysis.report.content import Absent, Cell, Finding, Picture, Quotes, Section, Table, join, number, signed
from analysis.report.material import ReportMaterial
from analysis.report.settings import not_plotted
from sdo.errors import counted

_WEAKEST = 5
_ROWS = 24  # clusters of a picture
_PICTURES = 4  # runs whose clusters are plotted; more would not fit a page that can be sent
_ABSENT = Absent(
    "No predictions were given: --predictions FILE… with --embeddings and --clusters, or --labels, shows balance over "
    "clusters."
)


def balance_section(material: ReportMaterial) -> Section | Absent:
    """Metrics of each run beside what equal clusters would give, and comparisons with the baseline."""
    summary = material.balance
    if summary is None:
        return _ABSENT
    tables = [_run_table(name, one) for name, one in summary.balances.items()]
    tables += [_comparison_table(summary, name) for name in summary.comparisons]
    words = [_homogeneity(summary), *(_compared(summary, name) for name in summary.comparisons)]
    return Section(
        words=tuple(words),
        tables=tuple(tables),
        pictures=tuple(_pictures(summary)),
        more=(*WORDS, *(f"{note[:1].upper()}{note[1:]}." for note in summary.notes)),
        findings=tuple(_findings(summary)),
        data=summary.content,
    )


def weakest_section(material: ReportMaterial) -> Section | Absent:
    """The clusters that are surest to be weak in the last run, with what they are about."""
    summary = material.balance
    if summary is None:
        return _ABSENT
    run = list(summary.balances)[-1]
    scored = [entry for entry in summary.content["per_cluster"] if entry["runs"][run]["accuracy"] is not None]
    # The upper end: a cluster of two questions that both failed is not surely weak.
    scored.sort(key=lambda entry: (entry["runs"][run]["interval"][1], entry["cluster"]))
    chosen = scored[:_WEAKEST]
    words = (
        f"The {counted(len(chosen), 'cluster')} of {run} whose 95 % interval ends lowest. Among many equally good "
        "clusters some look weak by chance; the homogeneity test above says whether clusters differ at all.",
    )
    if len(scored) == 1:
        words = (f"{run} has one cluster, so none is weaker than another.",)
    quotes = tuple(_described(entry, list(summary.balances)) for entry in chosen)
    data = {"run": run, "clusters": [entry["cluster"] for entry in chosen]}
    return Section(words=words, quotes=quotes, data=data)


def _run_table(name: str, one: Balance) -> Table:
    rows = []
    for metric in METRICS:
        found = one.metrics[metric]
        rows.append(
            (
                Cell(NAMES[metric]),
                _value(metric, None if metric == "spread" else found.value, "it is the latent value itself"),
                _interval(metric, found.equal_band, found.reason),
                _value(metric, found.latent, found.reason),
                _interval(metric, found.latent_interval, found.reason),
            )
        )
    head = ("", "raw", "raw if clusters were equal (95 %)", "latent", "95 % interval of latent")
    clusters = counted(len(one.names), "cluster")
    caption = f"{name}: {counted(one.n, 'question')} ({one.distinct} distinct) in {clusters}"
    low, high = one.question_interval
    notes = (f"{ACCURACY.capitalize()}: {one.question_accuracy:.3f}, 95 % interval {low:.3f} to {high:.3f}.",)
    return Table(head, tuple(rows), caption, notes=notes)


def _comparison_table(summary: BalanceSummary, name: str) -> Table:
    one = summary.comparisons[name]
    rows = [_difference_row(ACCURACY, "mean", one.question_accuracy)]
    rows += [_difference_row(NAMES[metric], metric, one.metrics[metric]) for metric in METRICS]
    rows.append(_difference_row("… of log-odds", "spread", one.logit))
    head = ("", "difference", "95 % interval", "p", "verdict")
    moving = join([NAMES[metric].partition(",")[0] for metric in METRICS if metric in MOVES_WITH_MEAN])
    notes = (f"{moving} move with the mean: their verdicts are on these numbers, not on balance.",)
    caption = f"{name} minus {summary.baseline}, on the same {counted(one.n, 'question')}"
    return Table(head, tuple(rows), caption, notes=notes)


def _difference_row(label: str, metric: str, one: Difference) -> tuple[Cell, ...]:
    return (
        Cell(label),
        _value(metric, one.difference, one.reason, sign="+"),
        _interval(metric, one.interval, one.reason, sign="+"),
        number(one.p, "{:.3f}", one.reason),
        Cell(one.verdict, one.reason),
    )


def _value(metric: str, value: float | None, reason: str | None, sign: str = "") -> Cell:
    pattern, shown = _pattern(metric, sign), value
    if value is not None and metric == "gap":
        shown = 100 * value
    return number(shown, pattern, reason or "undefined")


def _interval(metric: str, interval: Interval | None, reason: str | None, sign: str = "") -> Cell:
    if interval is None:
        return number(None, reason=reason or "undefined")
    low, high = (_value(metric, end, None, sign).text for end in interval)
    return Cell(f"{low} to {high}")


def _pattern(metric: str, sign: str) -> str:
    return f"{{:{sign}.1f}}" if metric == "gap" else f"{{:{sign}.3f}}"


def _homogeneity(summary: BalanceSummary) -> str:
    differ: list[str] = []
    alike: list[str] = []
    unknown: dict[str | None, list[str]] = {}
    for name, one in summary.balances.items():
        p = one.homogeneity.p
        if p is None:
            unknown.setdefault(one.homogeneity.reason, []).append(name)
        else:
            (differ if p < summary.content["level"] else alike).append(f"{name} (p = {p:.3f})")
    parts = []
    if differ:
        parts.append(f"Clusters differ more than chance allows in {join(differ)}.")
    if alike:
        parts.append(f"Compatible with equally good clusters: {join(alike)}.")
    parts += [f"No homogeneity test for {join(names)}: {reason}." for reason, names in unknown.items()]
    return " ".join(parts)


def _compared(summary: BalanceSummary, name: str) -> str:
    one = summary.comparisons[name]
    spread = one.metrics["spread"]
    told = f"{name} against {summary.baseline}: balance {one.verdict}"
    if spread.difference is None:
        told += f" ({spread.reason})"
    elif spread.p is not None:
        told += f" (difference of the latent spread {signed(spread.difference, '{:+.3f}')}, p = {spread.p:.3f})"
    for label, mean in ((ACCURACY, one.question_accuracy), (NAMES["mean"], one.metrics["mean"])):
        if mean.difference is not None and mean.p is not None:
            told += f"; {label} {mean.verdict} ({signed(mean.difference, '{:+.3f}')}, p = {mean.p:.3f})"
    return f"{told}."


def _findings(summary: BalanceSummary) -> list[Finding]:
    if not summary.comparisons:
        return [Finding("plain", _homogeneity(summary))]
    compared = [Finding(one.verdict, _compared(summary, name)) for name, one in summary.comparisons.items()]
    return [*compared, Finding("plain", CAVEAT)]


def _pictures(summary: BalanceSummary) -> list[Picture]:
    words = summary.keywords or None
    pictures = []
    plotted, compared = list(summary.balances)[:_PICTURES], list(summary.comparisons)[: _PICTURES - 1]
    told = not_plotted(plotted, list(summary.balances), "sdo balance PREDICTIONS… --out DIR")
    for name in plotted:
        one = summary.balances[name]
        figure, _ = ranked_clusters(one, keywords=words, rows=_ROWS, title=name)
        band = ", and the band of equally good clusters" if len(one.names) > 1 else ""
        caption = f"{name}: accuracy by cluster, Wilson 95 % intervals{band}."
        caption += told if name == plotted[-1] else ""
        pictures.append(Picture.of(figure, alt=f"Clusters of {name} ranked by accuracy.", caption=caption))
    for name in compared:
        figure, _ = dumbbell(summary.comparisons[name], baseline=summary.baseline, run=name, keywords=words, rows=_ROWS)
        caption = f"Accuracy of each cluster in {summary.baseline} and {name}."
        pictures.append(Picture.of(figure, alt=caption, caption=caption))
    figure, _ = lorenz(summary.balances)
    pictures.append(Picture.of(figure, alt="Lorenz curves of cluster accuracies.", caption="Lorenz curves."))
    figure, _ = cluster_sizes([entry["n"] for entry in summary.content["per_cluster"]])
    pictures.append(Picture.of(figure, alt="Cluster sizes, sorted.", caption="Questions in each cluster."))
    return pictures


def _described(entry: dict[str, Any], runs: list[str]) -> Quotes:
    keywords = f": {', '.join(entry['keywords'])}" if entry["keywords"] else ""
    scores = []
    for name in runs:
        one = entry["runs"][name]
        if one["accuracy"] is None:
            scores.append(f"{name} has no question here")
        else:
            low, high = one["interval"]
            scores.append(f"{name} {one['accuracy']:.2f} ({low:.2f} to {high:.2f})")
    small = ", a small cluster" if entry["small"] else ""
    words = f"{counted(entry['n'], 'question')}{small}. {'; '.join(scores)}."
    return Quotes(f"Cluster {entry['cluster']}{keywords}", words, tuple(entry["examples"] or ()))
