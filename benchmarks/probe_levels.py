"""How often the intervals and the advice of ``sdo probe`` are wrong: by simulation.

In each simulation all samples get gradients of a stated kind, a probe looks at a few of them, and its intervals are
compared with what all samples and all steps of the plan would have shown, computed exactly. Embeddings are GSM8K's
where they are. ``python -m benchmarks.probe_levels --help``; results go, cell by cell, into
``benchmarks/results/probe_levels.json``, and a cell that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.jackknife import IntervalEstimate
from analysis.locality.sample_pairs import mantel_test
from analysis.probe.batches import ProbeRows
from analysis.probe.design import ProbeDesign, design_probe
from analysis.probe.study import SignalProbe, probe_signal
from benchmarks.locality_levels import BATCH, PAPER_N, Store, embeddings_here
from sdo import SDO, Embeddings
from sdo.organizers.plan import Plan

RESULTS = Path(__file__).parent / "results" / "probe_levels.json"
PLANS = 40
SAMPLES = (128, 256, 512, 1024)
SIMULATIONS = 400
SMALLEST = 0.05
_WIDTH = 64

Generator = np.random.Generator
World = Callable[[NDArray[np.float64], Generator], NDArray[np.float64]]
# What each interval is compared with, by name.
INTERVALS = ("difference", "within", "size", "predicted", "predicted_size", "predicted_change", "slope", "departure")


def _world(
    follow: float = 0.0, *, common: float = 0.7, topics: float = 0.0, heavy: float = 0.0, bent: bool = False
) -> World:
    """Gradients with a common direction, a part that follows embeddings and one of their own, of about length one.

    `topics`: the part that follows is the same for all samples nearest to one of 150 anchors. `heavy`: spread of the
    logarithm of their lengths. `bent`: near pairs agree by more than a line through distant ones says.
    """

    def gradients(unit: NDArray[np.float64], rng: Generator) -> NDArray[np.float64]:
        rows = rng.standard_normal((len(unit), _WIDTH)) / np.sqrt(_WIDTH)
        rows += common * rng.standard_normal(_WIDTH) / np.sqrt(_WIDTH)
        if follow:
            turn = rng.standard_normal((unit.shape[1], _WIDTH)) / np.sqrt(_WIDTH)
            followed = unit - unit.mean(axis=0)
            if bent:
                width = rng.standard_normal((unit.shape[1], _WIDTH)) * 3
                rows += follow * np.cos(followed @ width + rng.uniform(0, 2 * np.pi, _WIDTH)) * np.sqrt(2 / _WIDTH)
            else:
                rows += follow * followed @ turn
        if topics:
            anchors = unit[rng.choice(len(unit), 150, replace=False)]
            vectors = rng.standard_normal((150, _WIDTH)) / np.sqrt(_WIDTH)
            rows += topics * vectors[np.argmax(unit @ anchors.T, axis=1)]
        if heavy:
            rows *= np.exp(heavy * rng.standard_normal(len(unit)))[:, None]
        return rows

    return gradients


WORLDS: dict[str, World] = {
    "nothing follows": _world(),
    "nothing follows, no common direction": _world(common=0.0),
    "nothing follows, uneven lengths": _world(heavy=1.0),
    "follows": _world(0.5),
    "follows strongly": _world(1.5),
    "follows, uneven lengths": _world(1.0, heavy=1.0),
    "follows by topics": _world(topics=0.7),
    "follows, near pairs more": _world(0.7, bent=True),
}


@dataclass(frozen=True, eq=False)
class Truth:
    """What all samples and all steps show of SDO's batches, under the names of `INTERVALS`, and the smallest change."""

    values: dict[str, float]
    smallest: float

    @classmethod
    def of(cls, unit: NDArray[np.float64], gradients: NDArray[np.float64], plan: Plan, design: ProbeDesign) -> Truth:
        """Compute it from sums over all samples and all batches, without a pair being formed."""
        norm = np.linalg.norm(gradients, axis=1)
        direction = gradients / norm[:, None]
        batches = plan.batches(0, design.steps)
        within, between = _within_between(direction, batches)
        alike, apart = _within_between(unit, batches)
        product, _ = _within_between(gradients, batches)
        own = np.square(norm)
        rho = product / own[batches].mean()
        slope, level = _population_line(unit, direction, np.ones(len(unit)))
        product_slope, product_level = _population_line(unit, gradients, own)
        cosine, uniform = design.arms["sdo"].cosine, design.arms["uniform"].cosine
        assert cosine is not None
        assert uniform is not None
        B = design.batch_size
        values = {
            "difference": within - between,
            "within": within,
            "size": B / (1 + (B - 1) * rho),
            "predicted": level + slope * cosine,
            "predicted_size": B / (1 + (B - 1) * (product_level + product_slope * cosine) / own.mean()),
            "predicted_change": slope * (cosine - uniform),
            "slope": slope,
            "departure": within - between - slope * (alike - apart),
        }
        return cls(values, SMALLEST * (1 + (B - 1) * between) / (B - 1))


def _within_between(rows: NDArray[np.float64], batches: NDArray[np.int64]) -> tuple[float, float]:
    """Mean inner product of different samples inside batches, and between batches, over all batches."""
    B, T = batches.shape[1], len(batches)
    own = np.square(rows).sum(axis=1)
    sums = rows[batches].sum(axis=1)
    inside = np.square(sums).sum() - own[batches].sum()
    times = np.bincount(batches.ravel(), minlength=len(rows))
    outside = np.square(sums.sum(axis=0)).sum() - np.square(sums).sum() - ((times * (times - 1)) * own).sum()
    count = (T * B) ** 2 - T * B * B - (times * (times - 1)).sum()
    return float(inside / (T * B * (B - 1))), float(outside / count)


def _population_line(
    unit: NDArray[np.float64], rows: NDArray[np.float64], own: NDArray[np.float64]
) -> tuple[float, float]:
    """Least squares of inner products over embedding cosines, over all pairs of all samples; slope and value at 0."""
    n = len(unit)
    pairs = n * (n - 1)
    length = np.square(unit).sum(axis=1)
    x = (np.square(unit.sum(axis=0)).sum() - length.sum()) / pairs
    y = (np.square(rows.sum(axis=0)).sum() - own.sum()) / pairs
    xx = (np.square(unit.T @ unit).sum() - np.square(length).sum()) / pairs
    xy = (np.square(unit.T @ rows).sum() - (length * own).sum()) / pairs
    slope = (xy - x * y) / (xx - x * x)
    return float(slope), float(y - slope * x)


def estimates(found: SignalProbe) -> dict[str, IntervalEstimate]:
    """Return the intervals of a probe under the names of `INTERVALS`."""
    arm, slope = found.arms["sdo"], found.slope
    named: dict[str, IntervalEstimate] = {
        name: getattr(arm, name) for name in INTERVALS if name not in ("predicted_change", "slope")
    }
    named["predicted_change"] = found.predicted_change
    named["slope"] = IntervalEstimate(slope.value, slope.low, slope.high, slope.samples)
    return named


class Probes:
    """Designs of one number of samples on several plans, which the simulations take in turn."""

    def __init__(self, embeddings: Embeddings, n_samples: int, samples: int, plans: int = PLANS) -> None:
        self.unit = embeddings.unit[:n_samples].astype(np.float64)
        first: Plan = SDO(Embeddings.from_array(self.unit), seed=617).plan(BATCH)
        first.epoch(0)
        self.plans = [first.redraw(number) for number in range(plans)]
        self.designs = [design_probe(plan, samples=samples) for plan in self.plans]

    def resized(self, samples: int) -> Probes:
        """Return designs of another number of samples on the same plans."""
        other = object.__new__(Probes)
        other.unit, other.plans = self.unit, self.plans
        other.designs = [design_probe(plan, samples=samples) for plan in self.plans]
        return other


def cell(probes: Probes, world: World, simulations: int, rng: Generator) -> dict[str, Any]:
    """Run one kind of gradients; return how often each interval misses the truth, and each outcome comes.

    ``overlooked``: ``unlikely`` among the ``large``, those whose true difference is the smallest change or more.
    """
    missed = dict.fromkeys(INTERVALS, 0)
    outcomes = {"likely": 0, "unlikely": 0, "cannot tell": 0}
    widths, shares, large, overlooked, mantel = [], [], 0, 0, 0
    for number in range(simulations):
        plan, design = probes.plans[number % len(probes.plans)], probes.designs[number % len(probes.designs)]
        gradients = world(probes.unit, rng)
        truth = Truth.of(probes.unit, gradients, plan, design)
        ids = design.sample_ids
        norm = np.linalg.norm(gradients[ids], axis=1)
        rows = ProbeRows(ids, probes.unit[ids], gradients[ids], norm, np.ones(len(ids), dtype=bool))
        found = probe_signal(design, rows, smallest_change=SMALLEST, permutations=0)
        for name, one in estimates(found).items():
            inside = one.low is not None and one.high is not None and one.low <= truth.values[name] <= one.high
            missed[name] += not inside
        outcomes[found.verdict.outcome] += 1
        widths.append(found.arms["sdo"].difference.half_width or np.nan)
        shares.append(truth.values["difference"] / truth.smallest)
        if abs(truth.values["difference"]) >= truth.smallest:
            large += 1
            overlooked += found.verdict.outcome == "unlikely"
        if number < 100:
            curve = np.isin(ids, design.curve_ids)
            p = mantel_test(rows.unit[curve], rows.sketch[curve], permutations=99, seed=number).p
            mantel += p is not None and p <= 0.05
    return {
        "simulations": simulations,
        "missed": missed,
        "outcomes": outcomes,
        "large": large,
        "overlooked": overlooked,
        "difference_in_smallest_changes": float(np.mean(shares)),
        "half_width": float(np.nanmean(widths)),
        "mantel": int(mantel),
    }


def measure(
    embeddings: Embeddings, names: list[str], sizes: list[int], simulations: int, keep: Callable[..., bool]
) -> None:
    """Run every cell that `keep` does not have yet."""
    probes: Probes | None = None
    for samples in sizes:
        wanted = [name for name in names if not keep(f"{name} | {samples}")]
        if not wanted:
            continue
        probes = Probes(embeddings, PAPER_N, samples) if probes is None else probes.resized(samples)
        for name in wanted:
            started = time.perf_counter()
            key = f"{name} | {samples}"
            result = cell(probes, WORLDS[name], simulations, np.random.default_rng([617, *key.encode()]))
            result["seconds"] = round(time.perf_counter() - started, 1)
            keep(key, result)
            print(f"{key}: {result}", flush=True)


def table(cells: dict[str, dict[str, Any]]) -> str:
    """Return the shares of 95 % intervals that miss the truth, and of the outcomes."""
    lines = [
        "share of 95 % intervals that miss the truth, and of each outcome; half: of the interval of the difference"
    ]
    short = [name.replace("predicted", "pred") for name in INTERVALS]
    heading = f"{'gradients':38}{'samples':>8}" + "".join(f"{one:>12}" for one in short)
    lines.append(f"{heading}{'likely':>9}{'unlikely':>9}{'unsure':>9}{'overlooked':>14}{'Mantel':>8}{'half':>8}")
    for key, one in cells.items():
        name, _, samples = key.partition(" | ")
        n = one["simulations"]
        line = f"{name[:37]:38}{samples:>8}" + "".join(f"{one['missed'][name] / n:12.3f}" for name in INTERVALS)
        line += "".join(f"{count / n:9.3f}" for count in one["outcomes"].values())
        overlooked = f"{one['overlooked']} of {one['large']}" if one["large"] else "-"
        lines.append(f"{line}{overlooked:>14}{one['mantel'] / min(n, 100):8.2f}{one['half_width']:8.4f}")
    return "\n".join(lines)


def main() -> None:
    """Print the committed table, and run a few of its cells anew."""
    if RESULTS.is_file():
        print(table(json.loads(RESULTS.read_text())))
    embeddings, name = embeddings_here()
    print(f"\nanew, 100 simulations each, embeddings: {name}")
    fresh: dict[str, dict[str, Any]] = {}

    def keep(key: str, result: dict[str, Any] | None = None) -> bool:
        if result is not None:
            fresh[key] = result
        return result is not None

    measure(embeddings, ["nothing follows", "follows"], [256], 100, keep)
    print(table(fresh))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=SIMULATIONS, help=f"a cell (default: {SIMULATIONS})")
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--samples", nargs="+", type=int, default=list(SAMPLES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    matrix, _ = embeddings_here()
    store = Store(given.out)
    measure(matrix, given.worlds, given.samples, given.simulations, store)
    print(table(store.cells))
