import math
import sys

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import (
    BatchCoherence,
    batch_coherence_series,
    coherence_heat_maps,
    heat_map,
    save,
    shared_limit,
    step_coherence,
    step_coherence_blocks,
)
from analysis.coherence.plots import UNDEFINED_GRAY, block_means
from analysis.drawing import plain_text


def coherence(T, undefined=(), seed=0):
    g = np.random.default_rng(seed).normal(size=(T, 8)) + 0.3
    g[list(undefined)] = 0
    return step_coherence(g)


def series(values, first=0):
    value = np.asarray(values, dtype=float)
    n = len(value)
    two = np.full(n, 2)
    return BatchCoherence(np.arange(first, first + n), value, two, two, (None,) * n)


@pytest.fixture(autouse=True)
def _settings_stay():
    before = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == before
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


@pytest.mark.parametrize(("T", "size"), [(1, 4), (4, 4), (5, 4), (9, 4), (10, 3)])
def test_block_means_are_means_of_defined_cells(T, size):
    matrix = np.random.default_rng(T).normal(size=(T, T))
    matrix[:, T // 2] = np.nan
    cells, block = block_means(matrix, size)
    assert block == math.ceil(T / size)
    for i in range(len(cells)):
        for j in range(len(cells)):
            part = matrix[i * block : (i + 1) * block, j * block : (j + 1) * block]
            known = [x for x in part.ravel() if not math.isnan(x)]
            assert cells[i, j] == pytest.approx(np.mean(known) if known else np.nan, nan_ok=True)
    assert len(cells) <= size


def test_block_means_of_nothing():
    cells, block = block_means(np.zeros((0, 0)))
    assert cells.shape == (0, 0)
    assert block == 1


def test_limit_ignores_the_diagonal_and_covers_all_runs():
    small, large = np.full((20, 20), 0.1), np.full((20, 20), -0.4)
    for matrix in (small, large):
        np.fill_diagonal(matrix, 1.0)
    assert shared_limit([small]) == pytest.approx(0.1)
    assert shared_limit([small, large]) == pytest.approx(0.4)
    assert shared_limit([np.full((3, 3), np.nan)]) == 1.0
    assert shared_limit([np.eye(3)]) == 1.0
    assert shared_limit([np.ones((1, 1))]) == 1.0


def test_heat_map_is_centered_at_zero_and_names_undefined_cells():
    figure, axes = heat_map(coherence(12, undefined=[3]), limit=0.5, title="run")
    (image,) = axes.images
    assert image.get_clim() == (-0.5, 0.5)
    assert image.cmap.get_bad()[:3] == pytest.approx(tuple(int(UNDEFINED_GRAY[i : i + 2], 16) / 255 for i in (1, 3, 5)))
    assert "undefined" in axes.get_legend().get_texts()[0].get_text()
    assert axes.get_xlabel() == axes.get_ylabel() == "step"
    assert len(figure.axes) == 2
    assert "clipped at ±0.5" in figure.axes[1].get_ylabel()
    assert heat_map(coherence(12), limit=0.5)[1].get_legend() is None


def test_heat_map_aggregates_and_says_so():
    _, axes = heat_map(coherence(600), limit=0.5)
    assert axes.images[0].get_array().shape == (200, 200)
    assert "3 × 3 steps" in axes.get_xlabel()


def test_blocks_of_steps_are_drawn_as_their_matrix_is():
    g = np.random.default_rng(5).normal(size=(300, 8)) + 0.3
    matrix, blocks = step_coherence(g), step_coherence_blocks(g)
    assert shared_limit([blocks]) == pytest.approx(shared_limit([matrix]), abs=1e-6)
    drawn = []
    for one in (matrix, blocks):
        _, (ax,) = coherence_heat_maps({"run": one})
        drawn.append((ax.images[0].get_array(), ax.images[0].get_extent(), ax.get_xlabel()))
    np.testing.assert_allclose(drawn[0][0], drawn[1][0], atol=1e-6)
    assert drawn[0][1:] == drawn[1][1:]
    assert "2 × 2 steps" in drawn[1][2]


def test_axes_carry_step_numbers():
    _, axes = heat_map(coherence(5), limit=1.0, steps=[100, 110, 120, 130, 140])
    label = axes.xaxis.get_major_formatter()
    assert [label(position) for position in (-1, 0, 3, 5)] == ["", "100", "130", ""]


@pytest.mark.parametrize("matrix", [np.zeros((0, 0)), np.ones((1, 1)), np.full((4, 4), np.nan)])
def test_few_data_give_a_message(matrix):
    figure, axes = heat_map(matrix, limit=1.0)
    assert not axes.images
    assert "nothing to compare" in axes.texts[0].get_text()
    assert len(figure.axes) == 1


def test_wrong_matrices_are_refused():
    with pytest.raises(ValueError, match="square"):
        heat_map(np.zeros((2, 3)), limit=1.0)
    with pytest.raises(ValueError, match="limit is 0"):
        heat_map(np.zeros((2, 2)), limit=0.0)
    with pytest.raises(ValueError, match="no runs"):
        coherence_heat_maps({})


def test_runs_are_compared_on_one_scale_with_one_bar():
    runs = {f"run {i}": coherence(10 + i, seed=i) for i in range(4)} | {"empty": np.ones((1, 1))}
    figure, axes = coherence_heat_maps(runs, title="all")
    assert len(axes) == 5
    assert len(figure.axes) == 6
    assert len({ax.images[0].get_clim() for ax in axes[:4]}) == 1
    assert [ax.get_title() for ax in axes] == list(runs)
    assert "step coherence" in figure.axes[-1].get_ylabel()


def test_own_axes_are_used():
    figure = Figure(layout="compressed")
    left, right = figure.subplots(1, 2)
    assert heat_map(coherence(5), limit=1.0, color_bar=False, ax=left) == (figure, left)
    assert batch_coherence_series({"a": series([0.1, 0.2])}, ax=right) == (figure, right)
    other = Figure()
    _, axes = coherence_heat_maps({"a": coherence(5), "b": coherence(6)}, ax=other.subplots(1, 2))
    assert axes[0].figure is other


def test_series_show_every_step_and_a_running_mean():
    values = np.array([0.1, np.nan, 0.3, 0.5, 0.2])
    _, axes = batch_coherence_series({"a": series(values, first=7)}, window=3)
    dots, line = axes.lines[:2]
    assert dots.get_xdata().tolist() == [7, 9, 10, 11]
    assert line.get_ydata() == pytest.approx([0.2, 0.3, 1 / 3, 0.35])
    assert axes.get_legend().get_texts()[0].get_text() == "a (4 steps; line: mean over 3 of them)"


def test_series_without_data_give_a_message():
    _, axes = batch_coherence_series({"a": series([np.nan])})
    assert "nothing to compare" in axes.texts[0].get_text()
    _, axes = batch_coherence_series({"a": series([np.nan]), "b": series([0.5])})
    assert len(axes.get_legend().get_texts()) == 1


@pytest.mark.parametrize("name", ["_a_b", "$x$", "$$", "a$b_{", "one\ntwo", "中文", r"\frac", "n" * 300, ""])
def test_any_name_is_drawn_as_it_is(tmp_path, name):
    figure, _ = heat_map(coherence(5), limit=1.0, title=name)
    save(figure, tmp_path / "a.png", dpi=50)
    figure, axes = batch_coherence_series({name: series([0.1, 0.2])}, title=name)
    save(figure, tmp_path / "b.png", dpi=50)
    assert axes.get_legend().get_texts()[0].get_text().startswith(plain_text(name))
    figure, _ = coherence_heat_maps({name: coherence(5)}, title=name)
    save(figure, tmp_path / "c.png", dpi=50)
