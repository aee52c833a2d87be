"""What comparing the gradients of all steps costs: time against a float32 matrix product, and memory at 50,000 steps.

Run: ``python -m benchmarks.coherence_speed [matrix|picture|long ...]``; each part in its own process, for its memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.results import interleaved, peak_gib, resident_gib, save, timed

STEPS, K, LONG = 5000, 8192, 50_000


def matrix() -> dict[str, Any]:
    """Step coherence of 5,000 x 8,192 against numpy's float32 products of the same matrix.

    ``a @ b.T`` is a product; of a matrix with itself numpy computes one half and mirrors it. Both are named.
    """
    from analysis import step_coherence

    sketch = np.random.default_rng(0).standard_normal((STEPS, K), dtype=np.float32)
    before = resident_gib()
    step_coherence(sketch)
    peak = peak_gib()
    other = sketch.copy()
    took = interleaved(
        {
            "product": lambda: sketch @ other.T,
            "half": lambda: sketch @ sketch.T,
            "ours": lambda: step_coherence(sketch),
        },
        rounds=3,
    )
    result = {f"{name}_seconds": round(one.wall, 2) for name, one in took.items()}
    result |= {f"{name}_cpu_seconds": round(one.cpu, 2) for name, one in took.items()}
    result |= {
        "of_product": round(took["ours"].wall / took["product"].wall, 2),
        "of_product_cpu": round(took["ours"].cpu / took["product"].cpu, 2),
        "of_half_cpu": round(took["ours"].cpu / took["half"].cpu, 2),
        "peak_gib": round(peak, 2),
        "sketches_gib": round(before, 2),
    }
    print(
        f"step coherence of {STEPS:,} x {K:,}, sums in float64: {took['ours'].wall:.2f} s = {result['of_product']} "
        f"float32 products ({result['of_product_cpu']} in CPU time; bar 2), {result['of_half_cpu']} of numpy's half "
        f"product; peak {peak:.2f} GiB, of which {before:.2f} before it began"
    )
    return result


def picture() -> dict[str, Any]:
    """The heat map of 5,000 steps, from the matrix to the PNG file."""
    from analysis import coherence_heat_maps
    from analysis import save as save_figure

    rng = np.random.default_rng(0)
    one = np.corrcoef(rng.standard_normal((STEPS, 40))).astype(np.float32)
    half = one @ one.T
    with TemporaryDirectory() as folder, timed() as took:
        figure, _ = coherence_heat_maps({"run": one, "other": half / np.abs(half).max()})
        size = save_figure(figure, Path(folder) / "map.png").stat().st_size
    print(f"heat map of two runs of {STEPS:,} steps: {took.wall:.1f} s (bar 10 s), {size / 1024:.0f} KiB")
    return {"seconds": round(took.wall, 2), "cpu_seconds": round(took.cpu, 2), "kib": size // 1024}


def write_run(folder: Path, steps: int, k: int, batch: int = 8, samples: int = 6796) -> None:
    """Write a run of random sketches that drift, in the format of diagnostics."""
    from diagnostics.run_folder.writer import GradientRow, RunLog

    rng = np.random.default_rng(0)
    log = RunLog.create(folder, {"signals": {"weight": {"stored": k}}, "organizer": None})
    common = rng.standard_normal(k, dtype=np.float32)
    for step in range(steps):
        sketch = rng.standard_normal(k, dtype=np.float32) + 0.2 * common
        ids = rng.choice(samples, batch, replace=False).tolist()
        row = GradientRow(
            step=step,
            kind="step",
            micro_batch=None,
            sample_ids=ids,
            tokens=100,
            norm=float(np.linalg.norm(sketch)),
            norm_state="raw",
            reason=None,
        )
        log.add_gradient("weight", row, sketch)
        if step % 50 == 49:
            log.flush()
    log.close("finished")


def long(steps: int = LONG, k: int = K) -> dict[str, Any]:
    """``sdo coherence`` on a run of 50,000 steps: time and memory of a process that does nothing else."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        write_run(folder / "run", steps, k)
        command = [
            sys.executable,
            "-m",
            "benchmarks.coherence_speed",
            "--command",
            str(folder / "run"),
            str(folder / "out"),
        ]
        with timed() as took:
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        measured = json.loads(out.splitlines()[-1])
    print(
        f"sdo coherence on {steps:,} steps x {k:,} ({4 * steps * k / 2**30:.2f} GiB of sketches): {took.wall:.0f} s "
        f"({measured['cpu_seconds']:.0f} s of CPU time), peak {measured['peak_gib']:.2f} GiB (bar 2 GiB)"
    )
    return {"steps": steps, "k": k, "seconds": round(took.wall, 1), **measured}


def run_command(run: str, out: str) -> None:
    """Run ``sdo coherence`` in this process and print what it took as JSON."""
    from sdo.cli.main import main as sdo

    with timed() as took:
        status = sdo(["coherence", run, "--out", out])
    assert not status, status
    print(json.dumps({"cpu_seconds": round(took.cpu, 1), "peak_gib": round(peak_gib(), 2)}))


PARTS = {"matrix": matrix, "picture": picture, "long": long}


def main(argv: list[str] | None = None) -> None:
    """Run the named parts, by default the two short ones."""
    names = (argv if argv is not None else []) or ["matrix", "picture"]
    if names[0] == "--command":
        run_command(*names[1:])
        return
    if names[0] == "--part":
        save(f"coherence-{names[1]}", PARTS[names[1]]())
        return
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise SystemExit(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    for name in names:
        subprocess.run([sys.executable, "-m", "benchmarks.coherence_speed", "--part", name], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
