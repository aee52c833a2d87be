"""What ``sdo balance`` prints: tables and sentences."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from sdo.cli.common.outputs import aligned
from sdo.errors import counted, printable

if TYPE_CHECKING:
    from analysis import BalanceSummary

_WIDTH = 110


def explained() -> str:
    """Return what the numbers are, folded for the terminal."""
    from analysis.balance.words import WORDS

    return textwrap.fill(" ".join(WORDS), _WIDTH, break_on_hyphens=False)


def describe(summary: BalanceSummary) -> str:
    """Return tables and sentences for the terminal; a dash stands where nothing is defined, with the reason below."""
    content = summary.content
    lines = [f"{counted(content['n'], 'question')} in {counted(content['clusters'], 'cluster')}"]
    lines += [f"note: {printable(note)}" for note in summary.notes]
    for name, metrics in content["runs"].items():
        lines += [
            "",
            name,
            _accuracy_words(content["accuracy"][name]),
            _run_table(metrics),
            *_reasons({name: one for name, one in metrics.items() if None in (*one.values(), *one["latent"].values())}),
            _homogeneity_words(content["homogeneity"][name], content["level"]),
        ]
    for entry in content["comparisons"]:
        common = counted(entry["n"], "common question")
        lines += ["", f"{entry['run']} against {entry['baseline']} ({common})", _comparison_table(entry)]
        missing = {name: one for name, one in entry["metrics"].items() if one["difference"] is None}
        lines += [*_reasons(missing), _balance_words(entry)]
    return "\n".join(lines)


def _number(value: float | None, metric: str, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    if metric == "gap":
        return f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"
    return f"{value:+.3f}" if sign else f"{value:.3f}"


def _range(pair: list[float] | None, metric: str, *, sign: bool = False) -> str:
    return "-" if pair is None else f"{_number(pair[0], metric, sign=sign)} to {_number(pair[1], metric, sign=sign)}"


def _accuracy_words(entry: dict[str, Any]) -> str:
    from analysis.balance.words import ACCURACY

    return f"  {ACCURACY} {_number(entry['accuracy'], '')}, 95 % interval {_range(entry['interval'], '')}"


def _run_table(metrics: dict[str, Any]) -> str:
    from analysis.balance.words import NAMES

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
        rows.append([NAMES[name], *cells])
    return aligned(rows, indent="  ")


def _reasons(entries: dict[str, Any]) -> list[str]:
    """Say why there are dashes, a line for each reason."""
    from analysis.balance.words import NAMES

    why: dict[str, list[str]] = {}
    for name, entry in entries.items():
        why.setdefault(entry["reason"], []).append(NAMES[name].partition(",")[0])
    return [f"  - for {', '.join(names)}: {reason}" for reason, names in why.items()]


def _homogeneity_words(test: dict[str, Any], level: float) -> str:
    if test["p"] is None:
        return f"  equal clusters: not tested, {test['reason']}"
    if test["p"] < level:
        return f"  the clusters differ by more than chance (p = {test['p']:.3g})"
    return f"  compatible with equal clusters (p = {test['p']:.3g})"


def _comparison_table(entry: dict[str, Any]) -> str:
    from analysis.balance.words import ACCURACY, NAMES

    rows = [["", "difference", "95 % interval", "p", "verdict"]]
    metrics = [(NAMES[name], name, one) for name, one in entry["metrics"].items()]
    for label, name, one in [(ACCURACY, "", entry["accuracy"]), *metrics, ("… of log-odds", "", entry["logit_spread"])]:
        p = "-" if one["p"] is None else f"{one['p']:.3g}"
        verdict = one["verdict"] + (" (moves with the mean)" if "note" in one else "")
        difference, interval = _number(one["difference"], name, sign=True), _range(one["interval"], name, sign=True)
        rows.append([label, difference, interval, p, verdict])
    return aligned(rows, last_text=True, indent="  ")


def _balance_words(entry: dict[str, Any]) -> str:
    spread = entry["metrics"]["spread"]
    because = f": {spread['reason']}" if "reason" in spread else ""
    return f"  verdict on balance: {entry['balance']}{because}"
