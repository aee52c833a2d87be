"""Run the quick benchmarks, or those named on the command line: ``python -m benchmarks [plan] [walk] [sketch] …``."""

from __future__ import annotations

import sys

from benchmarks import locality_levels, locality_speed, plan_speed, sketch_error

BENCHMARKS = {
    "plan": plan_speed.first_plan,
    "walk": plan_speed.million_walk,
    "sketch": sketch_error.main,
    "locality": locality_speed.main,
    "levels": locality_levels.main,
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
