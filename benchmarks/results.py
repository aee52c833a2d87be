"""Results of single measurements: small JSON files under ``benchmarks/results``, one a finished cell."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


@dataclass
class Took:
    """What a piece of work cost: wall seconds, and CPU seconds over all threads, which other processes distort less."""

    wall: float = 0.0
    cpu: float = 0.0


@contextmanager
def timed() -> Iterator[Took]:
    """Measure the body; the yielded object is filled at its end."""
    took = Took()
    wall, cpu = time.perf_counter(), time.process_time()
    yield took
    took.wall, took.cpu = time.perf_counter() - wall, time.process_time() - cpu


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, Took]:
    """Run all calls in turn, several rounds, so that a busy machine hits all of them.

    Parameters
    ----------
    calls
        Name to what is measured.
    rounds
        Times that each is run, after one that does not count.

    Returns
    -------
    dict
        Name to its shortest wall time and its least CPU time.
    """
    least = {name: Took(float("inf"), float("inf")) for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            with timed() as took:
                call()
            if number:
                least[name] = Took(min(least[name].wall, took.wall), min(least[name].cpu, took.cpu))
    return least


def peak_gib() -> float:
    """Return the largest resident size that this process has had, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def resident_gib() -> float:
    """Return the resident size now, in GiB, and where Linux allows it begin a new largest size from here."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_gib()


def save(name: str, result: dict[str, Any]) -> None:
    """Write one cell, with what it was measured on.

    Parameters
    ----------
    name
        The file's stem.
    result
        Numbers and texts.
    """
    import numpy

    FOLDER.mkdir(exist_ok=True)
    machine = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS") or "all",
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
    }
    text = json.dumps({"measured": result, "machine": machine}, indent=2, allow_nan=False)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
