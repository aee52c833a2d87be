"""FSDP2 on the CPU, without Trainer, which on a CPU falls back to DDP: a script under torchrun.

Writes what it found to ``<folder>/fsdp2-r<rank>.json``; the recorder's run folders lie beside it.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from leave import leave
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Sampler
from training import FIRST, ROWS, N
from transformers import TrainerControl, TrainerState, TrainingArguments

from diagnostics import GradientRecorder
from diagnostics.signals import SignalContext, Weight
from diagnostics.sketches.accuracy import cosine, exact_norm
from sdo.trainers.processes import Processes
from tests.llama import tiny_llama

STEPS, SIZE = 3, 4
# Rows that two processes cut evenly and unevenly, a vector, and a matrix of which one of them has nothing.
SHAPES = {"even": (60, 40), "odd": (61, 40), "vector": (5,), "single row": (1, 40)}


class Odd(nn.Module):
    """Parameters of odd shapes, of which the loss is linear and quadratic."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parts = nn.ParameterDict({n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in SHAPES.items()})

    def forward(self, scale):
        return sum((scale * part**3).sum() for part in self.parts.values())


def sketches(rank, mesh):
    """Sketches of shards, summed over processes, against the sketch of the gradient put together."""
    found = {}
    for name in SHAPES:
        net = Odd()
        fully_shard(net, mesh=mesh)
        tensor_hook = []
        parameter = dict(net.named_parameters())[f"parts.{name}"]
        micros = [object()]
        context = SignalContext(net, lambda micros=micros: (0, micros), Silent, k=16, share=0.5)
        capture = Weight(f"parts.{name}").of(context)
        capture.register()
        parameter.register_hook(lambda grad, seen=tensor_hook: seen.append(1))
        net(torch.tensor(1.0 + rank)).backward()
        grad = parameter.grad
        whole = grad.full_tensor()
        reduced = Processes(rank, 2).sum(capture.parts([])["sketch"]).float()
        square = Processes(rank, 2).sum(capture.step_norm.square()[None])
        found[name] = {
            "parameter": type(parameter).__name__,
            "gradient": type(grad).__name__ if isinstance(grad, DTensor) else "no DTensor",
            "local": list(grad.to_local().shape),
            "offset": capture.place.offset,
            "tensor_hooks": len(tensor_hook),
            "kind": capture.sketch.kind,
            "error": float((reduced - capture.sketch.sketch(whole)).norm() / capture.sketch.sketch(whole).norm()),
            "cosine": cosine(reduced, capture.sketch.sketch(whole)),
            "norm": float(square.sqrt()) / exact_norm(whole),
            # The mean over processes of 3 * scale * part ** 2.
            "mean": float((whole - 4.5 * Odd().parts[name] ** 2).abs().max()),
        }
    return found


class Silent:
    def __enter__(self): ...

    def __exit__(self, *error): ...


class Share(Sampler):
    """Every second pair of rows, as accelerate deals them out."""

    def __init__(self, rank, count):
        per_step = [range(step * SIZE, (step + 1) * SIZE) for step in range(STEPS)]
        self.positions = [i for batch in per_step for i in [*batch][rank * SIZE // count : (rank + 1) * SIZE // count]]

    def __iter__(self):
        return iter(self.positions)

    def __len__(self):
        return len(self.positions)


def collate(items):
    width = max(map(len, items))
    ids = torch.tensor([[*item, *[0] * (width - len(item))] for item in items])
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "attention_mask": (ids != 0).long()}


def record(out, args, net, clip):
    """The loop of a trainer, as far as a recorder sees it."""
    rank, count = args.process_index, args.world_size
    loader = DataLoader([ROWS[i] for i in range(N)], SIZE // count, sampler=Share(rank, count), collate_fn=collate)
    recorder, state, control = GradientRecorder(out, sample_every=1, sketch_size=64), TrainerState(), TrainerControl()
    state.is_world_process_zero = rank == 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder.on_train_begin(args, state, control, model=net, train_dataloader=loader)
    tokens = [sum(len(ROWS[i]) - 1 for i in range(step * SIZE, (step + 1) * SIZE)) for step in range(STEPS)]
    seen = []
    for step, batch in enumerate(loader):
        recorder.on_step_begin(args, state, control)
        seen.append((batch["input_ids"][:, 0] - FIRST).tolist())
        net.train()
        loss = net(**batch, num_items_in_batch=tokens[step]).loss
        (loss * count).backward()
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        recorder.on_pre_optimizer_step(args, state, control, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        state.global_step, state.epoch = step + 1, 0.0
        recorder.on_step_end(args, state, control)
    recorder.on_train_end(args, state, control)
    return seen


def arguments(out):
    return TrainingArguments(output_dir=str(out), use_cpu=True, report_to=[], max_grad_norm=0.5)


def sharded(mesh):
    net = tiny_llama()
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def main(folder):
    args = arguments(folder)
    rank = PartialState().process_index
    flat = init_device_mesh("cpu", (2,))
    copies = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    found = {"sketches": sketches(rank, flat)}
    found["copies"] = sketches(rank, copies)
    found["seen"] = record(folder / "sharded", args, sharded(flat), 0.5)
    record(folder / "copied", args, sharded(copies), 1e9)
    (folder / f"fsdp2-r{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
