"""A plain loop of one's own under DDP; a script under torchrun, a module elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from leave import leave
from torch import distributed
from torch.utils.data import DataLoader
from training import ROWS, N, organizer

from diagnostics import record
from sdo import Layout
from tests.llama import tiny_llama

STEPS = 7
SIGNALS = ("weight", "hidden", "samples:*.down_proj.weight")


def collate(items):
    width = max(len(ROWS[i]) for i in items)
    rows = [ROWS[i] + [0] * (width - len(ROWS[i])) for i in items]
    labels = [ROWS[i] + [-100] * (width - len(ROWS[i])) for i in items]
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor(labels), "sample_id": list(items)}


def train(out, accumulation):
    """Train steps of eight samples in micro-batches of two; returns the trained ledger."""
    joined = distributed.is_initialized()
    count, rank = (distributed.get_world_size(), distributed.get_rank()) if joined else (1, 0)
    plan = organizer().plan(8, layout=Layout(processes=count, accumulation=accumulation))
    loader = DataLoader(list(range(N)), batch_sampler=plan.sampler(rank=rank), collate_fn=collate)
    model = tiny_llama()
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if joined else model
    wrapped.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    turn = 0
    with record(out, wrapped, optimizer, plan=plan, signals=SIGNALS, sample_every=2, sketch_size=512) as rec:
        while turn < STEPS * accumulation:
            for batch in loader:
                ids = batch.pop("sample_id")
                with rec.micro_batch(ids=ids):
                    loss = wrapped(**batch, num_items_in_batch=torch.tensor(20)).loss
                    (loss * count).backward()  # DDP takes the mean
                turn += 1
                if turn % accumulation == 0:
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    rec.step(grad_norm=norm)
                    optimizer.step()
                    optimizer.zero_grad()
                if turn == STEPS * accumulation:
                    break
        return rec.trained.tolist()


def main(folder):
    distributed.init_process_group("gloo")
    trained = train(folder / "two", 2)
    (folder / f"loop-r{distributed.get_rank()}.json").write_text(json.dumps(trained))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
