"""Make the notebooks from the scripts beside them: ``python notebooks/build.py [--check]``.

A script is in jupytext's percent format: `# %%` begins a cell of code, `# %% [markdown]` one of text. The notebooks
hold no outputs, so that a change shows as a change of the script's words.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).resolve().parent
SCRIPTS = tuple(sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name))


def notebook_of(script: Path) -> str:
    """Return a script as the text of its notebook; the same script gives the same text."""
    book = jupytext.read(script, fmt="py:percent")
    for number, cell in enumerate(book.cells):
        cell["id"] = f"cell-{number}"  # nbformat would draw random ones
    book.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.validate(book)
    return nbformat.writes(book, version=4) + "\n"


def main() -> int:
    """Write the notebooks, or with ``--check`` name those that are not as their scripts are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a notebook is out of date")
    check = parser.parse_args().check
    stale = []
    for script in SCRIPTS:
        target, text = script.with_suffix(".ipynb"), notebook_of(script)
        if target.is_file() and target.read_text(encoding="utf-8") == text:
            continue
        stale.append(target.name)
        if not check:
            target.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'out of date' if check else 'written'}: {', '.join(stale)}", file=sys.stderr if check else sys.stdout)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
