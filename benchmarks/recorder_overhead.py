"""What recording adds to a step of SmolLM2-135M on 8 GSM8K rows, and how far sketched cosines of its gradients are off.

Run: ``python -m benchmarks.smollm2.prepare MODEL`` once, then
``python -m benchmarks.recorder_overhead MODEL GSM8K/train.jsonl [--rounds 12]``.

Five TRL trainers, one plain and four recorded, take their steps in turn: in each round all train the same 8 rows on
the same weights, one after the other, so that a busy machine hits all alike. bf16 autocast; plain SGD instead of AdamW,
which makes a step a little shorter and the recorder's share larger. Three figures a variant: the median over the rounds
of its step minus the plain one of the same round, in wall seconds and in CPU seconds over all threads, and the time
that the recorder counts itself; each over the median plain step. On a busy machine the first means nothing. The first
steps, in which the recorder compares its sketches with the gradients, train on short texts and are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import threading
import time
import warnings
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.results import peak_gib, save

ROWS, UNCOUNTED = 8, 10
LAST_FOUR = "model.layers.2[6-9].mlp.down_proj.weight"  # of 30 layers, 576 x 1,536 each
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight": {"signals": ["weight"]},  # the last matrix: down_proj of the last layer, 576 x 1,536
    "head": {"signals": ["weight"], "weight": "model.embed_tokens.weight"},  # SmolLM2 ties its head to it
    "hidden": {"signals": ["hidden"], "sample_every": 1},
    "samples": {"signals": [f"samples:{LAST_FOUR}"], "sample_every": 1, "sketch_size": 4096},
}
BARS = {"weight": 0.02, "head": 0.10, "hidden": 0.08, "samples": 0.10}


class Turns:
    """Lets threads run one at a time, round by round; each round begins with another, so that none is always first."""

    def __init__(self, names: list[str]) -> None:
        self._order = (name for first in itertools.count() for name in rotated(names, first))
        self._current = next(self._order)
        self._changed = threading.Condition()
        self.failed = False

    def wait(self, name: str) -> None:
        """Wait for the turn of this name."""
        with self._changed:
            self._changed.wait_for(lambda: self.failed or self._current == name)
            if self.failed:
                raise RuntimeError("another variant failed")

    def end(self) -> None:
        """Give the turn to the next."""
        with self._changed:
            self._current = next(self._order)
            self._changed.notify_all()

    def fail(self) -> None:
        """Wake everybody up to stop."""
        with self._changed:
            self.failed = True
            self._changed.notify_all()


def rotated(names: list[str], first: int) -> list[str]:
    """Return names from the first-th on, and then those before it."""
    first %= len(names)
    return names[first:] + names[:first]


class StepBegins(TrainerCallback):
    """Added before the recorder: waits for its turn and starts the clock."""

    def __init__(self, name: str, turns: Turns) -> None:
        self.name, self.turns, self.started, self.cpu_started = name, turns, 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start."""
        self.turns.wait(self.name)
        self.started, self.cpu_started = time.perf_counter(), time.process_time()


class StepEnds(TrainerCallback):
    """Added after the recorder: stops the clock and gives the turn on."""

    def __init__(self, begins: StepBegins) -> None:
        self.begins = begins
        self.seconds: list[float] = []
        self.cpu: list[float] = []  # of the whole process, in which nobody else has the turn

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop."""
        self.seconds.append(time.perf_counter() - self.begins.started)
        self.cpu.append(time.process_time() - self.begins.cpu_started)
        self.begins.turns.end()


def short_rows(steps: int) -> list[dict[str, str]]:
    """Return rows of a few tokens."""
    return [{"prompt": "1 + 1 =", "completion": f" {n % 7}"} for n in range(steps * ROWS)]


def rows(path: Path, rounds: int) -> list[dict[str, str]]:
    """Return short rows for the uncounted steps, then GSM8K's first ones."""
    lines = path.read_text(encoding="utf-8").splitlines()[: rounds * ROWS]
    real = [json.loads(line) for line in lines]
    return short_rows(UNCOUNTED) + [{"prompt": one["question"], "completion": " " + one["answer"]} for one in real]


def configuration(out: Path, steps: int, **changed: Any) -> Any:
    """Return the options of a trainer that takes the rows in order and does little beside its steps."""
    from trl import SFTConfig

    options: dict[str, Any] = {
        "per_device_train_batch_size": ROWS,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_length": 512,
        "use_cpu": True,
        "activation_checkpointing": False,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return SFTConfig(output_dir=str(out), max_steps=steps, **{**options, **changed})


def share_weights(model: Any, first: Any) -> None:
    """Let two models of one shape hold one copy of the weights."""
    for parameter, shared in zip(model.parameters(), first.parameters(), strict=True):
        parameter.data = shared.data


def trainer_of(name: str, model: Any, tokenizer: Any, data: list[dict[str, str]], turns: Turns, out: Path) -> Any:
    """Make one variant's trainer, which waits for its turn at each step, and the callback that timed it."""
    from datasets import Dataset
    from trl import SFTTrainer

    from diagnostics import GradientRecorder

    args = configuration(out / f"{name}-output", len(data) // ROWS, bf16=True)
    trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(data), processing_class=tokenizer)
    begins = StepBegins(name, turns)
    ends = StepEnds(begins)
    trainer.add_callback(begins)
    if VARIANTS[name]:
        trainer.add_callback(GradientRecorder(out / name, **VARIANTS[name]))
    trainer.add_callback(ends)
    return trainer, ends


def train(trainers: dict[str, Any], turns: Turns) -> None:
    """Let all trainers train, each in a thread of its own."""
    errors: list[BaseException] = []

    def one(trainer: Any) -> None:
        try:
            trainer.train()
        except BaseException as error:
            errors.append(error)
            turns.fail()

    threads = [threading.Thread(target=one, args=(trainer,)) for trainer in trainers.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def overhead(folder: Path, data: list[dict[str, str]]) -> dict[str, Any]:
    """Measure all variants.

    Parameters
    ----------
    folder
        The model.
    data
        As :func:`rows` returns them.

    Returns
    -------
    dict
        ``plain_seconds``, and for each recorded variant ``difference``, ``difference_cpu`` and ``own_clock`` as shares.
    """
    import pyarrow.parquet as pq

    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    turns = Turns(list(VARIANTS))
    trainers, ends = {}, {}
    with TemporaryDirectory() as place:
        out = Path(place)
        for name in VARIANTS:
            model = first if name == "plain" else AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
            share_weights(model, first)
            trainers[name], ends[name] = trainer_of(name, model, tokenizer, data, turns, out)
        train(trainers, turns)
        own = {
            name: pq.read_table(out / name / "steps").sort_by("step").column("recorder_seconds").to_pylist()[UNCOUNTED:]
            for name in VARIANTS
            if name != "plain"
        }
    wall = {name: one.seconds[UNCOUNTED:] for name, one in ends.items()}
    cpu = {name: one.cpu[UNCOUNTED:] for name, one in ends.items()}
    plain = median(wall["plain"])
    result: dict[str, Any] = {"rounds": len(wall["plain"]), "plain_seconds": plain}
    result["plain_cpu_seconds"] = median(cpu["plain"])
    for name, clock in own.items():
        result[name] = {"own_clock": median(clock) / plain, "own_seconds": median(clock)}
        for key, times in (("difference", wall), ("difference_cpu", cpu)):
            differences = [a - b for a, b in zip(times[name], times["plain"], strict=True)]
            result[name][key] = median(differences) / median(times["plain"])
    return result


def head_error(folder: Path, data: list[dict[str, str]], hashes: int) -> dict[str, dict[str, Any]]:
    """Compare sketched with exact cosines of the head's gradients of some batches, over several hash functions.

    Both as ``weight`` sketches them, in one stage, and by the rule of ``head_only``, which hashes rows first.

    Parameters
    ----------
    folder, data
        As in :func:`overhead`.
    hashes
        Hash functions that the error is taken over.

    Returns
    -------
    dict
        Signal -> ``rmse``, ``largest_rmse`` (of a hash function), ``worst`` (pair), the number of ``pairs`` and the
        range of their ``cosines``.
    """
    import torch

    from diagnostics.sketches.accuracy import cosine
    from diagnostics.sketches.count_sketch import GradientSketch

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    head = model.get_output_embeddings().weight
    sketchers = {
        name: [GradientSketch(tuple(head.shape), seed=seed, factored=name == "head_only") for seed in range(hashes)]
        for name in ("weight", "head_only")
    }
    grads: list[torch.Tensor] = []
    sketches: dict[str, list[list[torch.Tensor]]] = {name: [] for name in sketchers}
    for start in range(UNCOUNTED * ROWS, len(data), ROWS):
        batch = data[start : start + ROWS]
        inputs = tokenizer([one["prompt"] + one["completion"] for one in batch], return_tensors="pt", padding=True)
        labels = inputs.input_ids.masked_fill(inputs.attention_mask == 0, -100)
        for i, one in enumerate(batch):
            labels[i, : len(tokenizer(one["prompt"]).input_ids)] = -100
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(**inputs, labels=labels).loss.backward()
        grads.append(head.grad)
        for name, ways in sketchers.items():
            sketches[name].append([sketcher.sketch(head.grad) for sketcher in ways])
        model.zero_grad(set_to_none=True)
    pairs = list(itertools.combinations(range(len(grads)), 2))
    exact = np.array([cosine(grads[i], grads[j]) for i, j in pairs])
    found = {}
    for name, made in sketches.items():
        errors = np.array([[cosine(made[i][h], made[j][h]) for i, j in pairs] for h in range(hashes)]) - exact
        found[name] = {
            "pairs": len(pairs),
            "rmse": float(np.sqrt(np.mean(errors**2))),
            "largest_rmse": float(np.sqrt(np.mean(errors**2, axis=1)).max()),
            "worst": float(np.abs(errors).max()),
            "cosines": [float(exact.min()), float(exact.max())],
        }
    return found


def samples_error(folder: Path, data: list[dict[str, str]], hashes: int, k: int = 4096) -> dict[str, Any]:
    """Compare sketched with exact cosines of the gradients of single samples, over several hash functions.

    Exact gradients come from a backward pass of each sample alone, sketches from one pass of a batch of all of them.

    Parameters
    ----------
    folder, data, hashes
        As in :func:`head_error`; all rows of `data` are one batch.
    k
        Length of the sketches.

    Returns
    -------
    dict
        ``rmse``, ``largest_rmse`` (of a hash function), ``worst`` (pair), the number of ``pairs``, the range of their
        ``cosines``, and how far the norms were off, ``norm_error``.
    """
    import torch

    from diagnostics.signals import MicroBatch, Samples, SignalContext
    from diagnostics.sketches.count_sketch import GradientSketch
    from sdo.trainers.ids import BatchIds

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    ids = BatchIds(tuple(range(len(data))), (1,) * len(data))

    def backward(rows: list[dict[str, str]]) -> None:
        inputs = tokenizer([one["prompt"] + one["completion"] for one in rows], return_tensors="pt", padding=True)
        labels = inputs.input_ids.masked_fill(inputs.attention_mask == 0, -100)
        for i, one in enumerate(rows):
            labels[i, : len(tokenizer(one["prompt"]).input_ids)] = -100
        model.zero_grad(set_to_none=True)
        model(**inputs, labels=labels, num_items_in_batch=torch.tensor(1)).loss.backward()

    micro = MicroBatch(ids)
    context = SignalContext(model, lambda: (0, [micro]), contextlib.nullcontext, k=k, sample_every=1)
    captures = [Samples(LAST_FOUR, name=str(seed)).of(context) for seed in range(hashes)]
    for seed, capture in enumerate(captures):
        capture.sketch, capture.check = GradientSketch(capture.sketch.shape, k=k, seed=seed), None
        capture.register()
    backward(data)
    found = [list(capture.samples(micro) or []) for capture in captures]
    sketches = torch.stack([torch.stack([sketch for sketch, _ in one]) for one in found]).double()
    norms = torch.tensor([float(norm or 0) for _, norm in found[0]])
    for capture in captures:
        capture.remove()
    parameters = dict(model.named_parameters())
    exact = []
    for row in data:
        backward([row])
        exact.append(torch.cat([parameters[name].grad.double().flatten() for name in captures[0].layers.names]))
    own = torch.stack([one.norm() for one in exact])
    unit = torch.stack(exact) / own[:, None]
    one, two = np.triu_indices(len(data), 1)
    cosines = (unit @ unit.T).numpy()[one, two]
    sketches = torch.nn.functional.normalize(sketches, dim=-1)
    errors = (sketches @ sketches.transpose(1, 2)).numpy()[:, one, two] - cosines
    return {
        "k": k,
        "pairs": len(one),
        "rmse": float(np.sqrt(np.mean(errors**2))),
        "largest_rmse": float(np.sqrt(np.mean(errors**2, axis=1)).max()),
        "worst": float(np.abs(errors).max()),
        "cosines": [float(cosines.min()), float(cosines.max())],
        "norm_error": float((norms / own - 1).abs().max()),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", type=Path, help="folder of a causal language model, as benchmarks.smollm2.prepare makes"
    )
    parser.add_argument("data", type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--hashes", type=int, default=8, help="hash functions that the sketch error is taken over")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=UserWarning)
    data = rows(args.data, max(args.rounds, 6))
    error = head_error(args.model, data[: (UNCOUNTED + 6) * ROWS], args.hashes)
    for name, one in error.items():
        low, high = one["cosines"]
        print(
            f"sketch of the head's gradient as {name}, k = 8192, {args.hashes} hash functions x {one['pairs']} pairs "
            f"with cosines from {low:.3f} to {high:.3f}: rmse {one['rmse']:.4f} (bar 0.012), worst hash function "
            f"{one['largest_rmse']:.4f}, worst pair {one['worst']:.4f}"
        )
    samples = samples_error(args.model, data[UNCOUNTED * ROWS :][:24], args.hashes)
    low, high = samples["cosines"]
    print(
        f"gradients of 24 single samples, the last four down_proj, k = {samples['k']}, {args.hashes} hash functions x "
        f"{samples['pairs']} pairs with cosines from {low:.3f} to {high:.3f}: rmse {samples['rmse']:.4f} (bar 0.02), "
        f"worst hash function {samples['largest_rmse']:.4f}, worst pair {samples['worst']:.4f}; norms differ by "
        f"{samples['norm_error']:.1e}"
    )
    result = overhead(args.model, data[: (UNCOUNTED + args.rounds) * ROWS])
    print(f"plain step of {ROWS} rows: {result['plain_seconds']:.2f} s (median of {result['rounds']})")
    for name, bar in BARS.items():
        one = result[name]
        print(
            f"{name:7} adds {one['difference']:+.2%} of the step, {one['difference_cpu']:+.2%} in CPU time, "
            f"{one['own_clock']:.2%} ({1e3 * one['own_seconds']:.0f} ms) by its own clock (bar {bar:.0%})"
        )
    save(
        "recorder-overhead",
        {**result, "head_sketch_error": error, "samples_error": samples, "peak_gib": round(peak_gib(), 2)},
    )


if __name__ == "__main__":
    main()
