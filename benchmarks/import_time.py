"""CPU seconds until a command or an import is ready, as multiples of importing numpy in the same run.

Run: ``python -m benchmarks.import_time [--rounds 7]``. Bar: ``sdo --help`` below 0.5 s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from statistics import median

CASES = {
    "python": ["-c", "pass"],
    "import numpy": ["-c", "import numpy"],
    "import sdo": ["-c", "import sdo"],
    "import analysis": ["-c", "import analysis"],
    "from sdo import SDO": ["-c", "from sdo import SDO"],
    "from analysis import Run": ["-c", "from analysis import Run"],
    "sdo --help": ["-m", "sdo", "--help"],
    "import torch": ["-c", "import torch"],
    "from sdo import OrganizedSampler": ["-c", "from sdo import OrganizedSampler"],
}


def cpu_seconds(arguments: list[str]) -> float:
    """Return the CPU seconds of one interpreter, user and system."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def main(argv: list[str] | None = None) -> None:
    """Measure in turns and print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args(argv).rounds
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, arguments in CASES.items():
            seconds[name].append(cpu_seconds(arguments))
    plain = median(seconds["import numpy"])
    for name, each in seconds.items():
        print(f"{name:34} {median(each):6.2f} s of CPU, {median(each) / plain:5.1f} times importing numpy")


if __name__ == "__main__":
    main()
