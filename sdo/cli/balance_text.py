"""What ``sdo balance`` prints: tables and sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdo.cli.outputs import aligned

if TYPE_CHECKING:
    from analysis import BalanceSummary

_TITLES = {
    "mean": "mean",
    "b20": "B-20%",
    "cv": "CV",
    "gini": "Gini",
    "gap": "gap, points",
    "spread": "latent spread",
}
WORDS = (
    "Equal clusters: where 95 % of the values lie if all clusters are equally good. Latent: the metric of the\n"
    "clusters' underlying accuracies, with a 95 % interval. B-20%, CV, Gini and gap move with the mean; the latent\n"
    "spread, the standard deviation of the underlying accuracies, alone carries the verdict on balance. Compare runs\n"
    "that were decoded alike. A verdict is on these answers, not on how the models were trained: that takes several\n"
    "seeds."
)


def describe(summary: BalanceSummary) -> str:
    """Return tables and sentences for the terminal; a dash stands where nothing is defined (the JSON file says why)."""
    content = summary.content
    lines = [f"{content['n']} questions in {content['clusters']} clusters"]
    lines += [f"note: {_plain(note)}" for note in summary.notes]
    for name, metrics in content["runs"].items():
        lines += [
            "",
            _plain(name),
            _run_table(metrics),
            _homogeneity_words(content["homogeneity"][name], content["level"]),
        ]
    for entry in content["comparisons"]:
        lines += ["", f"{_plain(entry['run'])} against {_plain(entry['baseline'])} ({entry['n']} common questions)"]
        lines += [_comparison_table(entry), _balance_words(entry)]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Names and notes can hold what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _number(value: float | None, metric: str, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    if metric == "gap":
        return f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"
    return f"{value:+.3f}" if sign else f"{value:.3f}"


def _range(pair: list[float] | None, metric: str, *, sign: bool = False) -> str:
    return "-" if pair is None else f"{_number(pair[0], metric, sign=sign)} to {_number(pair[1], metric, sign=sign)}"


def _run_table(metrics: dict[str, Any]) -> str:
    rows = [["", "value", "equal clusters", "latent", "95 % interval"]]
    for name, entry in metrics.items():
        latent = entry["latent"]
        value = "" if name == "spread" else _number(entry["value"], name)
        cells = [
            value,
            _range(entry["equal_band"], name),
            _number(latent["value"], name),
            _range(latent["interval"], name),
        ]
        rows.append([_TITLES[name], *cells])
    return aligned(rows, indent="  ")


def _homogeneity_words(test: dict[str, Any], level: float) -> str:
    if test["p"] is None:
        return f"  equal clusters: not tested, {test['reason']}"
    if test["p"] < level:
        return f"  the clusters differ by more than chance (p = {test['p']:.3g})"
    return f"  compatible with equal clusters (p = {test['p']:.3g})"


def _comparison_table(entry: dict[str, Any]) -> str:
    rows = [["", "difference", "95 % interval", "p", "verdict"]]
    for name, one in entry["metrics"].items():
        p = "-" if one["p"] is None else f"{one['p']:.3g}"
        verdict = one["verdict"] + (" (moves with the mean)" if "note" in one else "")
        difference, interval = _number(one["difference"], name, sign=True), _range(one["interval"], name, sign=True)
        rows.append([_TITLES[name], difference, interval, p, verdict])
    one = entry["logit_spread"]
    p = "-" if one["p"] is None else f"{one['p']:.3g}"
    difference, interval = _number(one["difference"], "", sign=True), _range(one["interval"], "", sign=True)
    rows.append(["… of log-odds", difference, interval, p, one["verdict"]])
    return aligned(rows, last_text=True, indent="  ")


def _balance_words(entry: dict[str, Any]) -> str:
    spread = entry["metrics"]["spread"]
    because = f": {spread['reason']}" if "reason" in spread else ""
    return f"  verdict on balance: {entry['balance']}{because}"
