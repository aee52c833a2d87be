"""The exposure rule: a rising threshold, the cold/hot split and the inverse-exposure draw."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from sdo.random_keys import exponentials


@dataclass(frozen=True, eq=False)
class Split:
    """The samples after an epoch, by how often they were seen.

    Attributes
    ----------
    threshold
        ``(e + 1) * delta_tau``.
    cold, hot
        Ascending sample indices: exposure below the threshold, and the rest.
    """

    threshold: float
    cold: NDArray[np.int64]
    hot: NDArray[np.int64]


def split_by_exposure(exposure: NDArray[np.int64], epoch: int, delta_tau: float) -> Split:
    """Split all samples after epoch ``epoch`` at the rising threshold.

    Parameters
    ----------
    exposure
        Shape ``(N,)``, the planned ledger u after the epoch.
    epoch
        Organizer epoch e, from 0.
    delta_tau
        The threshold's rise per epoch.

    Notes
    -----
    cold = {u < (e + 1) delta_tau}. The paper's prose on delta_tau 1 and 3 contradicts its re-entry argument; only
    this direction lets every frozen sample come back (SDO, arXiv 2607.27273).
    """
    threshold = (epoch + 1) * delta_tau
    cold = exposure < threshold
    return Split(threshold=threshold, cold=np.flatnonzero(cold), hot=np.flatnonzero(~cold))


def retained_count(retain: float, n_hot: int) -> int:
    """Return ``ceil(retain * n_hot)``, with ``retain`` read as the decimal that the user wrote.

    Binary floating point would make ``0.07 * 100`` a little more than 7, and its ceiling 8.
    """
    return math.ceil(Fraction(repr(float(retain))) * n_hot)


def draw_inverse_exposure(
    hot: NDArray[np.int64], exposure: NDArray[np.int64], keys: NDArray[np.uint64], count: int
) -> NDArray[np.int64]:
    """Draw ``count`` hot samples without replacement, each next one with probability proportional to 1/u.

    Parameters
    ----------
    hot
        Shape ``(h,)``, ascending sample indices.
    exposure
        Shape ``(h,)``, their exposures, at least 1.
    keys
        Shape ``(h,)``, one uniform 64-bit integer each.
    count
        How many, at most ``h``.

    Returns
    -------
    NDArray[np.int64]
        Shape ``(count,)``, ascending.

    Notes
    -----
    With E standard exponential, the order of E/w is that of successive draws with weights w (Efraimidis and Spirakis,
    "Weighted random sampling with a reservoir", 2006); w = 1/u gives the keys E u. Inclusion probabilities are
    therefore those of successive draws, not exactly proportional to 1/u.
    """
    arrival = exponentials(keys) * exposure.astype(np.float64)
    return np.sort(hot[np.lexsort((hot, arrival))[:count]])
