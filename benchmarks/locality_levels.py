"""How often the tests of locality are wrong, and how often they see what was planted: by simulation.

A level is the share of false positives at nominal 5 % in a situation where gradients do not follow embeddings. Plans
are drawn once per kind and length and used by all simulations: in each, one of them plays the run and the others are
its re-draws. ``python -m benchmarks.locality_levels --help``; results go, cell by cell, into
``benchmarks/results/locality_levels.json``, and a cell that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from analysis.locality.association import (
    MatrixDesign,
    SeriesDesign,
    StepGradients,
    matrix_inflation,
    series_inflation,
)
from analysis.locality.redraw import PlanDraw
from analysis.locality.redraw_tests import redraw_p
from analysis.locality.sample_pairs import SamplePairs, all_pairs, pair_slope
from benchmarks.plan_speed import clustered
from sdo import SDO, Embeddings, Uniform
from sdo.atomic import write_atomically
from sdo.organizers.plan import Plan

RESULTS = Path(__file__).parent / "results" / "locality_levels.json"
GSM8K = Path(os.environ.get("SDO_GSM8K", Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"))
PAPER_N = 6796
BATCH = 8
PLANS = 100  # one plays the run, 99 are its re-draws: p <= 0.05 is then exactly 5 % of the ranks
_WIDTH = 64  # of simulated gradients
_COLUMNS = 250  # series at a time, to stay in cache

# label -> steps whose gradients are recorded, number of samples
LENGTHS: dict[str, tuple[NDArray[np.int64], int]] = {
    "50": (np.arange(50), PAPER_N),
    "100": (np.arange(100), PAPER_N),
    "300": (np.arange(300), PAPER_N),
    "1000": (np.arange(1000), PAPER_N),
    "3000": (np.arange(3000), PAPER_N),
    "600 of 3000": (np.arange(0, 3000, 5), PAPER_N),
    "100, N=512": (np.arange(100), 512),
    "300, N=512": (np.arange(300), 512),
    "1000, N=512": (np.arange(1000), 512),
}
KINDS: dict[str, Callable[[Embeddings], Any]] = {
    "sdo": lambda z: SDO(z, seed=617),
    "uniform": lambda z: Uniform(z, seed=617),
    "random": lambda z: SDO(z, seed=617, locality="random"),
}

Generator = np.random.Generator


class Plans:
    """The plans of one kind at one choice of steps, and what the tests keep of each."""

    def __init__(self, kind: str, label: str, embeddings: Embeddings) -> None:
        self.steps, self.n_samples = LENGTHS[label]
        self.T = len(self.steps)
        stop = int(self.steps[-1]) + 1
        base: Plan = KINDS[kind](embeddings).plan(BATCH, rows=np.arange(self.n_samples))
        base.epoch(0)
        self.unit = embeddings.unit
        self.batches, self.draws = [], []
        for number in range(PLANS):
            plan = base.redraw(number)
            batches = plan.batches(0, stop)
            epoch = np.array([plan.epoch_of(step).organizer_epoch for step in range(stop)])
            self.batches.append(batches[self.steps])
            self.draws.append(PlanDraw.of(*plan.flat(0, stop), epoch, self.steps, embeddings))


# Series under the null: (plans, number of the run's plan, rng) -> (T,)
def _walk(rng: Generator, T: int) -> NDArray[np.float64]:
    walk = np.cumsum(rng.standard_normal(T))
    return walk / walk.std()


def _autoregressive(coefficient: float) -> Callable[[Plans, int, Generator], NDArray[np.float64]]:
    def series(plans: Plans, own: int, rng: Generator) -> NDArray[np.float64]:
        noise = rng.standard_normal(plans.T + 500)
        return lfilter([1.0], [1.0, -coefficient], noise)[500:]  # type: ignore[no-any-return]

    return series


def _exponential(plans: Plans, own: int, rng: Generator) -> NDArray[np.float64]:
    return 3 * np.exp(-np.arange(plans.T) / (0.2 * plans.T)) + rng.standard_normal(plans.T)


def _level_shifts(plans: Plans, own: int, rng: Generator) -> NDArray[np.float64]:
    epoch = plans.draws[own].organizer_epoch
    return rng.standard_normal(int(epoch.max()) + 1)[epoch] * 2 + 0.5 * rng.standard_normal(plans.T)


def _sample_vectors(plans: Plans, own: int, rng: Generator) -> NDArray[np.float64]:
    """Batch coherence of random per-sample gradients: batches that share pairs of samples correlate."""
    vectors = rng.standard_normal((plans.n_samples, 16))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    total = vectors[plans.batches[own]].sum(axis=1)
    return (np.square(total).sum(axis=1) - BATCH) / (BATCH * (BATCH - 1))


def _sample_trait(plans: Plans, own: int, rng: Generator) -> NDArray[np.float64]:
    """The same with a trait of each sample: some samples' batches are more coherent, whatever their embeddings."""
    trait = rng.standard_normal(plans.n_samples)[plans.batches[own]].mean(axis=1)
    vectors = _sample_vectors(plans, own, rng)
    return vectors / vectors.std() + trait / trait.std()


def _trait_and_drift(plans: Plans, own: int, rng: Generator) -> NDArray[np.float64]:
    return _sample_trait(plans, own, rng) + 2 * _walk(rng, plans.T)


def _exposure(plans: Plans, own: int, rng: Generator) -> NDArray[np.float64]:
    """Coherence that falls with how often samples were seen; hubs are seen more."""
    seen = plans.draws[own].exposure[:, 1]
    effect = seen / seen.std() if seen.std() > 0 else seen
    return -2 * effect + rng.standard_normal(plans.T)


SERIES: dict[str, Callable[[Plans, int, Generator], NDArray[np.float64]]] = {
    "independent noise": lambda plans, own, rng: rng.standard_normal(plans.T),
    "AR(1) 0.9": _autoregressive(0.9),
    "AR(1) 0.99": _autoregressive(0.99),
    "random walk": lambda plans, own, rng: _walk(rng, plans.T),
    "exponential trend": _exponential,
    "level shifts": _level_shifts,
    "sample vectors": _sample_vectors,
    "sample trait": _sample_trait,
    "sample trait, drift": _trait_and_drift,
    "exposure": _exposure,
}


def _planted_series(strength: float) -> Callable[[Plans, int, Generator], NDArray[np.float64]]:
    def series(plans: Plans, own: int, rng: Generator) -> NDArray[np.float64]:
        """Residual correlation `strength` with l_t under noise of unit variance, and drift."""
        own_residual = SeriesDesign(plans.draws[own]).residual
        signal = own_residual / own_residual.std()
        return strength * signal + np.sqrt(1 - strength**2) * rng.standard_normal(plans.T) + _walk(rng, plans.T)

    return series


SERIES_POWER = {f"planted {r}": _planted_series(r) for r in (0.05, 0.1, 0.2)}


# Step gradients under the null: (plans, number, rng) -> (T, width)
def _directions(rng: Generator, rows: int) -> NDArray[np.float64]:
    return rng.standard_normal((rows, _WIDTH)) / np.sqrt(_WIDTH)


def _drift(plans: Plans, rng: Generator) -> NDArray[np.float64]:
    path = np.cumsum(rng.standard_normal((plans.T, _WIDTH)), axis=0)
    return path / np.linalg.norm(path - path.mean(axis=0), axis=1).mean()


def _matrix(
    drift: float, sample: float, *, trend: bool = False, planted: float = 0.0
) -> Callable[[Plans, int, Generator], NDArray[np.float64]]:
    """Noise of length one, plus drift, per-sample gradients and a planted effect of the given lengths."""

    def gradients(plans: Plans, own: int, rng: Generator) -> NDArray[np.float64]:
        rows = _directions(rng, plans.T) + drift * _drift(plans, rng)
        if sample:
            own_gradients = _directions(rng, plans.n_samples)
            rows += sample * np.sqrt(BATCH) * own_gradients[plans.batches[own]].mean(axis=1)
        if trend:
            # A common direction whose share shrinks with the epochs: unit gradients spread out more and more.
            epoch = plans.draws[own].organizer_epoch + plans.draws[own].step / (plans.draws[own].step[-1] + 1)
            rows += np.exp(-epoch)[:, None] * 3 * _directions(rng, 1)
        if planted:
            centered = plans.draws[own].centroid - plans.draws[own].centroid.mean(axis=0)
            turn = rng.standard_normal((centered.shape[1], _WIDTH)) / np.sqrt(_WIDTH)
            rows += planted * centered @ turn
        return rows

    return gradients


MATRIX: dict[str, Callable[[Plans, int, Generator], NDArray[np.float64]]] = {
    "drift": _matrix(1.0, 0.0),
    "sample gradients": _matrix(0.0, 0.5),
    "sample gradients, strong": _matrix(0.0, 2.0),
    "sample gradients, drift": _matrix(1.0, 1.0),
    "norm trend": _matrix(0.5, 1.0, trend=True),
}
MATRIX_POWER = {f"planted {s}": _matrix(1.0, 0.5, planted=s) for s in (0.15, 0.3, 0.6)}


def series_cell(
    plans: Plans,
    designs: list[SeriesDesign],
    make: Callable[[Plans, int, Generator], NDArray[np.float64]],
    simulations: int,
    rng: Generator,
) -> dict[str, Any]:
    """Run one situation; return the number of rejections and the mean r."""
    rejected, defined, values = 0, 0, []
    for start in range(0, simulations, _COLUMNS):
        own = np.arange(start, min(start + _COLUMNS, simulations)) % PLANS
        series = np.stack([make(plans, int(number), rng) for number in own], axis=1)
        r, z = (np.stack(one) for one in zip(*(design.correlate(series) for design in designs), strict=True))
        for column, number in enumerate(own):
            others = np.arange(PLANS) != number
            value = r[number, column]
            if np.isnan(value):
                continue
            defined += 1
            inflation = series_inflation(float(z[number, column]), z[others, column])
            rejected += redraw_p(float(value), r[others, column], inflation) <= 0.05
            values.append(float(value))
    return {"simulations": defined, "rejected": int(rejected), "mean": float(np.mean(values)) if values else None}


def matrix_cell(
    plans: Plans,
    designs: list[MatrixDesign],
    make: Callable[[Plans, int, Generator], NDArray[np.float64]],
    simulations: int,
    rng: Generator,
) -> dict[str, Any]:
    """Run one situation; return the number of rejections and the mean statistic."""
    rejected, values = 0, []
    for number in range(simulations):
        own = number % PLANS
        gradients = StepGradients(make(plans, own, rng))
        statistic = np.array([design.statistic(gradients) for design in designs])
        others = np.delete(statistic, own)
        first = designs[(own + 1) % PLANS]
        inflation = matrix_inflation(designs[own].linked_variance(gradients), first.linked_variance(gradients), others)
        rejected += redraw_p(float(statistic[own]), others, inflation) <= 0.05
        values.append(float(statistic[own]))
    return {"simulations": simulations, "rejected": int(rejected), "mean": float(np.mean(values))}


# Gradients of single samples that follow embeddings: (plans, number, rng) -> (T, B, width)
def _samples(drift: float, own: float) -> Callable[[Plans, int, Generator], NDArray[np.float64]]:
    def gradients(plans: Plans, number: int, rng: Generator) -> NDArray[np.float64]:
        batches = plans.batches[number]
        turn = rng.standard_normal((plans.unit.shape[1], _WIDTH)) / np.sqrt(_WIDTH)
        rows = plans.unit[batches] @ turn + rng.standard_normal((*batches.shape, _WIDTH)) / np.sqrt(_WIDTH)
        rows += drift * _drift(plans, rng)[:, None]
        return np.asarray(rows + own * _directions(rng, plans.n_samples)[batches])

    return gradients


PAIRS: dict[str, Callable[[Plans, int, Generator], NDArray[np.float64]]] = {
    "follows embeddings": _samples(0.0, 0.0),
    "the same, drift": _samples(2.0, 0.0),
    "the same, own gradients": _samples(2.0, 1.0),
}
_SAMPLED = 5  # sample rows at every 5th step, as the recorder is advised to


def pairs_cell(
    plans: Plans,
    designs: list[None],
    make: Callable[[Plans, int, Generator], NDArray[np.float64]],
    simulations: int,
    rng: Generator,
) -> dict[str, Any]:
    """Return how often the interval of the slope between pairs of one step misses the mean over simulations."""
    found = []
    for number in range(simulations):
        own = number % PLANS
        rows = make(plans, own, rng)
        steps = range(0, plans.T, _SAMPLED)
        each = [all_pairs(plans.unit[ids], rows[t], ids) for t in steps for ids in (plans.batches[own][t],)]
        found.append(
            pair_slope(
                SamplePairs(
                    np.concatenate([one.first for one in each]),
                    np.concatenate([one.second for one in each]),
                    np.repeat(np.arange(len(each)), [len(one) for one in each]),
                    np.concatenate([one.embedding for one in each]),
                    np.concatenate([one.gradient for one in each]),
                )
            )
        )
    truth = float(np.mean([one.value for one in found if one.value is not None]))
    missed = sum(1 for one in found if one.low is None or one.high is None or not one.low <= truth <= one.high)
    return {"simulations": simulations, "rejected": missed, "mean": truth}


_TESTS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "series": (SeriesDesign, series_cell, SERIES, SERIES_POWER),
    "matrix": (MatrixDesign, matrix_cell, MATRIX, MATRIX_POWER),
    "pairs": (lambda draw: None, pairs_cell, PAIRS, {}),
}
_SHARES = {
    "series": "share of p <= 0.05 (simulations)",
    "matrix": "share of p <= 0.05 (simulations)",
    "pairs": "share of 95 % intervals of the slope that miss it (simulations)",
}


def measure(
    test: str, kind: str, label: str, embeddings: Embeddings, simulations: int, power: int, keep: Callable[..., None]
) -> None:
    """Run every cell of one test, kind of plan and length that `keep` does not have yet."""
    make_design, cell, null, planted = _TESTS[test]
    wanted = [(name, make, simulations) for name, make in null.items()]
    wanted += [(name, make, power) for name, make in planted.items() if power]
    steps, n_samples = LENGTHS[label]
    if kind == "uniform" and BATCH * int(steps[-1]) < n_samples:
        wanted = [one for one in wanted if one[0] != "exposure"]  # nothing is seen twice
    wanted = [one for one in wanted if not keep(f"{test} | {kind} | {label} | {one[0]}")]
    if not wanted:
        return
    plans = Plans(kind, label, embeddings)
    designs = [make_design(draw) for draw in plans.draws]
    for name, make, count in wanted:
        key = f"{test} | {kind} | {label} | {name}"
        started = time.perf_counter()
        rng = np.random.default_rng([617, *key.encode()])
        result = cell(plans, designs, make, count, rng)
        result["seconds"] = round(time.perf_counter() - started, 1)
        keep(key, result)
        print(f"{key}: {result}", flush=True)


class Store:
    """The results so far, one file, rewritten after each cell."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}

    def __call__(self, key: str, result: dict[str, Any] | None = None) -> bool:
        """Say whether a cell is there, or keep it."""
        if result is None:
            return key in self.cells
        self.cells[key] = result
        text = json.dumps(self.cells, indent=0, sort_keys=True) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically({self.path: lambda file: file.write_text(text)})
        return True


def table(cells: dict[str, dict[str, Any]]) -> str:
    """Return the share of rejections by situation and length, with the number of simulations below it."""
    lines = []
    for test, (_, _, null, planted) in _TESTS.items():
        for kind in KINDS:
            labels = [one for one in LENGTHS if any(key.startswith(f"{test} | {kind} | {one} |") for key in cells)]
            if not labels:
                continue
            lines += ["", f"{test}, {kind} plans: {_SHARES[test]}"]
            lines.append("".join(f"{one:>24}" for one in ("T", *labels)))
            for name in (*null, *planted):
                row = []
                for label in labels:
                    cell = cells.get(f"{test} | {kind} | {label} | {name}")
                    done = cell is not None and cell["simulations"]
                    row.append(f"{cell['rejected'] / done:.3f} ({done})" if cell and done else "-")
                lines.append("".join(f"{one:>24}" for one in (name[:24], *row)))
    return "\n".join(lines)


def embeddings_here() -> tuple[Embeddings, str]:
    """Return the paper's embeddings where they are, else generated ones of the same size."""
    file = GSM8K / "train_minilm.npy"
    if file.is_file():
        return Embeddings.read(file), "GSM8K, MiniLM"
    return Embeddings.from_array(clustered(PAPER_N, 384, 200)), "generated clusters"


def main() -> None:
    """Print the committed table, and run a few of its cells anew."""
    if RESULTS.is_file():
        print(table(json.loads(RESULTS.read_text())))
    embeddings, name = embeddings_here()
    print(f"\nanew, 200 simulations each, 300 steps, embeddings: {name}")
    for test in ("series", "matrix"):
        fresh: dict[str, dict[str, Any]] = {}

        def keep(key: str, result: dict[str, Any] | None = None, fresh: dict[str, Any] = fresh) -> bool:
            if result is not None:
                fresh[key] = result
            return result is not None

        measure(test, "sdo", "300", embeddings, 200, 200, keep)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=2000, help="of series, a cell (default: 2000)")
    parser.add_argument("--matrix-simulations", type=int, default=500, help="of matrices, a cell (default: 500)")
    parser.add_argument("--power", type=int, default=200, help="simulations of planted effects (default: 200)")
    parser.add_argument("--tests", nargs="+", choices=list(_TESTS), default=list(_TESTS))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["sdo", "uniform"])
    parser.add_argument("--lengths", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    matrix, _ = embeddings_here()
    store = Store(given.out)
    for label in given.lengths:
        for test in given.tests:
            count = given.matrix_simulations if test == "matrix" else given.simulations
            for kind in given.kinds:
                measure(test, kind, label, matrix, count, min(given.power, count), store)
    print(table(store.cells))
