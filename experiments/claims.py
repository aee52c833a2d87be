"""The paper's claims, one by one: what was measured here, with its interval, and what that says.

The published figures are those of arXiv 2607.27273 (one seed or three of Qwen3.5-4B on other data): another model,
another scale. A claim that does not show here may hold there, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.seeds.differences import FEW_PAIRS, PairedComparison
from experiments.figures import (
    FEW_STEPS,
    Measure,
    Result,
    balance,
    by_seed,
    difference,
    holm,
    inside,
    mean_score,
    score,
    seeds_needed,
    series_r,
    training_reward,
    values,
)
from experiments.tables import shown_difference

Cells = Mapping[str, Sequence[Result]]  # by a setting's label
LEVEL = 0.05


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
    published
        Size of the published difference in the measure's unit, where there is one to look for.
    """

    setting: str
    arm: str
    baseline: str
    measure: Measure
    expected: str | None = None
    published: float | None = None

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
    note
        What a reader of the table should know.
    """

    title: str
    published: str
    tests: tuple[Test, ...]
    note: str = ""


def _against_sdo(arms: Mapping[str, float | None], measures: Sequence[Measure]) -> tuple[Test, ...]:
    """SDO as the paper has it against variants of it: the claim is that SDO is better.

    Parameters
    ----------
    arms
        Arm -> by how much the paper's accuracy is better, where it says so.
    measures
        What is compared.
    """
    return tuple(
        Test("families-small", "sdo", arm, one, published=accuracy if one is _ACCURACY else None)
        for arm, accuracy in arms.items()
        for one in measures
    )


def _coherence(setting: str) -> tuple[Test, ...]:
    """Both coherences, where the signals have them."""
    measures = [inside("signals", "hidden", "batch_coherence", label="batch coherence, hidden")]
    for signal in ("hidden", "weight"):
        path = ("signals", signal, "step_coherence")
        measures.append(inside(*path, "mean", label=f"step coherence, {signal}", digits=4))
        measures.append(inside(*path, "disjoint", label=f"…, steps without a common sample, {signal}", digits=4))
    return tuple(Test(setting, "sdo", "uniform", one, "higher", 0.12) for one in measures)


_FIRST = score("eval_loss", 1, "held-out loss, first checkpoint", "lower")
_SECOND = score("eval_loss", 2, "held-out loss, second", "lower")
_LOSS = score("eval_loss", -1, "held-out loss, last", "lower")
# What these arms change acts from the second SDO epoch on, that is after about 130 of 360 steps.
_LATE = mean_score("eval_loss", "held-out loss, mean from step 180 on", "lower", first=3)
_MATRIX = inside("locality", "weight", "matrix", "value", label="locality, matrix r, weight")
_CURVE = mean_score("eval_loss", "held-out loss, mean of checkpoints", "lower")
_ACCURACY = score("eval_correct", -1, "accuracy, last", "higher")
_SPREAD = balance("spread", "latent spread of accuracy", "lower")

CLAIMS = (
    Claim(
        "It learns faster early on",
        "SFT loss at 200 steps 1.526 → 1.503; DPO margin +0.044 at 2k steps; GRPO accuracy +1.85 points at 3k steps",
        (
            Test("families-small", "sdo", "uniform", _FIRST, published=0.023),
            Test("families-small", "sdo", "uniform", _SECOND, published=0.023),
            Test("sft-small", "sdo", "uniform", _FIRST, published=0.023),
            Test("sft-small", "sdo", "uniform", _SECOND, published=0.023),
            Test(
                "dpo-small",
                "sdo",
                "uniform",
                score("eval_rewards/margins", 2, "reward margin, second", "higher"),
                published=0.044,
            ),
            Test("grpo-small", "sdo", "uniform", training_reward(), published=0.0185),
        ),
    ),
    Claim(
        "It ends a little better",
        "SFT loss 1.096 → 1.095 at the end; GRPO accuracy 82.41 → 82.89",
        (
            Test("families-small", "sdo", "uniform", _LOSS, published=0.001),
            Test("families-small", "sdo", "uniform", _ACCURACY, published=0.0048),
            Test("sft-small", "sdo", "uniform", _LOSS, published=0.001),
            Test("dpo-small", "sdo", "uniform", score("eval_rewards/margins", -1, "reward margin, last", "higher")),
            Test(
                "grpo-small",
                "sdo",
                "uniform",
                score("eval_reward", -1, "held-out reward, last", "higher"),
                published=0.0048,
            ),
        ),
    ),
    Claim(
        "Gradients are more coherent",
        "gradient coherence of the last trainable layer over the first 3k steps 0.17 → 0.29; the paper does not say "
        "which of the two coherences it is, so both stand here",
        tuple(
            test
            for setting in ("families-small", "sft-small", "dpo-small", "grpo-small")
            for test in _coherence(setting)
        ),
        "Batch coherence is that of the samples of one batch (of `weight` its micro-batches), step coherence that of "
        "the gradients of different steps; "
        "`hidden` is the gradient at the final norm's output, `weight` that of the matrix which a setting names. Which "
        "of these the paper measured is open, so a verdict speaks of the same direction, not of the same quantity, and "
        "the published 0.12 is excluded only if it is of this one. "
        "Batches of neighbors can be more alike within and less alike among each other at once.",
    ),
    Claim(
        "Gradient similarity follows embedding similarity, more than under uniform batches",
        "correlation −0.09 → +0.26 (the authors call it suggestive)",
        tuple(
            Test(setting, "sdo", "uniform", measure, "higher", 0.35)
            for setting, measure in (
                ("families-small", _MATRIX),
                ("families-small", series_r("hidden")),
                ("sft-small", _MATRIX),
                ("dpo-small", _MATRIX),
                ("grpo-small", _MATRIX),
            )
        ),
        f"`sft-small`, `dpo-small` and `grpo-small` have batch coherence of too few steps for a series (below "
        f"{FEW_STEPS}): drift and exposure, which are fitted away first, leave next to nothing of it.",
    ),
    Claim(
        "Clusters are served more evenly",
        "B-20% 0.559 → 0.575, Gini 0.1100 → 0.1038, gap 1.00 → 0.80",
        tuple(
            Test("families-small", "sdo", "uniform", measure, published=published)
            for measure, published in (
                (_SPREAD, None),
                (balance("b20", "B-20%", "higher"), 0.0156),
                (balance("gini", "Gini", "lower"), 0.0062),
                (balance("gap", "gap", "lower"), 0.20),
            )
        ),
        "Accuracy is low here, and a family has few held-out questions: these metrics have little to tell.",
    ),
    Claim(
        "K = 4 is better than 2 and 8",
        "GRPO accuracy at 3k: K 2 75.28, K 4 79.68, K 8 76.95",
        _against_sdo({"k2": 0.0440, "k8": 0.0273}, (_CURVE, _ACCURACY)),
    ),
    Claim(
        "Each part of SDO helps",
        "GRPO accuracy at 5k: full 83.92, static graph 82.94, shuffle 82.79, no exposure 83.78 (one seed)",
        (
            *_against_sdo({"static-graph": 0.0098, "no-exposure": 0.0014}, (_LATE, _ACCURACY, _SPREAD)),
            *_against_sdo({"locality-random": None}, (_CURVE, _ACCURACY, _SPREAD)),
            Test("sft-small", "sdo", "locality-random", _CURVE),
        ),
        "`locality-shuffle` is not among them: it visits every sample once an epoch, in random order, so that its "
        "batches are those of uniform, one by one, and its cells the same. Without exposure and with a static graph "
        "the batches are SDO's until its first epoch ends, so that only later checkpoints can tell.",
    ),
    Claim(
        "Δτ = 2 and r = 0.2 are well chosen",
        "mean accuracy 84.43 (Δτ 1), 83.27 (Δτ 3), 85.27 (r 0.1); Gini 0.1014 at Δτ 1",
        _against_sdo(dict.fromkeys(("delta-tau1", "delta-tau3", "retain01", "retain03")), (_LATE, _ACCURACY)),
        "The paper also says that both matter little. How little is not said: the intervals tell how much they may.",
    ),
)


@dataclass(frozen=True)
class Finding:
    """What was found for a test.

    Parameters
    ----------
    difference, verdict, more
        The difference as text, the verdict, and what else the interval says.
    p
        Of the paired t-test, None where there is none.
    """

    difference: str
    verdict: str
    more: str
    p: float | None = None


def finding(test: Test, cells: Cells) -> Finding:
    """Return what the cells say to a test, see :func:`reading`; one seed gives no verdict."""
    found = cells.get(test.setting, ())
    one = difference(found, test.baseline, test.arm, test.measure)
    text = shown_difference(one, test.measure)
    if one is None:
        wanted = [arm for arm in (test.arm, test.baseline) if not by_seed(found, arm)]
        return Finding(text, "not measured", f"cells of {', '.join(wanted)}" if wanted else "undefined in these cells")
    if isinstance(one, float):
        return Finding(text, "no verdict", "more seeds")
    if one.low is None or one.high is None:
        every = {value for arm in (test.arm, test.baseline) for value in values(found, arm, test.measure).values()}
        alike = f"{every.pop():.{test.measure.digits}f} in every cell: it says nothing here" if len(every) == 1 else ""
        return Finding(text, "undetermined", alike or "the differences do not vary")
    verdict, more = reading(one, test)
    return Finding(text, verdict, more, one.p)


def reading(one: PairedComparison, test: Test) -> tuple[str, str]:
    """Return verdict and remark, both read off the 95 % interval of the paired differences.

    Seen in the claim's direction, the interval says "as claimed" where it lies above 0, "the other way" where it lies
    below, else "undetermined", with its upper end as what is unlikely to be exceeded. The published difference is
    excluded where it lies outside; where it lies inside an undetermined one, the remark says how many seeds would tell
    it from 0.

    Parameters
    ----------
    one
        Paired differences with an interval.
    test
        Gives the claim's direction and the published difference.
    """
    assert one.low is not None  # the caller saw to it
    assert one.high is not None
    low, high = sorted((test.direction * one.low, test.direction * one.high))
    verdict = "as claimed" if low > 0 else "the other way" if high < 0 else "undetermined"
    said = []
    if verdict == "undetermined":
        said.append(f"more than {high:.{test.measure.digits}f} in the claim's direction is unlikely")
    if test.published is not None:
        published = f"the published {test.published:.2g}"
        if not low <= test.published <= high:
            side = "larger" if test.published > high else "smaller"
            said.append(f"excludes {published}" + (f", which is {side}" if verdict == "as claimed" else ""))
        elif verdict == "undetermined":
            seeds = seeds_needed(one, test.published)
            many = seeds is not None and seeds > one.n
            said.append(f"to tell {published} from 0 takes {seeds:,} seeds" if many else f"holds 0 and {published}")
    return verdict, "; ".join(said) or "–"


def sections(cells: Cells) -> str:
    """Return the claims' part of the page; p-values are adjusted for all comparisons of the part."""
    found = {test: finding(test, cells) for claim in CLAIMS for test in claim.tests}
    tested = [test for test, one in found.items() if one.p is not None]
    adjusted = dict(zip(tested, holm([found[test].p or 0.0 for test in tested]), strict=True))
    survive = sum(p < LEVEL for p in adjusted.values())
    parts = [
        f"There are {len(tested)} comparisons with a p-value; *p, all* is that of the paired t-test adjusted for all "
        f"of them (Holm), and below 0.05 in {survive}. A verdict that holds for its own comparison only "
        f"says *alone*. With fewer than {FEW_PAIRS} seeds no sign-flip test can reach 0.05: there p rests on normal "
        "differences."
    ]
    for claim in CLAIMS:
        lines = [f"### {claim.title}", "", f"Published: {claim.published}.", ""]
        lines += ["| setting | measure | difference [95 %] (seeds) | verdict | p, all | what the interval says |"]
        lines.append("|---|---|---|---|---:|---|")
        missing = sorted({test.setting for test in claim.tests if found[test].verdict == "not measured"})
        for test in claim.tests:
            if found[test].verdict == "not measured":
                continue
            one, what = found[test], f"{test.measure.label}: {test.arm} − {test.baseline}"
            p = f"{adjusted[test]:.2g}" if test in adjusted else "–"
            alone = ", alone" if one.verdict in ("as claimed", "the other way") and adjusted[test] >= LEVEL else ""
            lines.append(f"| {test.setting} | {what} | {one.difference} | {one.verdict}{alone} | {p} | {one.more} |")
        lines += ["", f"Still to run: {', '.join(missing)}."] if missing else []
        parts.append("\n".join([*lines, *(["", claim.note] if claim.note else [])]))
    return "\n\n".join(parts)
