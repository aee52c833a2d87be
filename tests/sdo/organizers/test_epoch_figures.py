"""Figures of a plan against sums that anybody can follow."""

import numpy as np
import pytest

from sdo import SDO, Uniform
from sdo.organizers.epoch_figures import epoch_figures

MATRIX = np.random.default_rng(0).standard_normal((15, 4))


def mean_cosine(batches):
    unit = MATRIX / np.linalg.norm(MATRIX, axis=1, keepdims=True)
    pairs = [unit[a] @ unit[b] for batch in batches for a in batch for b in batch if a != b]
    return float(np.mean(pairs))


def test_each_epoch_is_summed_up_beside_as_many_uniform_batches():
    plan = SDO(MATRIX, k=2, seed=3).plan(4)
    uniform = Uniform(MATRIX, seed=3).plan(4)
    seen = np.zeros(15, int)
    for e, found in enumerate(epoch_figures(plan, uniform_seed=3, epochs=3)):
        epoch = plan.epoch(e)
        np.add.at(seen, epoch.batches.ravel(), 1)
        assert (found["organizer_epoch"], found["steps"], found["pool"]) == (e, len(epoch.steps), len(epoch.pool))
        assert (found["exposure_min"], found["exposure_max"]) == (seen.min(), seen.max())
        assert found["exposure_mean"] == pytest.approx(seen.mean())
        assert found["within_batch_cosine"] == pytest.approx(mean_cosine(epoch.batches), abs=1e-6)
        others = uniform.batches(epoch.first_step, epoch.stop)
        assert found["uniform_within_batch_cosine"] == pytest.approx(mean_cosine(others), abs=1e-6)


def test_uniform_batches_are_those_of_the_plans_own_samples():
    rows = np.array([0, 2, 4, 6, 8, 10, 12])
    plan = SDO(MATRIX, k=2, seed=3).plan(2, rows=rows)
    others = Uniform(MATRIX, seed=3).plan(2, rows=rows).batches(0, len(plan.epoch(0).steps))
    (found,) = epoch_figures(plan, uniform_seed=3, epochs=1)
    assert found["uniform_within_batch_cosine"] == pytest.approx(mean_cosine(others), abs=1e-6)


@pytest.mark.parametrize("plan", [Uniform(9, seed=1).plan(3), SDO(MATRIX, k=2).plan(1)])
def test_a_cosine_that_nobody_knows_is_none(plan):
    (found,) = epoch_figures(plan, uniform_seed=1, epochs=1)
    assert found["within_batch_cosine"] is None
    assert found["steps"] == len(plan.epoch(0).steps)
