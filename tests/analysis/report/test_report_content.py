from analysis.estimates import Estimate
from analysis.report.content import DASH, join, number


def test_numbers_have_a_true_minus_and_a_dash_with_its_reason():
    assert number(-0.1234, "{:+.2f}").text == "−0.12"
    assert number(3, "{:d}").text == "3"
    undefined = number(Estimate.undefined("no pair"), "{:.2f}")
    assert (undefined.text, undefined.reason) == (DASH, "no pair")
    assert number(None, reason="why").reason == "why"
    assert number(Estimate.of(0.5, 1), "{:.2f}").reason is None


def test_names_are_joined_in_words():
    assert [join(list(names)) for names in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]
