import pytest

from analysis.estimates import Estimate
from analysis.report.content import DASH, excerpt, join, number


def test_numbers_have_a_true_minus_and_a_dash_with_its_reason():
    assert number(-0.1234, "{:+.2f}").text == "−0.12"
    assert number(3, "{:d}").text == "3"
    undefined = number(Estimate.undefined("no pair"), "{:.2f}")
    assert (undefined.text, undefined.reason) == (DASH, "no pair")
    assert number(None, reason="why").reason == "why"
    assert number(Estimate.of(0.5, 1), "{:.2f}").reason is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n\tb  c", "a b c"),
        ("x" * 30, "x" * 19 + "…"),
        ("y" * 1_000_000, "y" * 19 + "…"),
        ("a" + " " * 500, "a…"),
        ("gnp.exe\u202egpj\u2066", "gnp.exe\ufffdgpj\ufffd"),
        ("\x00\x1b[31m", "\ufffd\ufffd[31m"),
        ("مرحبا $x$", "مرحبا $x$"),
        ("", ""),
    ],
)
def test_excerpts_are_one_short_line_without_hidden_characters(text, shown):
    assert excerpt(text, 20) == shown


def test_names_are_joined_in_words():
    assert [join(list(names)) for names in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]
