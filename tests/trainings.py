"""Tiny training runs, what really went into each of their steps, and the gradients plain autograd finds for it."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl", reason="needs the extra train")

import torch
import trl.trainer.utils
from datasets import Dataset
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from diagnostics import GradientRecorder
from diagnostics.signals.registry import DEFAULT_SIGNALS
from sdo import SDO, attach
from sdo.demo import tiny_model, word_problems
from sdo.trainers.versions import checkpointing_name
from tests.llama import SHAPE

ROWS, HIDDEN = 14, SHAPE["hidden_size"]
SIGNALS = ("weight", "hidden", "head_only")
FUSED = hasattr(trl.trainer.utils, "add_fused_lm_head")  # before, TRL's losses hid what head_only needs

CHECKPOINTING = checkpointing_name(TrainingArguments)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAST_MATRIX, FIRST_QUERY = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"
ADAPTER = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.default.weight"
MASKED_ROW = 5  # its labels are all masked where a case asks for such a sample
OVERFLOWING_STEP = 2  # of the case with a loss scaler
LEARNING_RATE = 1e-2


def make_rows(count: int, seed: int) -> list[dict[str, str]]:
    """Prompts of 3, 4, 5, … words and completions of different lengths, no two rows alike."""
    problems = word_problems.generate(count, seed=seed)
    return [
        {"prompt": " ".join(p.prompt.split()[: 3 + n % 9]), "completion": p.completion} for n, p in enumerate(problems)
    ]


@functools.cache
def make_tokenizer() -> Any:
    rows = make_rows(ROWS, seed=1)
    texts = [row["prompt"] + row["completion"] for row in rows]
    return tiny_model.build(texts, seed=0, hidden=HIDDEN, layers=1, vocab=300)[1]


def make_config(arch: str, tied: bool) -> Any:
    """Two layers of the shape of a family of models, without dropout."""
    tokenizer = make_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    shared = {"vocab_size": len(tokenizer), "tie_word_embeddings": tied, **ids}
    if arch == "gpt2":
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(n_positions=256, n_embd=HIDDEN, n_layer=2, n_head=4, **still, **shared)
    shared |= SHAPE
    head = {"head_dim": HIDDEN // 4}
    gemma = {**head, "query_pre_attn_scalar": HIDDEN // 4, "sliding_window": 8, "attn_implementation": "eager"}
    make = {
        "llama": lambda: LlamaConfig(**shared),
        "qwen3": lambda: Qwen3Config(**shared, **head),
        "gemma2": lambda: Gemma2Config(**shared, **gemma, final_logit_softcapping=5.0),
        "gemma3": lambda: Gemma3TextConfig(**shared, **gemma),
    }
    return make[arch]()


def make_model(*, tied: bool = True, seed: int = 0, arch: str = "llama") -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_config(arch, tied)).float()
        for parameter in model.parameters():  # the default weights are so small that all samples look alike
            if parameter.ndim > 1:
                parameter.data.mul_(4)
        return model


def lora(**options: Any) -> Any:
    """A low-rank adapter on two kinds of matrices of each layer."""
    import peft

    usual = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**usual, **options})


def prompt_tuning() -> Any:
    """Three trained vectors in front of each prompt."""
    import peft

    return peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")


def make_embeddings(count: int = ROWS) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((count, 8)).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """How one run is set up; what is left out is the plainest choice."""

    arch: str = "llama"
    adapter: Callable[[], Any] | None = None  # makes the configuration of a PEFT adapter
    tied: bool = True
    weight: str | None = None
    follows: str | None = None  # the full name that ``weight`` stands for
    trainer: str = "sft"  # or "left", "right": transformers.Trainer with a collator that pads on that side
    batch: int = 4
    accumulation: int = 1
    max_steps: int = 5
    sample_every: int = 1
    sketch_size: int = 16384
    organizer: bool = False
    id_column: bool = False
    recorder_first: bool = False
    masked_row: bool = False
    loss_scale: float = 1.0
    smoothing: float = 0.0
    trained_positions: bool = False  # TRL's head leaves the others out, as it does on a GPU
    tolerance: float = 1e-5  # of a gradient's error, relative to its norm; 3e-7 is usual
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def overflow(self) -> int | None:
        """The step whose gradients overflow and whose update is therefore skipped."""
        return None if self.loss_scale == 1.0 else OVERFLOWING_STEP

    @property
    def followed(self) -> str:
        """Name of the parameter that the weight signal follows."""
        return self.follows or self.weight or (LAST_MATRIX if self.tied else HEAD)

    @property
    def tells_loss(self) -> bool:
        """Whether the model is given the labels: transformers' label smoothing takes them out of the call."""
        return not (self.smoothing and self.trainer != "sft")

    def scale(self, step: int) -> float:
        """Loss scale of a step: the overflow halves it for those after it."""
        return self.loss_scale / 2 if self.overflow is not None and step > self.overflow else self.loss_scale


def checkpointed(use_reentrant: bool) -> Case:
    """The followed parameter lies inside a block whose forward pass is run again in backward."""
    kwargs = {"use_reentrant": use_reentrant}
    args = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": kwargs}
    return Case(weight=FIRST_QUERY, accumulation=2, batch=2, max_steps=3, args=args)


def adapted_checkpointed(use_reentrant: bool) -> Case:
    """Frozen embeddings give a checkpointed block no input to differentiate, unless they are told to."""
    case = checkpointed(use_reentrant)
    first = "model.layers.0.self_attn.q_proj.lora_B"
    return replace(
        case, adapter=lora, weight=f"{first}.default.weight", follows=f"base_model.model.{first}.default.weight"
    )


def scaled(optim: str) -> Case:
    """Training under a loss scaler, clipped, with one overflow."""
    args = {"max_grad_norm": 1e-3, "logging_steps": 1, "optim": optim}
    return Case(max_steps=4, organizer=True, loss_scale=1024.0, args=args)


CASES = {
    # One micro-batch a step, the last batch of an epoch smaller, two evaluation datasets.
    "fused": Case(
        args={
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "eval_on_start": True,
            "per_device_eval_batch_size": 3,
        }
    ),
    # A real sketch of the tied embedding, clipped, organized, the rows shuffled.
    "tied": Case(
        weight=EMBEDDING,
        batch=2,
        accumulation=2,
        max_steps=8,
        sample_every=3,
        sketch_size=2048,
        organizer=True,
        id_column=True,
        args={"max_grad_norm": 1e-3, "logging_steps": 2, "shuffle_dataset": True},
    ),
    # 7 micro-batches an epoch: its steps have 3, 3 and 1 of them. Never clipped.
    "head": Case(tied=False, batch=2, accumulation=3, args={"max_grad_norm": 0.0, "logging_steps": 1}),
    # bfloat16 keeps 8 bits: a single rounding errs by up to 0.4 %, and a gradient gathers several of them.
    "bf16": Case(accumulation=2, batch=2, max_steps=3, tolerance=0.03, args={"bf16": True}),
    "reentrant": checkpointed(use_reentrant=True),
    "not_reentrant": checkpointed(use_reentrant=False),
    # Some of its steps are clipped and some are not.
    "right": Case(
        trainer="right",
        accumulation=2,
        batch=3,
        max_steps=4,
        args={"max_grad_norm": 2.0, "logging_steps": 1},
    ),
    "left": Case(
        trainer="left",
        tied=False,
        weight=HEAD,
        batch=3,
        max_steps=3,
        organizer=True,
        recorder_first=True,
    ),
    # Batches of one sample, so that the masked row is a micro-batch without a token.
    "masked": Case(trainer="right", batch=1, accumulation=2, max_steps=7, masked_row=True),
    # The sketches are shorter than either signal.
    "smoothing": Case(batch=3, max_steps=2, sketch_size=16, smoothing=0.1, args={"label_smoothing_factor": 0.1}),
    "smoothing_plain": Case(trainer="right", batch=3, max_steps=2, smoothing=0.1, args={"label_smoothing_factor": 0.1}),
    "workers": Case(batch=2, accumulation=2, max_steps=8, args={"dataloader_num_workers": 2}),
    # Other families: norms of queries and keys; capped logits, scaled embeddings; windows; transformer.ln_f and Conv1D.
    "qwen3": Case(arch="qwen3", tied=False, batch=3, max_steps=2),
    "gemma2": Case(arch="gemma2", batch=2, accumulation=2, max_steps=2),
    "gemma3": Case(arch="gemma3", batch=3, max_steps=2, weight=EMBEDDING),
    "gpt2": Case(arch="gpt2", batch=3, max_steps=2, follows="transformer.h.1.mlp.c_proj.weight"),
    # Frozen head; the names with and without what PEFT adds.
    "lora": Case(adapter=lora, batch=2, accumulation=2, max_steps=3, follows=ADAPTER.format("B")),
    "lora_a": Case(
        adapter=lora,
        batch=3,
        max_steps=3,
        weight="model.layers.1.mlp.down_proj.lora_A.weight",
        follows=ADAPTER.format("A"),
    ),
    "lora_head": Case(
        adapter=functools.partial(lora, modules_to_save=["lm_head"]),
        tied=False,
        batch=3,
        max_steps=3,
        weight=HEAD,
        follows="base_model.model.lm_head.modules_to_save.default.weight",
        args={"logging_steps": 1},
    ),
    "lora_reentrant": adapted_checkpointed(use_reentrant=True),
    "lora_not_reentrant": adapted_checkpointed(use_reentrant=False),
    "prompt_tuning": Case(
        adapter=prompt_tuning, batch=3, max_steps=2, follows="prompt_encoder.default.embedding.weight"
    ),
    # TRL's head scores the trained positions alone where Triton runs, that is on every GPU.
    "trained_positions": Case(
        batch=2, accumulation=2, max_steps=4, organizer=True, trained_positions=True, args={"logging_steps": 1}
    ),
    # A loss scaler as of float16, and one step whose gradients overflow; the trainer sees that it was skipped.
    "scaled": scaled(optim="adamw_torch"),
    # The default optimizer skips such a step inside its kernel, and accelerate 1.15 takes it for a step like others.
    "scaled_fused": scaled(optim="adamw_torch_fused"),
}


@contextlib.contextmanager
def scoring_trained_positions() -> Iterator[None]:
    """Let TRL's fused head believe that Triton runs; the kernels ask for themselves and stay in torch."""
    with pytest.MonkeyPatch.context() as patch:
        if FUSED:
            patch.setattr(trl.trainer.utils, "_use_triton", lambda device: True)
        yield


class Witness(TrainerCallback):
    """Keeps the weights at each step's start and at the end, and everything that was logged."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.logs: list[tuple[int, dict[str, float]]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append({n: t.detach().clone() for n, t in kwargs["model"].state_dict().items()})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.logs.append((state.global_step, dict(logs or {})))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_begin(args, state, control, **kwargs)


class Recorded:
    """A run that is recorded, and what witnesses outside the package saw of it.

    Attributes
    ----------
    table
        Input ids and labels of each dataset position.
    ids
        Sample id of each dataset position.
    arguments
        Names of the arguments that reached the model's forward.
    hooks_before
        Hooks on the model before anything of the package touched it.
    """

    def __init__(
        self,
        folder: Path,
        case: Case,
        *,
        model: torch.nn.Module | None = None,
        recorder: GradientRecorder | None = None,
        **trainer: Any,
    ) -> None:
        self.case = case
        self.folder = folder / "run"
        self.trainer = make_trainer(folder / "trainer", case, model, **trainer)
        self.hooks_before = count_hooks(self.trainer.model)
        self.recorder = recorder or GradientRecorder(
            self.folder,
            signals=SIGNALS if FUSED or case.trainer != "sft" else DEFAULT_SIGNALS,
            weight=case.weight,
            sample_every=case.sample_every,
            sketch_size=case.sketch_size,
        )
        if case.recorder_first:
            self.trainer.add_callback(self.recorder)
        self.handle = attach(self.trainer, make_organizer(case)) if case.organizer else None
        if not case.recorder_first:
            self.trainer.add_callback(self.recorder)
        self._witness = Witness()
        self.trainer.add_callback(self._witness)
        self.weights, self.logs = self._witness.weights, self._witness.logs
        dataset = self.trainer.train_dataset
        self.table = [(list(row["input_ids"]), list(row["labels"])) for row in dataset]
        self.ids = list(dataset["sample_id"]) if case.id_column else list(range(len(dataset)))
        self.arguments: set[str] = set()
        self._micros: list[tuple[int, list[int]]] = []
        self._watch_batches()

    def _watch_batches(self) -> None:
        """Find out which rows are trained by the content of the batches, and by nothing of the package."""
        positions = {tuple(input_ids): position for position, (input_ids, _) in enumerate(self.table)}
        training_step = self.trainer.training_step

        def watch(model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
            pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
            rows = [positions[tuple(ids[mask.bool()].tolist())] for ids, mask in pairs]
            self._micros.append((self.trainer.state.global_step, rows))
            return training_step(model, inputs, *args, **kwargs)

        self.trainer.training_step = watch

    def train(self, **kwargs: Any) -> Recorded:
        """Train, and see what reaches the model once the package's hook has run."""
        spy = self.trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs: self.arguments.update(kwargs), with_kwargs=True
        )
        overflow = use_loss_scaler(self.trainer, self.case) if self.case.overflow is not None else spy
        announced: Any = contextlib.nullcontext()
        if not self.case.tells_loss:
            announced = pytest.warns(UserWarning, match="losses of the steps are not recorded: .* call has no labels")
        started = time.perf_counter()
        try:
            with announced, scoring_trained_positions() if self.case.trained_positions else contextlib.nullcontext():
                self.trainer.train(**kwargs)
        finally:
            self.seconds = time.perf_counter() - started
            spy.remove()
            overflow.remove()
        return self

    @functools.cached_property
    def steps(self) -> list[list[list[int]]]:
        """Dataset positions of each step's micro-batches."""
        count = self.trainer.state.global_step
        return [[rows for at, rows in self._micros if at == step] for step in range(count)]

    def micro_ids(self, step: int) -> list[list[int]]:
        """Sample ids of each micro-batch of a step."""
        return [[self.ids[position] for position in micro] for micro in self.steps[step]]

    def step_ids(self, step: int) -> list[int]:
        """Sample ids of a step, in the order in which they were trained."""
        return [sample for micro in self.micro_ids(step) for sample in micro]

    def rows(self, stream: str, **wanted: Any) -> list[dict[str, Any]]:
        """Rows of one stream of the run folder that have the wanted values."""
        rows = pq.read_table(self.folder / stream).to_pylist()
        return [row for row in rows if all(row[key] == value for key, value in wanted.items())]

    def hooks(self) -> dict[str, int]:
        """Hooks on the model now, in the form of ``hooks_before``."""
        return count_hooks(self.trainer.model)

    @property
    def info(self) -> dict[str, Any]:
        """What run.json holds."""
        return dict(json.loads((self.folder / "run.json").read_text()))

    @functools.cached_property
    def truth(self) -> Truth:
        """Independent gradients and losses."""
        return Truth(self)

    @functools.cached_property
    def truth_of_head(self) -> Truth:
        """The same of a model whose head is a trained copy of its own."""
        return Truth(self, head=True)


@dataclass
class SampleTruth:
    """One sample's share of a step: its summed NLL, and the gradients of its part of the step's loss."""

    nll: float
    tokens: int
    hidden: torch.Tensor
    grads: dict[str, torch.Tensor]


class Truth:
    """Gradients by plain autograd, one unpadded sample at a time, through the model's own logits."""

    def __init__(self, recorded: Recorded, *, tied: bool | None = None, head: bool = False) -> None:
        """With ``head`` the model's head is a trained copy of its own, whatever the case says."""
        self._recorded = recorded
        case = recorded.case
        self._model = make_model(tied=not head and (case.tied if tied is None else tied), arch=case.arch)
        self._decoder = self._model.base_model
        if case.adapter is not None:
            import peft

            self._model = peft.get_peft_model(self._model, case.adapter())
        if head:
            self._model.get_output_embeddings().weight.requires_grad_(True)
        self._steps: dict[int, list[list[SampleTruth]]] = {}

    def step(self, step: int) -> list[list[SampleTruth]]:
        """The samples of each micro-batch of a step."""
        if step not in self._steps:
            micros = self._recorded.steps[step]
            total = sum(self._trained_tokens(position) for micro in micros for position in micro)
            self._model.load_state_dict(self._recorded.weights[step])
            self._steps[step] = [[self._sample(position, total) for position in micro] for micro in micros]
        return self._steps[step]

    def samples(self, step: int) -> list[SampleTruth]:
        """All samples of a step, in the order in which they were trained."""
        return [sample for micro in self.step(step) for sample in micro]

    def loss(self, step: int) -> float:
        """Mean NLL per trained token of a step."""
        samples = self.samples(step)
        return sum(s.nll for s in samples) / sum(s.tokens for s in samples)

    def weight(self, step: int) -> torch.Tensor:
        """The step's gradient of the followed parameter."""
        return sum_of(self.samples(step), self._recorded.case.followed)

    def total_norm(self, step: int) -> float:
        """Norm of the step's gradient over all parameters."""
        samples = self.samples(step)
        return float(torch.stack([sum_of(samples, name).norm() for name in samples[0].grads]).norm())

    def held_out(self, updates: int, input_ids: list[int], labels: list[int]) -> tuple[float, int]:
        """Summed NLL and tokens of any sequence, after a number of updates."""
        self._model.load_state_dict(self._recorded.weights[updates])
        with torch.no_grad():
            logits = self._model(torch.tensor([input_ids])).logits[0, :-1]
        target = torch.tensor(labels[1:])
        return float(functional.cross_entropy(logits, target, reduction="sum")), int((target != -100).sum())

    def _trained_tokens(self, position: int) -> int:
        return sum(label != -100 for label in self._recorded.table[position][1][1:])

    def _sample(self, position: int, total: int) -> SampleTruth:
        input_ids, labels = self._recorded.table[position]
        kept: list[torch.Tensor] = []

        def keep(module: Any, args: Any, output: torch.Tensor) -> None:
            output.retain_grad()
            kept.append(output)

        self._model.zero_grad()
        norm = self._decoder.ln_f if self._recorded.case.arch == "gpt2" else self._decoder.norm
        hook = norm.register_forward_hook(keep)
        logits = self._model(torch.tensor([input_ids])).logits[0, -len(input_ids) : -1]
        hook.remove()
        target = torch.tensor(labels[1:])
        loss = nll = functional.cross_entropy(logits, target, reduction="sum")
        if self._recorded.case.smoothing:
            # A smoothed label spreads the rest of its probability evenly over the vocabulary.
            even = -functional.log_softmax(logits, dim=-1)[target != -100].mean(dim=-1).sum()
            loss = (1 - self._recorded.case.smoothing) * nll + self._recorded.case.smoothing * even
        (loss / total).backward()
        return SampleTruth(
            nll=nll.item(),
            tokens=int((target != -100).sum()),
            hidden=kept[0].grad[0].sum(dim=0),
            grads={n: p.grad.clone() for n, p in self._model.named_parameters() if p.grad is not None},
        )


def sum_of(samples: list[SampleTruth], name: str) -> torch.Tensor:
    """Gradient of some samples: of the parameter ``name``, or "hidden" for the one at the final norm's output."""
    return torch.stack([s.hidden if name == "hidden" else s.grads[name] for s in samples]).sum(dim=0)


def head_gradient(samples: list[SampleTruth]) -> torch.Tensor:
    """Gradient of the head of some samples of ``truth_of_head``."""
    ends = ("lm_head.weight", "lm_head.modules_to_save.default.weight")
    return sum_of(samples, next(name for name in samples[0].grads if name.endswith(ends)))


def relative_error(found: Any, expected: torch.Tensor) -> float:
    """Norm of the difference, relative to the norm of what was expected."""
    found = torch.as_tensor(found, dtype=torch.float64).reshape(-1)
    expected = expected.double().reshape(-1)
    return float((found - expected).norm() / expected.norm())


def count_hooks(model: torch.nn.Module) -> dict[str, int]:
    """Number of hooks of each kind on each module and parameter, where there are any."""
    counts: dict[str, int] = {}
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, module in model.named_modules():
        counts.update({f"{name}{kind}": len(getattr(module, kind)) for kind in kinds})
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            counts[f"{name}{kind}"] = len(getattr(parameter, kind) or ())
    return {name: count for name, count in counts.items() if count}


def pad(items: list[dict[str, Any]], side: str) -> dict[str, torch.Tensor]:
    """A plain collator: the longest row decides, padding on one side."""
    width = max(len(item["input_ids"]) for item in items)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for item in items:
        gap = width - len(item["input_ids"])
        for name, values, filler in (
            ("input_ids", item["input_ids"], 0),
            ("attention_mask", [1] * len(item["input_ids"]), 0),
            ("labels", item["labels"], -100),
        ):
            columns[name].append([filler] * gap + values if side == "left" else values + [filler] * gap)
    return {name: torch.tensor(rows) for name, rows in columns.items()}


def tokenized(rows: list[dict[str, str]], masked: int | None = None) -> Dataset:
    """Rows as a plain Trainer takes them: the prompt carries no label, the row ``masked`` none at all."""
    tokenizer, items = make_tokenizer(), []
    for number, row in enumerate(rows):
        prompt = tokenizer(row["prompt"])["input_ids"]
        whole = [*prompt, *tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        labels = [-100] * len(prompt) + whole[len(prompt) :]
        items.append({"input_ids": whole, "labels": [-100] * len(whole) if number == masked else labels})
    return Dataset.from_list(items)


def make_organizer(case: Case) -> SDO:
    """The case's organizer; where ids are not positions there are twice as many embeddings as rows."""
    count = 2 * ROWS if case.id_column else ROWS
    embeddings = np.random.default_rng(5).standard_normal((count, 8)).astype(np.float32)
    return SDO(embeddings, k=2, seed=617)


def make_trainer(folder: Path, case: Case, model: torch.nn.Module | None = None, **more: Any) -> Trainer:
    """A trainer of the case, without organizer and recorder."""
    rows = make_rows(ROWS, seed=1)
    model = make_model(tied=case.tied, arch=case.arch) if model is None else model
    if case.adapter is not None:
        more.setdefault("peft_config", case.adapter())
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": case.batch,
        "gradient_accumulation_steps": case.accumulation,
        "max_steps": case.max_steps,
        "learning_rate": LEARNING_RATE,
        "logging_steps": 100,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        CHECKPOINTING: False,
        **case.args,
    }
    if case.trainer != "sft":
        return Trainer(
            model=model,
            args=TrainingArguments(**options),
            train_dataset=tokenized(rows, MASKED_ROW if case.masked_row else None),
            data_collator=functools.partial(pad, side=case.trainer),
            **more,
        )
    dataset = Dataset.from_list(rows)
    if case.id_column:
        ids = np.random.default_rng(2).permutation(2 * ROWS)[:ROWS]
        dataset = dataset.add_column("sample_id", ids.tolist())
    evaluated = {
        "single": Dataset.from_list(make_rows(3, seed=8)),  # one batch
        "several": Dataset.from_list(make_rows(5, seed=9)),  # two batches, the last one smaller
    }
    announced = contextlib.nullcontext()
    if case.smoothing:
        announced = pytest.warns(FutureWarning, match="label_smoothing_factor")
    with announced:
        return SFTTrainer(
            model=model,
            args=SFTConfig(**options),
            train_dataset=dataset,
            eval_dataset=evaluated if "eval_strategy" in case.args else None,
            processing_class=make_tokenizer(),
            **more,
        )


def use_loss_scaler(trainer: Trainer, case: Case) -> Any:
    """Scale the loss as float16 training does, though on the CPU, and let the gradient overflow in one step."""
    accelerator = trainer.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=case.loss_scale)
    # accelerate unscales before clipping where mixed precision is fp16, which it refuses on a CPU.
    accelerator.unscale_gradients = lambda optimizer=None: accelerator.scaler.unscale_(trainer.optimizer.optimizer)

    def overflow(grad: torch.Tensor) -> torch.Tensor | None:
        return grad * torch.inf if trainer.state.global_step == case.overflow else None

    return dict(trainer.model.named_parameters())[case.followed].register_hook(overflow)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``runs(name)`` is the run of that case, trained when it is first asked for."""
    return functools.cache(lambda name: Recorded(tmp_path_factory.mktemp(name), CASES[name]).train())


@pytest.fixture(scope="session", params=list(CASES))
def recorded(request: pytest.FixtureRequest, runs: Any) -> Recorded:
    """Each case's run in turn."""
    return runs(request.param)


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers of this file by name, for the tests of several folders."""
    helpers = (Case, Recorded, Truth, lora, make_model, make_organizer, make_rows, make_tokenizer)
    helpers += (make_trainer, head_gradient, relative_error, sum_of, tokenized)
    names: dict[str, Any] = {
        "ADAPTER": ADAPTER,
        "CASES": CASES,
        "CHECKPOINTING": CHECKPOINTING,
        "EMBEDDING": EMBEDDING,
        "HEAD": HEAD,
        "LAST_MATRIX": LAST_MATRIX,
        "LEARNING_RATE": LEARNING_RATE,
    }
    numbers = {"ROWS": ROWS, "HIDDEN": HIDDEN, "MASKED_ROW": MASKED_ROW, "FUSED": FUSED}
    return SimpleNamespace(**{helper.__name__: helper for helper in helpers}, **names, **numbers)
