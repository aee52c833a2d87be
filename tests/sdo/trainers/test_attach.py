"""`attach` on real SFT trainers: a random Llama of two layers, on the CPU, a few milliseconds a step.

What the model was trained on is read off its embedding layer: sample i begins with token FIRST + i and no other sample
does. So neither our ids nor our hooks take part in proving what they claim.
"""

import gc
import json
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl")

import datasets
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from torch.utils.data import RandomSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from analysis import Run
from diagnostics import GradientRecorder, doctor
from sdo import SDO, Embeddings, InputError, OrganizedSampler, Uniform, attach
from sdo.trainers.row_ids import refusals
from sdo.trainers.session import _sessions
from tests.llama import tiny_llama

N, FIRST = 22, 20
ROWS = [[FIRST + i] + [5 + (3 * i + j) % 11 for j in range(2 + i % 4)] for i in range(N)]
MATRIX = np.random.default_rng(0).standard_normal((N, 6))
STATE = "OrganizerCallback"

pytestmark = [
    pytest.mark.usefixtures("quiet_datasets"),
    # `resume_from_checkpoint` loads torch's own files; the notice is transformers' and not ours.
    pytest.mark.filterwarnings("ignore:.*TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.*:UserWarning"),
    # transformers 5.0 minds checkpoints that are written within a moment.
    pytest.mark.filterwarnings("ignore:mtime may not be reliable:UserWarning"),
]


def dataset(ids=range(N), **columns):
    """Rows of the given samples, in that order, with their ids."""
    ids = list(ids)
    return Dataset.from_dict({"input_ids": [ROWS[i] for i in ids], "sample_id": ids, **columns})


def without_ids(rows=None):
    return (dataset() if rows is None else rows).remove_columns("sample_id")


def arguments(out, **changes):
    defaults = {
        "output_dir": str(out),
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "max_steps": 7,
    }
    return SFTConfig(**{**defaults, **changes})


class Probe(TrainerCallback):
    """What the model embedded, by optimizer step and micro-batch, and when the trainer's events came."""

    def __init__(self, model):
        self.steps, self.events, self._micro = [], [], []
        model.get_input_embeddings().register_forward_pre_hook(self._note)

    def _note(self, module, inputs):
        if module.training and torch.is_grad_enabled():
            self._micro.append([int(i) - FIRST for i in inputs[0][:, 0]])

    def on_step_begin(self, args, state, control, **kwargs):
        self._micro = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(self._micro)

    def on_epoch_end(self, args, state, control, **kwargs):
        self.events.append(("epoch end", state.global_step, round(state.epoch)))

    def on_evaluate(self, args, state, control, **kwargs):
        epoch = state.epoch or 0  # None before training, in transformers 5.0
        self.events.append(("evaluation", state.global_step, round(epoch)))

    @property
    def batches(self):
        """Samples of each optimizer step, in the order in which the model saw them."""
        return [[i for micro in step for i in micro] for step in self.steps]


class StopAt(TrainerCallback):
    def __init__(self, step, *, crash=False):
        self.step, self.crash = step, crash

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            if self.crash:
                raise OSError("the machine went away")
            control.should_training_stop = True


@pytest.fixture
def make(tmp_path, tokenizer):
    """Build a trainer with a probe; `rows` and `model` can be given."""

    def make(rows=None, *, model=None, cls=SFTTrainer, eval_rows=None, out=None, **changes):
        trainer = cls(
            model=tiny_llama() if model is None else model,
            args=arguments(out or tmp_path / "out", **changes),
            train_dataset=dataset() if rows is None else rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
        )
        trainer.probe = Probe(trainer.model)
        trainer.add_callback(trainer.probe)
        return trainer

    return make


def sdo(**options):
    return SDO(MATRIX, **{"k": 2, "seed": 617, **options})


def counts(batches, n=N):
    return np.bincount([i for batch in batches for i in batch], minlength=n)


def same_weights(first, second):
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------- what a step trains


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_one_step_trains_one_planned_batch_in_order(make, accumulation, workers):
    """transformers#29561, #14309, #22098: of 11 batches, 2 or 4 a step, none is skipped and none runs over."""
    trainer = make(
        gradient_accumulation_steps=accumulation,
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,
        max_steps=15,
    )
    handle = attach(trainer, sdo())
    trainer.train()
    size = 2 * accumulation
    assert handle.plan.batch_size == size
    assert trainer.probe.batches == sdo().plan(size).batches(0, 15).tolist()
    assert [[len(micro) for micro in step] for step in trainer.probe.steps] == [[2] * accumulation] * 15
    assert handle.trained.tolist() == counts(trainer.probe.batches).tolist()
    # The end of an epoch is a whole step like any other: no gradient is lost, none stays behind (transformers#2995).
    assert all(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "grad_norm" in entry)
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())


@pytest.mark.parametrize("organizer", [sdo(locality="shuffle"), Uniform(N, seed=3), Uniform(MATRIX, seed=3)])
def test_every_organizer(make, organizer):
    trainer = make(max_steps=14)
    handle = attach(trainer, organizer)
    trainer.train()
    assert trainer.probe.batches == organizer.plan(2).batches(0, 14).tolist()
    assert handle.trained.sum() == 28


@pytest.mark.parametrize("changes", [{"num_train_epochs": 3, "max_steps": -1}, {"max_steps": 14}, {"max_steps": 5}])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_lengths_schedules_and_evaluations_keep_their_meaning(make, changes, accumulation):
    """transformers#8859: training ended after the first epoch although max_steps was larger."""
    both = []
    for organize in (False, True):
        trainer = make(
            eval_rows=dataset(range(4)),
            eval_strategy="epoch",
            gradient_accumulation_steps=accumulation,
            **changes,
        )
        if organize:
            attach(trainer, sdo())
        trainer.train()
        rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
        state = trainer.state
        both.append((state.max_steps, state.global_step, rates, trainer.probe.events))
        # In the middle of an epoch the trainer counts micro-batches, of which a plain epoch may have fewer: 11 here,
        # not 12.
        assert state.epoch == pytest.approx(state.global_step / -(-N // (2 * accumulation)), abs=0.1)
    assert both[0] == both[1]
    steps = {3: 3 * -(-N // (2 * accumulation))}.get(changes.get("num_train_epochs"), changes["max_steps"])
    assert both[1][1] == steps
    # Linear decay from 0.01: the last step's rate is one step away from 0.
    assert both[1][2][-1] == pytest.approx(1e-2 / steps)


@pytest.mark.parametrize(("n", "size", "accumulation"), [(8, 1, 8), (7, 3, 2), (9, 2, 1), (13, 4, 3), (5, 5, 1)])
def test_micro_batches_trained_are_those_offered(make, n, size, accumulation):
    """transformers#37923, #37777, #2995: wrong numbers of steps where accumulation and epoch do not divide."""
    trainer = make(
        dataset(range(n)),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=3,
        max_steps=-1,
    )
    handle = attach(trainer, Uniform(n, seed=1))
    trainer.train()
    steps = 3 * -(-n // (size * accumulation))
    assert trainer.probe.batches == Uniform(n, seed=1).plan(size * accumulation).batches(0, steps).tolist()
    assert len(trainer.get_train_dataloader()) * 3 == sum(len(step) for step in trainer.probe.steps)
    assert handle.trained.sum() == steps * size * accumulation


def test_more_accumulation_than_samples_is_refused(make):
    """transformers#2995, #17157: with more accumulation than batches an epoch never made a step."""
    trainer = make(gradient_accumulation_steps=12)
    with pytest.raises(InputError, match=r"batch size 24 is larger than the 22 samples.*accumulation"):
        attach(trainer, sdo())


@pytest.mark.parametrize("stop", [1, 4, 11, 13])
def test_early_stop_trains_a_prefix(make, stop):
    trainer = make(max_steps=30)
    handle = attach(trainer, sdo())
    trainer.add_callback(StopAt(stop))
    trainer.train()
    assert trainer.probe.batches == sdo().plan(2).batches(0, stop).tolist()
    assert handle.trained.tolist() == counts(trainer.probe.batches).tolist()


def test_trained_before_and_after(make):
    trainer = make(max_steps=3)
    handle = attach(trainer, sdo())
    assert handle.trained.tolist() == [0] * N
    trainer.train()
    trainer.train()  # a second call starts the plan again, as the trainer starts its count again
    assert trainer.probe.batches[:3] == trainer.probe.batches[3:]
    assert handle.trained.sum() == 6


def test_a_step_that_the_scaler_skipped_is_not_counted(make):
    trainer = make(max_steps=6)
    handle = attach(trainer, sdo())

    class SkipThird(TrainerCallback):
        """Does what accelerate's optimizer does under fp16 when a gradient overflowed; the CPU has no scaler."""

        def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            optimizer._is_overflow = state.global_step == 2

    trainer.add_callback(SkipThird())
    trainer.train()
    kept = [batch for step, batch in enumerate(trainer.probe.batches) if step != 2]
    assert handle.trained.tolist() == counts(kept).tolist()


def test_two_seeds_differ_and_one_repeats(make):
    """transformers#11389, #26218: the order did not depend on the seed, or could not be set."""
    orders = []
    for seed, training_seed in ((1, 42), (1, 7), (2, 42)):
        trainer = make(max_steps=12, seed=training_seed)
        attach(trainer, sdo(seed=seed))
        trainer.train()
        orders.append(trainer.probe.batches)
    assert orders[0] == orders[1] != orders[2]


def test_a_loader_that_someone_changed_is_noticed(make):
    trainer = make()
    attach(trainer, sdo())

    class Intruder(TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
            train_dataloader.set_sampler(RandomSampler(range(N)))

    trainer.add_callback(Intruder())
    with pytest.raises(RuntimeError, match=r"step 0 trained samples .* but the plan holds"):
        trainer.train()


# ---------------------------------------------------------------------- which row is which sample

SHUFFLED = np.random.default_rng(5).permutation(N).tolist()


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (dataset(SHUFFLED), {}),
        (dataset(), {"shuffle_dataset": True}),
        (dataset(SHUFFLED), {"shuffle_dataset": True, "dataloader_num_workers": 2}),
        # transformers#43598: columns that the model does not take are dropped, and with False they are not.
        (dataset(SHUFFLED), {"remove_unused_columns": False}),
        pytest.param(
            dataset(SHUFFLED).with_format("torch"),
            {},
            # TRL's collator makes tensors of the tensors.
            marks=pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
        ),
        (dataset(SHUFFLED).cast_column("sample_id", datasets.Value("uint8")), {}),
    ],
    ids=["before", "by the trainer", "both", "all columns", "torch format", "uint8"],
)
def test_the_id_column_survives_any_order_of_the_rows(make, rows, changes):
    trainer = make(rows, max_steps=14, **changes)
    handle = attach(trainer, sdo())
    trainer.train()
    assert trainer.probe.batches == sdo().plan(2).batches(0, 14).tolist()
    assert handle.trained.tolist() == counts(trainer.probe.batches).tolist()


def test_another_name_for_the_column(make):
    trainer = make(dataset(SHUFFLED).rename_column("sample_id", "row"))
    attach(trainer, sdo(), id_column="row")
    trainer.train()
    assert trainer.probe.batches == sdo().plan(2).batches(0, 7).tolist()


KEYS = [f"q{(7 * i) % N:02d}" for i in range(N)]


@pytest.mark.parametrize("keys", [KEYS, [100 + (7 * i) % N for i in range(N)]], ids=["strings", "integers"])
def test_keys_find_their_rows_in_the_embeddings_ids(make, tmp_path, keys):
    embeddings = Embeddings.from_array(MATRIX, ids=keys)
    rows = without_ids(dataset(SHUFFLED)).add_column("uid", [keys[i] for i in SHUFFLED])
    trainer = make(rows)
    handle = attach(trainer, SDO(embeddings, k=3, seed=7), id_column="uid")
    trainer.add_callback(GradientRecorder(tmp_path / "run", signals=["hidden"]))
    trainer.train()
    expected = SDO(MATRIX, k=3, seed=7).plan(2)
    assert handle.plan.fingerprint == expected.fingerprint
    assert trainer.probe.batches == expected.batches(0, 7).tolist()
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found["dataset"]["sample_id"] == "row of the embeddings whose id is in column 'uid'"
    assert found["embeddings"]["ids"] == ("strings" if keys is KEYS else "integers")
    steps = pq.read_table(tmp_path / "run" / "steps", partitioning=None)
    assert steps.column("sample_ids").to_pylist() == expected.batches(0, 7).tolist()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["q99", *KEYS[1:]], r"column 'sample_id': 'q99' \(row 0\) is not among the 22 ids"),
        ([KEYS[1], *KEYS[1:]], r"holds 1 repeated ids, the first 'q07' in row 1"),
        (list(range(N)), "column 'sample_id' hold integers, the ids of the embeddings are strings"),
    ],
)
def test_wrong_keys_are_refused(make, column, message):
    trainer = make(without_ids().add_column("sample_id", column))
    with pytest.raises(InputError, match=message):
        attach(trainer, SDO(Embeddings.from_array(MATRIX, ids=KEYS), seed=7))


def test_ids_without_a_column_leave_the_position(make):
    trainer = make(without_ids())
    attach(trainer, Uniform(Embeddings.from_array(MATRIX, ids=KEYS), seed=7))
    trainer.train()
    assert trainer.probe.batches == Uniform(N, seed=7).plan(2).batches(0, 7).tolist()


def masked(*hidden):
    """Rows of which some are wholly masked: TRL drops these when it prepares the dataset."""
    labels = [[-100] * len(row) if i in hidden else row for i, row in enumerate(ROWS)]
    return dataset(labels=labels)


def test_dropped_rows_leave_a_plan_over_the_rest(make):
    trainer = make(masked(0, 9), num_train_epochs=2, max_steps=-1)
    assert len(trainer.train_dataset) == N - 2
    handle = attach(trainer, sdo())
    trainer.train()
    rest = np.setdiff1d(np.arange(N), [0, 9])
    assert handle.plan.ids.tolist() == rest.tolist()
    assert trainer.probe.batches == sdo().plan(2, rows=rest).batches(0, 20).tolist()
    assert handle.trained.tolist() == counts(trainer.probe.batches)[rest].tolist()
    assert {0, 9}.isdisjoint(i for batch in trainer.probe.batches for i in batch)


ADD = r"fix: dataset = dataset\.add_column\('sample_id', list\(range\(len\(dataset\)\)\)\)"


def test_dropped_rows_without_a_column_are_refused(make):
    trainer = make(without_ids(masked(0)))
    with pytest.raises(InputError, match=rf"has 21 rows, the embeddings have 22.*{ADD}"):
        attach(trainer, sdo())


def test_shuffled_rows_without_a_column_are_refused(make):
    trainer = make(without_ids(), shuffle_dataset=True)
    with pytest.raises(InputError, match=rf"shuffle_dataset moved the rows.*{ADD}"):
        attach(trainer, sdo())


def test_without_a_column_the_position_is_the_id(make):
    trainer = make(without_ids(), max_steps=14)
    attach(trainer, sdo())
    trainer.train()
    assert trainer.probe.batches == sdo().plan(2).batches(0, 14).tolist()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 0, *range(2, N)], "holds 1 repeated ids"),
        ([-1, *range(1, N)], r"reaches from -1 to 21, but the embeddings have 22 rows"),
        ([N, *range(1, N)], r"reaches from 1 to 22, .* expected ids 0 to 21"),
        ([2**62, *range(1, N)], "reaches from 1 to 4611686018427387904"),
        ([str(i) for i in range(N)], "expected integers"),
        ([float(i) for i in range(N)], "holds float64; expected integers"),
        ([i % 2 == 0 for i in range(N)], "holds bool; expected integers"),
        ([None, *range(1, N)], "expected integers"),
    ],
    ids=["repeated", "negative", "too large", "far too large", "text", "floats", "truth values", "missing"],
)
def test_wrong_ids_are_refused(make, ids, message):
    rows = without_ids().add_column("sample_id", ids)
    trainer = make(rows)
    before = traces(trainer)
    with pytest.raises(InputError, match=message):
        attach(trainer, sdo())
    assert traces(trainer) == before


# ---------------------------------------------------------------------- what is refused


def traces(trainer):
    """All that attaching could leave behind on a trainer and its model."""
    model = trainer.model
    hooks = [
        (name, kind, list(getattr(module, kind)))
        for name, module in model.named_modules()
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_forward_pre_hooks_with_kwargs")
    ]
    parameter_hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    callbacks = [id(callback) for callback in trainer.callback_handler.callbacks]
    return sorted(vars(trainer)), sorted(vars(model)), callbacks, hooks, parameter_hooks, model in _sessions


SAMPLING = (
    [("train_sampling_strategy", "group_by_length"), ("train_sampling_strategy", "batch_rebalance")]
    if hasattr(TrainingArguments, "train_sampling_strategy")
    else [("group_by_length", True)]  # transformers 5.0
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size is set.*per_device_train_batch_size"),
        *[({option: value}, f"{option} is set") for option, value in SAMPLING],
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True"),
        # transformers#26548: rows of different lengths fail under dispatch_batches, deep inside accelerate.
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True"),
        ({"accelerator_config": {"even_batches": False}}, "even_batches=False"),
        ({"restore_callback_states_from_checkpoint": True}, "restore_callback_states_from_checkpoint is set"),
        ({"packing": True, "max_length": 8}, "packing is set.*mixes samples"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*[Pp]ack:UserWarning")
def test_options_that_would_break_the_plan_are_refused(make, changes, message):
    trainer = make(**changes)
    before = traces(trainer)
    with pytest.raises(InputError, match=message):
        attach(trainer, sdo())
    assert traces(trainer) == before


def test_all_refusals_are_listed_at_once(make):
    trainer = make(auto_find_batch_size=True, ignore_data_skip=True)
    before = traces(trainer)
    found = refusals(trainer, sdo())
    assert [reason.split(" is set")[0] for reason in found] == ["auto_find_batch_size", "ignore_data_skip"]
    assert traces(trainer) == before
    with pytest.raises(InputError) as error:
        attach(trainer, sdo())
    assert str(error.value) == found[0]
    assert refusals(make(), sdo()) == []
    assert ["expected ids 0 to" in reason for reason in refusals(make(), Uniform(N - 1))] == [True]
    assert "got a list" in refusals([], sdo())[0]


@pytest.mark.parametrize("base", [Trainer, SFTTrainer])
def test_trainers_of_other_methods_are_refused_by_name(base):
    # Not initialized: the class decides before anything else is looked at, and setting one up costs seconds.
    cls = type("OtherTrainer", (base,), {"__module__": "trl.experimental.other"})
    for kind in (cls, type("Mine", (cls,), {"__module__": "train"})):
        with pytest.raises(InputError, match=rf"got a {cls.__name__}; this version supports SFTTrainer"):
            attach(object.__new__(kind), sdo())
    with pytest.raises(InputError, match="attach got a list; expected a transformers or TRL trainer"):
        attach([], sdo())


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from ({"input_ids": row, "labels": row} for row in ROWS)


class StreamedWithLength(Streamed):
    def __len__(self):
        return N


def plain_trainer(tmp_path, rows, model=None, **changes):
    """A transformers Trainer, without TRL."""
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "plain"),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        max_steps=6,
        **{"per_device_train_batch_size": 2, **changes},
    )

    def collate(items):
        width = max(len(item["input_ids"]) for item in items)
        padded = [list(item["input_ids"]) + [0] * (width - len(item["input_ids"])) for item in items]
        ids = torch.tensor(padded)
        return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "attention_mask": ids != 0}

    models = {"model_init": model} if model is not None else {"model": tiny_llama()}
    return Trainer(**models, args=arguments, train_dataset=rows, data_collator=collate)


@pytest.mark.parametrize(
    "rows",
    [Streamed(), StreamedWithLength(), dataset().to_iterable_dataset()],
    ids=["stream", "stream with a length", "datasets' stream"],
)
def test_iterable_datasets_are_refused(tmp_path, rows):
    """transformers#15418, trl#3213: an order was asked for and silently ignored, since a stream has none."""
    trainer = plain_trainer(tmp_path, rows)
    with pytest.raises(InputError, match="the training dataset is iterable; expected a map-style dataset"):
        attach(trainer, Uniform(N))


def test_a_trainer_without_a_dataset_is_refused(tmp_path):
    with pytest.raises(InputError, match="no train_dataset"):
        attach(plain_trainer(tmp_path, None), Uniform(N))


def test_a_plain_transformers_trainer_with_a_list_for_a_dataset(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer = plain_trainer(tmp_path, rows, remove_unused_columns=False)
    probe = Probe(trainer.model)
    trainer.add_callback(probe)
    handle = attach(trainer, sdo())
    trainer.train()
    assert probe.batches == sdo().plan(2).batches(0, 6).tolist()
    assert handle.trained.sum() == 12


def test_a_model_that_train_builds_anew(tmp_path):
    """With model_init, train() replaces the model: ids must travel with the new one, or attach must say why not."""
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer = plain_trainer(tmp_path, rows, model=lambda: tiny_llama(), remove_unused_columns=False)
    try:
        handle = attach(trainer, sdo())
    except InputError as error:
        assert "model_init" in str(error)  # noqa: PT017 - refusing is as good as working
        return
    trainer.train()
    assert handle.trained.sum() == 12


def test_attaching_twice_is_refused_until_detached(make):
    """transformers#33875: two callbacks of one class make the state in checkpoints grow."""
    trainer = make(max_steps=14)
    first = attach(trainer, sdo())
    before = traces(trainer)
    with pytest.raises(InputError, match=r"already has an organizer.*detach\(\)"):
        attach(trainer, Uniform(N))
    assert traces(trainer) == before
    first.detach()
    attach(trainer, Uniform(N, seed=8))
    trainer.train()
    assert trainer.probe.batches == Uniform(N, seed=8).plan(2).batches(0, 14).tolist()


def test_a_second_trainer_takes_a_model_over(make):
    """A notebook's cell that is run again makes another trainer of the model that is there."""
    first = make()
    attach(first, sdo())
    first.train()
    second = make(model=first.model)
    with pytest.warns(UserWarning, match="organizer of an earlier trainer of this model was detached"):
        handle = attach(second, Uniform(N, seed=8))
    with pytest.raises(InputError, match=r"another trainer's organizer has taken over.*attach an organizer"):
        first.train()
    second.train()
    assert second.probe.batches == Uniform(N, seed=8).plan(2).batches(0, 7).tolist()
    with pytest.warns(UserWarning, match="earlier trainer"):
        attach(first, sdo()).detach()
    assert "_get_train_sampler" not in vars(first)
    assert first.model not in _sessions
    handle.detach()
    assert "_get_train_sampler" in vars(second)  # refuses since the first took the model back


@pytest.mark.parametrize("share", [False, True], ids=["own arguments", "the same arguments"])
def test_a_recorder_alone_does_not_describe_the_plan_of_another_trainer(make, tmp_path, share):
    """The baseline after the organized run, on the model that is there: no plan is its own, and ids are positions."""
    first = make(rows=dataset(reversed(range(N))))
    attach(first, sdo())
    first.train()
    second = make(rows=without_ids(), model=first.model)
    if share:
        second.args = first.args
    with pytest.raises(InputError, match=r"another trainer's organizer has this trainer's model.*fix: detach"):
        doctor(second)
    assert "_get_train_sampler" in vars(first)  # doctor changed nothing
    second.add_callback(GradientRecorder(tmp_path / "run", signals=("hidden",)))
    with pytest.warns(UserWarning, match="organizer of an earlier trainer of this model was detached"):
        second.train()
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (info["organizer"], info["dataset"]["sample_id"]) == (None, "position in the prepared dataset")
    steps = pq.read_table(tmp_path / "run" / "steps").to_pylist()
    assert [row["sample_ids"] for row in steps] == second.probe.batches
    assert not (tmp_path / "run" / "exposure").exists()


def test_a_model_that_nobody_holds_is_let_go(make):
    """Neither the organizer nor a recorder keeps a model and its trainer alive."""
    trainer = make()
    handle = attach(trainer, sdo())
    trainer.train()
    model = weakref.ref(trainer.model)
    del trainer, handle
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("change", [("per_device_train_batch_size", 3), ("gradient_accumulation_steps", 2)])
def test_a_batch_size_changed_after_attach_is_refused(make, change):
    trainer = make()
    attach(trainer, sdo())
    setattr(trainer.args, *change)
    size = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(InputError, match=rf"one optimizer step now takes {size} samples.*bound to 2 by attach"):
        trainer.train()
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())


def test_a_loader_of_another_batch_size_than_the_arguments_is_refused_before_a_step(make):
    """transformers took the size when the trainer was built, and 5.0 takes the arguments' again when it trains."""
    trainer = make()
    trainer.args.per_device_train_batch_size = 3
    attach(trainer, sdo())
    try:
        trainer.train()
    except InputError as error:
        assert "draws 2 samples at a time; expected 3" in str(error)  # noqa: PT017 - refusing is as good as working
        assert trainer.probe.steps == []
    else:
        assert trainer.probe.batches == sdo().plan(3).batches(0, 7).tolist()


# ---------------------------------------------------------------------- how it is plugged in


def test_the_sampler_can_be_asked_for_in_every_way(make):
    """transformers#38226: the signature changed; GRPOTrainer calls the argument `dataset`."""
    trainer = make()
    handle = attach(trainer, sdo())
    rows = trainer.train_dataset
    ask = trainer._get_train_sampler
    assert ask() is ask(rows) is ask(train_dataset=rows) is ask(dataset=rows) is handle.sampler


def test_the_loaders_sampler_is_ours_and_hears_of_epochs(make, monkeypatch):
    """accelerate#2057, #2117: RandomSampler is replaced. transformers#11460: set_epoch must arrive."""
    trainer = make(num_train_epochs=3, max_steps=-1)
    handle = attach(trainer, sdo())
    heard = []
    monkeypatch.setattr(OrganizedSampler, "set_epoch", lambda self, epoch: heard.append(epoch))
    loaders = []
    trainer.add_callback(Keep(loaders))
    trainer.train()
    assert loaders[0].batch_sampler.sampler is handle.sampler
    assert sorted(set(heard)) == [0, 1, 2]
    # Not needed for the right order: it came from global_step.
    assert trainer.probe.batches == sdo().plan(2).batches(0, 33).tolist()
    assert len(loaders[0]) == 11


class Keep(TrainerCallback):
    def __init__(self, loaders):
        self.loaders = loaders

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        self.loaders.append(train_dataloader)


def test_evaluation_and_prediction_are_left_alone(make):
    rows = dataset(range(5))
    plain = make(eval_rows=rows)
    organized = make(eval_rows=rows)
    attach(organized, sdo())
    for trainer in (plain, organized):
        trainer.metrics = trainer.evaluate()
    assert organized.metrics["eval_loss"] == plain.metrics["eval_loss"]
    organized.train()
    assert not isinstance(organized.get_eval_dataloader().batch_sampler.sampler, OrganizedSampler)
    assert np.isfinite(organized.evaluate()["eval_loss"])


def test_detach_before_training_leaves_an_untouched_trainer(make):
    plain, organized = make(num_train_epochs=2, max_steps=-1), make(num_train_epochs=2, max_steps=-1)
    before = traces(organized)
    handle = attach(organized, sdo())
    assert traces(organized) != before
    handle.detach()
    handle.detach()
    assert traces(organized) == before
    for trainer in (plain, organized):
        torch.manual_seed(3)
        trainer.train()
    assert organized.probe.steps == plain.probe.steps
    assert organized.state.log_history[:-1] == plain.state.log_history[:-1]  # the last entry holds wall times
    assert same_weights(organized.model, plain.model)


def test_detach_after_training_leaves_an_untouched_trainer(make):
    plain, organized = make(), make()
    before = traces(organized)
    handle = attach(organized, sdo())
    organized.train()
    trained = handle.trained.copy()
    plain.train()
    handle.detach()
    assert traces(organized)[2:] == before[2:]
    # transformers adds attributes of its own while it trains, to both alike.
    assert traces(organized)[:2] == traces(plain)[:2]
    # From the same weights on, both train the same, bit for bit.
    for trainer in (plain, organized):
        trainer.model.load_state_dict(tiny_llama().state_dict())
        trainer.optimizer = trainer.lr_scheduler = None
        torch.manual_seed(3)
        trainer.train()
    assert organized.probe.steps[7:] == plain.probe.steps[7:]
    assert same_weights(organized.model, plain.model)
    assert handle.trained.tolist() == trained.tolist()  # the record stays, and nothing is added to it


def test_a_loader_from_before_detach_says_so(make):
    trainer = make()
    handle = attach(trainer, sdo())
    loader = trainer.get_train_dataloader()
    handle.detach()
    with pytest.raises(RuntimeError, match="detached"):
        next(iter(loader))


def test_detach_after_a_crash(make):
    trainer = make()
    before = traces(trainer)
    handle = attach(trainer, sdo())
    crash = StopAt(2, crash=True)
    trainer.add_callback(crash)
    with pytest.raises(OSError, match="the machine went away"):
        trainer.train()
    handle.detach()
    trainer.remove_callback(crash)
    # What transformers itself adds to trainer and model while it trains is its own affair.
    assert "_get_train_sampler" not in vars(trainer)
    assert traces(trainer)[2:] == before[2:]


def test_two_trainers_do_not_touch_each_other(make):
    first, second, plain = make(max_steps=13), make(max_steps=13), make(max_steps=13)
    handles = attach(first, sdo()), attach(second, Uniform(N, seed=9))
    second.train()
    assert handles[0].trained.sum() == 0
    torch.manual_seed(1)
    plain.train()
    first.train()
    handles[0].detach()
    assert first.probe.batches == sdo().plan(2).batches(0, 13).tolist()
    assert second.probe.batches == Uniform(N, seed=9).plan(2).batches(0, 13).tolist()
    for handle, trainer in zip(handles, (first, second), strict=True):
        assert handle.trained.tolist() == counts(trainer.probe.batches).tolist()
    # No class was changed: a trainer that nobody organized shuffles as ever, each sample once an epoch.
    assert sorted(i for batch in plain.probe.batches[:11] for i in batch) == list(range(N))
    second.train()
    assert handles[1].trained.sum() == 26


def test_no_class_is_changed(make):
    before = [dict(vars(cls)) for cls in (Trainer, SFTTrainer)]
    trainer = make()
    attach(trainer, sdo())
    trainer.train()
    assert [dict(vars(cls)) for cls in (Trainer, SFTTrainer)] == before


# ---------------------------------------------------------------------- resuming

STEPS = 18  # three trainer epochs of ceil(22 / 4) = 6 steps
# Middle of epoch 0, boundary, middle of epoch 1, boundary, one before the end.
STOPS = [3, 6, 10, 12, 17]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokenizer):
    """An uninterrupted run that saved a checkpoint at every step."""
    out = tmp_path_factory.mktemp("whole")
    trainer = resumable(out, tokenizer, save_strategy="steps", save_steps=1, num_train_epochs=3, max_steps=-1)
    handle = attach(trainer, sdo())
    trainer.train()
    assert trainer.state.global_step == STEPS
    return SimpleNamespace(trainer=trainer, handle=handle, out=out)


def resumable(out, tokenizer, model_seed=0, organize=None, rows=None, eval_rows=None, **changes):
    trainer = SFTTrainer(
        model=tiny_llama(model_seed),
        args=arguments(out, **{"gradient_accumulation_steps": 2, **changes}),
        train_dataset=dataset(SHUFFLED) if rows is None else rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
    )
    trainer.probe = Probe(trainer.model)
    trainer.add_callback(trainer.probe)
    if organize is not None:
        trainer.handle = attach(trainer, organize)
    return trainer


@pytest.mark.parametrize(
    ("stop", "changes"),
    [(stop, {}) for stop in STOPS]
    # accelerate#3110, pytorch-lightning#21941: workers that drew ahead before the epoch was known.
    + [(stop, {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4}) for stop in (3, 10, 12)]
    + [(10, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True})],
)
def test_a_resumed_run_equals_an_uninterrupted_one(whole, tmp_path, tokenizer, stop, changes):
    """transformers#40691, #11582: wrong order when resuming in a later epoch.

    accelerate#4071, #4233, #1451: the loader's epoch restarted, the order of an epoch came twice, or batches were
    skipped in every later epoch too. The reference has no workers: with them the run must be the same.
    """
    trainer = resumable(
        tmp_path / "out", tokenizer, model_seed=1, organize=sdo(), num_train_epochs=3, max_steps=-1, **changes
    )
    torch.manual_seed(stop)  # as in #11582: whatever the global state was before
    np.random.seed(stop)  # noqa: NPY002 - the global state is what is meant
    trainer.train(resume_from_checkpoint=str(whole.out / f"checkpoint-{stop}"))
    assert trainer.state.global_step == STEPS
    assert trainer.probe.steps == whole.trainer.probe.steps[stop:]
    assert trainer.probe.batches == sdo().plan(4).batches(stop, STEPS).tolist()
    assert trainer.handle.trained.tolist() == whole.handle.trained.tolist()
    assert same_weights(trainer.model, whole.trainer.model)


def test_resuming_a_large_accumulation(tmp_path, tokenizer):
    """transformers#17157: with accumulation over the whole epoch, resumed runs counted other steps."""
    rows, organizer = dataset(range(8)), Uniform(8, seed=2)
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "max_steps": 5, "rows": rows}
    full = resumable(tmp_path / "a", tokenizer, organize=organizer, save_strategy="steps", save_steps=3, **changes)
    full.train()
    resumed = resumable(tmp_path / "b", tokenizer, organize=organizer, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert full.probe.batches == organizer.plan(8).batches(0, 5).tolist()
    assert resumed.probe.steps == full.probe.steps[3:]
    assert same_weights(resumed.model, full.model)


def test_stopped_and_resumed_twice_in_one_folder(tmp_path, tokenizer, whole):
    """As a job on a cluster does, with resume_from_checkpoint=True; transformers#33875: state does not pile up."""
    seen = []
    for stop, resume in ((4, None), (9, True), (None, True)):
        trainer = resumable(
            tmp_path / "out",
            tokenizer,
            organize=sdo(),
            num_train_epochs=3,
            max_steps=-1,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=1,
        )
        if stop:
            trainer.add_callback(StopAt(stop))
        trainer.train(resume_from_checkpoint=resume)
        seen += trainer.probe.batches
        (last,) = (tmp_path / "out").glob("checkpoint-*")
        saved = json.loads((last / "trainer_state.json").read_text())["stateful_callbacks"][STATE]
        digest = saved["attributes"].pop("dataset")
        assert len(digest) == 64
        assert saved == {"args": {}, "attributes": {"plan": sdo().plan(4).describe(), "skipped_steps": []}}
    assert seen == whole.trainer.probe.batches
    assert trainer.handle.trained.tolist() == whole.handle.trained.tolist()
    assert same_weights(trainer.model, whole.trainer.model)


@pytest.mark.parametrize(
    ("organizer", "changes", "message"),
    [
        (sdo(k=3), {}, "under another plan: k = 2 then and 3 now"),
        (sdo(seed=618), {}, "under another plan: seed = 617 then and 618 now"),
        (sdo(visit="anchor"), {}, "under another plan: visit = cover then and anchor now"),
        (sdo(exposure=False), {}, "under another plan: exposure = True then and False now"),
        (SDO(MATRIX + 1, k=2, seed=617), {}, "under another plan: embeddings = "),
        (Uniform(MATRIX, seed=617), {}, "under another plan: name = sdo then and uniform now"),
        (sdo(), {"per_device_train_batch_size": 3}, "under another plan: batch_size = 4 then and 6 now"),
        (sdo(), {"rows": dataset(range(N - 1))}, "under another plan: n_samples = 22 then and 21 now"),
    ],
    ids=["k", "seed", "visit", "exposure", "embeddings", "organizer", "batch size", "rows"],
)
def test_resuming_under_another_plan_is_refused(whole, tmp_path, tokenizer, organizer, changes, message):
    trainer = resumable(tmp_path, tokenizer, organize=organizer, num_train_epochs=3, max_steps=-1, **changes)
    with pytest.raises(InputError, match=message) as caught:
        trainer.train(resume_from_checkpoint=str(whole.out / "checkpoint-3"))
    assert "the checkpoint at step 3" in str(caught.value)
    assert trainer.probe.steps == []


def test_resuming_on_other_rows_under_the_same_ids_is_refused(whole, tmp_path, tokenizer):
    """No plan can tell: the ids are the same, as after the texts were edited or tokenized otherwise."""
    other = dataset(SHUFFLED).map(lambda row: {"input_ids": [*row["input_ids"], 5]})
    trainer = resumable(tmp_path, tokenizer, organize=sdo(), rows=other, num_train_epochs=3, max_steps=-1)
    with pytest.raises(InputError, match=r"step 3 was trained on other rows under the same ids: dataset = \w{16} then"):
        trainer.train(resume_from_checkpoint=str(whole.out / "checkpoint-3"))
    assert trainer.probe.steps == []


def test_the_same_rows_in_another_order_may_resume(whole, tmp_path, tokenizer):
    trainer = resumable(tmp_path, tokenizer, organize=sdo(), rows=dataset(), num_train_epochs=3, max_steps=-1)
    trainer.train(resume_from_checkpoint=str(whole.out / "checkpoint-10"))
    assert trainer.probe.batches == whole.trainer.probe.batches[10:]


def test_the_same_batches_split_otherwise_may_resume(whole, tmp_path, tokenizer):
    """4 x 1 instead of 2 x 2 is the same plan: only the sums are rounded in another order."""
    trainer = resumable(
        tmp_path,
        tokenizer,
        organize=sdo(),
        num_train_epochs=3,
        max_steps=-1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
    )
    try:
        trainer.train(resume_from_checkpoint=str(whole.out / "checkpoint-10"))
    except InputError as error:
        assert "draws 2 samples at a time; expected 4" in str(error)  # noqa: PT017
        assert trainer.probe.steps == []
        assert Version(transformers.__version__) < Version("5.24")  # 5.0 takes the checkpoint's batch size
    else:
        assert trainer.probe.batches == whole.trainer.probe.batches[10:]


def test_a_checkpoint_without_organizer_is_refused(tmp_path, tokenizer):
    plain = resumable(tmp_path / "out", tokenizer, save_strategy="steps", save_steps=2, max_steps=2)
    plain.train()
    trainer = resumable(tmp_path / "out", tokenizer, organize=sdo(), max_steps=6)
    with pytest.raises(InputError, match="checkpoint at step 2 was written without an organizer"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.probe.steps == []


def test_ignore_data_skip_cannot_train_another_order(whole, tmp_path, tokenizer):
    """It makes the trainer start its epoch anew after a resume: batches would come twice."""
    expected = whole.trainer.probe.batches[10:]
    try:
        trainer = resumable(
            tmp_path, tokenizer, organize=sdo(), num_train_epochs=3, max_steps=-1, ignore_data_skip=True
        )
        trainer.train(resume_from_checkpoint=str(whole.out / "checkpoint-10"))
    except InputError as error:
        assert "ignore_data_skip" in str(error)  # noqa: PT017 - refusing is as good as working
        return
    assert trainer.probe.batches == expected


# ---------------------------------------------------------------------- together with the recorder

RECORDED = {"max_steps": 15, "save_strategy": "steps", "save_steps": 5, "gradient_accumulation_steps": 2}
WALL_TIMES = ("seconds", "recorder_seconds")


def recorded(out, tokenizer, **changes):
    trainer = resumable(
        out / "model",
        tokenizer,
        organize=sdo(),
        eval_rows=dataset(range(5)),
        eval_strategy="steps",
        eval_steps=5,
        **{**RECORDED, **changes},
    )
    trainer.add_callback(GradientRecorder(out / "run", sample_every=2, sketch_size=64))
    return trainer


def tables(run):
    """All rows of a run folder by stream, in the order of their parts."""
    found = {}
    for folder in sorted({path.parent for path in run.rglob("part-*.parquet")}):
        parts = [pq.read_table(path, partitioning=None) for path in sorted(folder.glob("part-*.parquet"))]
        table = pa.concat_tables([part.replace_schema_metadata() for part in parts])
        found[str(folder.relative_to(run))] = table.drop_columns(
            [name for name in WALL_TIMES if name in table.column_names]
        )
    return found


@pytest.fixture(scope="module")
def recorded_whole(tmp_path_factory, tokenizer):
    out = tmp_path_factory.mktemp("recorded")
    trainer = recorded(out, tokenizer)
    trainer.train()
    return SimpleNamespace(trainer=trainer, run=out / "run", tables=tables(out / "run"))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "crashed"])
def test_the_run_folder_after_resuming_equals_an_uninterrupted_one(recorded_whole, tmp_path, tokenizer, crash, workers):
    """Stopped two steps after a checkpoint: the steps in between are recorded twice and must stand there once."""
    first = recorded(tmp_path, tokenizer, dataloader_num_workers=workers)
    first.add_callback(StopAt(12, crash=crash))
    if crash:
        with pytest.raises(OSError, match="the machine went away"):
            first.train()
    else:
        first.train()
    shutil.rmtree(tmp_path / "model" / "checkpoint-15", ignore_errors=True)
    if not crash:
        shutil.rmtree(tmp_path / "model" / "checkpoint-12", ignore_errors=True)
    second = recorded(tmp_path, tokenizer, dataloader_num_workers=workers)
    second.train(resume_from_checkpoint=str(tmp_path / "model" / "checkpoint-10"))
    resumed = tables(tmp_path / "run")
    assert resumed.keys() == recorded_whole.tables.keys()
    for stream, table in recorded_whole.tables.items():
        assert resumed[stream].equals(table), stream  # sketches bit for bit
    assert same_weights(second.model, recorded_whole.trainer.model)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_the_run_folder_says_what_the_model_saw(recorded_whole):
    steps = recorded_whole.tables["steps"]
    assert steps.column("step").to_pylist() == list(range(15))
    assert steps.column("sample_ids").to_pylist() == recorded_whole.trainer.probe.batches
    exposure = recorded_whole.tables["exposure"].to_pylist()
    last = max(row["organizer_epoch"] for row in exposure)
    trained = [row["trained"] for row in exposure if row["organizer_epoch"] == last]
    assert trained == recorded_whole.trainer.handle.trained.tolist()
    info = json.loads((recorded_whole.run / "run.json").read_text())
    plan = recorded_whole.trainer.handle.plan
    assert info["organizer"] == {**json.loads(json.dumps(plan.describe())), "fingerprint": plan.fingerprint}


def test_detach_while_the_recorder_stays(make, tmp_path):
    """After detach the recorder works on its own: no plan, no exposure, ids as they are."""
    trainer = make(dataset(SHUFFLED))
    handle = attach(trainer, sdo())
    trainer.add_callback(GradientRecorder(tmp_path / "run", signals=["weight"], sample_every=0, sketch_size=32))
    handle.detach()
    trainer.train()
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["organizer"] is None
    assert not (tmp_path / "run" / "exposure").exists()


@pytest.mark.parametrize("name", ["sdo", "uniform"])
def test_a_checkpoint_of_the_first_version_is_continued(make, tmp_path, name):
    """What the version before `Steps` kept of the organizer in checkpoint-3 is taken, and the batches go on."""
    organizer = {"sdo": sdo(), "uniform": Uniform(MATRIX, seed=617)}[name]
    first = make(max_steps=3, save_strategy="steps", save_steps=3)
    attach(first, organizer)
    first.train()
    state = tmp_path / "out" / "checkpoint-3" / "trainer_state.json"
    kept = json.loads(state.read_text())
    stored = json.loads((Path(__file__).with_name("stored") / "checkpoints.json").read_text())[name]
    assert kept["stateful_callbacks"][STATE] == stored
    kept["stateful_callbacks"][STATE] = stored
    state.write_text(json.dumps(kept))
    second = make(max_steps=6)
    handle = attach(second, organizer)
    second.train(resume_from_checkpoint=str(state.parent))
    assert [sorted(batch) for batch in second.probe.batches] == [sorted(handle.plan.batch(t)) for t in (3, 4, 5)]
    assert handle.trained.tolist() == handle.plan.counts(6).tolist()


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("organized", [True, False])
def test_a_run_resumed_at_its_end_trains_nothing(make, tmp_path, organized, recorded):
    """transformers looks at max_steps after a step only: each resume trained one more."""

    def trainer(**changes):
        made = make(save_strategy="steps", save_steps=2, max_steps=6, **changes)
        if organized:
            attach(made, sdo())
        if recorded:
            made.add_callback(GradientRecorder(tmp_path / "run"))
        return made

    first = trainer()
    first.train()
    assert len(first.probe.steps) == 6
    last = str(tmp_path / "out" / "checkpoint-6")
    before = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*.parquet"))}
    if not organized and not recorded:
        return  # transformers' own affair
    for _ in range(2):
        again = trainer()
        with pytest.warns(UserWarning, match="this run had ended at step 6 of 6: nothing was trained"):
            again.train(resume_from_checkpoint=last)
        assert again.probe.steps == []
        assert again.state.global_step == 6
    after = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*.parquet"))}
    assert {path.name for path in after} == {path.name for path in before}
    if recorded:
        run = Run.open(tmp_path / "run")
        run.check()
        assert run.steps().column("step").to_pylist() == list(range(6))
        assert run.info["status"] == "finished"


def test_a_lower_end_than_the_checkpoint_trains_nothing(make, tmp_path):
    first = make(save_strategy="steps", save_steps=2, max_steps=4)
    attach(first, sdo())
    first.train()
    again = make(max_steps=3)
    attach(again, sdo())
    with pytest.warns(UserWarning, match="this run had ended at step 4 of 3"):
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert again.probe.steps == []


@pytest.mark.parametrize(("waited", "ended"), [(3, True), (2, False)])
def test_a_run_whose_patience_was_used_up_trains_nothing(make, tmp_path, waited, ended):
    """Early stopping keeps its counter in the checkpoint; a stop of another kind is not the end of a run."""
    first = make(save_strategy="steps", save_steps=2, max_steps=6)
    attach(first, sdo())
    first.train()
    state = tmp_path / "out" / "checkpoint-4" / "trainer_state.json"
    kept = json.loads(state.read_text())
    kept["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"] = True
    kept["stateful_callbacks"]["EarlyStoppingCallback"] = {
        "args": {"early_stopping_patience": 3, "early_stopping_threshold": 0.0},
        "attributes": {"early_stopping_patience_counter": waited},
    }
    state.write_text(json.dumps(kept))
    again = make(max_steps=6)
    attach(again, sdo())
    if ended:
        with pytest.warns(UserWarning, match="early stopping had ended this run at step 4 of 6: nothing was trained"):
            again.train(resume_from_checkpoint=str(state.parent))
        assert again.probe.steps == []
    else:
        again.train(resume_from_checkpoint=str(state.parent))
        assert len(again.probe.steps) == 2


def test_a_longer_record_is_kept_where_nothing_is_trained(make, tmp_path):
    """Resumed from an earlier checkpoint, with an end that lies there: the six recorded steps stay."""

    def trainer(last, **changes):
        made = make(max_steps=last, **changes)
        attach(made, sdo())
        made.add_callback(GradientRecorder(tmp_path / "run"))
        return made

    trainer(6, save_strategy="steps", save_steps=2).train()
    before = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}
    with pytest.warns(UserWarning, match="this run had ended at step 4 of 4"):
        trainer(4).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert {path: path.read_bytes() for path in before} == before
