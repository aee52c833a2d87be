"""The notebooks are as their scripts are, and run from the first cell to the last."""

import importlib.util
import os
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="executing notebooks needs nbclient, of the extra dev")
pytest.importorskip("jupytext", reason="notebooks are made by jupytext, of the extra dev")
pytest.importorskip("trl", reason="the notebooks train with TRL")

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
BOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
SECONDS = 240  # for each cell, on a machine that is busy; alone, a notebook takes less than a minute


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_script_has_its_notebook(build):
    assert [script.stem for script in build.SCRIPTS] == BOOKS
    assert len(BOOKS) >= 1


def test_notebooks_are_made_from_their_scripts(build):
    stale = [s.name for s in build.SCRIPTS if s.with_suffix(".ipynb").read_text("utf-8") != build.notebook_of(s)]
    assert stale == [], "run: python notebooks/build.py"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for folder in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder.lower()))
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(book, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert len(outputs) > 3
    assert [output for output in outputs if output.output_type == "error"] == []
