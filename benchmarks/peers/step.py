"""One training step of SmolLM2-135M on 8 GSM8K rows: plain, under our recorder, and under a peer's.

Run in an environment that has the peer, TRL and this library's requirements, with one thread, once for each peer:
``OMP_NUM_THREADS=1 MALLOC_ARENA_MAX=1 python -m benchmarks.peers.step {bergson,dattri-llm} MODEL GSM8K/train.jsonl``.
(Each trainer has a thread; without the second setting each thread keeps the memory of its steps, 16 GB and more.)
bergson 2.5.1 and dattri-llm 0.1.0 (with dattri 0.3.0 for its projections) install with ``pip install --no-deps``;
bergson imports simple-parsing, docstring-parser, jaxtyping, wadler-lindig, natsort, petname and peft besides.

All trainers are float32 (bergson does not run under bf16 autocast), share one copy of the weights and train with
learning rate 0, so that all have the same gradients; they take their steps in turn. A recorder's cost is the median
over the rounds of its step minus the plain one of the same round, in CPU seconds over all threads. Stored gradients
are compared by their cosines: of the steps' gradients of the last matrix (a peer's samples are added up), of the
samples' shares of it within each batch, and of the samples' shares of all matrices in the first batch. Exact ones are
the plain trainer's gradients, and one backward pass a sample without any trainer. Short runs first try what users of
TRL do.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks import results
from benchmarks.peers.arms import MATRIX, Arm, Bergson, DattriLLM, Recorder
from benchmarks.peers.cosines import cosine_errors, gram_cosines, pair_cosines
from benchmarks.recorder_overhead import (
    ROWS,
    UNCOUNTED,
    StepBegins,
    StepEnds,
    Turns,
    configuration,
    rows,
    share_weights,
    short_rows,
    train,
)

Arms = dict[str, Callable[[Path], Arm]]
LAST, HEAD = {MATRIX: "linear_io"}, {"lm_head": "linear_io"}
# dattri-llm's projection on two sides, as bergson's default.
TWO_SIDED = {"__default__": {"style": "logra", "proj_dim": 16, "proj_max_batch_size": 8}}


def recorder(out: Path) -> Arm:
    """Return ours: step and sample rows of the last matrix and of the final norm's output."""
    return Recorder(out, signals=["weight", "hidden", f"samples:{MATRIX}.weight"], sample_every=1)


PEERS: dict[str, Arms] = {
    "bergson": {"all matrices, 16 x 16 (default)": Bergson},
    "dattri-llm": {
        "last matrix, factors": lambda out: DattriLLM(out, {"hook_types": LAST}),
        "all matrices, logra 16 x 16": lambda out: DattriLLM(
            out, {"linear_io": [r"_proj$"], "projection_kwargs": TWO_SIDED, "capture_style": "auto"}
        ),
    },
}
# What TRL's users do, tried on two steps of short rows: arms, and what is changed in the trainer's options.
HALVES = {"per_device_train_batch_size": ROWS // 2, "gradient_accumulation_steps": 2}
TRIALS: dict[str, dict[str, tuple[Callable[[Path], Arm], dict[str, Any]]]] = {
    "recorder": {
        "bf16 autocast": (recorder, {"bf16": True}),
        "accumulation": (recorder, HALVES),
        "checkpointing": (recorder, {"gradient_checkpointing": True}),
        "head": (lambda out: Recorder(out, signals=["weight"], weight="model.embed_tokens.weight"), {}),
    },
    "bergson": {
        "bf16 autocast": (Bergson, {"bf16": True}),
        "accumulation": (Bergson, HALVES),
        "checkpointing": (Bergson, {"gradient_checkpointing": True}),
    },
    "dattri-llm": {
        "bf16 autocast": (lambda out: DattriLLM(out, {"hook_types": LAST}), {"bf16": True}),
        "accumulation": (lambda out: DattriLLM(out, {"hook_types": LAST}, accumulation=2), HALVES),
        "checkpointing": (lambda out: DattriLLM(out, {"hook_types": LAST}), {"gradient_checkpointing": True}),
        "head": (lambda out: DattriLLM(out, {"hook_types": HEAD}), {}),
        "head and last matrix": (lambda out: DattriLLM(out, {"hook_types": {**HEAD, **LAST}}), {}),
        "step gradient whole": (
            lambda out: DattriLLM(out, {"hook_types": {MATRIX: "param_grad"}}, kind="per_batch"),
            {},
        ),
        "head, step gradient whole, and last matrix": (
            lambda out: DattriLLM(out, {"hook_types": {"lm_head": "param_grad", **LAST}}, kind="per_batch"),
            {},
        ),
    },
}


class KeepsGradient(TrainerCallback):
    """Keeps the gradient of `MATRIX` of the counted steps, as the optimizer is given it."""

    def __init__(self) -> None:
        self.rows: list[NDArray[np.float32]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Copy it."""
        if state.global_step >= UNCOUNTED:
            self.rows.append(kwargs["model"].get_submodule(MATRIX).weight.grad.flatten().clone().numpy())
            print(f"round {len(self.rows)}", file=sys.stderr, flush=True)


class Bench:
    """The model, its tokenizer and the makers of trainers.

    Parameters
    ----------
    folder
        The model.
    place
        For what trainers write.
    """

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder, self.place = folder, place
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.first = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")

    def model(self) -> Any:
        """Return a model of its own on the one copy of the weights."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype="float32")
        share_weights(model, self.first)
        return model

    def trainer(self, name: str, data: list[dict[str, str]], changed: dict[str, Any]) -> Any:
        """Return a trainer that changes no weight and clips no gradient."""
        from datasets import Dataset
        from trl import SFTTrainer

        options = {"bf16": False, "learning_rate": 0.0, "max_grad_norm": 0.0, **changed}
        args = configuration(self.place / f"{name}-output", len(data) // ROWS, **options)
        made = Dataset.from_list(data)
        return SFTTrainer(model=self.model(), args=args, train_dataset=made, processing_class=self.tokenizer)


def run(bench: Bench, makers: Arms, data: list[dict[str, str]]) -> tuple[dict[str, Arm], dict[str, StepEnds], Any]:
    """Train all arms in turn; return them, their clocks and the plain one's gradients."""
    turns = Turns(list(makers))
    arms, clocks, keeps = {}, {}, KeepsGradient()
    for number, (name, make) in enumerate(makers.items()):
        arm, trainer = make(bench.place / f"arm{number}"), bench.trainer(f"arm{number}", data, {})
        begins = StepBegins(name, turns)
        clocks[name] = StepEnds(begins)
        trainer.add_callback(begins)
        arm.attach(trainer)
        if name == "plain":
            trainer.add_callback(keeps)
        trainer.add_callback(clocks[name])
        arms[name] = arm
    train(arms, turns)
    return arms, clocks, np.stack(keeps.rows)


def exact(bench: Bench, data: list[dict[str, str]], collate: Callable[[Any], Any]) -> dict[str, NDArray[Any]]:
    """Return gradients by one backward pass a sample, on a model that nothing has touched.

    Parameters
    ----------
    bench
        The model.
    data
        Counted rows, as the trainer tokenized them.
    collate
        The trainer's collator.

    Returns
    -------
    dict
        ``matrix`` and ``hidden``: one row a sample; ``all``: (ROWS, ROWS) products of the first batch's samples over
        all matrices of the body.
    """
    model, gram = bench.model().eval(), np.zeros((ROWS, ROWS))
    matrix, hidden, first = [], [], []
    seen: list[torch.Tensor] = []

    def watch(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(seen.append)

    model.model.norm.register_forward_hook(watch)
    for number, row in enumerate(data):
        batch = collate([row])
        labels = batch["labels"]
        trained = int((labels[:, 1:] != -100).sum())
        model(input_ids=batch["input_ids"], labels=labels).loss.mul(trained).backward()
        matrix.append(model.get_submodule(MATRIX).weight.grad.flatten().numpy())
        hidden.append(seen.pop().sum(dim=(0, 1)).numpy())
        if number < ROWS:
            first.append([m.weight.grad for m in model.model.modules() if isinstance(m, torch.nn.Linear)])
        model.zero_grad(set_to_none=True)
        if number == ROWS - 1:
            for grads in zip(*first, strict=True):
                stacked = torch.stack([one.flatten() for one in grads])
                gram += (stacked @ stacked.T).double().numpy()
            first = []
    return {"matrix": np.stack(matrix), "hidden": np.stack(hidden), "all": gram}


def within_batches(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """Return the cosines of all pairs of one batch, batch after batch."""
    return np.concatenate([pair_cosines(vectors[i : i + ROWS]) for i in range(0, len(vectors), ROWS)])


def compare(arm: Arm, truth: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the errors of an arm's cosines, for whatever it holds."""
    found = {}
    steps, samples = arm.steps(UNCOUNTED, ROWS), arm.samples(UNCOUNTED, ROWS)
    hidden, everything = arm.hidden(UNCOUNTED, ROWS), arm.all_matrices(UNCOUNTED, ROWS)
    if steps is not None:
        found["steps"] = {"stored": steps.shape[1], **cosine_errors(pair_cosines(steps), pair_cosines(truth["steps"]))}
    for name, rows_, exact_rows in (("samples", samples, truth["matrix"]), ("hidden", hidden, truth["hidden"])):
        if rows_ is not None:
            errors = cosine_errors(within_batches(rows_), within_batches(exact_rows))
            found[name] = {"stored": rows_.shape[1], **errors}
    if everything is not None:
        errors = cosine_errors(pair_cosines(everything), gram_cosines(truth["all"]))
        found["all_matrices"] = {"stored": everything.shape[1], **errors}
    return found


def trial(bench: Bench, name: str, make: Callable[[Path], Arm], changed: dict[str, Any]) -> dict[str, Any]:
    """Train two short steps and return what the store holds then, or the error, and what was warned of."""
    arm = make(bench.place / name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            arm.attach(bench.trainer(name, short_rows(2), changed))
            arm.train()
            found = arm.held()
        except Exception as error:  # whatever a peer raises is the finding
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    said = {str(one.message).splitlines()[0] for one in caught if not issubclass(one.category, DeprecationWarning)}
    gc.collect()  # trainer, model and hooks hold each other
    found["warnings"] = sorted(said)
    print(f"{name}: {found}", file=sys.stderr, flush=True)
    return found


def try_out(bench: Bench, peer: str) -> dict[str, Any]:
    """Return what the trials of ours and of a peer left."""
    return {
        who: {what: trial(bench, f"{who}-{i}", *how) for i, (what, how) in enumerate(TRIALS[who].items())}
        for who in ("recorder", peer)
    }


def measure(bench: Bench, peer: str, data: list[dict[str, str]]) -> dict[str, Any]:
    """Measure the steps of one peer beside ours."""
    arms, clocks, steps = run(bench, {"plain": Arm, "recorder": recorder, **PEERS[peer]}, data)
    trainer = arms["plain"].trainer
    tokenized = [trainer.train_dataset[i] for i in range(UNCOUNTED * ROWS, len(data))]
    truth = exact(bench, tokenized, trainer.data_collator)
    truth["steps"] = steps
    summed = truth["matrix"].reshape(len(steps), ROWS, -1).sum(axis=1)
    agreement = [pair_cosines(np.stack(pair))[0] for pair in zip(summed, steps, strict=True)]
    cosines = pair_cosines(steps)
    plain_cpu, plain_wall = clocks["plain"].cpu[UNCOUNTED:], clocks["plain"].seconds[UNCOUNTED:]
    result: dict[str, Any] = {
        "rounds": len(steps),
        "plain_cpu_seconds": median(plain_cpu),
        "plain_seconds": median(plain_wall),
        "exact_step_cosines": {"mean": float(cosines.mean()), "sd": float(cosines.std())},
        "least_agreement_of_the_two_exact": float(min(agreement)),
        "arms": {},
    }
    for name in list(arms)[1:]:
        cpu = [a - b for a, b in zip(clocks[name].cpu[UNCOUNTED:], plain_cpu, strict=True)]
        wall = [a - b for a, b in zip(clocks[name].seconds[UNCOUNTED:], plain_wall, strict=True)]
        result["arms"][name] = {
            "cpu_seconds": median(cpu),
            "cpu_share": median(cpu) / median(plain_cpu),
            "cpu_share_each": [round(a / b, 4) for a, b in zip(cpu, plain_cpu, strict=True)],
            "wall_share": median(wall) / median(plain_wall),
            "bytes_a_step": arms[name].step_bytes(UNCOUNTED, len(data) // ROWS),
            "cosine_errors": compare(arms[name], truth),
        }
    return {**result, "peak_gib": round(results.peak_gib(), 2)}


def main(argv: list[str] | None = None) -> None:
    """Measure one peer, print it as JSON and keep it beside the others in ``results/peers.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("model", type=Path, help="folder of SmolLM2-135M, as benchmarks.smollm2.prepare makes it")
    parser.add_argument("data", type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("--rounds", type=int, default=8, help="counted steps")
    parser.add_argument("--only", choices=["trials", "steps"], help="measure again only this part")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=UserWarning)
    made: dict[str, Any] = {"version": version(args.peer), "torch": torch.__version__}
    with TemporaryDirectory() as place:
        bench = Bench(args.model, Path(place))
        if args.only != "steps":
            made["trials"] = try_out(bench, args.peer)
        if args.only != "trials":
            made["steps"] = measure(bench, args.peer, rows(args.data, args.rounds))
    print(json.dumps(made, indent=2))
    kept = results.FOLDER / "peers.json"
    before = json.loads(kept.read_text(encoding="utf-8"))["measured"] if kept.exists() else {}
    results.save("peers", {**before, args.peer: {**before.get(args.peer, {}), **made}})


if __name__ == "__main__":
    main()
