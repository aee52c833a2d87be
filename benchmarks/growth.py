"""How time and memory grow with the samples N, the dimension d, the neighbors K and the steps of a run.

Run: ``python -m benchmarks.growth [--out docs/growth.png]``; some minutes on two cores. Each point is measured in a
process of its own: CPU seconds over all threads, and by how much the resident size grew at most.
Numbers go to ``benchmarks/results/growth.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import peak_gib, resident_gib, save, timed

# What is varied, over which values, what stays, and how the work grows.
SWEEPS: dict[str, dict[str, Any]] = {
    "N": {"values": [4096, 8192, 16384, 32768, 65536, 131073, 262144], "fixed": {"d": 384, "K": 4}, "power": 2},
    "d": {"values": [128, 256, 512, 1024, 2048, 4096], "fixed": {"N": 8192, "K": 4}, "power": 1},
    "K": {"values": [1, 2, 4, 8, 16, 32], "fixed": {"N": 8192, "d": 384}, "power": 1},
    "steps": {"values": [500, 1000, 2000, 4000, 8000], "fixed": {"k": 8192}, "power": 2},
}
SMALL = {"N": 32768, "d": 2048, "K": 16, "steps": 2000}
LABELS = {
    "N": "samples N (d = 384, K = 4)",
    "d": "dimension d (N = 8,192, K = 4)",
    "K": "neighbors K (N = 8,192, d = 384)",
    "steps": "steps of a run (k = 8,192)",
}


def plan(N: int, d: int, K: int) -> None:
    """Make the first epoch's plan."""
    from benchmarks.neighbors_speed import sentence_like
    from sdo import SDO, Embeddings

    rows = np.empty((N, d), dtype=np.float32)
    start = 0
    for block in sentence_like(N, d):
        rows[start : start + len(block)] = block
        start += len(block)
    embeddings = Embeddings.from_array(rows)
    del rows, block
    measured(lambda: SDO(embeddings, k=K, seed=617).plan(8).epoch(0))


def coherence(steps: int, k: int) -> None:
    """Compare all steps of a run."""
    from analysis import step_coherence

    sketch = np.random.default_rng(0).standard_normal((steps, k), dtype=np.float32)
    measured(lambda: step_coherence(sketch))


def measured(call: Any) -> None:
    """Print what a call took as JSON."""
    before = resident_gib()
    with timed() as took:
        call()
    print(json.dumps({"cpu_seconds": took.cpu, "added_gib": peak_gib() - before}))


def cell(variable: str, value: int) -> dict[str, float]:
    """Measure one point in a new process."""
    arguments = {**SWEEPS[variable]["fixed"], variable: value}
    command = [sys.executable, "-m", "benchmarks.growth", "--cell", json.dumps(arguments)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, float] = json.loads(out.splitlines()[-1])
    return result


def draw(found: dict[str, dict[str, list[float]]], out: Path) -> None:
    """Plot time above memory, a column a variable; dotted lines show the growth of the work."""
    from matplotlib.figure import Figure

    from analysis import save as save_figure

    figure = Figure(figsize=(13, 5.4), layout="constrained")
    axes = figure.subplots(2, len(found))
    for column, (variable, one) in enumerate(found.items()):
        values, power = np.array(one["values"], dtype=float), SWEEPS[variable]["power"]
        for row, name in enumerate(("cpu_seconds", "added_gib")):
            ax, y = axes[row][column], np.maximum(one[name], 1e-3)
            ax.plot(values, y, "o-", color="#0072b2", linewidth=1.6, markersize=4)
            if name == "cpu_seconds":
                slope = y[-2] * (values / values[-2]) ** power
                if variable == "N":
                    exact = values <= 131_072
                    slope = np.where(exact, y[exact][-1] * (values / values[exact][-1]) ** power, np.nan)
                if variable == "N" and values[-1] > 131_072:
                    ax.axvline(131_072, color="#999999", linewidth=0.8)
                    ax.annotate(
                        "exact", (131_072, y.min()), xytext=(-4, 0), textcoords="offset points", ha="right", size=8
                    )
                    ax.annotate("groups", (131_072, y.min()), xytext=(4, 0), textcoords="offset points", size=8)
                ax.plot(
                    values, slope, ":", color="#555555", linewidth=1, label=f"∝ {variable}{'²' if power == 2 else ''}"
                )
                ax.legend(frameon=False, fontsize="small")
                ax.set_title("first plan" if variable != "steps" else "step coherence", fontsize="medium")
            else:
                ax.set_xlabel(LABELS[variable])
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.set_xticks(values, [f"{v:,.0f}" if v < 10_000 else f"{v / 1000:,.0f}k" for v in values], fontsize=8)
            ax.minorticks_off()
            ax.grid(axis="y", color="#dddddd", linewidth=0.6)
            ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("CPU seconds")
    axes[1][0].set_ylabel("added memory, GiB")
    save_figure(figure, out, dpi=90)


def main(argv: list[str] | None = None) -> None:
    """Measure all sweeps and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/growth.png"))
    parser.add_argument("--small", action="store_true", help="leave out the points that take more than some seconds")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.cell:
        arguments = json.loads(args.cell)
        coherence(**arguments) if "steps" in arguments else plan(**arguments)
        return
    found: dict[str, dict[str, list[float]]] = {}
    for variable, sweep in SWEEPS.items():
        cells = []
        values = [value for value in sweep["values"] if not args.small or value <= SMALL[variable]]
        for value in values:
            one = cell(variable, value)
            cells.append(one)
            print(f"{variable} = {value:,}: {one['cpu_seconds']:.2f} CPU s, {one['added_gib']:.2f} GiB", flush=True)
        found[variable] = {name: [round(one[name], 3) for one in cells] for name in ("cpu_seconds", "added_gib")}
        found[variable]["values"] = values
    save("growth", {name: {**SWEEPS[name], **found[name]} for name in found})
    draw(found, args.out)


if __name__ == "__main__":
    main()
