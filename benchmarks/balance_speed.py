"""What `sdo balance` costs: a million predictions in a thousand clusters, from the files to the pictures."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_SEED = 617
_LIMIT_SECONDS, _LIMIT_GIB = 60, 2


def main(n: int = 1_000_000, clusters: int = 1000) -> None:
    """Time two runs of n / 2 predictions each with prompts, and one of n, each in a process of its own."""
    for runs in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            files = _write(Path(folder), n // runs, clusters, runs)
            reading = _reading(files)
            seconds, cpu, gib = _command(Path(folder), files)
        print(f"{runs} run(s) of {n // runs:,} predictions, {clusters:,} clusters, prompts, 999 resamples, pictures:")
        limits = f"limits: {_LIMIT_SECONDS} s, {_LIMIT_GIB} GiB"
        print(f"  {seconds:.1f} s, of them {cpu:.1f} s of processor time; peak {gib:.2f} GiB resident ({limits})")
        print(f"  = {cpu / reading:.1f} times the processor time of reading the predictions as JSON ({reading:.2f} s)")


def _write(folder: Path, n: int, clusters: int, runs: int) -> list[Path]:
    rng = np.random.default_rng(_SEED)
    weight = rng.gamma(2.0, size=clusters)
    label = rng.choice(clusters, size=n, p=weight / weight.sum())
    np.save(folder / "L.npy", label)
    words = np.array([f"word{i}" for i in range(5000)])
    topic = rng.integers(5000, size=(clusters, 20))
    texts = [" ".join(row) for row in words[topic[label[:, None], rng.integers(20, size=(n, 12))]]]
    pq.write_table(pa.table({"question": [f"{text} {i}" for i, text in enumerate(texts)]}), folder / "q.parquet")
    files = []
    for run in range(runs):
        right = rng.random(n) < rng.beta(8, 2, clusters)[label]
        file = folder / f"run{run}.jsonl"
        with file.open("w") as stream:
            stream.writelines(f'{{"sample_id": {i}, "correct": {int(c)}}}\n' for i, c in enumerate(right))
        files.append(file)
    return files


def _reading(files: list[Path]) -> float:
    started = time.process_time()
    for file in files:
        with file.open() as stream:
            for line in stream:
                json.loads(line)
    return time.process_time() - started


def _command(folder: Path, files: list[Path]) -> tuple[float, float, float]:
    """Run the command; seconds, processor seconds and peak resident memory in GiB."""
    prompts = ["--prompts", str(folder / "q.parquet"), "--column", "question"]
    argv = ["balance", *map(str, files), "--labels", str(folder / "L.npy"), *prompts, "--out", str(folder / "out")]
    code = (
        "import resource, sys\nfrom sdo.cli.main import main\nstatus = main(sys.argv[1:])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_maxrss * 1024 / 2**30, used.ru_utime + used.ru_stime)\nsys.exit(status)"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    gib, cpu = map(float, done.stdout.splitlines()[-1].split())
    return seconds, cpu, gib


if __name__ == "__main__":
    main()
