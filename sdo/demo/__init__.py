"""What ``sdo demo`` is made of: a data set, a small model, a folder and a section of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from sdo.demo.folder import DemoFolder
    from sdo.demo.word_problems import Problem
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "DemoFolder",
    "Problem",
]
