"""Names of a package that are loaded when they are first asked for.

The package ``lazy_loader`` does this from a ``.pyi`` file beside each ``__init__``. Ours reads the imports that stand
in ``__init__`` under ``if TYPE_CHECKING`` for the type checker anyway, and says which extra is missing.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from sdo.errors import absent_package

_EXTRA_TRAIN = ("torch", "transformers", "accelerate")


def exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package, whose ``__init__`` imports under ``if TYPE_CHECKING``."""
    module = sys.modules[package]

    @functools.cache
    def homes() -> dict[str, str]:
        loader: Any = module.__spec__ and module.__spec__.loader
        blocks = [node.body for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If)]
        imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
        return {name.name: str(one.module) for one in imports for name in one.names}

    def load(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            found = getattr(importlib.import_module(homes()[name]), name)
        except ModuleNotFoundError as error:
            absent = absent_package(error)
            if absent not in _EXTRA_TRAIN:
                raise
            needed = f"{package}.{name} needs {absent}; fix: pip install 'sdo-toolkit[train]'"
            raise ModuleNotFoundError(needed, name=absent) from None
        setattr(module, name, found)
        return found

    return load, lambda: sorted(module.__all__)
