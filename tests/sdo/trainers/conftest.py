"""Recorded trainings for the tests of trainers, where the extra train is installed."""

import contextlib

import pytest

with contextlib.suppress(pytest.skip.Exception):
    from tests.trainings import kit, recorded, runs  # noqa: F401 - fixtures
