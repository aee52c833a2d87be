"""The uniform baseline: random permutations end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdo.checks import whole_number
from sdo.embeddings.matrix import Embeddings, as_embeddings
from sdo.organizers.plan import Plan, with_seed
from sdo.organizers.steps import EpochPlan, Layout, Steps
from sdo.random_keys import MAX_SEED, ORDER, order_by_keys, raw_keys


class Uniform:
    """The baseline: random permutations end to end.

    Parameters
    ----------
    source
        The number of samples, or their embeddings, which the plan does not use but tables do.
    seed
        0 to 2**64 - 1.

    Notes
    -----
    The tail of a permutation that fills no batch is carried into the next one; a batch holds distinct samples.
    """

    def __init__(self, source: int | Embeddings | ArrayLike | str | Path, *, seed: int = 0) -> None:
        self.seed = whole_number("seed", seed, 0, MAX_SEED)
        self.embeddings: Embeddings | None
        if not isinstance(source, Embeddings | str | Path | list | tuple) and np.ndim(source) == 0:
            self.embeddings = None
            self.n_samples = whole_number("number of samples", source, 1)
        else:
            self.embeddings = as_embeddings(source)
            self.n_samples = len(self.embeddings)

    @property
    def name(self) -> str:
        """``"uniform"``."""
        return "uniform"

    @property
    def options(self) -> dict[str, Any]:
        """The seed."""
        return {"seed": self.seed}

    def with_seed(self, seed: int) -> Uniform:
        """Return the same organizer with another seed, 0 to 2**64 - 1."""
        return with_seed(self, seed)

    def plan(
        self,
        batch_size: int,
        rows: NDArray[np.int64] | None = None,
        *,
        layout: Layout = Layout(),
    ) -> Plan:
        """Bind the batch size; see :meth:`SDO.plan`."""
        return _UniformPlan(self, batch_size, rows, layout=layout)


class _UniformPlan(Plan):
    """Permutations end to end; epoch e holds the batches that permutation e completes."""

    version: ClassVar[int] = 1

    def __init__(self, organizer: Uniform, batch_size: int, rows: NDArray[np.int64] | None, *, layout: Layout) -> None:
        super().__init__(organizer, batch_size, rows, layout=layout)
        self._uniform = organizer
        self._carried = np.empty(0, dtype=np.int64)

    def make_epoch(self, epoch: int, first_step: int, exposure: NDArray[np.int64]) -> EpochPlan:
        """Cut the next permutation behind the tail of the one before; see :meth:`Plan.make_epoch`."""
        everyone = np.arange(len(self.ids))
        keys = raw_keys(self._uniform.seed, ORDER, epoch, self._uniform.n_samples)[self.ids]
        permutation = order_by_keys(keys, everyone)
        # The first batch begins with the carried tail; a sample that the permutation repeats there waits for the next.
        repeated = np.isin(permutation, self._carried)
        fresh = permutation[~repeated][: self.batch_size - len(self._carried)]
        left = permutation[~np.isin(permutation, fresh)]
        stream = np.concatenate([self._carried, fresh, left])
        full = len(stream) - len(stream) % self.batch_size
        self._carried = stream[full:]
        batches = stream[:full].reshape(-1, self.batch_size)
        return EpochPlan(
            organizer_epoch=epoch,
            first_step=first_step,
            steps=Steps.of(self.ids[batches]),
            pool=self.ids,
            exposure=exposure + np.bincount(batches.ravel(), minlength=len(self.ids)),
        )
