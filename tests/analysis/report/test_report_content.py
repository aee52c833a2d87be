from types import SimpleNamespace

from analysis.estimates import Estimate
from analysis.report.content import DASH, join, number, some
from analysis.report.locality import _sentence


def test_numbers_have_a_true_minus_and_a_dash_with_its_reason():
    assert number(-0.1234, "{:+.2f}").text == "−0.12"
    assert number(3, "{:d}").text == "3"
    undefined = number(Estimate.undefined("no pair"), "{:.2f}")
    assert (undefined.text, undefined.reason) == (DASH, "no pair")
    assert number(None, reason="why").reason == "why"
    assert number(Estimate.of(0.5, 1), "{:.2f}").reason is None


def test_names_are_joined_in_words():
    assert [join(list(names)) for names in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]


def test_many_names_are_cut_and_counted():
    assert some(list("abcdef")) == "a, b, c, d, e and f"
    assert some(list("abcdefg")) == "a, b, c, d, e and 2 more"


def test_a_sentence_on_locality_says_which_way_and_that_nothing_is_adjusted():
    series, matrix = SimpleNamespace(value=-0.19, p=0.04), SimpleNamespace(value=0.1, p=0.4)
    both = SimpleNamespace(reason=None, signals={"hidden": SimpleNamespace(series=series, matrix=matrix)})
    said = _sentence("uniform", both)
    assert "hidden of batches is negatively associated with embeddings (r = −0.19, p = 0.040)" in said
    assert "hidden between steps is not shown to be associated with embeddings (r = +0.10, p = 0.400)" in said
    assert said.endswith("None of these 2 p-values is adjusted for the others.")
    one = SimpleNamespace(reason=None, signals={"hidden": SimpleNamespace(series=series, matrix=None)})
    assert _sentence("uniform", one).endswith("A p speaks of this run alone.")
