"""Real training processes, killed at any moment (SIGKILL), resumed and killed again, until one run is through.

What is left must be what an uninterrupted run leaves: the same rows in the run folder, the same ledgers, the same
weights. The moments are drawn with a seed, over the time that a whole run takes, its start included.
"""

import contextlib
import json
import os
import shutil
import signal
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl")

from safetensors.numpy import load_file

from analysis import Run
from sdo.trainers.checkpoints import last_checkpoint

STEPS, KILLS = 24, 8
# Three trainer epochs of 6 steps and more; evaluations fall on steps with and without a checkpoint.
JOB = {
    "accumulation": 2,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "evaluate": 5,
}
LAUNCHES = {
    "one process": (1, {**JOB, "per_device": 2}),
    "workers": (1, {**JOB, "per_device": 2, "dataloader_num_workers": 2}),
    "two processes": (2, {**JOB, "per_device": 1}),
}
VOLATILE = ("seconds", "recorder_seconds")


def tables(run):
    """All rows of a run folder by stream, whichever parts they lie in, wall times aside."""
    found = {}
    for folder in sorted({path.parent for path in run.rglob("part-*.parquet")}):
        parts = [pq.read_table(path, partitioning=None) for path in sorted(folder.glob("part-*.parquet"))]
        table = pa.concat_tables([part.replace_schema_metadata() for part in parts])
        table = table.drop_columns([name for name in VOLATILE if name in table.column_names])
        # Parts of two processes interleave; within a process the order of rows is part of what is compared.
        order = np.argsort(table["step"].to_numpy(), kind="stable") if "step" in table.column_names else None
        found[str(folder.relative_to(run))] = table if order is None else table.take(order)
    return found


def by_process(run, signal):
    """The rows that each process wrote."""
    return {
        rank: pa.concat_tables([pq.read_table(p) for p in sorted(run.glob(f"gradients/{signal}/part-r{rank}-*"))])
        for rank in {path.name.split("-")[1][1:] for path in run.glob(f"gradients/{signal}/part-r*")}
    }


@pytest.mark.parametrize("name", list(LAUNCHES))
def test_killed_at_any_moment_and_resumed_nothing_is_lost_and_nothing_twice(nursery, tmp_path, name):
    count, job = LAUNCHES[name]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    started = time.monotonic()
    nursery.start({**job, "out": str(whole)}, count)
    assert nursery.statuses() == [0] * count, (tmp_path / "whole-r0.log").read_text()[-3000:]
    usual = time.monotonic() - started
    moments = np.random.default_rng(617)
    killed, resumed_at = 0, []
    while True:
        checkpoint = last_checkpoint(broken / "trainer")
        if checkpoint is None:  # died before its first checkpoint: as the recorder says, a new run needs a new folder
            shutil.rmtree(broken, ignore_errors=True)
        resumed_at.append(0 if checkpoint is None else int(checkpoint.name.split("-")[1]))
        resume = None if checkpoint is None else str(checkpoint)
        processes = nursery.start({**job, "out": str(broken), "resume": resume}, count)
        if killed < KILLS:
            # Most of a run's time is its start, in which nothing can be lost; a resumed run is shorter.
            time.sleep(usual * moments.uniform(0.25, 1.0))
            for process in moments.permutation(processes).tolist():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        statuses = nursery.statuses()
        if statuses == [0] * count:
            break
        assert killed < KILLS, (tmp_path / "broken-r0.log").read_text()[-3000:]
        assert -signal.SIGKILL in statuses, (tmp_path / "broken-r0.log").read_text()[-3000:]
        killed += 1
    assert killed > 0
    mine, other = tables(broken / "run"), tables(whole / "run")
    assert mine.keys() == other.keys() >= {"steps", "exposure", "evaluations", "gradients/weight", "gradients/hidden"}
    for stream, table in other.items():
        assert mine[stream].equals(table), (stream, resumed_at)  # sketches bit for bit
    for signal_name in ("weight", "hidden"):
        assert by_process(broken / "run", signal_name).keys() == {str(rank) for rank in range(count)}
    run = Run.open(broken / "run")
    assert run.info["status"] == "finished"
    assert set(run.info.get("resumed_at", [])) <= set(resumed_at)  # some died before they came to resuming
    weights = [load_file(out / "trainer" / f"checkpoint-{STEPS}" / "model.safetensors") for out in (broken, whole)]
    assert weights[0].keys() == weights[1].keys()
    assert all(np.array_equal(weights[0][key], weights[1][key]) for key in weights[0])
    saved = [
        json.loads((out / "trainer" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["stateful_callbacks"]
        for out in (broken, whole)
    ]
    assert saved[0]["OrganizerCallback"] == saved[1]["OrganizerCallback"]
