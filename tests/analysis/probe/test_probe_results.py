import pytest

from analysis.probe.results import _rounded, duration, rule


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (3599, "60 min"), (7300, "122 min")]
)
def test_durations(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(("count", "rounded"), [(7.2, 8), (355, 360), (360, 360), (1001, 1100), (99.5, 100)])
def test_counts_are_rounded_up_to_two_digits(count, rounded):
    assert _rounded(count) == rounded


def test_the_rule_names_the_share_and_both_errors():
    assert "by 10%" in rule(0.1)
    assert "at most 5 %" in rule()
    assert "at most 2.5 %" in rule()
