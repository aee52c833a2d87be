"""Nearest rows by cosine, the same on every machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from sdo.neighbors.all_pairs import propose_all
    from sdo.neighbors.candidates import CandidateLists
    from sdo.neighbors.exact import nearest
    from sdo.neighbors.inverted import InvertedLists
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "CandidateLists",
    "InvertedLists",
    "nearest",
    "propose_all",
]
