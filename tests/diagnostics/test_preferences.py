"""DPO, KTO and Reward trainers recorded: a pair is one sample, and the reference model is not the policy."""

from __future__ import annotations

import functools
import json
import math
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from torch.nn import functional
from transformers import LlamaForSequenceClassification, TrainerCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from diagnostics import GradientRecorder, doctor
from sdo import SDO, attach
from sdo.errors import InputError
from sdo.trainers.ids import BATCH_KEY
from sdo.trainers.row_ids import refusals
from sdo.trainers.trainer_types import PLAIN, SUPPORTED, kind_of
from tests.trainings import SIGNALS

PAIRS, BETA = 11, 0.5
pytestmark = [
    # TRL asks transformers 5.24 by names that it gave up; peft warns of a model that comes from no hub.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The PEFT config's .base_model_name_or_path:UserWarning"),
]

# trainer, samples a micro-batch, accumulation, steps; the rest goes to the trainer's arguments.
CASES = {
    "dpo": ("dpo", 2, 2, 4, {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}),
    # Without an organizer the last step of an epoch has fewer micro-batches, the last of which is smaller.
    "remainder": ("dpo", 2, 4, 3, {}),
    "lora": ("dpo", 3, 1, 3, {"eval_strategy": "steps", "eval_steps": 2}),
    "precomputed": ("dpo", 3, 1, 2, {"precompute_ref_log_probs": True}),
    "checkpointed": ("dpo", 2, 1, 2, {"gradient_checkpointing": True}),
    "workers": ("dpo", 2, 2, 3, {"dataloader_num_workers": 2, "remove_unused_columns": False}),
    "logged_by_two": ("dpo", 2, 1, 4, {"logging_steps": 2}),
    "kto": ("kto", 3, 2, 2, {}),
    "kto_free": ("kto", 3, 2, 2, {"loss_type": "apo_zero_unpaired"}),
    "reward": ("reward", 3, 1, 3, {"eval_strategy": "steps", "eval_steps": 2}),
}
ORGANIZED = ("dpo", "lora", "workers", "reward")


def make_pairs(kit, count, seed=1):
    """Prompts with a right and a mangled completion, all of different lengths."""
    rows = kit.make_rows(count, seed=seed)
    return [
        {"prompt": r["prompt"], "chosen": r["completion"], "rejected": r["completion"][::-1][: 9 + n % 7]}
        for n, r in enumerate(rows)
    ]


def flat(parts):
    """The items of all parts."""
    return [item for part in parts for item in part]


class Weights(TrainerCallback):
    """Keeps the weights at each step's start and at the end."""

    def __init__(self):
        self.kept = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.kept.append({name: value.detach().clone() for name, value in model.state_dict().items()})

    on_train_end = on_step_begin


class Preferred:
    """A recorded run on pairs, what really went into its steps, and the gradients that plain autograd finds."""

    def __init__(self, kit, folder, name):
        method, batch, accumulation, steps, more = CASES[name]
        self.kit, self.name, self.method, self.steps = kit, name, method, steps
        self.folder, self.adapter = folder / "run", kit.lora() if name == "lora" else None
        model = self._make_model()
        model.save_pretrained(folder / "model")  # the reference is loaded from there
        options = {
            "output_dir": str(folder / "trainer"),
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "per_device_eval_batch_size": 2,
            "max_steps": steps,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "disable_tqdm": True,
            "seed": 3,
            "gradient_checkpointing": False,
            **more,
        }
        rows, held_out = make_pairs(kit, PAIRS), make_pairs(kit, 3, seed=8) if "eval_strategy" in more else None
        self.trainer = self._make_trainer(str(folder / "model"), options, rows, held_out)
        self.table = list(self.trainer.train_dataset)
        self.handle = None
        if name in ORGANIZED:
            embeddings = np.random.default_rng(5).standard_normal((len(self.table), 8)).astype(np.float32)
            self.handle = attach(self.trainer, SDO(embeddings, k=2, seed=617))
        layers = "*.down_proj.lora_B.weight" if self.adapter is not None else "*.down_proj.weight"
        signals = [*SIGNALS, f"samples:{layers}"] if method != "reward" else ["weight"]
        recorder = GradientRecorder(self.folder, signals=signals, sample_every=1)
        self.trainer.add_callback(recorder)
        self.weights = Weights()
        self.trainer.add_callback(self.weights)
        self.trained = []
        self._watch()
        self.trainer.train()

    def _make_model(self):
        if self.method != "reward":
            return self.kit.make_model()
        config = self.kit.make_model().config
        config.num_labels = 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = LlamaForSequenceClassification(config).float()
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.data.mul_(4)
        return model

    def _make_trainer(self, model, options, rows, held_out):
        shared = {"model": model, "processing_class": self.kit.make_tokenizer()}
        if self.method == "kto":
            data = [
                {"prompt": r["prompt"], "completion": r["chosen" if n % 2 else "rejected"], "label": bool(n % 2)}
                for n, r in enumerate(rows)
            ]
            args = KTOConfig(**options, beta=BETA)
            return KTOTrainer(args=args, train_dataset=Dataset.from_list(data), **shared)
        shared |= {
            "train_dataset": Dataset.from_list(rows),
            "eval_dataset": None if held_out is None else Dataset.from_list(held_out),
        }
        if self.method == "reward":
            return RewardTrainer(args=RewardConfig(**options), **shared)
        return DPOTrainer(args=DPOConfig(**options, beta=BETA), peft_config=self.adapter, **shared)

    def _watch(self):
        """Find out which rows are trained by the content of the batches, and what the reference model is given."""
        places = {tuple(self.sequences(row)[0][0]): n for n, row in enumerate(self.table)}
        training_step = self.trainer.training_step

        def watch(model, inputs, *args, **kwargs):
            pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
            rows = [places.get(tuple(ids[mask.bool()].tolist())) for ids, mask in pairs]
            count = len(rows) // len(self.sequences(self.table[0]))
            self.trained.append((self.trainer.state.global_step, rows[:count]))
            assert BATCH_KEY not in inputs
            return training_step(model, inputs, *args, **kwargs)

        self.trainer.training_step = watch
        self.seen_by_reference = set()
        reference = getattr(self.trainer, "ref_model", None)
        if reference is not None:
            reference.register_forward_pre_hook(
                lambda module, args, kwargs: self.seen_by_reference.update(kwargs), with_kwargs=True
            )

    def sequences(self, row):
        """Ids of each sequence of a sample, and how many of them are the prompt's."""
        if self.method == "kto":
            return [(row["prompt_ids"] + row["completion_ids"], len(row["prompt_ids"]))]
        if self.method == "reward":
            return [(row["chosen_ids"], 0), (row["rejected_ids"], 0)]
        return [(row["prompt_ids"] + row[f"{name}_ids"], len(row["prompt_ids"])) for name in ("chosen", "rejected")]

    def tokens(self, row):
        return 2 if self.method == "reward" else sum(len(ids) - start for ids, start in self.sequences(row))

    def micros(self, step):
        return [rows for at, rows in self.trained if at == step]

    def rows(self, stream, **wanted):
        rows = pq.read_table(self.folder / stream).to_pylist()
        return [row for row in rows if all(row[key] == value for key, value in wanted.items())]

    @property
    def info(self):
        return json.loads((self.folder / "run.json").read_text())

    # ------------------------------------------------------------------ truth

    @functools.cached_property
    def models(self):
        """The model as it is trained, with a head of its own, and the one that it began as."""
        made = []
        for _ in range(2):
            model = self.kit.make_model(tied=False) if self.method != "reward" else self._make_model()
            if self.adapter is not None:
                import peft

                model = peft.get_peft_model(model, self.adapter)
            if self.method != "reward":
                model.get_output_embeddings().weight.requires_grad_(True)
            model.load_state_dict(self.weights.kept[0])
            made.append(model)
        return made

    def score(self, model, ids, start):
        """Log-likelihood of the completion, or the reward; one unpadded sequence at a time."""
        if self.method == "reward":
            return model(torch.tensor([ids])).logits[0, 0]
        log_p = functional.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)
        return log_p[torch.arange(len(ids) - 1), torch.tensor(ids[1:])][start - 1 :].sum()

    def loss(self, row, policy, reference):
        """One sample's loss."""
        scores = [self.score(policy, *sequence) for sequence in self.sequences(row)]
        if self.method == "reward":
            return -functional.logsigmoid(scores[0] - scores[1])
        with torch.no_grad():
            before = [self.score(reference, *sequence) for sequence in self.sequences(row)]
        ratios = [score - old for score, old in zip(scores, before, strict=True)]
        if self.method == "kto":
            return 1 - torch.sigmoid(BETA * ratios[0] * (1 if row["label"] else -1))
        return -functional.logsigmoid(BETA * (ratios[0] - ratios[1]))

    @functools.cache  # noqa: B019 - lives as long as the session
    def truth(self, step):
        """Loss and gradients of each sample of a step, as parts of the step's loss, by micro-batch."""
        policy, reference = self.models
        policy.load_state_dict(self.weights.kept[step])
        micros = self.micros(step)
        return [[self._sample(n, policy, reference, len(rows) * len(micros)) for n in rows] for rows in micros]

    def _sample(self, position, policy, reference, share):
        kept = []

        def keep(module, args, output):
            if torch.is_grad_enabled():
                output.retain_grad()
                kept.append(output)

        policy.zero_grad()
        hook = policy.base_model.norm if self.adapter is None else policy.base_model.model.model.norm
        handle = hook.register_forward_hook(keep)
        loss = self.loss(self.table[position], policy, reference) / share
        handle.remove()
        loss.backward()
        return SimpleNamespace(
            loss=loss.item(),
            tokens=self.tokens(self.table[position]),
            hidden=torch.stack([output.grad[0].sum(dim=0) for output in kept]).sum(dim=0),
            grads={n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None},
        )


@pytest.fixture(scope="module")
def preferred(kit, tmp_path_factory):
    return functools.cache(lambda name: Preferred(kit, tmp_path_factory.mktemp(name), name))


@pytest.mark.parametrize("name", [name for name in CASES if name != "kto"])
def test_rows_are_the_gradients_of_plain_autograd(preferred, kit, name):
    """A row of a sample is that of a pair, whatever its batch mates, the padding and the accumulation."""
    run = preferred(name)
    followed = run.info["signals"]["weight"]["parameter"]
    for signal in run.info["signals"]:
        for row in run.rows(f"gradients/{signal}"):
            micros, truth = run.micros(row["step"]), run.truth(row["step"])
            if row["kind"] == "step":
                samples, ids = flat(truth), flat(micros)
            elif row["kind"] == "micro_batch":
                samples, ids = truth[row["micro_batch"]], micros[row["micro_batch"]]
            else:
                place = micros[row["micro_batch"]].index(row["sample_ids"][0])
                samples, ids = [truth[row["micro_batch"]][place]], row["sample_ids"]
            wanted = {"hidden": ["hidden"], "weight": [followed]}.get(signal, run.info["signals"][signal].get("layers"))
            if wanted is None:
                wanted = [next(n for n in samples[0].grads if n.endswith("lm_head.weight"))]
            gradient = torch.cat([kit.sum_of(samples, name) for name in wanted])
            assert row["sample_ids"] == ids
            assert row["tokens"] == sum(sample.tokens for sample in samples)
            if gradient.numel() == len(row["sketch"]):
                assert kit.relative_error(row["sketch"], gradient) < 1e-4
            assert row["norm"] == pytest.approx(
                float(gradient.norm()), rel=0.05 if "estimated" in row["norm_state"] else 1e-4
            )


@pytest.mark.parametrize("name", list(CASES))
def test_every_sample_of_a_step_has_its_row(preferred, name):
    run = preferred(name)
    for step in range(run.steps):
        ids = flat(run.micros(step))
        assert run.rows("steps", step=step)[0]["sample_ids"] == ids
        for signal in [s for s in run.info["signals"] if s != "weight"]:
            rows = run.rows(f"gradients/{signal}", step=step, kind="sample")
            assert flat(row["sample_ids"] for row in rows) == ids
            assert [row["tokens"] for row in rows] == [run.tokens(run.table[i]) for i in ids]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("kto", "logged_by_two")])
def test_loss_is_the_methods_own(preferred, name):
    run = preferred(name)
    for row in run.rows("steps"):
        samples = flat(run.truth(row["step"]))
        # A loss near 0 is as inexact relatively as the float32 log-probabilities in its exponent are absolutely.
        assert row["loss"] == pytest.approx(sum(sample.loss for sample in samples), rel=1e-5, abs=1e-8)
        assert row["tokens"] == sum(sample.tokens for sample in samples)
    logged = [entry["loss"] for entry in run.trainer.state.log_history if "loss" in entry]
    assert [row["loss"] for row in run.rows("steps")] == logged


def test_loss_is_null_where_a_log_is_a_mean_over_several_steps(preferred):
    assert {row["loss"] for row in preferred("logged_by_two").rows("steps")} == {None}


def test_losses_of_kto_are_those_of_the_log(preferred):
    run = preferred("kto")
    logged = [entry["loss"] for entry in run.trainer.state.log_history if "loss" in entry]
    assert [row["loss"] for row in run.rows("steps")] == logged
    assert all(row["grad_norm"] > 0 for row in run.rows("steps"))


def test_gradients_of_kto_add_up_to_the_trainers(preferred, kit):
    """Its samples share a term of the whole batch, so they are checked by their sum: the gradient of all parameters."""
    run = preferred("kto")
    for step in range(run.steps):
        for signal in ("hidden", "head_only"):
            rows = run.rows(f"gradients/{signal}", step=step)
            total = torch.tensor(next(row["sketch"] for row in rows if row["kind"] == "step"))
            parts = torch.tensor([row["sketch"] for row in rows if row["kind"] == "sample"])
            assert kit.relative_error(parts.sum(dim=0), total) < 1e-5
            assert float(total.norm()) > 0


@pytest.mark.parametrize("name", ["dpo", "lora", "reward"])
def test_evaluations_are_margins_per_pair(preferred, kit, name):
    """Under LoRA the same model is the reference once its adapters are off: that pass is not scored."""
    if name != "reward" and not kit.FUSED:
        pytest.skip("needs TRL's fused head, whose output holds the log-probabilities")
    run = preferred(name)
    policy, _ = run.models
    rows = run.rows("evaluations")
    steps = sorted({row["step"] for row in rows})
    # transformers 5.0 evaluates at every second step only, later ones after the last one too.
    assert steps == sorted({entry["step"] for entry in run.trainer.state.log_history if "eval_loss" in entry})
    assert set(steps) >= ({0, 2, 4} if name == "dpo" else {2})
    assert {row["name"] for row in rows} == {"eval_reward_margin" if name == "reward" else "eval_logp_margin"}
    for step in steps:
        policy.load_state_dict(run.weights.kept[step])
        with torch.no_grad():
            pairs = [[float(run.score(policy, *s)) for s in run.sequences(row)] for row in run.trainer.eval_dataset]
        found = [row for row in rows if row["step"] == step]
        assert [row["sample_id"] for row in found] == [0, 1, 2]
        assert [row["score"] for row in found] == pytest.approx([a - b for a, b in pairs], rel=1e-4, abs=1e-4)


def test_reward_margins_follow_from_two_evaluations(preferred, kit):
    """What `eval_on_start` gives is the reference's margin: beta times the difference is TRL's reward margin."""
    if not kit.FUSED:
        pytest.skip("needs TRL's fused head, whose output holds the log-probabilities")
    run = preferred("dpo")
    scores = {step: [r["score"] for r in run.rows("evaluations", step=step)] for step in (0, 4)}
    margin = BETA * np.mean(np.array(scores[4]) - np.array(scores[0]))
    logged = [e["eval_rewards/margins"] for e in run.trainer.state.log_history if "eval_rewards/margins" in e]
    batches = BETA * (np.array(scores[4]) - np.array(scores[0]))
    assert logged[-1] == pytest.approx(np.mean([batches[:2].mean(), batches[2:].mean()]), rel=1e-3)
    assert margin != 0


@pytest.mark.parametrize("name", ORGANIZED)
def test_a_pair_stays_in_one_batch_of_the_plan(preferred, name):
    run = preferred(name)
    for step in range(run.steps):
        assert flat(run.micros(step)) == run.handle.plan.batch(step).tolist()
    counts = run.handle.plan.counts(run.steps)
    assert run.handle.trained.tolist() == counts.tolist()


@pytest.mark.parametrize("name", ["dpo", "remainder", "workers", "kto"])
def test_the_reference_model_is_given_nothing_of_ours(preferred, name):
    seen = preferred(name).seen_by_reference
    assert "input_ids" in seen
    assert seen <= {"input_ids", "attention_mask", "labels", "fused_lm_head", "use_cache"}


def test_the_reference_and_the_hooks_are_left_as_they_were(preferred, kit):
    for name in ("dpo", "lora"):
        run = preferred(name)
        if run.handle is not None:
            run.handle.detach()
        counts = {}
        for parameter_or_module in [*run.trainer.model.modules()]:
            counts[parameter_or_module] = len(parameter_or_module._forward_hooks)
        assert sum(counts.values()) == 0


@pytest.mark.parametrize("name", ["dpo", "kto", "reward"])
def test_run_json_says_what_the_numbers_mean(preferred, name):
    run = preferred(name)
    meaning = run.info["meaning"]
    assert meaning == kind_of(type(run.trainer)).describe()
    assert meaning["trainer"] == type(run.trainer).__name__


def test_no_score_is_read_off_where_none_is_meant(preferred):
    assert not (preferred("kto").folder / "evaluations").exists()
    assert not (preferred("remainder").folder / "evaluations").exists()


class Mended(TrainerCallback):
    """Keeps the weights finite: a gradient that is not counts as zero."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0)


@pytest.mark.parametrize(
    ("accumulation", "spoil", "filtered", "expected"),
    [
        (1, lambda loss: loss * math.nan, True, None),
        (1, lambda loss: loss + math.nan, True, None),  # leaves the gradient as it is
        (1, lambda loss: loss * math.inf, True, None),
        (2, lambda loss: loss * math.nan, True, None),
        (2, lambda loss: loss * math.nan, False, None),
        (1, lambda loss: loss * 0, True, 0.0),  # a loss that is really 0, as hinge's may be
    ],
)
def test_a_loss_that_was_not_finite_is_null(kit, tmp_path, accumulation, spoil, filtered, expected):
    """transformers' logging_nan_inf_filter logs 0, or the other micro-batches' sum, in its place."""
    options = {"gradient_accumulation_steps": accumulation, "logging_steps": 1, "logging_nan_inf_filter": filtered}
    trainer = untrained(kit, tmp_path, **{**options, "max_steps": 3})
    recorder = GradientRecorder(tmp_path / "run", signals=["weight"], sample_every=0)
    trainer.add_callback(recorder)
    trainer.add_callback(Mended())
    compute, spoiled = trainer.compute_loss, []

    def compute_loss(*args, **kwargs):
        loss = compute(*args, **kwargs)
        if trainer.state.global_step == 1 and not spoiled:
            spoiled.append(True)
            return spoil(loss)
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    losses = pq.read_table(tmp_path / "run" / "steps").sort_by("step").column("loss").to_pylist()
    assert losses[1] == expected
    assert 0 < losses[0] < 2
    if filtered:  # else transformers' own sum stays nan from there on
        assert 0 < losses[2] < 2
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == logged[0]
    assert losses[2] == (logged[2] if filtered else None)


# ---------------------------------------------------------------------- before training


def untrained(kit, folder, cls=DPOTrainer, config=DPOConfig, rows=None, max_steps=2, **options):
    """A trainer that was not trained."""
    kit.make_model().save_pretrained(folder / "model")
    args = config(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        max_steps=max_steps,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        gradient_checkpointing=False,
        **options,
    )
    data = Dataset.from_list(make_pairs(kit, PAIRS) if rows is None else rows)
    model = str(folder / "model")
    return cls(model=model, args=args, train_dataset=data, processing_class=kit.make_tokenizer())


def organizer(count=PAIRS):
    return SDO(np.random.default_rng(5).standard_normal((count, 8)), k=2, seed=617)


@pytest.mark.parametrize("name", ["dpo", "lora", "reward", "kto"])
def test_the_doctor_foretells_what_the_run_does(preferred, kit, tmp_path, monkeypatch, name):
    trained = preferred(name)
    monkeypatch.setattr(Preferred, "_watch", lambda self: None)
    for cls in (DPOTrainer, KTOTrainer, RewardTrainer):
        monkeypatch.setattr(cls, "train", lambda self: None)
    fresh = Preferred(kit, tmp_path, name)
    before = {key: value.clone() for key, value in fresh.trainer.model.state_dict().items()}
    diagnosis = doctor(fresh.trainer)
    assert diagnosis.ok, diagnosis.refused
    assert [finding.fires for finding in diagnosis.signals] == [True] * len(trained.info["signals"])
    assert list(diagnosis.micro_step.sample_ids) == flat(trained.micros(0))[:2]
    assert diagnosis.micro_step.tokens == sum(trained.tokens(trained.table[i]) for i in diagnosis.micro_step.sample_ids)
    rows = {stream.name: stream.rows for stream in diagnosis.disk}
    for signal in [s for s in trained.info["signals"] if s != "weight"]:
        found = len(trained.rows(f"gradients/{signal}", kind="sample"))
        assert rows[f"gradients/{signal}, sample"] == found + (name == "kto")  # whose last batch is one short
    after = fresh.trainer.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not fresh.folder.exists()


def test_a_pair_that_trl_drops_needs_ids(kit, tmp_path):
    """A prompt that fills max_length is dropped, so that positions are no ids any more."""
    rows = make_pairs(kit, PAIRS)
    rows[4]["prompt"] = " ".join([rows[4]["prompt"]] * 9)
    trainer = untrained(kit, tmp_path / "one", rows=rows, max_length=60)
    assert len(trainer.train_dataset) == PAIRS - 1
    with pytest.raises(InputError, match=r"has 10 rows, the embeddings have 11.*add_column\('sample_id'"):
        attach(trainer, organizer())
    numbered = [{**row, "sample_id": n} for n, row in enumerate(rows)]
    trainer = untrained(kit, tmp_path / "two", rows=numbered, max_length=60)
    handle = attach(trainer, organizer())
    assert handle.plan.ids.tolist() == [n for n in range(PAIRS) if n != 4]
    trainer.add_callback(GradientRecorder(tmp_path / "run"))
    trainer.train()
    steps = pq.read_table(tmp_path / "run" / "steps").column("sample_ids").to_pylist()
    assert steps == handle.plan.batches(0, 2).tolist()


def test_an_organizer_is_refused_where_kto_pairs_neighbors_of_the_dataset(kit, tmp_path):
    """Its KL term is made of each prompt with the answer before it, batch by batch, when the data are prepared."""
    data = [{"prompt": r["prompt"], "completion": r["chosen"], "label": True} for r in make_pairs(kit, PAIRS)]
    paired = untrained(kit, tmp_path / "kl", KTOTrainer, KTOConfig, data)
    assert ["loss_type 'kto' is set" in reason for reason in refusals(paired, organizer())] == [True]
    with pytest.raises(InputError, match="fix: loss_type='apo_zero_unpaired'"):
        attach(paired, organizer())
    free = untrained(kit, tmp_path / "free", KTOTrainer, KTOConfig, data, loss_type="apo_zero_unpaired")
    handle = attach(free, organizer())
    free.add_callback(GradientRecorder(tmp_path / "run"))
    free.train()
    steps = pq.read_table(tmp_path / "run" / "steps").column("sample_ids").to_pylist()
    assert steps == handle.plan.batches(0, 2).tolist()
    assert handle.trained.sum() == 4


@pytest.mark.parametrize(
    ("signals", "why"),
    [(["weight", "hidden"], "are opposite and cancel"), (["head_only"], "has no language-model head")],
)
def test_what_a_reward_trainer_lacks_is_refused(preferred, tmp_path, signals, why):
    trainer = preferred("reward").trainer
    before = list(trainer.callback_handler.callbacks)
    trainer.remove_callback(GradientRecorder)
    trainer.add_callback(GradientRecorder(tmp_path / "run", signals=signals))
    try:
        with pytest.raises(
            InputError, match=rf"does not exist for a RewardTrainer: .*{why}; fix: signals=\['weight'\]"
        ):
            trainer.train()
    finally:
        trainer.callback_handler.callbacks[:] = before
    assert not (tmp_path / "run").exists()


def test_the_doctor_says_what_a_reward_trainer_lacks(preferred, monkeypatch):
    trainer = preferred("reward").trainer
    monkeypatch.setattr(trainer.callback_handler, "callbacks", [])
    diagnosis = doctor(trainer)  # without a recorder: its default options
    assert ["signal 'hidden' does not exist" in reason for reason in diagnosis.refused] == [True]
    assert [(finding.name, finding.fires) for finding in diagnosis.signals] == [("weight", True)]


# ---------------------------------------------------------------------- public bug reports (repo#number)


@pytest.mark.parametrize("given", [(), ("dataset",), {"train_dataset": None}, {"dataset": None}])
def test_the_sampler_is_given_however_it_is_asked_for(kit, tmp_path, given):
    """transformers#38226: the signature changed from version to version."""
    trainer = untrained(kit, tmp_path)
    handle = attach(trainer, organizer())
    found = trainer._get_train_sampler(**given) if isinstance(given, dict) else trainer._get_train_sampler(*given)
    assert found is handle.sampler


def test_the_loader_keeps_our_sampler(kit, tmp_path):
    """accelerate#2057, #2117: a random sampler is replaced by one of accelerate's own."""
    trainer = untrained(kit, tmp_path)
    handle = attach(trainer, organizer())
    assert trainer.get_train_dataloader().batch_sampler.sampler is handle.sampler


def test_a_stream_of_pairs_is_refused(kit, tmp_path):
    """trl#3213, #6351 and transformers#15418: an order that cannot be followed must not be ignored silently."""
    trainer = untrained(kit, tmp_path)
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    with pytest.raises(InputError, match="the training dataset is iterable"):
        attach(trainer, organizer())
    assert "_get_train_sampler" not in vars(trainer)


def test_attaching_twice_is_refused(kit, tmp_path):
    """transformers#33875: two callbacks of one class share a state that grows."""
    trainer = untrained(kit, tmp_path)
    attach(trainer, organizer())
    with pytest.raises(InputError, match="already has an organizer"):
        attach(trainer, organizer())


@pytest.mark.parametrize("remove", [True, False])
def test_ids_survive_whatever_columns_are_dropped(kit, tmp_path, remove):
    """trl#1186, #3349 and transformers#43598: extra columns are dropped by signature or by the collator."""
    rows = [{**row, "sample_id": PAIRS - 1 - n, "note": "x"} for n, row in enumerate(make_pairs(kit, PAIRS))]
    trainer = untrained(kit, tmp_path, rows=rows, remove_unused_columns=remove)
    handle = attach(trainer, organizer())
    trainer.add_callback(GradientRecorder(tmp_path / "run"))
    trainer.train()
    steps = pq.read_table(tmp_path / "run" / "steps").column("sample_ids").to_pylist()
    assert steps == handle.plan.batches(0, 2).tolist()


def test_a_remainder_of_an_epoch_is_a_step_of_its_own(preferred):
    """transformers#29561, #14309, #2995: 6 micro-batches an epoch by 4 make steps of 4 and 2, none left over."""
    run = preferred("remainder")
    assert [len(run.micros(step)) for step in range(3)] == [4, 2, 4]
    assert [len(run.rows("gradients/weight", step=step, kind="micro_batch")) for step in range(3)] == [4, 2, 4]


def test_every_kind_is_named_once_and_found():
    names = [name for kind in SUPPORTED for name in (kind.trainer, kind.config)]
    assert len(names) == len(set(names))
    for cls, config in ((DPOTrainer, DPOConfig), (KTOTrainer, KTOConfig), (RewardTrainer, RewardConfig)):
        mine = type("Mine", (cls,), {"__module__": "train"})
        assert kind_of(mine) is kind_of(config) is kind_of(cls)
        assert kind_of(cls) is not PLAIN
