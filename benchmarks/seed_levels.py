"""How often the tests of two groups of runs are wrong where nothing differs: ``python -m benchmarks.seed_levels``."""

from __future__ import annotations

import argparse

import numpy as np

from analysis import compare_unpaired

# Runs of each side, and the spread of the second beside that of the first.
SETTINGS = ((4, 4, 1), (4, 4, 3), (6, 6, 1), (5, 9, 1), (5, 9, 3), (9, 5, 3), (10, 10, 1))


def main() -> None:
    """Simulate and print a line a setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=4000)
    simulations = parser.parse_args().simulations
    rng = np.random.default_rng(0)
    for n, m, spread in SETTINGS:
        each = [compare_unpaired(rng.normal(size=n), rng.normal(0, spread, size=m)) for _ in range(simulations)]
        welch = np.mean([one.p is not None and one.p < 0.05 for one in each])
        labels = np.mean([one.permutation_p < 0.05 for one in each])
        held = np.mean([one.low is not None and one.high is not None and one.low <= 0 <= one.high for one in each])
        print(f"{n} and {m} runs, spread 1 and {spread}: Welch {welch:.3f}, labels {labels:.3f}, coverage {held:.3f}")


if __name__ == "__main__":
    main()
