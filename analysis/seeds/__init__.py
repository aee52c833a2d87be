"""What a difference between two kinds of run is worth over several seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from analysis.seeds.compare import Pairing, SeedComparison, compare_seeds, pair_runs
    from analysis.seeds.differences import PairedComparison, UnpairedComparison, compare_paired, compare_unpaired
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "PairedComparison",
    "Pairing",
    "SeedComparison",
    "UnpairedComparison",
    "compare_paired",
    "compare_seeds",
    "compare_unpaired",
    "pair_runs",
]
