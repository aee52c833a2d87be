"""The promised surface: what the packages export is documented, and its examples run."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import sdo

PACKAGES = ("sdo", "diagnostics", "analysis")
EXTRAS = ("torch", "transformers", "trl")  # what a module may need beyond an install without extras
MODULES = sorted(
    info.name
    for package in PACKAGES
    for info in pkgutil.walk_packages(importlib.util.find_spec(package).submodule_search_locations, f"{package}.")
)
ROOMS = (
    *("sdo.organizers", "sdo.selectors", "sdo.neighbors", "sdo.embeddings", "sdo.demo"),
    *("diagnostics.signals", "diagnostics.sketches", "diagnostics.run_folder", "diagnostics.examination"),
    *("analysis.balance", "analysis.coherence", "analysis.exposure", "analysis.locality", "analysis.probe"),
    *("analysis.report", "analysis.run_folder", "analysis.seeds"),
)


@contextlib.contextmanager
def extras():
    """Skip what an install without extras does not hold; a package that it lacks in itself is an error."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name not in EXTRAS:
            raise
        pytest.skip(f"needs {missing.name}, which is not installed")


def load(name):
    with extras():
        return importlib.import_module(name)


@pytest.mark.parametrize("package", [*PACKAGES, *ROOMS])
def test_exports_are_sorted_and_the_package_is_documented(package):
    module = load(package)
    assert module.__doc__
    assert module.__all__ == sorted(module.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018 - the access is the test


@pytest.mark.parametrize("package", [*PACKAGES, *ROOMS])
def test_exports_exist_and_are_documented(package):
    module = load(package)
    with extras():
        for name in module.__all__:
            assert inspect.getdoc(getattr(module, name)), f"{package}.{name} has no docstring"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import sdo", {"numpy", "faiss", "torch", "pyarrow"}),
        ("import diagnostics", {"numpy", "torch", "transformers"}),
        ("import analysis; analysis.Run", {"matplotlib", "scipy", "sklearn", "torch", "faiss"}),
        ("import analysis.balance, analysis.coherence, analysis.report", {"matplotlib", "scipy", "sklearn", "torch"}),
        ("from sdo import SDO", {"faiss", "torch", "scipy", "pyarrow"}),
        ("import sdo.cli.plan, sdo.cli.report, sdo.cli.sft", {"faiss", "torch", "scipy", "pyarrow", "matplotlib"}),
    ],
)
def test_imports_load_what_they_need(code, absent):
    code += f"; import sys; print(sorted({absent} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", [*PACKAGES, *ROOMS])
def test_completion_shows_what_is_promised(package):
    assert dir(load(package)) == sorted(load(package).__all__)


def test_the_module_is_the_command_and_tells_its_version():
    for how in (["-m", "sdo"], ["-c", "import sys; from sdo.cli.main import main; sys.exit(main())"]):
        done = subprocess.run([sys.executable, *how, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"sdo {sdo.__version__}\n"
    assert importlib.metadata.version("sdo-toolkit") == sdo.__version__


@pytest.mark.parametrize("name", ["sdo.attach", "sdo.OrganizedSampler", "diagnostics.GradientRecorder"])
def test_without_an_extra_the_remedy_is_named(name):
    """As a user without torch sees it, in a process that cannot find it."""
    package, _, member = name.partition(".")
    code = f"import sys; sys.modules['torch'] = None; from {package} import {member or 'GradientRecorder'}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("; fix: pip install 'sdo-toolkit[train]'")


@pytest.mark.parametrize("package", PACKAGES)
def test_public_methods_are_documented(package):
    module = load(package)
    bare = []
    with extras():
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                members = [m for m in vars(value) if not m.startswith("_") and callable(getattr(value, m, None))]
                bare += [f"{package}.{name}.{m}" for m in members if not inspect.getdoc(getattr(value, m))]
    assert bare == []


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(load(name)).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = map(
        importlib.import_module,
        (
            "sdo.organizers.exposure",
            "sdo.random_keys",
            "sdo.organizers.sdo",
            "sdo.organizers.plan",
            "analysis.coherence.cosines",
        ),
    )
    assert sum(len(test.examples) for module in modules for test in finder.find(module)) >= 5


def test_every_package_is_typed():
    for package in PACKAGES:
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        assert (Path(folder) / "py.typed").is_file()
