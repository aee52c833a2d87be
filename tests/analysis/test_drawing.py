import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from analysis import heat_map, save
from analysis.drawing import MANY_RUNS, figure_of, plain_text, root_figure, running_mean, runs_legend, short_names


def test_plain_text():
    assert plain_text("a\n$b_c") == r"a \$b_c"
    assert plain_text("中") == r"\u4e2d"
    assert plain_text("x" * 90, 10) == "x" * 9 + "…"


def test_plain_text_holds_nothing_that_is_obeyed():
    assert plain_text("a\nb \x1b[31m\u202e") == r"a b \x1b[31m\u202e"


def test_saved_pictures_are_small_palettes_and_replace_old_ones(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    figure, _ = heat_map(np.random.default_rng(0).uniform(-1, 1, (300, 300)), limit=1.0)
    assert save(figure, path) == path
    with Image.open(path) as image:
        assert image.mode == "P"
        assert image.format == "PNG"
    assert path.stat().st_size < 200_000
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]


def test_axes_of_subfigures_belong_to_the_whole_figure():
    whole = Figure()
    left, right = whole.subfigures(1, 2)
    nested, _ = right.subfigures(1, 2)
    for holder in (whole, left, nested):
        assert root_figure(holder.add_subplot()) is whole
    loose = whole.add_subplot()
    loose.remove()
    with pytest.raises(ValueError, match="belong to no figure"):
        root_figure(loose)


def test_running_mean_is_centered_and_cut_at_the_ends():
    values = np.array([1.0, 5.0, 3.0, 8.0, 2.0, 7.0])
    for window in range(1, 7):
        slow = [
            np.mean(values[max(0, i - (window - 1) // 2) : min(len(values), i + window // 2 + 1)])
            for i in range(len(values))
        ]
        np.testing.assert_allclose(running_mean(values, window), slow, rtol=1e-12)


def drawn(names, ax=None):
    figure, axes = figure_of(ax, (5.6, 3.8))
    handles = [axes.plot([0, 1], [0, i])[0] for i in range(len(names))]
    axes.set_xlabel("step")
    runs_legend(axes, handles, names, [": more"] * len(names), grow=ax is None)
    figure.canvas.draw()
    return figure, axes, axes.get_legend()


def test_few_runs_stand_with_details_and_many_below_the_axes_alone():
    few = [f"_run {i}" for i in range(MANY_RUNS)]
    figure, _, legend = drawn(few)
    assert figure.get_figheight() == 3.8
    assert [text.get_text() for text in legend.get_texts()] == [f"{name}: more" for name in few]
    many = [f"_run $ {i}" for i in range(20)]
    figure, axes, legend = drawn(many)
    assert [text.get_text() for text in legend.get_texts()] == [plain_text(name) for name in many]
    below, inside = legend.get_window_extent(), axes.get_window_extent()
    assert below.y1 < inside.y0 - 20  # the axis label is between
    assert below.x1 <= figure.bbox.x1
    assert inside.height / figure.dpi > 2.5


def test_many_runs_leave_the_size_of_a_users_figure_alone():
    figure = Figure(figsize=(6, 4))
    assert drawn([f"r{i}" for i in range(20)], ax=figure.subplots())[0] is figure
    assert figure.get_figheight() == 4


def test_long_names_lose_what_they_share_and_stay_apart():
    assert short_names(["a", "b"], 3) == ["a", "b"]
    names = [f"a-study-of-the-spring-{arm}-{seed}" for arm in ("sdo", "uniform") for seed in (101, 211)]
    assert short_names(names) == ["…sdo-101", "…sdo-211", "…uniform-101", "…uniform-211"]
    ends = ["x" * 30 + str(i) + "y" * 30 for i in range(3)]
    assert len(set(short_names(ends, 9))) == 3
    apart = [f"{i}-{'x' * 40}-{seed}" for i in range(2) for seed in (1, 2)]
    assert short_names(apart, 9) == ["0-xx…xx-1", "0-xx…xx-2", "1-xx…xx-1", "1-xx…xx-2"]
