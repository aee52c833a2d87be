"""Recorded trainings for the tests of diagnostics."""

from tests.trainings import kit, recorded, runs  # noqa: F401 - fixtures
