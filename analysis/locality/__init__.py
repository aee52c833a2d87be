"""Whether gradients agree more where embeddings do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from analysis.locality.plots import locality_cloud, locality_series, signal_clouds
    from analysis.locality.redraw import Redraws, recorded_plan
    from analysis.locality.redraw_tests import Association
    from analysis.locality.sample_pairs import (
        BinnedMean,
        PermutationTest,
        SamplePairs,
        Slope,
        all_pairs,
        binned_mean,
        binned_pairs,
        mantel_test,
        pair_slope,
        pairs_within_steps,
    )
    from analysis.locality.study import Cloud, RunLocality, SignalLocality, run_locality
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "Association",
    "BinnedMean",
    "Cloud",
    "PermutationTest",
    "Redraws",
    "RunLocality",
    "SamplePairs",
    "SignalLocality",
    "Slope",
    "all_pairs",
    "binned_mean",
    "binned_pairs",
    "locality_cloud",
    "locality_series",
    "mantel_test",
    "pair_slope",
    "pairs_within_steps",
    "recorded_plan",
    "run_locality",
    "signal_clouds",
]
