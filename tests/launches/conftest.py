"""Launching real training in several processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the scripts are modules too: one process trains for comparison
TIMEOUT = 240  # seconds; a launch takes about 25 on a free machine


def environment():
    """One thread a process, no network, this checkout before an installed package."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(HERE.parents[1]),
        "PYTHONWARNINGS": "ignore",
    }


@pytest.fixture(scope="session")
def torchrun():
    """Run a script in two gloo processes, which find each other on a free port."""

    def run(script, *arguments):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "localhost:0", str(HERE / script), *map(str, arguments)]
        with subprocess.Popen(
            command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        ) as launched:
            try:
                _, errors = launched.communicate(timeout=TIMEOUT)
            except BaseException:
                os.killpg(launched.pid, signal.SIGKILL)  # its processes too
                raise
        assert launched.returncode == 0, errors.decode()[-5000:]

    return run


@pytest.fixture(scope="session")
def launch(torchrun):
    """Train several jobs in two processes; returns what each process saw of each, by the job's name."""

    def launch(folder, jobs):
        (folder / "jobs.json").write_text(json.dumps(jobs))
        torchrun("training.py", folder)
        return {
            job["name"]: [json.loads((folder / f"{job['name']}-r{rank}.json").read_text()) for rank in range(2)]
            for job in jobs
        }

    return launch


class Nursery:
    """Forks training processes that can be killed; see nursery.py."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")],
            env={**environment(), "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == {"ready": True}

    def _answer(self):
        return json.loads(self._process.stdout.readline())

    def start(self, job, count):
        self._process.stdin.write(json.dumps({"job": job, "count": count}) + "\n")
        self._process.stdin.flush()
        return self._answer()["ids"]

    def statuses(self):
        return self._answer()["statuses"]

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)


@pytest.fixture(scope="session")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()
