"""The paper's claims, one by one: what was measured here, with its interval, and what that says.

The published figures are those of arXiv 2607.27273 (one seed or three of Qwen3.5-4B on other data): another model,
another scale. A claim that does not show here may hold there, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.seeds import PairedComparison
from benchmarks.paper.figures import (
    Measure,
    Result,
    balance,
    by_seed,
    difference,
    inside,
    mean_score,
    score,
    seeds_needed,
    training_reward,
)
from benchmarks.paper.tables import shown_difference

Cells = Mapping[str, Sequence[Result]]  # by a setting's label


@dataclass(frozen=True)
class Test:
    """One comparison that speaks to a claim.

    Parameters
    ----------
    setting
        Label of the setting and scale.
    arm, baseline
        The claim is about `arm` minus `baseline`.
    measure
        Its ``better``, or `expected`, is the direction that the claim says.
    expected
        ``"lower"`` or ``"higher"`` where the measure has no better direction.
    """

    setting: str
    arm: str
    baseline: str
    measure: Measure
    expected: str | None = None

    @property
    def direction(self) -> int:
        """1 where the claim says that the arm is higher, -1 where lower."""
        return 1 if (self.expected or self.measure.better) == "higher" else -1


@dataclass(frozen=True)
class Claim:
    """One claim.

    Parameters
    ----------
    title, published
        What is claimed, and the figures that the paper gives.
    tests
        What was measured for it.
    """

    title: str
    published: str
    tests: tuple[Test, ...]


def _against_sdo(arms: Sequence[str], measures: Sequence[Measure]) -> tuple[Test, ...]:
    """SDO as the paper has it against variants of it: the claim is that SDO is better."""
    return tuple(Test("families-small", "sdo", arm, measure) for arm in arms for measure in measures)


_LOSS = score("eval_loss", -1, "held-out loss, last", "lower")
_CURVE = mean_score("eval_loss", "held-out loss, mean of checkpoints", "lower")
_ACCURACY = score("eval_correct", -1, "accuracy, last", "higher")
_SPREAD = balance("spread", "latent spread of accuracy", "lower")

CLAIMS = (
    Claim(
        "It learns faster early on",
        "SFT loss at 200 steps 1.526 → 1.503; DPO margin +0.044 at 2k steps; GRPO accuracy +1.85 points at 3k steps",
        (
            Test("families-small", "sdo", "uniform", score("eval_loss", 1, "held-out loss, first checkpoint", "lower")),
            Test("families-small", "sdo", "uniform", score("eval_loss", 2, "held-out loss, second", "lower")),
            Test("sft-small", "sdo", "uniform", score("eval_loss", 1, "held-out loss, first checkpoint", "lower")),
            Test("sft-small", "sdo", "uniform", score("eval_loss", 2, "held-out loss, second", "lower")),
            Test("dpo-small", "sdo", "uniform", score("eval_rewards/margins", 2, "reward margin, second", "higher")),
            Test("grpo-small", "sdo", "uniform", training_reward()),
        ),
    ),
    Claim(
        "It ends a little better",
        "SFT loss 1.096 → 1.095 at the end; GRPO accuracy 82.41 → 82.89",
        (
            Test("families-small", "sdo", "uniform", _LOSS),
            Test("families-small", "sdo", "uniform", _ACCURACY),
            Test("sft-small", "sdo", "uniform", _LOSS),
            Test("dpo-small", "sdo", "uniform", score("eval_rewards/margins", -1, "reward margin, last", "higher")),
            Test("grpo-small", "sdo", "uniform", score("eval_reward", -1, "held-out reward, last", "higher")),
        ),
    ),
    Claim(
        "Gradients are more coherent",
        "gradient coherence of the last trainable layer over the first 3k steps 0.17 → 0.29; the paper does not say "
        "which of the two coherences it is, so both stand here",
        tuple(
            Test(setting, "sdo", "uniform", measure, "higher")
            for setting in ("families-small", "sft-small", "dpo-small", "grpo-small")
            for measure in (
                inside("signals", "hidden", "batch_coherence", label="batch coherence, hidden"),
                inside("signals", "weight", "step_coherence", "mean", label="step coherence, weight", digits=4),
            )
        ),
    ),
    Claim(
        "Gradient similarity follows embedding similarity, more than under uniform batches",
        "correlation −0.09 → +0.26 (the authors call it suggestive)",
        tuple(
            Test(setting, "sdo", "uniform", measure, "higher")
            for setting in ("families-small", "sft-small")
            for measure in (
                inside("locality", "weight", "matrix", "value", label="locality, matrix r, weight"),
                inside("locality", "hidden", "series", "value", label="locality, series r, hidden"),
            )
        ),
    ),
    Claim(
        "Clusters are served more evenly",
        "B-20% 55.94 → 57.50, Gini 0.1100 → 0.1038, gap 100 → 80 points",
        tuple(
            Test("families-small", "sdo", "uniform", measure)
            for measure in (
                _SPREAD,
                balance("b20", "B-20%", "higher"),
                balance("gini", "Gini", "lower"),
                balance("gap", "gap", "lower"),
            )
        ),
    ),
    Claim(
        "K = 4 is better than 2 and 8",
        "GRPO accuracy at 3k: K 2 75.28, K 4 79.68, K 8 76.95",
        _against_sdo(("k2", "k8"), (_CURVE, _ACCURACY)),
    ),
    Claim(
        "Each part of SDO helps",
        "GRPO accuracy at 5k: full 83.92, static graph 82.94, shuffle 82.79, no exposure 83.78 (one seed)",
        _against_sdo(
            ("static-graph", "locality-random", "locality-shuffle", "no-exposure"), (_CURVE, _ACCURACY, _SPREAD)
        ),
    ),
    Claim(
        "Δτ and r matter little, and are well chosen",
        "mean accuracy 84.43 (Δτ 1), 83.27 (Δτ 3), 85.27 (r 0.1); Gini 0.1014 at Δτ 1",
        _against_sdo(("delta-tau1", "delta-tau3", "retain01", "retain03"), (_CURVE, _ACCURACY)),
    ),
)


def verdict(test: Test, cells: Cells) -> tuple[str, str, str]:
    """Return the difference as text, the verdict, and what it would take to settle it.

    The verdict is read off the 95 % interval of the paired differences: "as claimed" where it lies on the claim's side
    of 0, "the other way" on the other, else "undetermined". One seed gives none.
    """
    found = cells.get(test.setting, ())
    one = difference(found, test.baseline, test.arm, test.measure)
    text = shown_difference(one, test.measure)
    if one is None:
        wanted = [arm for arm in (test.arm, test.baseline) if not by_seed(found, arm)]
        return text, "not measured", f"cells of {', '.join(wanted)}" if wanted else "it is undefined in these cells"
    if isinstance(one, float):
        return text, "no verdict", "more seeds"
    if one.low is None or one.high is None:
        return text, "undetermined", "the differences do not vary"
    if one.low > 0 or one.high < 0:
        side = 1 if one.mean > 0 else -1
        return text, "as claimed" if side == test.direction else "the other way", "–"
    return text, "undetermined", _to_settle(one)


def _to_settle(one: PairedComparison) -> str:
    seeds = seeds_needed(one, one.mean)
    if seeds is None:
        return "–"
    return f"{seeds:,} seeds, if the difference is what it looks like" if seeds < 100_000 else "no difference to find"


def section(claim: Claim, cells: Cells) -> str:
    """Return a claim's part of the page."""
    lines = [f"### {claim.title}", "", f"Published: {claim.published}.", ""]
    lines += ["| setting | measure | difference [95 %] (seeds) | verdict | to settle it |", "|---|---|---|---|---|"]
    for test in claim.tests:
        text, said, needed = verdict(test, cells)
        what = f"{test.measure.label}: {test.arm} − {test.baseline}"
        lines.append(f"| {test.setting} | {what} | {text} | {said} | {needed} |")
    return "\n".join(lines)
