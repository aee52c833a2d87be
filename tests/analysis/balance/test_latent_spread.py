import numpy as np
import pytest
from scipy import integrate, stats
from scipy.special import expit, logit

from analysis.balance.latent_spread import (
    beta_shape,
    latent_spread,
    logit_spread,
    random_effect_variance,
    refitted,
    spread_interval,
    underlying,
    within_variance,
)
from analysis.balance.metrics import raw_metrics
from analysis.balance.questions import BOOTSTRAP, QuestionUnits, generator


def slow_anova(groups):
    """Within and between variance by the textbook: mean squares of a one-way layout, in plain loops."""
    N, C = sum(map(len, groups)), len(groups)
    grand = sum(map(sum, groups)) / N
    within = sum((x - sum(g) / len(g)) ** 2 for g in groups for x in g) / (N - C)
    between = sum(len(g) * (sum(g) / len(g) - grand) ** 2 for g in groups) / (C - 1)
    n0 = (N - sum(len(g) ** 2 for g in groups) / N) / (C - 1)
    return within, (between - within) / n0


def test_variance_components_of_unequal_groups():
    rng = np.random.default_rng(0)
    groups = [rng.random(n).round(2).tolist() for n in (3, 7, 1, 12, 5)]
    units = QuestionUnits.of(np.concatenate(groups), np.repeat(np.arange(5), [3, 7, 1, 12, 5]))
    within, between = slow_anova(groups)
    assert within_variance(units, units.sums())[0] == pytest.approx(within)
    a = units.sums().weighted / units.size
    assert random_effect_variance(units, a, np.array([within]))[0] == pytest.approx(between)
    assert latent_spread(units, units.sums())[0] == pytest.approx(np.sqrt(max(0, between)))


def test_spread_is_undefined_without_two_clusters_or_two_units():
    one = QuestionUnits.of([1, 0, 1], [0, 0, 0])
    assert np.isnan(latent_spread(one, one.sums())[0])
    singles = QuestionUnits.of([1, 0, 1], [0, 1, 2])
    assert np.isnan(latent_spread(singles, singles.sums())[0])
    with pytest.raises(ValueError, match="two clusters"):
        spread_interval(one)
    alike = QuestionUnits.of([1, 1, 0, 0], [0, 0, 1, 1])
    with pytest.raises(ValueError, match="positive variance"):
        spread_interval(alike)


def test_interval_inverts_the_generalized_q():
    rng = np.random.default_rng(4)
    label = np.repeat(np.arange(40), rng.integers(2, 15, 40))
    units = QuestionUnits.of(rng.random(len(label)) < rng.beta(4, 2, 40)[label], label)
    low, high = spread_interval(units)
    noise = within_variance(units, units.sums())[0] / units.size
    a = units.sums().weighted[0] / units.size

    def q(tau):
        w = 1 / (tau**2 + noise)
        return (w * (a - (w * a).sum() / w.sum()) ** 2).sum()

    assert 0 < low < latent_spread(units, units.sums())[0] < high < 0.5
    assert stats.chi2.cdf(q(low), 39) == pytest.approx(0.975)
    assert stats.chi2.cdf(q(high), 39) == pytest.approx(0.025)


def test_interval_is_zero_where_clusters_are_more_alike_than_chance():
    units = QuestionUnits.of([1, 0] * 20, np.repeat(np.arange(20), 2))
    assert spread_interval(units) == (0.0, 0.0)


@pytest.mark.parametrize(("mean", "spread"), [(0.83, 0.1), (0.4, 0.25), (0.5, 0.01)])
def test_beta_has_the_wanted_mean_and_spread(mean, spread):
    a, b = (float(shape) for shape in beta_shape(mean, spread))
    assert stats.beta.mean(a, b) == pytest.approx(mean)
    assert stats.beta.std(a, b) == pytest.approx(spread)


@pytest.mark.parametrize(("mean", "spread"), [(0.83, 0.1), (0.4, 0.15)])
def test_logit_spread_by_integration(mean, spread):
    a, b = (float(shape) for shape in beta_shape(mean, spread))

    def moment(power):
        # In terms of x = logit p the density is smooth, where in p it has poles.
        return integrate.quad(lambda x: x**power * stats.beta.pdf(expit(x), a, b) * expit(x) * expit(-x), -60, 60)[0]

    assert logit_spread(mean, spread) == pytest.approx(np.sqrt(moment(2) - moment(1) ** 2), rel=1e-6)


def test_logit_spread_at_the_ends():
    value = logit_spread([0.0, 1.0, 0.5, 0.5], [0.0, 0.0, 0.0, 1e-4])
    assert np.isnan(value[:2]).all()
    assert value[2] == 0
    assert value[3] == pytest.approx(1e-4 / 0.25, rel=1e-3)


def test_an_undefined_spread_stays_undefined():
    assert np.isnan(beta_shape([0.5, 0.0, 1.0], np.nan)).all()
    assert np.isnan(logit_spread(0.5, np.nan))
    found = underlying([0.5, 0.5], [np.nan, 0.0], 3)
    assert np.isnan(found[0]).all()
    assert (found[1] == 0.5).all()


def test_underlying_accuracies_give_the_metrics_of_many_draws():
    mean, spread, C = 0.83, 0.12, 60
    a, b = (float(shape) for shape in beta_shape(mean, spread))
    drawn = raw_metrics(np.random.default_rng(0).beta(a, b, (20_000, C)))
    fitted = raw_metrics(underlying(mean, spread, C))
    for name, one in fitted.items():
        assert one[0] == pytest.approx(drawn[name].mean(), rel=0.03), name


def test_underlying_without_spread_is_the_mean():
    assert (underlying([0.3, 0.0, 1.0], [0.0, 0.0, 0.0], 4) == np.array([[0.3], [0.0], [1.0]])).all()
    assert underlying(0.5, 0.1, 5000).shape == (1, 1000)
    wide, narrow = raw_metrics(underlying(0.7, 0.1, 1001)), raw_metrics(underlying(0.7, 0.1, 1000))
    for name, one in wide.items():
        assert one[0] == pytest.approx(narrow[name][0], rel=0.01), name


def test_bootstrap_reproduces_the_sampling_of_the_fit():
    mean, spread, C, n = 0.7, 0.12, 50, 12
    label = np.repeat(np.arange(C), n)
    score = (np.random.default_rng(0).random(C * n) < 0.7).astype(float)
    units = QuestionUnits.of(score, label)
    means, spreads = refitted(units, mean, spread, mean * (1 - mean) - spread**2, 3000, generator(0, BOOTSTRAP))
    # The same experiment, one question at a time.
    rng = np.random.default_rng(1)
    a, b = (float(shape) for shape in beta_shape(mean, spread))
    slow_means, slow_spreads = [], []
    for _ in range(600):
        answers = rng.random((C, n)) < rng.beta(a, b, C)[:, None]
        within, between = slow_anova(answers.astype(float).tolist())
        slow_means.append(answers.mean())
        slow_spreads.append(np.sqrt(max(0, between)))
        assert within > 0
    assert means.mean() == pytest.approx(np.mean(slow_means), abs=0.003)
    assert means.std() == pytest.approx(np.std(slow_means), rel=0.12)
    assert spreads.mean() == pytest.approx(np.mean(slow_spreads), abs=0.004)
    assert spreads.std() == pytest.approx(np.std(slow_spreads), rel=0.15)


def test_bootstrap_of_averages_has_less_noise():
    rng = np.random.default_rng(0)
    C, n, k = 60, 8, 16
    label = np.repeat(np.arange(C), n)
    mean, spread = 0.6, 0.1
    a, b = (float(shape) for shape in beta_shape(mean, spread))
    p = rng.beta(a, b, C)
    # Averages over k answers whose own chance of being right varies between questions.
    units = QuestionUnits.of(rng.binomial(k, np.clip(p[label] + rng.normal(0, 0.05, C * n), 0, 1)) / k, label)
    within = float(within_variance(units, units.sums())[0])
    assert within < 0.25 * mean * (1 - mean)
    means, spreads = refitted(units, mean, spread, within, 2000, generator(0, BOOTSTRAP))
    assert means.mean() == pytest.approx(mean, abs=0.005)
    assert spreads.mean() == pytest.approx(spread, abs=0.005)
    assert spreads.std() < 0.02
    assert logit(means.mean()) == pytest.approx(logit(mean), abs=0.05)
