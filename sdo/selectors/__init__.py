"""What of a step is trained: selectors keep some of the samples that a plan offers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from sdo.selectors.random import RandomSelect
    from sdo.selectors.selector import Candidates, Scores, Selector
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "Candidates",
    "RandomSelect",
    "Scores",
    "Selector",
]
