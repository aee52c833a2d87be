"""What others might add to the toolkit, written with the promised names alone; tests put it through every door."""

import dataclasses

import numpy as np

from sdo import EpochPlan, InputError, Layout, OrganizerSpec, Plan, Steps


class Blocks:
    """Blocks of B neighbours by the first coordinate, in an order that the seed turns."""

    name = "blocks"

    def __init__(self, embeddings, *, turn=1, seed=0):
        if turn < 0:
            raise InputError(f"turn is {turn}; expected a whole number from 0")
        self.embeddings, self.n_samples = embeddings, len(embeddings)
        self.options = {"turn": turn, "seed": seed}

    def with_seed(self, seed):
        return Blocks(self.embeddings, **{**self.options, "seed": seed})

    def plan(self, batch_size, rows=None, *, layout=Layout()):
        return BlocksPlan(self, batch_size, rows, layout=layout)


class BlocksPlan(Plan):
    version = 1

    def make_epoch(self, epoch, first_step, exposure):
        options = self.organizer.options
        order = self.ids[np.argsort(self.organizer.embeddings.unit[self.ids, 0], kind="stable")]
        full = len(order) // self.batch_size
        batches = np.roll(
            order[: full * self.batch_size].reshape(full, -1), options["seed"] + options["turn"] * epoch, 0
        )
        seen = exposure + np.isin(self.ids, batches)
        return EpochPlan(epoch, first_step, Steps.of(batches), np.sort(batches.ravel()), seen, {"blocks": full})


@dataclasses.dataclass
class BlocksOptions:
    turn: int = dataclasses.field(default=1, metadata={"help": "blocks that an epoch starts later"})


BLOCKS = OrganizerSpec(
    "blocks", lambda inputs, **options: Blocks(inputs.embeddings, **options), BlocksOptions, frozenset({"embeddings"})
)
