"""The baseline of all selectors: chance alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdo.checks import whole_number
from sdo.random_keys import MAX_SEED, SELECT, key_of
from sdo.selectors.selector import Candidates, Scores, check_keep, check_scope


class RandomSelect:
    """Keeps a random share of each step: the control of every selector that looks at samples.

    Parameters
    ----------
    keep
        Share of the candidates that is kept, above 0, at most 1.
    scope
        Among whom: each ``"micro_batch"``, or all of a process's in the ``"step"``.
    seed
        A sample's chance is a function of seed, step and sample id, the same on every machine.

    Raises
    ------
    InputError
        For options out of range.

    Examples
    --------
    >>> RandomSelect(keep=0.25).options
    {'keep': 0.25, 'scope': 'micro_batch', 'seed': 0}
    """

    name = "random"
    needs: frozenset[str] = frozenset()

    def __init__(self, keep: float, *, scope: str = "micro_batch", seed: int = 0) -> None:
        self.keep, self.scope = check_keep(keep), check_scope(scope)
        self.seed = whole_number("seed", seed, 0, MAX_SEED)
        self.options: dict[str, Any] = {"keep": self.keep, "scope": self.scope, "seed": self.seed}

    def __repr__(self) -> str:
        return f"RandomSelect({self.keep}, scope={self.scope!r}, seed={self.seed})"

    def score(self, candidates: Candidates) -> Scores:
        """Return a number from [0, 1) for each."""
        keys = [key_of(self.seed, SELECT, candidates.step, int(sample)) for sample in candidates.sample_ids]
        return Scores((np.array(keys, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def chosen(self, candidates: Candidates, kept: NDArray[np.bool_]) -> None:
        """Chance learns nothing."""

    def state(self) -> dict[str, Any]:
        """Return nothing: what is kept is a function of seed, step and id."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept."""
