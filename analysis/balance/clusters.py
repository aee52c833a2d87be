"""Clusters of questions: by k-means, or given by labels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.balance.duplicates import NOISE
from analysis.balance.kmeans import CLUSTERS, ITERATIONS, first_centers, lloyd, nearest
from sdo.checks import integer_array, whole_number
from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError, counted
from sdo.random_keys import MAX_SEED, raw_keys

_ROWS_PER_CENTER = 256  # rows that the centers are fitted on, per center


@dataclass(frozen=True, eq=False)
class Clustering:
    """Labels of N rows.

    Attributes
    ----------
    labels
        Shape ``(N,)``, int64; -1 is noise: rows without a direction, or what a given labeling leaves out.
    requested
        Clusters asked for, or None for given labels.
    iterations
        Of Lloyd's algorithm; 0 for given labels.
    notes
        What is unusual, in words: fewer clusters than asked for, labels without members, rows left out.
    source
        What they rest on, for provenance: ``method``, and the ``labels`` file; or ``embeddings``, ``k`` and ``seed``.
    """

    labels: NDArray[np.int64]
    requested: int | None
    iterations: int
    notes: tuple[str, ...] = ()
    source: Mapping[str, Any] = field(default_factory=lambda: {"method": "given labels"})

    @property
    def sizes(self) -> dict[int, int]:
        """Rows of each label, noise left out."""
        names, counts = np.unique(self.labels[self.labels >= 0], return_counts=True)
        return dict(zip(names.tolist(), counts.tolist(), strict=True))


def cluster(embeddings: Embeddings, k: int, *, seed: int = 0) -> Clustering:
    """Cluster unit rows by k-means (Lloyd 1982), with the same labels on every machine and thread count.

    Parameters
    ----------
    embeddings
        N rows.
    k
        Clusters wanted.
    seed
        0 … 2**64 - 1; decides the first centers.

    Returns
    -------
    Clustering
        Labels 0 … in canonical order: the largest cluster first, ties by the first member.

    Raises
    ------
    InputError
        If k is no whole number from 1 to the number of rows, the seed is out of range, or no row has a direction.

    Notes
    -----
    First centers are drawn by greedy k-means++ (Arthur and Vassilvitskii, SODA 2007) from at most 32·k distinct rows,
    one by one up to k = 512, beyond that several at once. Centers are fitted on at most 256·k rows, chosen at random,
    for at most 100 iterations; a center that loses all its rows moves to the row farthest from its own. Centers are
    rounded to multiples of 2**-24.

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.repeat(np.eye(3), [2, 4, 3], axis=0)
    >>> cluster(Embeddings.from_array(rows), 3).labels.tolist()
    [2, 2, 0, 0, 0, 0, 1, 1, 1]
    """
    k, seed = whole_number("number of clusters", k, None), whole_number("seed", seed, 0, MAX_SEED)
    if not 1 <= k <= len(embeddings):
        raise InputError(
            f"{counted(k, 'cluster')} of {counted(len(embeddings), 'row')}; expected 1 to {len(embeddings)}"
        )
    valid = np.flatnonzero(embeddings.valid)
    notes = []
    if len(valid) < len(embeddings):
        notes.append(f"rows with NaN or infinity, or zero, which count as noise: {len(embeddings) - len(valid)}")
    if not len(valid):
        raise InputError("no embedding row has a direction; expected finite, non-zero rows; fix: embed again")
    keys = raw_keys(seed, CLUSTERS, 0, len(embeddings))
    fitted = np.sort(valid[np.argsort(keys[valid], kind="stable")[: _ROWS_PER_CENTER * k]])
    rows = embeddings.unit[fitted].astype(np.float64)
    centers = first_centers(rows, k, seed)
    if len(centers) < k:
        notes.append(f"distinct rows: {len(centers)}, so {counted(len(centers), 'cluster')} instead of {k}")
    centers, iterations = lloyd(rows, centers)
    if iterations == ITERATIONS:
        notes.append(f"k-means stopped after {ITERATIONS} iterations, before its labels had settled")
    labels = np.full(len(embeddings), NOISE, dtype=np.int64)
    labels[valid] = nearest(embeddings.unit[valid], centers)[0]
    found = len(np.unique(labels[valid]))
    if found < len(centers):
        notes.append(f"clusters that ended empty and were dropped: {len(centers) - found}")
    source = {"method": "k-means", "embeddings": described_embeddings(embeddings), "k": k, "seed": seed}
    return Clustering(canonical(labels), k, iterations, tuple(notes), source)


def described_embeddings(embeddings: Embeddings) -> dict[str, Any]:
    """Return where embeddings were read from, None where they came from Python, and what tells them from others."""
    return {
        "path": embeddings.path,
        "fingerprint": embeddings.fingerprint,
        "rows": len(embeddings),
        "dim": embeddings.dim,
    }


def canonical(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number clusters anew: the largest first, ties by the first member; noise stays -1."""
    names, first, inverse, counts = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    order = [i for i in np.lexsort((first, -counts)) if names[i] != NOISE]
    number = np.full(len(names), NOISE, dtype=np.int64)
    number[order] = np.arange(len(order))
    return number[inverse.ravel()]


def read_labels(path: str | os.PathLike[str]) -> Clustering:
    """Read given clusters: a 1-D integer array in a ``.npy`` file, -1 for noise.

    Raises
    ------
    InputError
        If the file is missing, holds something else, or no row is in a cluster.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"labels {file}: no such file; expected a .npy file with one integer a row; fix: numpy.save")
    try:
        array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, OSError, OverflowError) as error:
        raise InputError(f"labels {file} is not a readable .npy file; expected one integer a row") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        came = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "an archive"
        raise InputError(f"labels {file} hold {came}; expected a 1-D array of integers, -1 for noise")
    return replace(given_labels(array, f"labels {file}"), source={"method": "given labels", "labels": os.fspath(path)})


def given_labels(labels: ArrayLike, what: str = "labels") -> Clustering:
    """Take clusters as they are; labels keep their numbers.

    Parameters
    ----------
    labels
        Shape ``(N,)``, integers of at least -1.
    what
        Named in errors.

    Raises
    ------
    InputError
        If labels are no integers (floats, booleans, masked), one is below -1, or all are noise.
    """
    array = integer_array(labels, what)
    if array.size and array.min() < NOISE:
        raise InputError(f"{what} hold {array.min()}; expected -1 (noise) or a cluster's number from 0")
    inside = np.unique(array[array >= 0])
    if not len(inside):
        raise InputError(f"{what} put no row into a cluster; expected at least one label from 0 up")
    missing = int(inside[-1]) + 1 - len(inside)
    # Labels may be any numbers; gaps are worth a word only where they are the exception.
    notes = (f"cluster numbers below {inside[-1]} without a member: {missing}",) if 0 < missing <= len(inside) else ()
    return Clustering(array, None, 0, notes)
