import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import save
from analysis.probe.batches import ProbeRows
from analysis.probe.design import design_probe
from analysis.probe.plots import probe_figure
from analysis.probe.study import probe_signal
from sdo import SDO, Embeddings

RNG = np.random.default_rng(1)
EMBEDDINGS = Embeddings.from_array(RNG.normal(size=(150, 5)))
DESIGN = design_probe(SDO(EMBEDDINGS, k=2, seed=1).plan(4), samples=96)


def found_with(sketch=None):
    ids = DESIGN.sample_ids
    sketch = EMBEDDINGS.unit[ids] + RNG.normal(size=(len(ids), 5)) if sketch is None else sketch
    norm = np.linalg.norm(sketch, axis=1)
    return probe_signal(DESIGN, ProbeRows(ids, EMBEDDINGS.unit[ids], sketch, norm, norm > 0), permutations=9)


def texts(axes):
    return " ".join(t.get_text() for t in axes.findobj(lambda artist: hasattr(artist, "get_text")))


def test_a_row_a_signal_with_what_was_found():
    found = {"weight": found_with(), "hidden_$x$": found_with()}
    figure, axes = probe_figure(found, DESIGN, title="tiny")
    assert isinstance(figure, Figure)
    assert axes.shape == (2, 2)
    for row, (name, one) in zip(axes, found.items(), strict=True):
        curve, arms = row
        assert name.replace("$", r"\$") in curve.get_title()
        assert f"{one.slope.value:+.3f}" in curve.get_title()
        drawn = [(line.get_xdata(), line.get_ydata()) for line in curve.get_lines()]
        for binned in (one.curve, one.neighbors):
            assert any(len(x) == len(binned.x) and np.allclose(y, binned.y) for x, y in drawn)
        assert one.verdict.outcome in arms.get_title()
        assert [label.get_text() for label in arms.get_yticklabels()] == ["SDO", "SDO, random locality", "uniform"]
        points = [float(line.get_xdata()[0]) for line in arms.get_lines() if len(line.get_xdata()) == 1]
        expected = [
            getattr(one.arms[a], f).value
            for f in ("predicted", "within", "between")
            for a in ("uniform", "random", "sdo")
        ]
        assert points == pytest.approx(expected)
        assert f"inside - between {one.arms['sdo'].difference.value:+.3f}" in texts(arms)


def test_it_can_be_saved(tmp_path):
    figure, _ = probe_figure({"weight": found_with()}, DESIGN)
    save(figure, tmp_path / "probe.png")
    assert (tmp_path / "probe.png").stat().st_size > 10_000


def test_without_gradients_it_says_why(tmp_path):
    figure, axes = probe_figure({"weight": found_with(np.zeros((len(DESIGN.sample_ids), 5)))}, DESIGN)
    save(figure, tmp_path / "probe.png")
    assert "0 pairs of samples" in texts(axes[0, 0])
    assert "cannot tell" in axes[0, 1].get_title()
    assert "batches with two gradients" in texts(axes[0, 1])


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="no signal"):
        probe_figure({}, DESIGN)
