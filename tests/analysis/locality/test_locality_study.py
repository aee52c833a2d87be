import json
from types import SimpleNamespace

import numpy as np
import pytest

from analysis import Run, batch_coherence, run_locality
from analysis.locality.association import MatrixTest
from analysis.locality.sample_pairs import BinnedMean
from analysis.locality.study import Cloud, _bin_means, _bins, _Picture, _with_band, locality_entry
from sdo import SDO, Embeddings, InputError, Uniform


@pytest.fixture
def saved(tmp_path):
    np.save(tmp_path / "E.npy", np.random.default_rng(3).normal(size=(80, 6)).astype(np.float32))
    return Embeddings.read(tmp_path / "E.npy")


@pytest.mark.parametrize("maker", [SDO, Uniform])
def test_a_planted_effect_is_found_in_all_three_parts(saved, make_planned, maker):
    plan = maker(saved, seed=5).plan(6)
    path = make_planned("run", plan, steps=130, effect=3.0, sample_every=1).path
    found = run_locality(Run.open(path), redraws=59)
    one = found.signals["hidden"]
    assert found.reason is None
    assert one.series.p == one.matrix.p == 1 / 60
    assert one.slope.low > 0
    assert (one.between, one.series.steps, one.matrix.steps, found.redraws) == ("samples", 130, 130, 59)
    series = batch_coherence(Run.open(path).iter_steps("hidden", "sample"))
    assert one.coherence == pytest.approx(series.value)
    for cloud in one.clouds.values():
        assert cloud.binned.count.sum() == len(cloud.x) == len(cloud.y)
        assert np.isfinite(cloud.binned.low).all()
    # The effect shows as a mean beyond the band of the re-draws.
    assert one.clouds["matrix"].binned.y[-1] > one.clouds["matrix"].binned.high[-1]
    again = run_locality(Run.open(path), redraws=59, workers=3)
    assert again.signals["hidden"].matrix == one.matrix
    assert again.signals["hidden"].series == one.series


def test_gradients_that_ignore_embeddings_show_nothing(saved, make_planned):
    path = make_planned("run", SDO(saved, seed=5).plan(6), steps=110, sample_every=1).path
    one = run_locality(Run.open(path), redraws=39).signals["hidden"]
    assert one.series.p > 0.05
    assert one.matrix.p > 0.05
    assert one.slope.low < 0 < one.slope.high


def test_short_series_get_no_p_but_the_matrix_does(saved, make_planned):
    path = make_planned("run", SDO(saved, seed=5).plan(6), steps=120, sample_every=5).path
    one = run_locality(Run.open(path), redraws=39).signals["hidden"]
    assert one.series.value is not None
    assert one.series.p is None
    assert "24 steps; the test was found valid from 100" in one.series.reason
    assert one.matrix.p is not None
    assert "series" not in one.clouds


def test_without_a_plan_there_are_numbers_but_no_p(saved, make_planned):
    plan = SDO(saved, seed=5).plan(6)
    writer = make_planned("run", plan, steps=110, sample_every=1)
    whole = run_locality(Run.open(writer.path), redraws=0)
    assert whole.reason == "no re-draws were asked for"
    writer.info(embeddings={"path": saved.path, "fingerprint": saved.fingerprint})
    found = run_locality(Run.open(writer.path), redraws=39)
    assert "no organizer" in found.reason
    for part in ("series", "matrix"):
        one = getattr(found.signals["hidden"], part)
        assert one.p is None
        assert "no organizer" in one.reason
        assert one.redraws == 0
    assert found.signals["hidden"].matrix.value == pytest.approx(whole.signals["hidden"].matrix.value)
    part = next((writer.path / "steps").iterdir())
    part.rename(part.with_name("moved"))
    with pytest.raises(InputError, match="no recorded step has sample ids"):
        run_locality(Run.open(writer.path))


def test_steps_that_are_not_recorded_from_the_first_on_have_no_value_without_a_plan(saved, make_planned):
    plan = SDO(saved, seed=5).plan(6)
    writer = make_planned("run", plan, steps=40)
    next((writer.path / "steps").iterdir()).unlink()
    writer.steps(3, 39, plan.batches(3, 40))
    writer.info(embeddings={"path": saved.path, "fingerprint": saved.fingerprint})
    one = run_locality(Run.open(writer.path)).signals["hidden"]
    assert one.matrix.value is None
    assert "recorded from 0 on" in one.matrix.reason


def test_the_entry_is_json_with_reasons(saved, make_planned):
    plan = SDO(saved, seed=5).plan(6)
    writer = make_planned("run", plan, steps=110, sample_every=200)
    entry = locality_entry(run_locality(Run.open(writer.path), redraws=39))
    json.dumps(entry, allow_nan=False)
    hidden = entry["signals"]["hidden"]
    assert hidden["series"] is None
    assert "1 step with a batch coherence" in hidden["series_reason"]
    assert hidden["matrix"]["redraws"] == 39
    assert len(hidden["matrix"]["binned_mean"]) == 10
    assert entry["redraws"] == 39
    assert entry["within_batch_cosine"] is not None


def test_ids_beyond_the_embeddings_are_refused(saved, make_planned, tmp_path):
    writer = make_planned("run", SDO(saved, seed=5).plan(6), steps=10)
    np.save(tmp_path / "small.npy", np.ones((5, 6), dtype=np.float32))
    small = Embeddings.read(tmp_path / "small.npy")
    writer.info(embeddings={"path": small.path, "fingerprint": small.fingerprint})
    with pytest.raises(InputError, match="no rows of the embeddings"):
        run_locality(Run.open(writer.path))


def test_the_band_is_that_of_the_re_draws_widened_about_its_middle():
    nothing = np.full(2, np.nan)
    binned = BinnedMean(np.arange(3.0), np.array([0.5, 1.5]), np.zeros(2), nothing, nothing, np.array([4, 4]))
    others = np.random.default_rng(0).normal(size=(199, 2))
    others[20:, 1] = np.nan
    wide = _with_band(Cloud(np.zeros(8), np.zeros(8), binned), others, 1.5).binned
    middle = others[:, 0].mean()
    low, high = np.quantile(others[:, 0], [0.025, 0.975])
    assert (wide.low[0], wide.high[0]) == pytest.approx((middle - 1.5 * (middle - low), middle + 1.5 * (high - middle)))
    assert np.isnan(wide.low[1])  # 20 re-draws have no tail of 2.5 %


def test_a_run_whose_steps_all_share_samples_keeps_its_other_numbers(tmp_path, make_planned):
    """A matrix needs steps without a common sample; 64 samples in batches of 32 leave none."""
    np.save(tmp_path / "E.npy", np.random.default_rng(3).normal(size=(64, 6)).astype(np.float32))
    plan = SDO(Embeddings.read(tmp_path / "E.npy"), seed=5).plan(32)
    steps = plan.batches(0, 100)
    sharing = [len(np.intersect1d(steps[t], steps[s])) > 0 for t in range(100) for s in range(t)]
    path = make_planned("run", plan, steps=100, sample_every=1).path
    found = run_locality(Run.open(path), redraws=39)
    one = found.signals["hidden"]
    assert all(sharing)
    assert (one.matrix.value, one.matrix.p) == (None, None)
    assert "no pairs of steps without a common sample" in one.matrix.reason
    assert "matrix" not in one.clouds
    assert one.series.value is not None
    assert one.slope.value is not None
    json.dumps(locality_entry(found), allow_nan=False)


def test_a_picture_without_points_is_empty():
    picture = _Picture(MatrixTest(np.arange(4), np.random.default_rng(0).normal(size=(4, 3))))
    every = np.triu_indices(4, 1)
    none = SimpleNamespace(rows=every[0], columns=every[1], centroid=np.eye(4, dtype=np.float32))
    some = SimpleNamespace(rows=every[0][1:], columns=every[1][1:], centroid=np.eye(4, dtype=np.float32))
    observed = picture.of(none, -1)
    cloud, others = picture.result(observed, [picture.of(none, 0), picture.of(some, 1), None])
    assert len(cloud.x) == len(cloud.y) == len(cloud.binned.count) == len(cloud.binned.edges) == 0
    assert others.shape == (2, 0)


def test_means_by_bin_equal_a_loop_over_the_bins():
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=400), rng.normal(size=400)
    edges = np.array([-1.0, -0.2, 0.3, 0.300001, 1.5])  # points lie beyond both ends, and one bin is empty
    x[(x >= 0.3) & (x < 0.300001)] = 0
    x[:3] = edges[1]  # an edge belongs to the bin above it
    place, count = _bins(x, edges)
    inside = [x < -0.2, (x >= -0.2) & (x < 0.3), np.zeros(400, dtype=bool), x >= 0.300001]
    assert count.tolist() == [one.sum() for one in inside]
    for values, means in zip((x, y), _bin_means([x, y], place, count), strict=True):
        assert np.isnan(means[2])
        for b in (0, 1, 3):
            assert means[b] == pytest.approx(values[inside[b]].mean(), rel=1e-12)
