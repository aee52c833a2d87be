"""Which samples a probe looks at: whole batches, or a part of them, of an organizer's own plan and of its two controls.

The batches of ``"uniform"`` and of ``"random"`` (SDO with random members in the place of neighbors) are drawn without
a look at the embeddings: their samples together make the curve, on which predictions rest. The batches of ``"sdo"``
are kept apart, so that they can check what was predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdo.checks import whole_number
from sdo.embeddings.matrix import Embeddings, within_batch_cosine
from sdo.errors import InputError
from sdo.organizers.plan import Plan
from sdo.organizers.registry import OrganizerInputs, make_organizer
from sdo.random_keys import PROBE, order_by_keys, raw_keys

ARMS = ("uniform", "random", "sdo")
MEMBERS = 8  # of a batch at most: more batches tell more than more pairs of one batch
CURVE_SAMPLES = 2000  # two million pairs
EPOCHS = 2  # organizer epochs of the plan that a prediction is for, unless the steps are given
_PAIRS = 2**17  # of a plan, kept for its picture
_EQUAL = 1 - 1e-6  # cosine of what counts as the same embedding


@dataclass(frozen=True, eq=False)
class Arm:
    """One way to form batches.

    Parameters
    ----------
    name
        One of `ARMS`.
    batches
        (T, m) int64, sample ids: members of T of the plan's batches.
    cosine
        Mean within-batch cosine of the embeddings over all steps of the plan; None where undefined.
    pairs
        (P,) float64, cosines of pairs within batches, of steps spread evenly over the plan.
    equal
        Share of these pairs that have the same embedding.
    """

    name: str
    batches: NDArray[np.int64]
    cosine: float | None
    pairs: NDArray[np.float64]
    equal: float


@dataclass(frozen=True, eq=False)
class ProbeDesign:
    """What a probe looks at.

    Parameters
    ----------
    arms
        By name, in the order of `ARMS`.
    batch_size
        B, samples of one step.
    steps
        Steps of each plan that batches were drawn from and predictions are for.
    asked
        Samples asked for.
    """

    arms: dict[str, Arm]
    batch_size: int
    steps: int
    asked: int

    @property
    def sample_ids(self) -> NDArray[np.int64]:
        """(n,) ascending ids of all samples that are looked at."""
        return np.unique(np.concatenate([arm.batches.ravel() for arm in self.arms.values()]))

    @property
    def curve_ids(self) -> NDArray[np.int64]:
        """Ascending ids of the samples drawn without a look at the embeddings, at most `CURVE_SAMPLES`."""
        blind = np.concatenate([self.arms["uniform"].batches.ravel(), self.arms["random"].batches.ravel()])
        _, first = np.unique(blind, return_index=True)
        return np.unique(blind[np.sort(first)[:CURVE_SAMPLES]])

    @property
    def members(self) -> int:
        """Samples looked at in one batch, m."""
        return int(self.arms["sdo"].batches.shape[1])


def design_probe(plan: Plan, *, samples: int = 256, steps: int | None = None) -> ProbeDesign:
    """Choose the samples of a probe: half of them in SDO's batches, a quarter in those of each control.

    Parameters
    ----------
    plan
        Of an :class:`sdo.SDO` with neighbors.
    samples
        How many gradients to take, about: a sample of two batches is taken once.
    steps
        Steps of the plan to draw from; by default those of its first two organizer epochs.

    Returns
    -------
    ProbeDesign
        A pure function of the plan and the arguments. Batches are drawn at random from the steps, each at most once.

    Raises
    ------
    InputError
        If the plan has no neighbors, its batches no pairs, or the samples are too few for two batches of a control.
    """
    sdo, locality = plan.organizer, plan.organizer.options.get("locality")
    if sdo.embeddings is None or locality != "knn":
        got = sdo.name if locality is None else f"locality {locality!r}"
        raise InputError(
            f"the organizer is {got}; expected SDO with neighbors, since uniform batches and random locality are what "
            "it is compared with; fix: organizer.name sdo, organizer.locality knn"
        )
    if plan.batch_size < 2:
        raise InputError("the batch size is 1; expected at least 2, since batches of one sample have no coherence")
    members = min(plan.batch_size, MEMBERS)
    if whole_number("samples", samples, None) < 8 * members:
        raise InputError(
            f"samples is {samples}; expected at least {8 * members}: two batches of {members} for each control and "
            "four of SDO"
        )
    if steps is not None:
        whole_number("steps", steps, 1)
    last = plan.epoch(EPOCHS - 1)
    steps = last.stop if steps is None else steps
    total = samples // members
    counts = {"random": total // 4, "sdo": total // 2}
    counts["uniform"] = total - sum(counts.values())
    inputs, options = OrganizerInputs(sdo.n_samples, sdo.embeddings), sdo.options
    uniform = make_organizer("uniform", inputs, {"seed": options["seed"]})
    random = make_organizer(sdo.name, inputs, {**options, "locality": "random"})
    plans = {
        "uniform": uniform.plan(plan.batch_size, rows=plan.ids),
        "random": random.plan(plan.batch_size, rows=plan.ids),
        "sdo": plan,
    }
    arms = {name: _arm(number, name, plans[name], counts[name], steps, members) for number, name in enumerate(ARMS)}
    return ProbeDesign(arms, plan.batch_size, steps, samples)


def _arm(number: int, name: str, plan: Plan, count: int, steps: int, members: int) -> Arm:
    """Draw batches of one plan, and measure all of them."""
    batches = plan.batches(0, steps)
    seed = int(plan.organizer.options["seed"])
    drawn = np.sort(order_by_keys(raw_keys(seed, PROBE, number, steps), np.arange(steps))[:count])
    chosen = batches[drawn]
    if members < plan.batch_size:
        keys = raw_keys(seed, PROBE, len(ARMS) + number, chosen.size).reshape(chosen.shape)
        chosen = np.take_along_axis(chosen, np.argsort(keys, axis=1, kind="stable")[:, :members], axis=1)
    embeddings = plan.organizer.embeddings
    assert embeddings is not None  # noqa: S101 - all three plans were made from them
    cosine = within_batch_cosine(embeddings.unit, embeddings.valid, *plan.flat(0, steps))
    known = cosine[~np.isnan(cosine)]
    pairs = _pair_cosines(embeddings, batches)
    equal = float(np.mean(pairs > _EQUAL)) if len(pairs) else 0.0
    return Arm(name, chosen, float(known.mean()) if len(known) else None, pairs, equal)


def _pair_cosines(embeddings: Embeddings, batches: NDArray[np.int64]) -> NDArray[np.float64]:
    """Cosines of pairs within batches, of as many steps, evenly spaced, as `_PAIRS` allows."""
    B = batches.shape[1]
    i, j = np.triu_indices(B, 1)
    every = max(1, -(-len(batches) * len(i) // _PAIRS))
    part = batches[::every]
    first, second = part[:, i].ravel(), part[:, j].ravel()
    both = embeddings.valid[first] & embeddings.valid[second]
    found = np.empty(int(both.sum()))
    first, second = first[both], second[both]
    for start in range(0, len(first), 4096):
        rows = slice(start, start + 4096)
        left, right = (embeddings.unit[ids[rows]].astype(np.float64) for ids in (first, second))
        found[rows] = np.einsum("ij,ij->i", left, right)
    return found
