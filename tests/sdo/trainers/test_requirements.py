"""Launches that are refused, each with its remedy, by attach and by the recorder alike."""

from types import SimpleNamespace

import pytest

pytest.importorskip("trl")

from accelerate.state import DistributedType
from datasets import Dataset
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer

from sdo import InputError
from sdo.trainers.requirements import check_launch, process_refusals, require_trained_tokens

LAUNCHES = [
    ({"n_gpu": 4}, r"4 devices in one process \(nn.DataParallel\).*torchrun --nproc-per-node 4"),
    ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "DeepSpeed.*fix: launch without DeepSpeed, with fsdp=True"),
    ({"fsdp": True, "fsdp_config": {"version": 1}}, "FSDP version 1.*fix: fsdp_config={'version': 2}"),
    ({"fsdp": "full_shard", "fsdp_config": {}}, "FSDP version 1"),  # the default of transformers before 5.24
    ({"fsdp": True, "fsdp_plugin_args": {"fsdp_version": 1}, "fsdp_config": {}}, "FSDP version 1"),
    ({"parallelism_config": SimpleNamespace(tp_size=2)}, "tp_size = 2.*fix: tp_size=1"),
    ({"parallelism_config": SimpleNamespace(tp_size=1, cp_size=4)}, "cp_size = 4"),
    ({"accelerator_config": SimpleNamespace(split_batches=True)}, "split_batches=True; .*fix: leave it out"),
    ({"accelerator_config": SimpleNamespace(dispatch_batches=True)}, "dispatch_batches=True; .*fix: leave it out"),
    ({"accelerator_config": SimpleNamespace(even_batches=False)}, "even_batches=False; .*fix: leave it True"),
]


@pytest.mark.parametrize(("changes", "message"), LAUNCHES)
def test_a_launch_that_cannot_be_followed_is_refused_with_its_remedy(changes, message):
    args = SimpleNamespace(**{"world_size": 1, "n_gpu": 1, **changes})
    for cls in (SFTTrainer, SFTConfig, TrainingArguments):
        with pytest.raises(InputError, match=message) as caught:
            check_launch(cls, args)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP version 1"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP version 1"),
    ],
)
def test_accelerate_launch_says_it_by_the_environment(monkeypatch, environment, message):
    monkeypatch.setattr("accelerate.state.is_initialized", lambda: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        check_launch(SFTConfig, SimpleNamespace(world_size=2))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"distributed_type": DistributedType.DEEPSPEED}, "DeepSpeed"),
        ({"fsdp_plugin": SimpleNamespace(fsdp_version=1)}, "FSDP version 1"),
    ],
)
def test_what_accelerate_found_counts(monkeypatch, state, message):
    found = SimpleNamespace(**{"distributed_type": DistributedType.NO, "fsdp_plugin": None, **state})
    monkeypatch.setattr("accelerate.state.is_initialized", lambda: True)
    monkeypatch.setattr("accelerate.state.AcceleratorState", lambda: found)
    (refusal,) = process_refusals(SimpleNamespace(world_size=2))
    assert message in refusal


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"world_size": 8},
        {"world_size": 8, "fsdp": True, "fsdp_config": {"version": 2}},
        {"world_size": 8, "fsdp": True, "fsdp_plugin_args": {"fsdp_version": 2}},
        {"accelerator_config": SimpleNamespace(split_batches=False, dispatch_batches=None, even_batches=True)},
    ],
)
def test_other_launches_are_taken(changes):
    assert list(process_refusals(SimpleNamespace(**changes))) == []
    assert check_launch(SFTConfig, SimpleNamespace(**changes)).trainer == "SFTTrainer"


def test_arguments_as_users_make_them(tmp_path):
    plain = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    assert list(process_refusals(plain)) == []
    uneven = {"split_batches": True, "dispatch_batches": True, "even_batches": False}
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], accelerator_config=uneven)
    assert [line.split(";")[0] for line in process_refusals(args)] == [
        "accelerator_config has split_batches=True",
        "accelerator_config has dispatch_batches=True",
        "accelerator_config has even_batches=False",
    ]


IDS = [[5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("labels", "shifts"),
    [
        ([[-100, -100, -100], [-100, -100]], False),
        ([[5, -100, -100], [8, -100]], True),  # nothing predicts a row's first token
    ],
)
def test_a_dataset_of_which_nothing_is_trained_is_refused(labels, shifts):
    dataset = Dataset.from_dict({"input_ids": IDS, "labels": labels})
    with pytest.raises(InputError, match=r"no token of the training dataset's 2 row\(s\) is .*; fix: look at"):
        require_trained_tokens(dataset, shifts=shifts)


@pytest.mark.parametrize(
    ("columns", "shifts"),
    [
        ({"input_ids": IDS, "labels": [[-100, -100, -100], [-100, 9]]}, True),
        ({"input_ids": IDS, "labels": [[5, -100, -100], [8, -100]]}, False),
        ({"input_ids": IDS, "labels": [[1], [0]]}, True),  # a label of the whole row, in a list
        ({"input_ids": IDS, "labels": [1, 0]}, True),
        ({"input_ids": IDS}, True),  # a collator makes the labels
        ({"input_ids": [], "labels": []}, True),
        ({"labels": [[-100], [-100]]}, True),
    ],
)
def test_other_datasets_pass(columns, shifts):
    for dataset in (Dataset.from_dict(columns), Dataset.from_dict(columns).with_format("torch")):
        assert require_trained_tokens(dataset, shifts=shifts) is None
    assert require_trained_tokens([{"labels": [-100]}], shifts=shifts) is None
