"""Rows that TRL leaves out: counted, and with the reason that holds for the trainer."""

import warnings

import pytest

pytest.importorskip("trl")

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from diagnostics import GradientRecorder, doctor
from sdo import InputError, Uniform, attach
from sdo.demo.tiny_model import build
from sdo.trainers.dropped import dropped_rows, empty_dataset, why_dropped

pytestmark = pytest.mark.usefixtures("quiet_datasets")

LONG, SHORT = "a long question of many words", "short"


@pytest.fixture(scope="module")
def parts():
    return build([LONG, SHORT], seed=0, hidden=16, layers=1, vocab=300)


def arguments(config, out, **changes):
    options = {"use_cpu": True, "bf16": False, "report_to": [], "per_device_train_batch_size": 2, "max_steps": 1}
    options |= {"gradient_checkpointing": False, "disable_tqdm": True, "save_strategy": "no"}
    return config(output_dir=str(out), **{**options, **changes})


def sft(parts, out, prompts, max_length):
    rows = {"prompt": prompts, "completion": [" yes"] * len(prompts), "sample_id": list(range(len(prompts)))}
    model, tokenizer = parts
    trained = arguments(SFTConfig, out, max_length=max_length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SFTTrainer(model=model, args=trained, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer)


def test_rows_beyond_the_length_are_counted_with_the_reason(parts, tmp_path):
    trainer = sft(parts, tmp_path, [LONG, SHORT, SHORT, LONG, SHORT], 5)
    assert len(trainer.train_dataset) == 3
    assert dropped_rows(trainer, 5) == "TRL dropped 2 of 5 rows: rows whose completion lies beyond max_length=5"
    assert dropped_rows(trainer, 3) is dropped_rows(trainer, None) is None
    trainer.eval_dataset = trainer.train_dataset
    said = "TRL dropped 1 of 4 evaluation rows: rows whose completion lies beyond max_length=5; scores are numbered by"
    assert dropped_rows(trainer, 4, evaluation=True).startswith(said)


def test_the_doctor_and_the_run_tell_of_samples_without_a_row(parts, tmp_path):
    trainer = sft(parts, tmp_path / "out", [LONG, SHORT, SHORT, LONG, SHORT], 5)
    attach(trainer, Uniform(5, seed=0))
    recorder = GradientRecorder(tmp_path / "run")
    trainer.add_callback(recorder)
    said = (
        "2 of 5 samples have no row in the training dataset; if nobody left them out, TRL dropped rows whose "
        "completion lies beyond max_length=5"
    )
    found = doctor(trainer)
    assert found.organizer["notes"] == [said]
    assert f"note        {said}" in str(found)
    trainer.train()
    assert recorder._log.info["dataset"]["rows"] == 3
    assert recorder._log.info["dataset"]["missing"] == 2


def test_an_empty_dataset_is_named_by_attach_and_the_doctor(parts, tmp_path):
    trainer = sft(parts, tmp_path, [LONG] * 4, 4)
    assert len(trainer.train_dataset) == 0
    message = (
        "the training dataset is empty: TRL dropped all 4 rows whose completion lies beyond max_length=4; expected"
    )
    with pytest.raises(InputError, match=message):
        attach(trainer, Uniform(4, seed=0))


def test_without_completions_the_reason_is_another(parts, tmp_path):
    model, tokenizer = parts
    reason = "without a token to train on beyond max_length=2"
    rows = Dataset.from_dict({"text": [SHORT, SHORT]})
    args = arguments(SFTConfig, tmp_path, max_length=2)
    trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    assert why_dropped(trainer) == f"rows {reason}"
    assert empty_dataset(trainer).startswith(f"the training dataset is empty: TRL dropped all rows {reason}; expected")


def test_pairs_go_by_the_length_of_their_prompt(parts, tmp_path):
    model, tokenizer = parts
    rows = {"prompt": [LONG, SHORT], "chosen": [" yes", " yes"], "rejected": [" no", " no"]}
    args = arguments(DPOConfig, tmp_path, max_length=5)
    trainer = DPOTrainer(
        model=model,
        ref_model=build([LONG], seed=0, hidden=16, layers=1, vocab=300)[0],
        args=args,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
    )
    assert len(trainer.train_dataset) == 1
    assert dropped_rows(trainer, 2) == (
        "TRL dropped 1 of 2 rows: rows whose prompt alone takes max_length=5 tokens or more"
    )


def test_of_another_trainer_the_reason_is_unknown(parts, tmp_path):
    from types import SimpleNamespace

    trainer = SimpleNamespace(args=SimpleNamespace(max_length=3), train_dataset=[1])
    assert dropped_rows(trainer, 4) == "TRL dropped 3 of 4 rows: rows for a reason that is unknown"
