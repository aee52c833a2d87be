"""The promised surface: what the packages export is documented, and its examples run."""

from __future__ import annotations

import doctest
import importlib
import importlib.resources
import inspect
import pkgutil

import pytest

PACKAGES = ("sdo", "diagnostics", "analysis")
MODULES = sorted(
    info.name
    for package in PACKAGES
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
)


@pytest.mark.parametrize("package", PACKAGES)
def test_exports_exist_and_are_documented(package):
    module = importlib.import_module(package)
    assert module.__doc__
    assert module.__all__ == sorted(module.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    for name in module.__all__:
        value = getattr(module, name)
        assert inspect.getdoc(value), f"{package}.{name} has no docstring"
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018 - the access is the test


def test_public_methods_are_documented():
    bare = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                members = [m for m in vars(value) if not m.startswith("_") and callable(getattr(value, m, None))]
                bare += [f"{package}.{name}.{m}" for m in members if not inspect.getdoc(getattr(value, m))]
    assert bare == []


def test_examples_in_docstrings_run():
    attempted = 0
    for name in MODULES:
        failed, tried = doctest.testmod(importlib.import_module(name), raise_on_error=False)
        assert failed == 0, name
        attempted += tried
    assert attempted >= 5


def test_every_package_is_typed():
    for package in PACKAGES:
        assert (importlib.resources.files(package) / "py.typed").is_file()
