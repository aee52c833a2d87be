import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from analysis import heat_map, save
from analysis.drawing import plain_text, root_figure, running_mean


def test_plain_text():
    assert plain_text("a\n$b_c") == r"a \$b_c"
    assert plain_text("中") == r"\u4e2d"
    assert plain_text("x" * 90, 10) == "x" * 9 + "…"


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


def test_running_mean_is_centred_and_cut_at_the_ends():
    values = np.array([1.0, 5.0, 3.0, 8.0, 2.0, 7.0])
    for window in range(1, 7):
        slow = [
            np.mean(values[max(0, i - (window - 1) // 2) : min(len(values), i + window // 2 + 1)])
            for i in range(len(values))
        ]
        np.testing.assert_allclose(running_mean(values, window), slow, rtol=1e-12)
