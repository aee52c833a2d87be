"""Structure-aware data organization (SDO) with its ablations."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args
from weakref import WeakSet

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdo.checks import number, shown, whole_number
from sdo.embeddings.matrix import Embeddings, as_embeddings
from sdo.embeddings.resolution import measure_resolution
from sdo.errors import InputError
from sdo.neighbors.candidates import CandidateLists, cut_to_members
from sdo.neighbors.exact import MISSING
from sdo.organizers.exposure import draw_inverse_exposure, retained_count, split_by_exposure
from sdo.organizers.plan import Plan, with_seed
from sdo.organizers.steps import EpochPlan, Layout, Steps
from sdo.organizers.walk import distance_to_anchor, fill, least_exposed, walk
from sdo.random_keys import HOT_DRAW, MAX_SEED, ORDER, RANDOM_NEIGHBORS, distinct_positions, order_by_keys, raw_keys

Visit = Literal["cover", "anchor"]
Graph = Literal["dynamic", "static"]
Locality = Literal["knn", "random", "shuffle"]
OnInvalid = Literal["raise", "isolate"]


class SDO:
    """Structure-aware data organization: batches of neighbors, exposure balanced over epochs.

    Parameters
    ----------
    embeddings
        Shape ``(N, d)``: a matrix or tensor, a path that :meth:`Embeddings.read` takes, or
        :class:`~sdo.embeddings.matrix.Embeddings`.
    k
        Neighbors that an anchor brings, K.
    delta_tau
        Rise of the exposure threshold per epoch.
    retain
        Share of the hot samples that stay in the next pool, drawn by inverse exposure; 0 to 1.
    visit
        ``"cover"``: a sample that was brought as a neighbor no longer anchors in this epoch; ``"anchor"``: every pool
        member anchors once.
    graph
        ``"dynamic"``: neighbors within the current pool; ``"static"``: neighbors over all samples, cut to the pool.
    locality
        ``"knn"``; ``"random"``: the same walk with random pool members as neighbors; ``"shuffle"``: no neighbors at
        all.
    exposure
        False keeps every sample in the pool for ever.
    on_invalid
        What to do with rows that hold NaN or infinity or are zero: ``"raise"``, or ``"isolate"`` them, so that they
        anchor alone and are nobody's neighbor.
    seed
        0 to 2**64 - 1.

    Raises
    ------
    InputError
        For options out of range and for embeddings that cannot be used.

    Notes
    -----
    After Structure-Aware Data Organization, arXiv 2607.27273. The plan is a pure function of embeddings, options, seed
    and batch size. Above 131,072 samples (``EXACT_LIMIT``), neighbors are approximate. Rows are rounded to
    multiples of 2**-24 for it. Where they are so nearly parallel that this decides who is a neighbor, 1 - cosine of
    neighbors below about 1e-5, making the first epoch warns, once for each :class:`~sdo.Embeddings`, and
    the plan's ``notes`` say how many neighbors are concerned.

    Examples
    --------
    >>> import numpy as np
    >>> from sdo import SDO
    >>> rows = np.eye(6, dtype=np.float32) + 0.5
    >>> plan = SDO(rows, k=2, seed=7).plan(batch_size=3)
    >>> sorted(set(plan.epoch(0).batches.ravel().tolist()))
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self,
        embeddings: Embeddings | ArrayLike | str | Path,
        *,
        k: int = 4,
        delta_tau: float = 2,
        retain: float = 0.2,
        visit: Visit = "cover",
        graph: Graph = "dynamic",
        locality: Locality = "knn",
        exposure: bool = True,
        on_invalid: OnInvalid = "raise",
        seed: int = 0,
    ) -> None:
        self.k = whole_number("k", k, 1)
        rise = number("delta_tau", delta_tau, 0, open_low=True)
        self.retain = float(number("retain", retain, 0, 1))
        _check_choice("visit", visit, Visit)
        _check_choice("graph", graph, Graph)
        _check_choice("locality", locality, Locality)
        _check_choice("on_invalid", on_invalid, OnInvalid)
        self.seed = whole_number("seed", seed, 0, MAX_SEED)
        if not isinstance(exposure, bool | np.bool_):
            raise InputError(f"exposure is {exposure!r}; expected True or False")
        self.embeddings: Embeddings = as_embeddings(embeddings)
        if on_invalid == "raise":
            self.embeddings.require_valid()
        self.n_samples = len(self.embeddings)
        # Plain numbers, whole ones as int: equal options give equal fingerprints and go into JSON.
        self.delta_tau = int(rise) if float(rise).is_integer() else rise
        self.visit = visit
        self.graph = graph
        self.locality = locality
        self.exposure = bool(exposure)
        self.on_invalid = on_invalid
        self._shared: dict[bytes, _Graphs] = {}

    @property
    def name(self) -> str:
        """``"sdo"``."""
        return "sdo"

    @property
    def options(self) -> dict[str, Any]:
        """All options, the seed among them."""
        names = (
            "k",
            "delta_tau",
            "retain",
            "visit",
            "graph",
            "locality",
            "exposure",
            "on_invalid",
            "seed",
        )
        return {name: getattr(self, name) for name in names}

    def with_seed(self, seed: int) -> SDO:
        """Return the same organizer with another seed, 0 to 2**64 - 1; neighbors that are known are shared."""
        return with_seed(self, seed)

    def plan(
        self,
        batch_size: int,
        rows: NDArray[np.int64] | None = None,
        *,
        layout: Layout = Layout(),
    ) -> Plan:
        """Bind the batch size.

        Parameters
        ----------
        batch_size
            Samples of one optimizer step over all ranks and accumulation, B.
        rows
            Shape ``(n,)``, integers: the samples that exist, where some of the embeddings' rows have none; all by
            default. A repeated one counts once. A mask is refused: ``numpy.flatnonzero(mask)`` gives its rows.
        layout
            How a step is cut into micro-batches; the plan does not depend on it.

        Raises
        ------
        InputError
            If B is not between 1 and the number of samples, or the rows are no row numbers.
        """
        return _SDOPlan(self, batch_size, rows, layout=layout)

    def _graphs(self, ids: NDArray[np.int64]) -> _Graphs:
        """What the plans over these samples share; that of the latest samples is kept."""
        key = b"" if len(ids) == self.n_samples else ids.tobytes()
        if key not in self._shared:
            unit, valid = self.embeddings.unit, self.embeddings.valid
            self._shared.clear()
            self._shared[key] = _Graphs(unit if not key else unit[ids], valid if not key else valid[ids])
        return self._shared[key]


@dataclass
class _Graphs:
    """What does not depend on the seed, so that plans drawn anew share it.

    Attributes
    ----------
    unit
        Shape ``(n, d)``, the embeddings of the plan's samples.
    valid
        Shape ``(n,)``, which of them have a direction.
    lists
        Each sample's nearest samples, or None until they are needed.
    whole
        Shape ``(n, k)``, the graph over all samples.
    note
        Set with it: where the grid does not tell neighbors apart, how far.
    """

    unit: NDArray[np.float32]
    valid: NDArray[np.bool_]
    lists: CandidateLists | None = None
    whole: NDArray[np.int64] | None = None
    note: str | None = None


# Whose nearly parallel rows were named already.
_WARNED: WeakSet[Embeddings] = WeakSet()


class _SDOPlan(Plan):
    """Epochs of the walk. Works on positions 0 … n-1 among ``ids``; keys are drawn by sample id."""

    version: ClassVar[int] = 1

    def __init__(self, organizer: SDO, batch_size: int, rows: NDArray[np.int64] | None, *, layout: Layout) -> None:
        super().__init__(organizer, batch_size, rows, layout=layout)
        self._sdo = organizer
        self._pool = np.arange(len(self.ids))
        self._graphs = organizer._graphs(self.ids)
        self._unit, self._valid = self._graphs.unit, self._graphs.valid

    @property
    def notes(self) -> tuple[str, ...]:
        """Whether rounding the embeddings decides neighbors; empty before the first epoch is made."""
        return () if self._graphs.note is None else (self._graphs.note,)

    def make_epoch(self, epoch: int, first_step: int, exposure: NDArray[np.int64]) -> EpochPlan:
        """Walk the pool, then split it for the next epoch; see :meth:`Plan.make_epoch`."""
        pool = self._pool
        keys = raw_keys(self._sdo.seed, ORDER, epoch, self._sdo.n_samples)[self.ids]
        order = order_by_keys(keys[pool], pool)
        graph = self._graph(epoch, pool)
        walked = walk(
            order,
            graph[np.searchsorted(pool, order)],
            len(self.ids),
            self.batch_size,
            cover=self._sdo.visit == "cover",
        )
        batches = walked.batches
        seen = exposure + np.bincount(batches.ravel(), minlength=len(self.ids))
        if len(walked.rest):
            # The ablations must not see the embeddings: there the anchors' random order breaks ties.
            if self._sdo.locality == "knn":
                tie = distance_to_anchor(self._unit, self._valid, pool, walked.last_anchor)
            else:
                tie = np.argsort(np.argsort(keys[pool], kind="stable")).astype(np.float64)
            last = fill(walked.rest, pool, seen[pool], self.batch_size, tie)
            batches = np.concatenate([batches, last[None]])
            seen[last] += 1
        split = split_by_exposure(seen, epoch, self._sdo.delta_tau) if self._sdo.exposure else None
        if split is not None:
            drawn = draw_inverse_exposure(
                split.hot,
                seen[split.hot],
                raw_keys(self._sdo.seed, HOT_DRAW, epoch, self._sdo.n_samples)[self.ids[split.hot]],
                retained_count(self._sdo.retain, len(split.hot)),
            )
            self._pool = self._filled(np.sort(np.concatenate([split.cold, drawn])), seen)
        return EpochPlan(
            organizer_epoch=epoch,
            first_step=first_step,
            steps=Steps.of(self.ids[batches]),
            pool=self.ids[pool],
            exposure=seen,
            figures={} if split is None else {"cold": len(split.cold), "hot": len(split.hot)},
        )

    def _filled(self, pool: NDArray[np.int64], exposure: NDArray[np.int64]) -> NDArray[np.int64]:
        """A pool below B takes the least exposed samples outside it, so that a batch can be formed."""
        if len(pool) >= self.batch_size:
            return pool
        outside = np.setdiff1d(np.arange(len(self.ids)), pool, assume_unique=True)
        return np.union1d(pool, least_exposed(outside, exposure[outside], self.batch_size - len(pool)))

    def _graph(self, epoch: int, pool: NDArray[np.int64]) -> NDArray[np.int64]:
        sdo = self._sdo
        if sdo.locality == "shuffle":
            return np.full((len(pool), 0), MISSING, dtype=np.int64)
        if sdo.locality == "random":
            k = self._lowered(len(pool) - 1, "pool members")
            draws = raw_keys(sdo.seed, RANDOM_NEIGHBORS, epoch, sdo.n_samples * k)
            keys = draws.reshape(sdo.n_samples, k)[self.ids[pool]]
            return pool[distinct_positions(keys, np.arange(len(pool)), len(pool))]
        if self._graphs.lists is None:
            self._graphs.lists = CandidateLists.build(self._unit, self._valid, sdo.k)
        lists = self._graphs.lists
        if sdo.graph == "dynamic" and len(pool) < len(self.ids):
            return lists.graph(pool, self._lowered(int(self._valid[pool].sum()) - 1, "usable pool members"))
        whole = self._graphs.whole
        if whole is None:
            what = "usable pool members" if sdo.graph == "dynamic" else "usable samples"
            k = self._lowered(int(self._valid.sum()) - 1, what)
            whole = self._graphs.whole = lists.graph(np.arange(len(self.ids)), k)
            self._note_resolution(whole)
        if len(pool) == len(self.ids):
            return whole
        inside = np.zeros(len(self.ids) + 1, dtype=np.bool_)
        inside[pool] = True
        cut, _ = cut_to_members(whole[pool].astype(np.int32), inside, whole.shape[1])
        return cut

    def _note_resolution(self, graph: NDArray[np.int64]) -> None:
        embeddings = self._sdo.embeddings
        found = measure_resolution(self._unit, self._valid, graph)
        self._graphs.note = found.note(embeddings.merged, len(embeddings))
        if self._graphs.note is not None and embeddings not in _WARNED:
            _WARNED.add(embeddings)
            warnings.warn(self._graphs.note, stacklevel=2)

    def _lowered(self, others: int, what: str) -> int:
        k = max(0, min(self._sdo.k, others))
        if k < self._sdo.k:
            warnings.warn(
                f"k = {self._sdo.k}, but a sample has only {max(0, others)} other {what}; using k = {k}",
                stacklevel=2,
            )
        return k


def _check_choice(name: str, value: object, choices: Any) -> None:
    known = get_args(choices)
    if not isinstance(value, str) or value not in known:
        raise InputError(f"{name} is {shown(value)}; expected one of {', '.join(known)}")
