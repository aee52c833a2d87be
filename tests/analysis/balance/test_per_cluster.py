import math

import numpy as np
import pytest
from scipy.stats import binomtest, chi2_contingency

from analysis.balance.metrics import LOWER, METRICS, wilson
from analysis.balance.per_cluster import LEVEL, UNMOVED, _difference, cluster_balance, compare_balance
from analysis.balance.questions import QuestionUnits
from analysis.balance.results import Difference, MetricBalance


def answers(p, n, seed=0):
    """Scores of n questions in each of len(p) clusters."""
    rng = np.random.default_rng(seed)
    label = np.repeat(np.arange(len(p)), n)
    return (rng.random(len(label)) < np.asarray(p)[label]).astype(float), label


def slow_raw(score, label):
    a = [np.mean([s for s, c in zip(score, label, strict=True) if c == k]) for k in sorted(set(label))]
    mean = sum(a) / len(a)
    lowest = sorted(a)[: math.ceil(len(a) / 5)]
    return {
        "mean": mean,
        "b20": sum(lowest) / len(lowest),
        "cv": float(np.std(a)) / mean,
        "gini": sum(abs(x - y) for x in a for y in a) / (2 * len(a) ** 2 * mean),
        "gap": max(a) - min(a),
    }


def slow_spread(score, label):
    groups = [[s for s, c in zip(score, label, strict=True) if c == k] for k in sorted(set(label))]
    N, C = len(score), len(groups)
    grand = sum(score) / N
    within = sum((x - sum(g) / len(g)) ** 2 for g in groups for x in g) / (N - C)
    between = sum(len(g) * (sum(g) / len(g) - grand) ** 2 for g in groups) / (C - 1)
    return math.sqrt(max(0.0, (between - within) / ((N - sum(len(g) ** 2 for g in groups) / N) / (C - 1))))


def test_values_follow_their_definitions():
    score, label = answers(np.linspace(0.2, 0.9, 12), 9)
    found = cluster_balance(score, label, resamples=99)
    assert found.n == found.distinct == 108
    assert tuple(found.metrics) == METRICS
    for name, value in slow_raw(score, label).items():
        assert found.metrics[name].value == pytest.approx(value), name
    assert found.metrics["spread"].value == found.metrics["spread"].latent == pytest.approx(slow_spread(score, label))
    assert found.accuracy == pytest.approx([score[label == c].mean() for c in range(12)])
    assert (found.interval[:, 0] < found.accuracy).all()
    assert not found.small.any()
    for name, metric in found.metrics.items():
        if name == "mean":  # of clusters of one size: no deal of the scores changes it
            assert metric.equal_band is None
            assert metric.reason == f"no band: {UNMOVED}"
        else:
            assert metric.reason is None
            assert metric.equal_band[0] < metric.equal_band[1]
        low, high = metric.latent_interval
        assert low <= metric.latent <= high


def test_band_is_that_of_permuted_scores():
    score, label = answers(np.linspace(0.5, 0.9, 15), 6, seed=1)
    found = cluster_balance(score, label, resamples=2000, seed=5)
    rng = np.random.default_rng(0)
    null = {name: [] for name in METRICS}
    for _ in range(1000):
        dealt = rng.permutation(score)
        for name, value in (slow_raw(dealt, label) | {"spread": slow_spread(dealt, label)}).items():
            null[name].append(value)
    for name, values in null.items():
        if name == "mean":
            assert np.ptp(values) < 1e-12
            continue
        low, high = np.quantile(values, [0.025, 0.975])
        # Means of three clusters of six, and gaps, are multiples of 1/18: a quantile may fall to the next.
        near = 0.12 * max(high - low, 0.02) + (1 / 18 if name in ("b20", "gap") else 0)
        assert found.metrics[name].equal_band == (pytest.approx(low, abs=near), pytest.approx(high, abs=near)), name


def test_homogeneity_is_pearsons_test():
    score, label = answers([0.4, 0.6, 0.8, 0.5], 30, seed=2)
    found = cluster_balance(score, label, resamples=4999).homogeneity
    table = [[np.sum(score[label == c] == v) for c in range(4)] for v in (0, 1)]
    expected = chi2_contingency(table, correction=False)
    assert found.statistic == pytest.approx(expected.statistic)
    assert found.p == pytest.approx(expected.pvalue, abs=0.012)


def test_deals_as_uneven_as_the_observed_one_count():
    # Of the six deals of two right answers to two clusters of two, two put both into one cluster.
    found = cluster_balance([1, 1, 0, 0], [0, 0, 1, 1], resamples=3000).homogeneity
    assert found.p == pytest.approx(1 / 3, abs=0.03)


def test_latent_values_take_the_noise_off():
    rng = np.random.default_rng(8)
    p = rng.beta(9.4, 1.9, 164)  # mean 0.83, standard deviation 0.107
    score, label = answers(p, 8, seed=9)
    found = cluster_balance(score, label)
    assert np.std([score[label == c].mean() for c in range(164)]) > 0.15
    assert found.metrics["spread"].latent == pytest.approx(p.std(), abs=0.03)
    lowest = np.sort(p)[:33].mean()
    assert found.metrics["b20"].value < lowest - 0.05
    assert found.metrics["b20"].latent == pytest.approx(lowest, abs=0.05)
    low, high = found.metrics["b20"].latent_interval
    assert low < lowest < high
    assert found.homogeneity.p == 1 / 1000


def test_equal_clusters_are_compatible_with_equal_clusters():
    score, label = answers([0.83] * 164, 8, seed=3)
    found = cluster_balance(score, label)
    assert found.metrics["gap"].value >= 0.5
    assert found.homogeneity.p > 0.05
    assert found.metrics["spread"].latent_interval[0] == 0


def test_order_of_questions_names_of_clusters_and_noise_do_not_matter():
    score, label = answers([0.3, 0.6, 0.9], 7)
    one = cluster_balance(score, label, resamples=99)
    order = np.random.default_rng(0).permutation(21)
    other = cluster_balance(
        np.append(score[order], [1, 0]), np.append(np.array([4, 70, 900])[label[order]], [-1, -1]), resamples=99
    )
    assert one.metrics == other.metrics
    assert other.names.tolist() == [4, 70, 900]
    assert other.n == 21


def test_duplicates_are_dealt_as_one_question():
    # Every question four times: with copies taken for questions of their own, clusters seem to differ.
    score, label = answers([0.5] * 30, 5, seed=11)
    group = np.tile(np.arange(len(score)), 4)
    score4, label4 = np.tile(score, 4), np.tile(label, 4)
    plain = cluster_balance(score, label)
    naive = cluster_balance(score4, label4)
    grouped = cluster_balance(score4, label4, group=group)
    assert naive.homogeneity.p == 1 / 1000
    assert grouped.homogeneity.p == pytest.approx(plain.homogeneity.p)
    assert grouped.homogeneity.statistic == pytest.approx(plain.homogeneity.statistic)
    assert (grouped.n, grouped.distinct) == (600, 150)
    for name in METRICS:
        assert grouped.metrics[name].value == pytest.approx(plain.metrics[name].value)
    assert grouped.interval == pytest.approx(plain.interval)


def test_averages_have_narrower_bands_than_single_answers():
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(40), 8)
    single = (rng.random(320) < 0.6).astype(float)
    average = rng.binomial(10, 0.6, 320) / 10
    one, ten = (cluster_balance(s, label) for s in (single, average))
    assert ten.metrics["gini"].equal_band[1] < 0.5 * one.metrics["gini"].equal_band[0]
    assert ten.homogeneity.p > 0.01
    low, high = ten.metrics["spread"].latent_interval
    assert low == 0
    assert high < one.metrics["spread"].latent_interval[1]


def test_one_cluster():
    found = cluster_balance([1, 0, 1, 1], [3, 3, 3, 3], resamples=99)
    mean = found.metrics["mean"]
    assert (mean.value, mean.equal_band, mean.latent) == (0.75, None, None)
    assert mean.reason == f"no band: {UNMOVED}; no latent interval: it needs at least two clusters"
    # A cv or gap of 0 would read as perfectly even, a lowest fifth of the whole as something else than the mean.
    nothing = MetricBalance(None, None, None, None, "it needs at least two clusters")
    assert {name: one for name, one in found.metrics.items() if name != "mean"} == dict.fromkeys(METRICS[1:], nothing)
    assert (found.homogeneity.p, found.homogeneity.reason) == (None, nothing.reason)


def test_two_runs_in_one_cluster_differ_in_the_mean_alone():
    a, b = [0, 0, 1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1, 0]
    found = compare_balance(a, b, [3] * 10, resamples=99)
    assert found.metrics["mean"].difference == pytest.approx(0.8)
    assert found.metrics["mean"].verdict == "better"
    nothing = Difference(None, None, None, "undetermined", "it needs at least two clusters")
    assert {name: one for name, one in found.metrics.items() if name != "mean"} == dict.fromkeys(METRICS[1:], nothing)
    assert found.logit == nothing
    assert found.verdict == "undetermined"


def test_singletons_alone():
    found = cluster_balance([1, 0, 1], [0, 1, 2], resamples=99)
    assert found.metrics["spread"].value is None
    assert "cannot be told apart" in found.metrics["spread"].reason
    assert found.metrics["gap"].value == 1
    assert found.homogeneity.p is None
    assert "one distinct question" in found.homogeneity.reason
    assert found.small.all()


@pytest.mark.parametrize(
    ("label", "reason"),
    [([0, 0, 0, 0], "it needs at least two clusters"), ([0, 1, 2, 3], "the metric is undefined in one of the runs")],
)
def test_log_odds_have_no_spread_without_a_latent_one(label, reason):
    assert cluster_balance([1, 0, 1, 1], label, resamples=99).logit is None
    found = compare_balance([1, 0, 1, 1], [0, 0, 1, 1], label, resamples=99)
    assert (found.logit.difference, found.logit.p, found.verdict) == (None, None, "undetermined")
    assert found.logit.reason == reason


@pytest.mark.parametrize(("value", "undefined"), [(0.0, {"cv", "gini"}), (1.0, set())])
def test_all_alike(value, undefined):
    found = cluster_balance(np.full(12, value), np.repeat(np.arange(3), 4), resamples=99)
    assert {name for name, metric in found.metrics.items() if metric.value is None} == undefined
    assert all(metric.latent_interval is None and metric.reason for metric in found.metrics.values())
    assert found.homogeneity.reason == "all scores are alike"
    assert found.logit is None
    assert found.metrics["spread"].value == 0


@pytest.mark.parametrize(
    ("score", "label", "options", "message"),
    [
        ([1, 2], [0, 0], {}, r"\[0, 1\]"),
        ([1, np.nan], [0, 0], {}, r"\[0, 1\]"),
        ([1, 0], [0], {}, "labels"),
        ([1, 0], [0, 0], {"group": [1]}, "one of each a question"),
        ([1, 0], [-1, -1], {}, "no question is in a cluster"),
        ([], [], {}, "no question is in a cluster"),
        ([1, 0], [0, 1], {"resamples": 98}, "at least 99"),
    ],
)
def test_refuses_wrong_input(score, label, options, message):
    with pytest.raises(ValueError, match=message):
        cluster_balance(score, label, **options)


def slow_swap_test(a, b, label, metric, draws=800):
    rng = np.random.default_rng(0)
    observed = metric(b, label) - metric(a, label)
    null = []
    for _ in range(draws):
        swap = rng.random(len(a)) < 0.5
        null.append(metric(np.where(swap, a, b), label) - metric(np.where(swap, b, a), label))
    return observed, (1 + sum(abs(x) >= abs(observed) - 1e-12 for x in null)) / (1 + draws), null


def test_swap_test_by_slow_swapping():
    p = np.linspace(0.3, 0.8, 8)
    a, label = answers(p, 6, seed=1)
    b, _ = answers(np.clip(p + 0.1, 0, 1), 6, seed=2)
    found = compare_balance(a, b, label, resamples=2999)
    metrics = {name: (lambda s, c, name=name: slow_raw(s, c)[name]) for name in ("mean", "b20", "cv", "gini", "gap")}
    metrics["spread"] = slow_spread
    for name, metric in metrics.items():
        observed, p_value, null = slow_swap_test(a, b, label, metric)
        one = found.metrics[name]
        assert one.difference == pytest.approx(observed)
        assert one.p == pytest.approx(p_value, abs=0.05), name
        half = np.quantile(np.abs(null), 0.95)
        low, high = one.interval
        assert (high - low) / 2 == pytest.approx(half, rel=0.15, abs=0.015), name
        if name == "mean":
            for end in (low, high):  # where |difference - δ| = half·√(1 - δ²)
                assert abs(one.difference - end) == pytest.approx(half * np.sqrt(1 - end**2), abs=0.02)
        else:
            assert one.difference - low == pytest.approx(high - one.difference)


def test_verdicts_and_their_direction():
    a, label = answers([0.4] * 20, 20, seed=1)
    b, _ = answers([0.8] * 20, 20, seed=2)
    found = compare_balance(a, b, label)
    back = compare_balance(b, a, label)
    assert found.metrics["mean"].verdict == "better"
    assert back.metrics["mean"].verdict == "worse"
    assert found.metrics["cv"].verdict == "better"
    assert found.metrics["cv"].difference < 0
    assert back.metrics["cv"].verdict == "worse"
    assert found.verdict == back.verdict == "undetermined"
    assert found.metrics["mean"].difference == pytest.approx(-back.metrics["mean"].difference)


def test_verdict_on_balance():
    rng = np.random.default_rng(0)
    even, label = answers([0.7] * 60, 25, seed=4)
    uneven, _ = answers(np.clip(0.7 + 0.2 * rng.choice([-1, 1], 60), 0, 1), 25, seed=5)
    found = compare_balance(uneven, even, label)
    assert found.verdict == found.metrics["spread"].verdict == found.logit.verdict == "better"
    assert compare_balance(even, uneven, label).verdict == "worse"


def test_spread_that_moves_with_the_mean_is_no_verdict():
    # Equal spread on the log-odds: near 1 the accuracies lie closer together.
    rng = np.random.default_rng(1)
    effect = rng.normal(0, 0.9, 150)
    a, label = answers(1 / (1 + np.exp(-effect)), 60, seed=6)
    b, _ = answers(1 / (1 + np.exp(-(effect + 2.2))), 60, seed=7)
    found = compare_balance(a, b, label)
    spread = found.metrics["spread"]
    assert spread.p < LEVEL
    assert not spread.interval[0] <= 0 <= spread.interval[1]
    assert found.logit.verdict != "better"
    assert spread.verdict == found.verdict == "undetermined"
    assert "the difference may be that of the means" in spread.reason


@pytest.mark.parametrize("draws", [99, 199, 999, 1000])
def test_interval_and_p_never_disagree(draws):
    rng = np.random.default_rng(draws)
    for observed in np.linspace(0, 1, 81):
        null = rng.standard_normal(draws).round(1) / 4
        for name in ("mean", "b20"):
            one = _difference(name, float(observed), null, 9)
            outside = not one.interval[0] <= 0 <= one.interval[1]
            assert outside == (one.p < LEVEL) == (one.verdict != "undetermined")
            assert -1 <= one.interval[0] <= observed <= one.interval[1] <= 1
    assert _difference("cv", -2.0, null, 9).verdict == "better"
    assert "cv" in LOWER
    assert _difference("b20", -1.0, null, 9).verdict == "worse"
    assert _difference("b20", -1.0, null, 9).p == 1 / (draws + 1)


def test_undefined_differences_have_a_reason():
    zero, label = np.zeros(20), np.repeat(np.arange(4), 5)
    some = zero.copy()
    some[3] = 1
    found = compare_balance(zero, some, label, resamples=99)
    assert found.metrics["gini"].difference is None
    assert found.metrics["gini"].reason == "the metric is undefined in one of the runs"
    assert found.metrics["gini"].verdict == "undetermined"
    assert found.metrics["mean"].p == 1.0
    lonely = compare_balance(some, np.roll(some, 1), label, resamples=99)
    # All swaps that give both answers to one run leave the other without a mean.
    assert lonely.metrics["gini"].interval is None
    assert "too many swaps" in lonely.metrics["gini"].reason


def test_runs_that_agree_are_undetermined():
    score, label = answers([0.2, 0.9], 10)
    found = compare_balance(score, score, label, resamples=99)
    assert {one.verdict for one in found.metrics.values()} == {"undetermined"}
    for one in found.metrics.values():
        assert (one.difference, one.interval, one.p) == (0, None, None)
        assert one.reason == "no swap of the two runs' answers makes a difference"
    accuracy = found.question_accuracy
    assert (accuracy.difference, accuracy.p, accuracy.verdict) == (0, None, "undetermined")
    assert accuracy.interval[0] < 0 < accuracy.interval[1]
    assert accuracy.reason == "the runs score every question alike: nothing to test"
    assert found.cluster_p.tolist() == [1, 1]


def test_duplicates_are_swapped_together():
    a, label = answers([0.5] * 10, 6, seed=1)
    b, _ = answers([0.7] * 10, 6, seed=2)
    plain = compare_balance(a, b, label, seed=3)
    four = compare_balance(np.tile(a, 4), np.tile(b, 4), np.tile(label, 4), group=np.tile(np.arange(60), 4), seed=3)
    assert four.metrics["mean"].difference == pytest.approx(plain.metrics["mean"].difference)
    assert four.metrics["mean"].p == pytest.approx(plain.metrics["mean"].p)
    assert (four.n, four.distinct) == (240, 60)
    assert four.cluster_p.tolist() == plain.cluster_p.tolist()


def test_single_clusters_by_exact_sign_tests():
    a = np.zeros(60)
    b = np.zeros(60)
    label = np.repeat(np.arange(3), 20)
    b[:12] = 1
    a[20:24], b[24:30] = 1, 1
    found = compare_balance(a, b, label, resamples=99)
    raw = [binomtest(0, 12).pvalue, binomtest(4, 10).pvalue, 1.0]
    assert found.cluster_p == pytest.approx([3 * raw[0], min(1, 2 * raw[1]), 1.0])


def test_same_seed_same_numbers():
    a, label = answers([0.3, 0.5, 0.8], 9)
    b, _ = answers([0.3, 0.5, 0.8], 9, seed=1)
    one, two, other = (compare_balance(a, b, label, seed=s, resamples=99) for s in (1, 1, 2))
    assert one.metrics == two.metrics
    assert one.metrics != other.metrics
    first, again = (cluster_balance(a, label, seed=4, resamples=99) for _ in range(2))
    assert first.metrics == again.metrics
    assert (first.ranked_band == again.ranked_band).all()


def test_thousands_of_clusters():
    rng = np.random.default_rng(0)
    label = rng.integers(0, 5000, 40_000)
    score = (rng.random(40_000) < 0.7).astype(float)
    found = cluster_balance(score, label, resamples=99)
    assert len(found.names) == len(np.unique(label))
    assert found.metrics["spread"].latent_interval[0] == 0
    assert found.ranked_band.shape == (2, len(found.names))
    assert (np.diff(found.lorenz_band[1]) >= -1e-12).all()


def test_means_of_duplicates_in_another_order_are_equal():
    # 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 in floating point.
    a, b = np.tile([0.1, 0.2, 0.3], 12), np.tile([0.3, 0.2, 0.1], 12)
    label, group = np.repeat([0, 1], 18), np.repeat(np.arange(12), 3)
    assert (QuestionUnits.of(a, label, group).score != QuestionUnits.of(b, label, group).score).all()
    found = compare_balance(a, b, label, group=group, resamples=99)
    assert found.cluster_p.tolist() == [1, 1]
    assert (found.metrics["mean"].interval, found.metrics["mean"].p, found.question_accuracy.p) == (None, None, None)


@pytest.mark.parametrize("labels", [np.repeat(np.arange(8), 6), np.arange(48), np.zeros(48, dtype=int)])
@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 0), (1, 1), ("some", 1), ("some", "others")])
def test_no_interval_has_no_width_or_leaves_its_range(labels, first, second):
    rng = np.random.default_rng(0)
    kinds = {0: np.zeros(48), 1: np.ones(48), "some": rng.integers(0, 2, 48), "others": rng.integers(0, 2, 48)}
    a, b = kinds[first], kinds[second]
    largest = {"cv": np.sqrt(max(labels)), "gini": 1 - 1 / (max(labels) + 1), "spread": 0.5}
    for balance in (cluster_balance(a, labels, resamples=99), cluster_balance(b, labels, resamples=99)):
        for name, one in balance.metrics.items():
            for interval in (one.equal_band, one.latent_interval):
                assert interval is not None or one.reason
                assert interval is None or 0 <= interval[0] < interval[1] <= largest.get(name, 1), name
        low, high = balance.question_interval
        assert 0 <= low < high <= 1
        assert balance.homogeneity.p is not None or balance.homogeneity.reason
    found = compare_balance(a, b, labels, resamples=99)
    for name, one in found.metrics.items():
        assert None not in (one.interval, one.p) or one.reason
        if one.interval is not None:
            most = largest.get(name, 1)
            assert -most <= one.interval[0] <= one.difference <= one.interval[1] <= most, name
            assert one.interval[0] < one.interval[1]
    low, high = found.question_accuracy.interval
    assert -1 <= low < high <= 1


def test_all_wrong_against_all_right():
    found = compare_balance(np.zeros(48), np.ones(48), np.repeat(np.arange(8), 6))
    mean, accuracy = found.metrics["mean"], found.question_accuracy
    assert (mean.difference, mean.verdict, accuracy.verdict) == (1, "better", "better")
    assert mean.interval[1] == accuracy.interval[1] == 1
    assert 0.8 < mean.interval[0] < 0.9
    # Wilson's interval of 48 of 48 begins at 0.926 and that of 0 ends at 0.074: Newcombe's 1 - √2·0.074.
    assert accuracy.interval[0] == pytest.approx(1 - np.sqrt(2) * 0.0741, abs=1e-3)
    assert accuracy.p == pytest.approx(2 * 0.5**48)
    for name in ("gap", "spread"):
        one = found.metrics[name]
        assert (one.difference, one.interval, one.p, one.verdict) == (0, None, None, "undetermined")


def test_swaps_that_rarely_move_a_metric_give_no_interval():
    # The lowest fifth of single questions is 0 in both runs after nearly every swap.
    found = compare_balance(np.zeros(48), np.ones(48), np.arange(48), resamples=99)
    b20 = found.metrics["b20"]
    assert (b20.difference, b20.interval, b20.p, b20.verdict) == (1, None, 1 / 100, "better")
    assert b20.reason == "nearly all swaps leave no difference: no interval"


def test_one_wrong_answer_cannot_show_that_clusters_differ():
    score = np.ones(48)
    score[0] = 0
    found = cluster_balance(score, np.repeat(np.arange(8), 6), resamples=99)
    assert found.homogeneity.p is None
    assert found.homogeneity.reason == UNMOVED
    assert found.metrics["gap"].equal_band is None
    assert cluster_balance(score, np.repeat([0, 1], [40, 8]), resamples=99).homogeneity.p is not None


def test_clusters_closer_than_chance_have_no_interval_of_the_spread():
    found = cluster_balance(np.tile([1, 1, 1, 0], 50), np.repeat(np.arange(20), 10), resamples=99)
    assert found.metrics["spread"].latent == 0
    assert found.metrics["spread"].latent_interval is None
    assert "closer together than chance" in found.metrics["spread"].reason


def test_accuracy_over_questions_counts_every_question():
    a = np.array([1, 1, 1, 1, 0, 0, 1, 0, 0, 0], dtype=float)
    b = np.array([1, 1, 0, 1, 1, 1, 1, 1, 1, 0], dtype=float)
    label = np.repeat([0, 1, -1], [6, 3, 1])
    one = cluster_balance(a, label, resamples=99)
    assert one.question_accuracy == pytest.approx(5 / 9)
    assert one.metrics["mean"].value == pytest.approx((4 / 6 + 1 / 3) / 2)
    assert one.question_interval == pytest.approx(tuple(wilson(5 / 9, 9)))
    found = compare_balance(a, b, label, resamples=99).question_accuracy
    assert found.difference == pytest.approx(3 / 9)
    assert found.p == pytest.approx(2 * (1 + 5) / 2**5)  # four questions of five went up
    assert found.verdict == "undetermined"


def test_accuracy_of_duplicates_and_averages():
    a, label = answers([0.4] * 10, 12, seed=1)
    b, _ = answers([0.8] * 10, 12, seed=2)
    plain = compare_balance(a, b, label, resamples=99).question_accuracy
    group = np.tile(np.arange(len(a)), 3)
    copies = compare_balance(
        np.tile(a, 3), np.tile(b, 3), np.tile(label, 3), group=group, resamples=99
    ).question_accuracy
    assert plain.verdict == copies.verdict == "better"
    assert copies.interval == pytest.approx(plain.interval)
    assert copies.p == plain.p
    # Most questions go up a little, some fall far: the sign test and the mean point to different sides.
    torn = compare_balance([0.5] * 60, [0.55] * 42 + [0.0] * 18, np.repeat([0, 1], 30), resamples=99).question_accuracy
    assert torn.difference < 0
    assert torn.p < LEVEL
    assert (torn.verdict, torn.reason) == ("undetermined", "the interval does not agree with the test")
