"""Run the quick benchmarks, or those named: ``python -m benchmarks [plan] [walk] [neighbors] [coherence] …``.

Larger ones are run by module: ``benchmarks.neighbors_speed 1000000``, ``benchmarks.coherence_speed long``,
``benchmarks.recorder_overhead MODEL DATA``, ``benchmarks.growth``, ``benchmarks.import_time``, ``benchmarks.gpu``,
``benchmarks.locality_levels``, ``benchmarks.probe_levels``.
Results are also written as JSON to ``benchmarks/results``.
"""

from __future__ import annotations

import sys

from benchmarks import (
    balance_levels,
    balance_speed,
    coherence_speed,
    locality_levels,
    locality_speed,
    neighbors_speed,
    plan_speed,
    probe_levels,
    sketch_error,
)

BENCHMARKS = {
    "plan": plan_speed.first_plan,
    "walk": plan_speed.million_walk,
    "neighbors": lambda: neighbors_speed.main(["100000"]),
    "coherence": coherence_speed.main,
    "sketch": sketch_error.main,
    "balance": balance_speed.main,
    "locality": locality_speed.main,
    "balance-levels": balance_levels.main,
    "locality-levels": locality_levels.main,
    "probe-levels": probe_levels.main,
}


def main() -> None:
    """Run them one after the other; each prints ratios to something measured in the same run, or shares."""
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise SystemExit(f"unknown benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    for name in names:
        print(f"== {name}")
        BENCHMARKS[name]()


if __name__ == "__main__":
    main()
