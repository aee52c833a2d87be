import sys

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import locality_cloud, locality_series, save
from analysis.locality.sample_pairs import BinnedMean
from analysis.locality.study import Cloud


@pytest.fixture(autouse=True)
def _settings_stay():
    before = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == before
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def cloud(n, band=True):
    rng = np.random.default_rng(n)
    x = rng.normal(size=n)
    edges = np.quantile(x, [0, 0.5, 1])
    mean = np.array([0.1, 0.3])
    low, high = (mean - 0.1, mean + 0.1) if band else (np.full(2, np.nan), np.full(2, np.nan))
    return Cloud(x, rng.normal(size=n), BinnedMean(edges, np.array([-0.8, 0.8]), mean, low, high, np.array([n, n])))


@pytest.mark.parametrize("n", [30, 3000])
def test_cloud_shows_points_or_hexagons_with_mean_and_band(n):
    figure, axes = locality_cloud(cloud(n), title="a", note="r = 1", interval="95 % of something")
    line = axes.lines[-1]
    assert line.get_xdata().tolist() == [-0.8, 0.8]
    assert line.get_ydata().tolist() == [0.1, 0.3]
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "95 % of something" in shown
    assert "mean in bins" in shown
    assert (f"{n} points" in shown) == (n == 30)
    hexagons = [c for c in axes.collections if type(c).__name__ == "PolyCollection" or "Poly" in type(c).__name__]
    assert hexagons
    assert len(figure.axes) == (1 if n == 30 else 2)
    assert axes.get_title() == "a\nr = 1"


def test_cloud_without_a_band_or_without_points():
    _, axes = locality_cloud(cloud(20, band=False))
    assert not axes.collections
    _, axes = locality_cloud(None, note="no sample rows")
    assert axes.texts[0].get_text() == "no sample rows"
    empty = np.zeros(0)
    nothing = Cloud(empty, empty, BinnedMean(empty, empty, empty, empty, empty, np.zeros(0, dtype=int)))
    _, axes = locality_cloud(nothing)
    assert "nothing to compare" in axes.texts[0].get_text()


def test_series_stand_below_each_other_on_the_same_steps(tmp_path):
    steps = np.arange(10)
    values = np.where(steps == 4, np.nan, steps / 10)
    figure, axes = locality_series({"l": (steps, values), "none": (steps, np.full(10, np.nan))}, window=1, title="run")
    dots, line = axes[0].lines
    assert dots.get_xdata().tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert line.get_ydata() == pytest.approx(values[np.isfinite(values)])
    assert "no step" in axes[1].texts[0].get_text()
    assert axes[0].get_title() == "run"
    save(figure, tmp_path / "a.png", dpi=50)
    with pytest.raises(ValueError, match="no series"):
        locality_series({})


def test_own_axes_are_used():
    figure = Figure()
    first, second, third = figure.subplots(3, 1)
    assert locality_cloud(cloud(10), ax=first) == (figure, first)
    _, axes = locality_series({"a": ([0, 1], [1.0, 2.0]), "b": ([0], [1.0])}, ax=[second, third])
    assert axes == [second, third]


@pytest.mark.parametrize("name", ["$x$", "_a", "中文", "a\nb", "n" * 400])
def test_any_name_is_drawn(tmp_path, name):
    figure, _ = locality_cloud(cloud(10), title=name, note=name, x_label=name)
    save(figure, tmp_path / "a.png", dpi=40)
    figure, _ = locality_series({name: ([0, 1], [1.0, 2.0])}, title=name)
    save(figure, tmp_path / "b.png", dpi=40)
    assert (tmp_path / "b.png").stat().st_size > 0
