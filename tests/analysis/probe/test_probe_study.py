"""Every number of a probe against loops over pairs, and planted gradients that follow embeddings or do not."""

import dataclasses
import itertools
import json
import warnings

import numpy as np
import pytest
from scipy import stats

from analysis import gradient_diversity, gram_matrix
from analysis.jackknife import IntervalEstimate
from analysis.probe.batches import FEW_BATCHES, ProbeRows
from analysis.probe.design import design_probe
from analysis.probe.results import advice, design_entry, more_samples, notes, rule, signal_entry
from analysis.probe.study import decide, probe_signal
from sdo import SDO, Embeddings

B = 4
RNG = np.random.default_rng(5)
CENTERS = RNG.normal(size=(30, 6))
EMBEDDINGS = Embeddings.from_array(CENTERS[RNG.integers(30, size=200)] + 0.3 * RNG.normal(size=(200, 6)))
PLAN = SDO(EMBEDDINGS, k=2, seed=1).plan(B)


def rows_of(design, follow, seed=0, common=1.0, own=1.0, undefined=(), norms=True):
    """Gradients of all samples of a design, with a part that follows the embeddings."""
    rng = np.random.default_rng(seed)
    ids, n = design.sample_ids, 200
    followed = follow * EMBEDDINGS.unit @ rng.normal(size=(6, 20)) / np.sqrt(20)
    gradients = followed + common * rng.normal(size=20) / np.sqrt(20) + own * rng.normal(size=(n, 20)) / np.sqrt(20)
    gradients *= np.exp(0.5 * rng.normal(size=n))[:, None] if norms else 1
    defined = ~np.isin(ids, undefined)
    sketch = np.where(defined[:, None], gradients[ids], 0)
    norm = np.where(defined, np.linalg.norm(gradients[ids], axis=1), 0)
    return ProbeRows(ids, EMBEDDINGS.unit[ids], sketch, norm, defined)


def cosine(a, b):
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


class Slow:
    """Loops over pairs and batches; nothing shared with the package."""

    def __init__(self, design, rows):
        self.design = design
        self.place = {int(i): n for n, i in enumerate(rows.sample_ids)}
        self.rows = rows
        self.ok = {i for i, n in self.place.items() if rows.defined[n]}

    def gradient(self, i):
        return np.asarray(self.rows.sketch[self.place[i]], dtype=float)

    def gradient_cosine(self, i, j):
        return cosine(self.gradient(i), self.gradient(j))

    def embedding_cosine(self, i, j):
        return cosine(*(self.rows.unit[self.place[k]].astype(float) for k in (i, j)))

    def product(self, i, j):
        return float(self.gradient(i) @ self.gradient(j))

    def batches(self, arm):
        kept = [[i for i in batch if i in self.ok] for batch in self.design.arms[arm].batches.tolist()]
        return [batch for batch in kept if len(batch) > 1]

    @staticmethod
    def within(batches, value):
        return np.mean([value(i, j) for batch in batches for i, j in itertools.combinations(batch, 2)])

    @staticmethod
    def between(batches, value):
        found = [
            value(i, j) for a, b in itertools.combinations(batches, 2) for i in a for j in b if i != j
        ]  # fmt: skip
        return np.mean(found)

    @classmethod
    def difference(cls, batches, value):
        return cls.within(batches, value) - cls.between(batches, value)

    def size(self, batches):
        rho = self.within(batches, self.product) / np.mean([self.product(i, i) for batch in batches for i in batch])
        return B / (1 + (B - 1) * rho)

    def over_batches(self, batches, statistic, scale=float, back=float):
        without = [scale(statistic(batches[:t] + batches[t + 1 :])) for t in range(len(batches))]
        return self.interval(statistic(batches), without, scale, back)

    @staticmethod
    def interval(value, without, scale=float, back=float):
        n = len(without)
        error = np.sqrt((n - 1) / n * sum((one - np.mean(without)) ** 2 for one in without))
        half = stats.t.ppf(0.975, n - 1) * error
        ends = sorted(back(scale(value) + sign * half) for sign in (-1, 1))
        return (value, *ends)

    def line(self, value, left_out=None):
        """Slope and level at 0 of the pairs of the curve's samples, without one of them."""
        ids = [int(i) for i in self.design.curve_ids if i in self.ok and i != left_out]
        x, y = zip(
            *[(self.embedding_cosine(i, j), value(i, j)) for i, j in itertools.combinations(ids, 2)], strict=True
        )
        return np.polyfit(x, y, 1)

    def over_samples(self, statistic, scale=float, back=float):
        ids = [int(i) for i in self.design.curve_ids if i in self.ok]
        return self.interval(statistic(None), [scale(statistic(i)) for i in ids], scale, back)


def triple(estimate):
    return estimate.value, estimate.low, estimate.high


@pytest.fixture(scope="module")
def material():
    design = design_probe(PLAN, samples=80, steps=200)
    rows = rows_of(design, 1.0, undefined=design.sample_ids[[3, 20, 31]])
    return design, rows, probe_signal(design, rows, permutations=99), Slow(design, rows)


def test_observed_coherence_equals_the_slow_one(material):
    _, _, found, slow = material
    batches = slow.batches("sdo")
    members = [i for batch in batches for i in batch]
    assert len(set(members)) < len(members)  # some sample stands in two batches: no pair of it with itself
    arm = found.arms["sdo"]
    assert arm.batches == len(batches) >= FEW_BATCHES
    for name in ("within", "between", "difference"):
        expected = slow.over_batches(batches, lambda some, name=name: getattr(slow, name)(some, slow.gradient_cosine))
        assert triple(getattr(arm, name)) == pytest.approx(expected, abs=1e-9)
    assert arm.cosine_within == pytest.approx(slow.within(batches, slow.embedding_cosine), abs=1e-6)
    assert arm.cosine_between == pytest.approx(slow.between(batches, slow.embedding_cosine), abs=1e-6)
    few = found.arms["uniform"]
    assert few.batches == len(slow.batches("uniform")) < FEW_BATCHES
    assert few.within.value == pytest.approx(slow.within(slow.batches("uniform"), slow.gradient_cosine))
    assert (few.within.low, few.difference.low, few.size.low) == (None, None, None)
    assert few.difference.reason == f"{few.batches} batches; an interval takes {FEW_BATCHES}"


def test_effective_batch_size_equals_the_slow_one_and_comes_from_gradient_diversity(material):
    design, rows, found, slow = material
    expected = slow.over_batches(slow.batches("sdo"), slow.size, np.log, np.exp)
    assert triple(found.arms["sdo"].size) == pytest.approx(expected, rel=1e-9)
    one = next(batch for batch in design.arms["sdo"].batches if slow.ok.issuperset(batch.tolist()))
    arms = {name: dataclasses.replace(arm, batches=one[None]) for name, arm in design.arms.items()}
    alone = probe_signal(dataclasses.replace(design, arms=arms), _only(rows, one), permutations=0)
    diversity = gradient_diversity(gram_matrix(np.stack([slow.gradient(i) for i in one]))).value
    assert alone.arms["sdo"].size.value == pytest.approx(B * diversity)


def _only(rows, ids):
    kept = np.isin(rows.sample_ids, ids)
    return ProbeRows(rows.sample_ids[kept], rows.unit[kept], rows.sketch[kept], rows.norm[kept], rows.defined[kept])


def test_effective_batch_size_of_whole_batches_is_the_ratio_of_sums():
    """B sum |g|^2 / |sum g|^2, numerator and denominator summed over batches."""
    design = design_probe(PLAN, samples=64, steps=60)
    rows = rows_of(design, 0.8)
    slow = Slow(design, rows)
    top = sum(slow.product(i, i) for batch in slow.batches("sdo") for i in batch)
    bottom = sum(float(np.square(sum(slow.gradient(i) for i in batch)).sum()) for batch in slow.batches("sdo"))
    found = probe_signal(design, rows, permutations=0).arms["sdo"].size
    assert found.value == pytest.approx(B * top / bottom)


def test_predictions_equal_the_slow_ones(material):
    design, _, found, slow = material
    fits = {
        i: slow.line(slow.gradient_cosine, i) for i in (None, *design.curve_ids.tolist()) if i is None or i in slow.ok
    }
    products = {i: slow.line(slow.product, i) for i in fits}
    squares = {i: np.mean([slow.product(j, j) for j in fits if j not in (None, i)]) for i in fits}
    for name in design.arms:
        at = design.arms[name].cosine
        expected = slow.over_samples(lambda i, at=at: np.polyval(fits[i], at))
        assert triple(found.arms[name].predicted) == pytest.approx(expected, abs=1e-6)

        def size(i, at=at):
            return B / (1 + (B - 1) * np.polyval(products[i], at) / squares[i])

        assert triple(found.arms[name].predicted_size) == pytest.approx(
            slow.over_samples(size, np.log, np.exp), rel=1e-5
        )
    apart = design.arms["sdo"].cosine - design.arms["uniform"].cosine
    assert triple(found.predicted_change) == pytest.approx(slow.over_samples(lambda i: fits[i][0] * apart), abs=1e-6)
    assert found.curve_samples == len(fits) - 1
    assert found.undefined == 3
    # The check: what the line says of the very batches observed, and how far they are from it.
    batches, arm = slow.batches("sdo"), found.arms["sdo"]
    shift = slow.difference(batches, slow.embedding_cosine)
    expected = slow.over_samples(lambda i: fits[i][0] * shift)
    assert triple(arm.predicted_difference) == pytest.approx(expected, abs=1e-6)

    def rest(some):
        return slow.difference(some, slow.gradient_cosine) - fits[None][0] * slow.difference(
            some, slow.embedding_cosine
        )

    T = len(batches)
    value, low, high = slow.over_batches(batches, rest)
    from_batches = (high - low) / 2 / stats.t.ppf(0.975, T - 1)
    from_samples = (expected[2] - expected[1]) / 2 / stats.t.ppf(0.975, len(fits) - 2)
    half = stats.t.ppf(0.975, T - 1) * np.hypot(from_batches, from_samples)
    assert triple(arm.departure) == pytest.approx((value, value - half, value + half), abs=1e-6)


def test_curves_are_binned_means(material):
    design, _, found, slow = material
    ids = [int(i) for i in design.curve_ids if i in slow.ok]
    both = [
        (found.curve, list(itertools.combinations(ids, 2))),
        (found.neighbors, [p for batch in slow.batches("sdo") for p in itertools.combinations(batch, 2)]),
    ]
    for binned, pairs in both:
        x, y = (np.array([f(i, j) for i, j in pairs]) for f in (slow.embedding_cosine, slow.gradient_cosine))
        assert binned.count.sum() == len(pairs)
        inner = np.quantile(x, np.linspace(0, 1, len(binned.count) + 1))[1:-1]
        expected = [y[np.digitize(x, inner) == b].mean() for b in range(len(binned.count))]
        assert binned.y == pytest.approx(expected, abs=1e-6)
    sdo = design.arms["sdo"].pairs
    x = [slow.embedding_cosine(i, j) for i, j in itertools.combinations(ids, 2)]
    assert found.beyond == pytest.approx(np.mean(sdo > np.quantile(x, 0.99)), abs=1e-6)


def test_where_gradients_follow_the_probe_says_likely_and_its_prediction_holds():
    design = design_probe(PLAN, samples=160, steps=90)
    found = probe_signal(design, rows_of(design, 3.0, norms=False), permutations=99)
    assert found.verdict.outcome == "likely"
    assert found.slope.low > 0
    assert found.mantel.p == 0.01
    assert found.predicted_change.low > 0
    arm = found.arms["sdo"]
    assert arm.difference.low > 0
    assert arm.departure.low < 0 < arm.departure.high
    assert arm.predicted.low < arm.within.high
    assert arm.within.low < arm.predicted.high
    for control in ("uniform", "random"):
        assert found.arms[control].difference.low < 0 < found.arms[control].difference.high
        assert found.arms[control].size.value > arm.size.value
    assert advice("weight", found, design, 0.5).startswith("likely: gradients of weight agree by 0.")


@pytest.mark.parametrize("common", [0.0, 1.0])
def test_where_they_do_not_follow_it_does_not(common):
    design = design_probe(PLAN, samples=160, steps=90)
    outcomes = []
    for seed in range(40):
        found = probe_signal(design, rows_of(design, 0.0, seed=seed, common=common), permutations=0)
        outcomes.append(found.verdict.outcome)
    assert outcomes.count("likely") <= 6  # of 40 at 5 %: more comes once in 300 times
    assert set(outcomes) <= {"likely", "unlikely", "cannot tell"}


def estimate(value, half):
    return IntervalEstimate(value, value - half, value + half, 20)


@pytest.mark.parametrize(
    ("value", "half", "outcome"),
    [
        (0.00, 0.01, "unlikely"),
        (0.01, 0.005, "unlikely"),
        (0.015, 0.01, "likely"),
        (0.05, 0.04, "likely"),
        (-0.05, 0.04, "likely"),
        (0.01, 0.02, "cannot tell"),
        (0.00, 0.03, "cannot tell"),
    ],
)
def test_the_rule(value, half, outcome):
    """At B = 8 and 0.25 between batches the smallest change is 0.05 (1 + 7 * 0.25) / 7 = 0.0196."""
    found = decide(estimate(value, half), estimate(0.25, 0.1), 8)
    assert found.outcome == outcome
    assert found.smallest == pytest.approx(0.05 * 2.75 / 7)
    assert (found.times_more is None) == (outcome != "cannot tell")


def test_samples_that_would_decide():
    """An interval of half width h falls to h / sqrt(f): then it reaches neither zero, or not the smallest change."""
    between = estimate(0.25, 0.1)
    smallest = 0.05 * 2.75 / 7
    for value, half in ((0.016, 0.02), (0.002, 0.03), (-0.004, 0.05)):
        times = decide(estimate(value, half), between, 8).times_more
        assert times > 1
        assert decide(estimate(value, half / np.sqrt(times) * 0.999), between, 8).outcome != "cannot tell"
        assert decide(estimate(value, half / np.sqrt(times) * 1.001), between, 8).outcome == "cannot tell"
    assert smallest == pytest.approx(decide(estimate(0, 1), between, 8).smallest)


def test_without_an_interval_nothing_can_be_told():
    nothing = IntervalEstimate(0.1, None, None, 3, "3 batches; an interval takes 6")
    found = decide(nothing, estimate(0.2, 0.1), 8)
    assert (found.outcome, found.reason) == ("cannot tell", "3 batches; an interval takes 6")
    opposed = decide(estimate(0.1, 0.01), estimate(-0.5, 0.1), 8)
    assert (opposed.outcome, opposed.reason) == ("cannot tell", "the gradients of a batch would cancel")


def everything(design, rows):
    found = probe_signal(design, rows, permutations=9)
    reasons = [None if one else "zero gradient" for one in rows.defined]
    said = notes({"weight": found}, {"weight": reasons}, design)
    parts = [signal_entry(found), design_entry(design), more_samples(found, design, 0.5), said, rule()]
    json.dumps(parts, allow_nan=False)
    return found, said, advice("weight", found, design, 0.5)


def every_missing_number_has_a_reason(entry):
    if isinstance(entry, dict):
        for name, value in entry.items():
            every_missing_number_has_a_reason(value)
            if value is None and "reason" in entry and name in ("value", "low", "high"):
                assert entry["reason"], entry
    elif isinstance(entry, list):
        for one in entry:
            every_missing_number_has_a_reason(one)


@pytest.mark.parametrize("left", [0, 1, 5])
def test_gradients_without_direction_are_left_out_until_none_is_left(left):
    design = design_probe(PLAN, samples=64, steps=90)
    rows = rows_of(design, 1.0, undefined=design.sample_ids[left:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, said, sentence = everything(design, rows)
    assert found.verdict.outcome == "cannot tell"
    assert sentence.startswith("cannot tell: ")
    assert found.undefined == len(design.sample_ids) - left
    assert any(f"{found.undefined} of {found.samples} gradients have no direction" in note for note in said)
    assert any("nothing is predicted" in note for note in said)
    every_missing_number_has_a_reason(signal_entry(found))


def test_equal_texts_give_no_curve_but_a_reason():
    embeddings = Embeddings.from_array(np.ones((60, 4)))
    design = design_probe(SDO(embeddings, k=2, seed=1).plan(B), samples=64, steps=40)
    ids = design.sample_ids
    sketch = np.tile(np.arange(1.0, 6.0), (len(ids), 1))
    rows = ProbeRows(ids, embeddings.unit[ids], sketch, np.ones(len(ids)), np.ones(len(ids), dtype=bool))
    found, said, sentence = everything(design, rows)
    assert "do not vary" in found.slope.reason
    assert found.arms["sdo"].within.value == pytest.approx(1)
    assert found.verdict.outcome == "unlikely"  # all batches are equally coherent, and exactly so
    assert any("equal embeddings" in note for note in said)
    assert sentence.startswith("unlikely to change them much: ")


def test_norms_too_large_to_square_are_scaled():
    design = design_probe(PLAN, samples=72, steps=90)
    rows = rows_of(design, 1.0)
    scaled = dataclasses.replace(rows, norm=rows.norm * 1e200)
    plain, huge = (probe_signal(design, one, permutations=0).arms["sdo"] for one in (rows, scaled))
    assert triple(huge.size) == pytest.approx(triple(plain.size))
    assert triple(huge.predicted_size) == pytest.approx(triple(plain.predicted_size))


def test_sentences():
    design = design_probe(PLAN, samples=160, steps=90)
    found = probe_signal(design, rows_of(design, 0.0), permutations=0)
    arm = dataclasses.replace(found.arms["sdo"], difference=estimate(-0.02, 0.03), between=estimate(0.2, 0.1))
    verdict = decide(arm.difference, arm.between, B)
    found = dataclasses.replace(found, arms=found.arms | {"sdo": arm}, verdict=verdict)
    text = advice("hidden", found, design, 0.5)
    assert text.startswith("cannot tell: gradients of hidden agree by 0.020 less inside SDO's batches")
    assert "neither no change nor one of 0.027 is excluded" in text
    assert text.endswith("about 360 samples (3 min) decide")
    cost = more_samples(found, design, 0.5)
    assert cost["samples"] == 320
    assert cost["more_seconds"] == pytest.approx(0.5 * len(design.sample_ids))
    assert cost["half_width_then"] == pytest.approx(0.03 / np.sqrt(2))


def test_intervals_cover_the_truth_in_a_small_copy_of_the_benchmark():
    """benchmarks/probe_levels.py at 160 samples of 200: for a second or two."""
    pytest.importorskip("benchmarks", reason="runs from the source tree")
    from benchmarks.probe_levels import WORLDS, Probes, cell

    probes = Probes(EMBEDDINGS, 200, 128, plans=6)
    for world, follows in (("nothing follows", False), ("follows strongly", True)):
        found = cell(probes, WORLDS[world], 60, np.random.default_rng(0))
        for name in ("difference", "predicted", "slope", "within"):
            assert found["missed"][name] / 60 <= 0.17, (world, name)
        assert found["outcomes"]["likely"] >= 50 if follows else found["outcomes"]["likely"] <= 9
