import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import (
    Exposure,
    SeedComparison,
    compare_paired,
    coverage_curves,
    exposure_histogram,
    save,
    seed_differences,
)


@pytest.fixture(autouse=True)
def _settings_stay():
    before = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == before


def exposure(times):
    distinct = np.arange(1, len(times) + 1)
    return Exposure(np.array(times), np.arange(len(times)), distinct, {}, "trained")


def comparison(differences):
    table = np.array(differences, dtype=float)
    zeros = np.zeros_like(table)
    each = tuple(compare_paired(a, b) for a, b in zip(zeros, table, strict=True))
    return SeedComparison("loss", tuple(range(len(table))), zeros, table, each, ())


def test_histogram_shows_shares_of_samples():
    _, axes = exposure_histogram({"a": exposure([0, 2, 2, 4]), "_b": exposure([1, 1])}, title="t")
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == [0.25, 0, 0.5, 0, 0.25, 0, 1.0, 0, 0, 0]
    labels = [text.get_text().strip() for text in axes.get_legend().get_texts()]
    assert labels[0] == "a: mean 2.00, Gini 0.375"
    assert labels[1].startswith("_b")
    assert exposure_histogram({"a": exposure([0, 90])})[1].lines
    assert "undefined" in exposure_histogram({"a": exposure([0, 0])})[1].get_legend().get_texts()[0].get_text()
    assert exposure_histogram({})[1].texts


def test_coverage_rises_to_the_share_seen():
    _, axes = coverage_curves({"a": exposure([1, 1, 1, 1])})
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 3, 4]
    assert axes.lines[0].get_ydata().tolist() == [0.25, 0.5, 0.75, 1.0]
    assert coverage_curves({})[1].texts


def test_differences_show_pairs_and_the_interval(tmp_path):
    one = comparison([[0.1, 0.3, 0.2], [0.1, 0.1, 0.1]])
    figure, axes = seed_differences(one, title="$x$")
    assert [line.get_ydata().tolist() for line in axes.lines[:3]] == [[0.1, 0.1], [0.3, 0.1], [0.2, 0.1]]
    bars = axes.containers[0].lines[2][0].get_segments()
    assert len(bars) == 1
    assert bars[0][:, 1] == pytest.approx([one.comparisons[0].low, one.comparisons[0].high])
    save(figure, tmp_path / "a.png", dpi=40)


def test_own_axes_are_used():
    figure = Figure()
    places = figure.subplots(1, 3)
    assert exposure_histogram({"a": exposure([1, 2])}, ax=places[0])[1] is places[0]
    assert coverage_curves({"a": exposure([1, 2])}, ax=places[1])[0] is figure
    assert seed_differences(comparison([[0.1, 0.3]]), ax=places[2])[1] is places[2]
