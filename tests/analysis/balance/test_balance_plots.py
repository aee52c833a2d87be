import sys

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import cluster_balance, cluster_sizes, compare_balance, dumbbell, lorenz, ranked_clusters, save


def scores(clusters, n, seed=0, p=0.6):
    rng = np.random.default_rng(seed)
    label = np.repeat(np.arange(clusters), n)
    return (rng.random(len(label)) < p).astype(float), label


def balance_of(clusters, n=6, seed=0, p=0.6):
    score, label = scores(clusters, n, seed, p)
    return cluster_balance(score, label, resamples=99)


def comparison_of(clusters, n=6, second=0.6):
    score, label = scores(clusters, n)
    return compare_balance(score, scores(clusters, n, 1, second)[0], label, resamples=99)


def labels_of(axes):
    return [text.get_text() for text in axes.get_yticklabels()]


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.fixture(autouse=True)
def _settings_stay():
    before = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == before
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_ranked_clusters_shows_all_of_few(tmp_path):
    one = balance_of(7)
    words = {2: ["ducks", "eggs", "farm", "fourth"], 3: []}
    figure, axes = ranked_clusters(one, keywords=words, title="run $x_1$")
    shown = labels_of(axes)
    order = sorted(range(7), key=lambda c: (one.accuracy[c], c))
    assert [label.split(" ")[0] for label in shown] == [str(c) for c in order]
    assert f"2 · n 6 · {', '.join(words[2][:3])}" in shown
    assert "3 · n 6" in shown
    dots = np.concatenate([line.get_xdata() for line in axes.lines if line.get_marker() == "o"])
    assert sorted(dots) == pytest.approx(sorted(one.accuracy))
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the weakest at the top
    assert f"mean over 7 clusters: {one.accuracy.mean():.3f}" in legend_of(axes)
    assert save(figure, tmp_path / "a.png").stat().st_size < 100_000


def test_ranked_clusters_cuts_many_and_says_so():
    one = balance_of(100, n=3)
    _, axes = ranked_clusters(one, rows=20)
    shown = labels_of(axes)
    assert len(shown) == 21
    assert shown[15] == "… 80 clusters between …"
    order = sorted(range(100), key=lambda c: (one.accuracy[c], c))
    assert [int(label.split(" ")[0]) for label in shown[:15]] == order[:15]
    assert [int(label.split(" ")[0]) for label in shown[16:]] == order[-5:]
    assert "fewer than 5 questions" in legend_of(axes)


def test_band_is_drawn_at_its_ranks():
    one = balance_of(5)
    _, axes = ranked_clusters(one)
    (band,) = axes.collections[:1]
    corners = band.get_paths()[0].vertices
    for rank in range(5):
        inside = corners[np.abs(corners[:, 1] - rank) < 0.51, 0]
        assert {round(x, 6) for x in one.ranked_band[:, rank]} <= {round(x, 6) for x in inside}


def test_lorenz_of_runs(tmp_path):
    runs = {"_a": balance_of(9), "b $y$": balance_of(9, seed=1), "none right": balance_of(9, p=-1)}
    figure, axes = lorenz(runs)
    texts = legend_of(axes)
    assert texts[1].startswith("_a: Gini ")
    assert texts[2].startswith("b \\$y\\$: Gini ")
    assert not any("none right" in text for text in texts)
    curve = axes.lines[0]
    share = np.append(0, np.cumsum(np.sort(runs["_a"].accuracy)) / runs["_a"].accuracy.sum())
    assert curve.get_ydata() == pytest.approx(share)
    save(figure, tmp_path / "a.png")


def test_lorenz_of_nothing_says_so():
    _, axes = lorenz({"a": balance_of(4, p=-1)})
    assert "no run has a correct answer" in axes.texts[0].get_text()


def test_one_cluster_has_neither_a_rank_nor_a_share():
    one = cluster_balance(scores(1, 6)[0], np.zeros(6, dtype=int), resamples=99)
    _, axes = ranked_clusters(one)
    assert legend_of(axes) == ["accuracy, 95 % Wilson interval", f"mean over 1 cluster: {one.accuracy[0]:.3f}"]
    assert len(axes.collections) == 1  # the interval, and no band
    _, axes = lorenz({"a": one, "b": balance_of(9)})
    assert [text.partition(":")[0] for text in legend_of(axes)[:2]] == ["equal accuracies", "b"]
    _, axes = lorenz({"a": one})
    assert "one of several clusters: nothing to share out" in axes.texts[0].get_text()


def test_dumbbell_orders_by_the_mean_of_both_and_marks_what_is_sure(tmp_path):
    one = comparison_of(6, n=40, second=0.95)
    figure, axes = dumbbell(one, baseline="old", run="new")
    order = sorted(range(6), key=lambda c: (one.baseline[c] + one.run[c], c))
    assert [int(label.split(" ")[0]) for label in labels_of(axes)] == order
    before, after = (line.get_xdata() for line in axes.lines[:2])
    assert before == pytest.approx(one.baseline[order])
    assert after == pytest.approx(one.run[order])
    sure = int((one.cluster_p < 0.05).sum())
    assert sure > 0
    assert legend_of(axes)[:3] == ["old", "new", f"beyond chance: {sure} of 6 clusters (sign test, Holm)"]
    assert len(axes.collections[1].get_paths()) == sure
    save(figure, tmp_path / "a.png")
    _, many = dumbbell(comparison_of(90), rows=8)
    assert "… 82 clusters between …" in labels_of(many)


def test_sizes():
    _, axes = cluster_sizes([3, 8, 1, 5])
    assert axes.patches[0].get_data().values.tolist() == [8, 5, 3, 1]
    assert legend_of(axes) == ["5 questions: fewer in 2 clusters"]
    assert axes.get_yscale() == "linear"
    assert "4 of them, median 4 questions" in axes.get_xlabel()
    assert cluster_sizes([1000, 1])[1].get_yscale() == "log"
    assert "no cluster" in cluster_sizes([])[1].texts[0].get_text()


def test_pictures_go_into_given_axes(tmp_path):
    figure = Figure(figsize=(14, 12))
    grid = figure.subplots(2, 2).ravel()
    one, both = balance_of(5), comparison_of(5)
    for draw, ax in (
        (lambda ax: ranked_clusters(one, ax=ax), grid[0]),
        (lambda ax: lorenz({"a": one}, ax=ax), grid[1]),
        (lambda ax: dumbbell(both, ax=ax), grid[2]),
        (lambda ax: cluster_sizes(one.size, ax=ax), grid[3]),
    ):
        returned, axes = draw(ax)
        assert returned is figure
        assert axes is ax
    save(figure, tmp_path / "a.png")


def test_thousands_of_clusters_and_scripts_of_other_directions(tmp_path):
    one = balance_of(5000, n=2)
    words = {c: ["שלום", "$\\frac", "数学"] for c in range(5000)}
    figure, axes = ranked_clusters(one, keywords=words)
    assert len(labels_of(axes)) == 41
    assert save(figure, tmp_path / "a.png").stat().st_size < 100_000
    assert save(lorenz({"a": one})[0], tmp_path / "b.png").stat().st_size < 100_000
    assert save(cluster_sizes(one.size)[0], tmp_path / "c.png").stat().st_size < 100_000
