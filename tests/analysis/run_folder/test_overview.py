"""The figures of a run, against sums over its files."""

from itertools import combinations

import numpy as np
import pytest

from analysis import Run
from analysis.run_folder.overview import (
    mean_within_batch_cosine,
    recorder_share,
    run_overview,
)
from sdo import Embeddings


def _cosine(a, b):
    return float(a @ b / np.sqrt(a @ a) / np.sqrt(b @ b))


@pytest.fixture
def embedded(make_training, tmp_path):
    """A run of 60 steps, and the matrix of its 40 samples in a file that run.json names."""
    matrix = np.random.default_rng(3).normal(size=(40, 5))
    np.save(tmp_path / "E.npy", matrix)
    noted = {"path": str(tmp_path / "E.npy"), "fingerprint": Embeddings.read(tmp_path / "E.npy").fingerprint}
    return Run.open(make_training(embeddings=noted, organizer={"name": "sdo"}).path), matrix


def test_within_batch_cosine_is_the_mean_over_pairs_and_steps(embedded):
    run, matrix = embedded
    batches = run.steps().column("sample_ids").to_pylist()
    slow = np.mean([np.mean([_cosine(matrix[i], matrix[j]) for i, j in combinations(b, 2)]) for b in batches])
    estimate = mean_within_batch_cosine(run)
    assert estimate.count == 60
    assert estimate.value == pytest.approx(slow, abs=1e-6)
    assert run_overview(run)["within_batch_cosine"] == estimate.value


@pytest.mark.parametrize(
    ("noted", "reason"),
    [
        (None, "notes no embeddings"),
        ({"path": "nowhere.npy"}, "is not there"),
        ({"path": "E.npy", "fingerprint": "0" * 64}, "has changed since"),
    ],
)
def test_embeddings_that_cannot_be_used_leave_a_reason(make_training, noted, reason):
    writer = make_training(embeddings=noted)
    np.save(writer.path / "E.npy", np.eye(40))
    estimate = mean_within_batch_cosine(Run.open(writer.path))
    assert estimate.value is None
    assert reason in estimate.reason


def test_samples_that_the_embeddings_lack_leave_a_reason(make_training):
    writer = make_training(embeddings={"path": "E.npy"})
    np.save(writer.path / "E.npy", np.eye(7))
    assert "no rows of the embeddings" in mean_within_batch_cosine(Run.open(writer.path)).reason


def test_the_share_of_the_recorder_is_its_time_over_all_time(make_training, make_run):
    assert recorder_share(Run.open(make_training().path)).value == pytest.approx(0.01 / 0.51)
    assert recorder_share(Run.open(make_run("empty").path)).reason == "no step has a time"


def test_losses_name_their_steps_and_skip_what_is_not_finite(make_run):
    writer = make_run()
    writer.steps(0, 3, [[0]] * 4, losses=[None, 2.0, 1.0, None])
    assert run_overview(Run.open(writer.path))["loss"] == {"first_step": 1, "first": 2.0, "last_step": 2, "last": 1.0}
