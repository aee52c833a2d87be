from types import SimpleNamespace

from matplotlib.figure import Figure

from analysis.estimates import Estimate
from analysis.report.content import DASH, join, number, some
from analysis.report.locality import _clouds, _sentence
from analysis.report.material import ReportMaterial
from analysis.report.settings import plotted_runs


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


def of_kinds(**counts):
    """Runs of some kinds, as many of each."""
    names = [(kind, i) for kind, count in counts.items() for i in range(count)]
    return {f"{kind}{i}": SimpleNamespace(info={"organizer": {"name": kind}}) for kind, i in names}


def test_runs_are_drawn_of_each_kind_in_turn():
    runs = of_kinds(a=1, b=5, c=3)
    assert plotted_runs(list(runs), runs, 6) == ["a0", "b0", "b1", "b2", "c0", "c1"]
    assert plotted_runs(list(runs)[::-1], runs, 2) == ["c2", "b4"]
    assert plotted_runs(list(runs), runs, 20) == list(runs)


def test_few_clouds_are_drawn_and_the_last_says_how_to_see_the_others(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "analysis.report.locality.signal_clouds", lambda found, title: (drawn.append(title), (Figure((1, 1)), []))[1]
    )
    runs = of_kinds(a=10, b=10)
    with_clouds = SimpleNamespace(clouds={"pairs": None})
    found = {name: SimpleNamespace(signals={"x": with_clouds, "y": SimpleNamespace(clouds={})}) for name in runs}
    pictures = _clouds(found, ReportMaterial(runs))
    assert drawn == ["x, a0", "x, a1", "x, b0", "x, b1"]
    assert [picture.caption for picture in pictures[2:]] == [
        "Locality of x, b0.",
        "Locality of x, b1. Drawn: 4 of 20 runs; the others by sdo locality RUN --out DIR.",
    ]
    found = {name: SimpleNamespace(signals={"x": with_clouds, "y": with_clouds}) for name in runs}
    assert len(_clouds(found, ReportMaterial(runs))) == 4
