"""The report in words, from values that are made up."""

from __future__ import annotations

import json

import pytest

from diagnostics.examination.diagnosis import Diagnosis, SignalFinding
from diagnostics.examination.disk_usage import Stream
from diagnostics.examination.micro_step import MicroStep

WEIGHT = SignalFinding(
    name="weight",
    fires=True,
    parameter="lm_head.weight",
    shape=(49_152, 576),
    tied_with=("model.embed_tokens.weight",),
    kind="count_two_stage",
    stored=8192,
    norm=1.5,
    table_bytes=9_633_792,
    copies=4,
    copy_bytes=452_984_832,
)
FOUND = Diagnosis(
    model={"class": "LlamaForCausalLM", "parameters": 2000, "trainable_parameters": 1000, "dtype": "float32"},
    samples=6796,
    ids="column 'sample_id'",
    schedule={"step_samples": 8, "micro_batches": 2, "steps_per_epoch": 850, "steps": 1700},
    organizer={
        "name": "sdo",
        "organizer_epoch": 0,
        "steps": 1901,
        "pool": 6796,
        "cold": 1,
        "hot": 2,
        "exposure_min": 1,
        "exposure_mean": 2.238,
        "exposure_max": 9,
        "within_batch_cosine": 0.4912,
        "uniform_within_batch_cosine": 0.3531,
    },
    recorder={"out": "runs/sdo", "sample_every": 10, "sketch_size": 8192},
    signals=(WEIGHT,),
    disk=(Stream("gradients/weight, step", 1700, 55_890_000), Stream("steps", 1700, 200_000)),
    micro_step=MicroStep((3, 5), 120, 2.5, 0.75, 900_000_000, "cpu"),
    refused=(),
)


def changed(**changes):
    return Diagnosis(**{**{name: getattr(FOUND, name) for name in vars(FOUND)}, **changes})


@pytest.mark.parametrize(
    "line",
    [
        "all is well",
        "model       LlamaForCausalLM, 1,000 of 2,000 parameters trained",
        "samples     6,796; ids: column 'sample_id'",
        "schedule    8 samples a step in 2 micro-batch(es); 850 steps a trainer epoch, 1,700 in all",
        "organizer   sdo; its first epoch: 1,901 steps, exposure min / mean / max 1 / 2.24 / 9, "
        "within-batch cosine 0.491 (uniform: 0.353)",
        "recorder    runs/sdo",
        "  weight    fires: lm_head.weight (49,152 x 576, tied with model.embed_tokens.weight), stored as a sketch of "
        "8,192 numbers",
        "disk        56.1 MB at the end:",
        "  gradients/weight, step               1,700 rows  55.9 MB",
        "memory      sketch tables 9.6 MB, throughout; copies of the first gradients 453.0 MB, until the sketch is "
        "checked",
        "micro-step  2 row(s), 120 tokens with a loss of 2.5000; forward and backward in 0.750 s on cpu, peak memory "
        "900.0 MB (resident); nothing was changed",
    ],
)
def test_lines_of_the_report(line):
    assert line in str(FOUND).splitlines()


def test_what_is_not_known_is_said_so():
    organizer = {**FOUND.organizer, "within_batch_cosine": None, "uniform_within_batch_cosine": None}
    text = str(changed(samples=None, schedule=None, disk=(), micro_step=None, organizer=organizer))
    assert "samples     unknown" in text
    assert "within-batch cosine unknown" in text
    assert "micro-step  not run" in text
    assert "schedule" not in text
    assert "disk" not in text


def test_plain_values():
    values = json.loads(json.dumps(FOUND.to_dict(), allow_nan=False))
    assert values["ok"] is True
    assert values["disk_bytes"] == 56_090_000
    assert values["micro_step"]["sample_ids"] == [3, 5]
    assert changed(refused=("a",)).to_dict()["ok"] is False
