"""What others might add to the toolkit, written with the promised names alone; tests put it through every door."""

import dataclasses

import numpy as np

from analysis.report import Absent, Cell, Finding, Section, SectionSpec, Table
from sdo import EpochPlan, InputError, Layout, OrganizerSpec, Plan, Steps


class Blocks:
    """Blocks of B neighbors by the first coordinate, in an order that the seed turns."""

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


class Growing:
    """An organizer of steps of 1, 2, 3, … samples in the order of their ids; the first of each is there twice."""

    name, embeddings, n_samples = "growing", None, 10

    def __init__(self, seed=0):
        self.options = {"seed": seed}

    def with_seed(self, seed):
        return Growing(seed)

    def plan(self, batch_size, rows=None, *, layout=Layout()):
        return GrowingPlan(self, batch_size, rows, layout=layout)


class GrowingPlan(Plan):
    version = 3
    ragged = True

    def make_epoch(self, epoch, first_step, exposure):
        ids, weight, offsets = [], [], [0]
        for size, start in ((1, 0), (2, 1), (3, 3), (4, 6)):
            own = np.roll(self.ids, self.organizer.options["seed"])[start : start + size].tolist()
            ids += [own[0], *own]
            weight += [0.0] + [1.0] * size
            offsets.append(len(ids))
        steps = Steps(
            np.array(ids),
            np.array(offsets),
            micro_batch=np.zeros(len(ids), dtype=np.int32),
            weight=np.array(weight),
            group=np.arange(len(ids), dtype=np.int32),
        )
        return EpochPlan(epoch, first_step, steps, self.ids, exposure + 1, {"largest": 4})


def longest_steps(material):
    """The longest step of each run.

    The first line is the heading where the function itself is given.
    """
    if not material.runs:
        return Absent("No run folder was given.")
    found = {}
    for name, run in material.runs.items():
        found[name] = material.once(("longest", name), lambda run=run: max(run.steps().column("seconds").to_pylist()))
    rows = tuple((Cell(name), Cell(f"{seconds:.2f}")) for name, seconds in found.items())
    return Section(
        words=("Seconds <of> the longest step.",),
        tables=(Table(("run", "seconds"), rows),),
        findings=(Finding("plain", "No step took longer than shown below."),),
        data={"seconds": found},
    )


LONGEST = SectionSpec("longest", "Longest steps", longest_steps)


def broken(material):
    raise RuntimeError("no\nink")


def not_a_section(material):
    return "some words"
