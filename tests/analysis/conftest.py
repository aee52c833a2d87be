"""Synthetic run folders for the tests of analysis."""

import pytest

from tests.run_folders import RunWriter, write_generated, write_planned, write_training


@pytest.fixture
def make_run(tmp_path):
    """Return a function that starts a run folder below tmp_path."""
    return lambda name="run", signals=None: RunWriter(tmp_path / name, signals or {"hidden": 6}).info()


@pytest.fixture
def make_training(tmp_path):
    """Return a function that writes a whole synthetic run below tmp_path."""
    return lambda name="run", **options: write_training(tmp_path / name, **options)


@pytest.fixture
def make_planned(tmp_path):
    """Return a function that writes a run of a plan below tmp_path."""
    return lambda name, plan, **options: write_planned(tmp_path / name, plan, **options)


@pytest.fixture
def make_generated(tmp_path):
    """Return a function that writes a GRPO run of a plan below tmp_path."""
    return lambda name, plan, **options: write_generated(tmp_path / name, plan, **options)
