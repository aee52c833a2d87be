"""Clusters of questions: k-means whose labels are the same on every machine, given labels, and duplicates.

scikit-learn's and faiss' k-means sum floating-point numbers in an order that depends on threads and processor, so that
a question between two centres may fall to either. Here rows and centres are multiples of 2**-24: products, sums and
distances are then exact in float64, in any order, whichever library computes them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.csgraph import connected_components

from sdo.checks import integer_array, number, whole_number
from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError, counted
from sdo.neighbors.exact import exact_dots
from sdo.random_keys import MAX_SEED, exponentials, raw_keys

NOISE = -1
NEAR_DUPLICATE = 0.95  # cosine: at 0.93 GSM8K's questions share a pattern, at 0.95 they are the same question reworded

_CLUSTERS = 11  # the use of sdo.random_keys' random numbers
_ROUNDS = 512  # at most, in which the first centres are drawn
_ROWS_TO_START = 32  # rows that the first centres are drawn from, per centre
_COARSE = 2.0**28  # squared distances are at most 4: below 2**23 of them sum exactly
_ITERATIONS = 100
_ROWS_PER_CENTRE = 256  # rows that the centres are fitted on, per centre
_BLOCK = 2**20  # numbers in a block of distances: 8 MiB of float64
_FEW_PAIRS = 32  # below one pair in so many, single exact products are faster than a whole exact matrix product
_GRID = 2.0**24


@dataclass(frozen=True, eq=False)
class Clustering:
    """Labels of N rows.

    Attributes
    ----------
    labels
        Shape ``(N,)``, int64; -1 is noise: rows without a direction, or what a given labelling leaves out.
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
        0 … 2**64 - 1; decides the first centres.

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
    First centres are drawn by greedy k-means++ (Arthur and Vassilvitskii, SODA 2007) from at most 32·k distinct rows,
    one by one up to k = 512, beyond that several at once. Centres are fitted on at most 256·k rows, chosen at random,
    for at most 100 iterations; a centre that loses all its rows moves to the row farthest from its own. Centres are
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
    keys = raw_keys(seed, _CLUSTERS, 0, len(embeddings))
    fitted = np.sort(valid[np.argsort(keys[valid], kind="stable")[: _ROWS_PER_CENTRE * k]])
    rows = embeddings.unit[fitted].astype(np.float64)
    centres = _first_centres(rows, k, seed)
    if len(centres) < k:
        notes.append(f"distinct rows: {len(centres)}, so {counted(len(centres), 'cluster')} instead of {k}")
    centres, iterations = _lloyd(rows, centres)
    if iterations == _ITERATIONS:
        notes.append(f"k-means stopped after {_ITERATIONS} iterations, before its labels had settled")
    labels = np.full(len(embeddings), NOISE, dtype=np.int64)
    labels[valid] = _nearest(embeddings.unit[valid], centres)[0]
    found = len(np.unique(labels[valid]))
    if found < len(centres):
        notes.append(f"clusters that ended empty and were dropped: {len(centres) - found}")
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


def duplicate_groups(
    labels: NDArray[np.int64],
    *,
    embeddings: Embeddings | None = None,
    text_keys: NDArray[Any] | None = None,
    threshold: float = NEAR_DUPLICATE,
) -> NDArray[np.int64]:
    """Group exact and near duplicates within clusters.

    Parameters
    ----------
    labels
        Shape ``(N,)``; rows of noise stay alone.
    embeddings
        N rows: those of one cluster whose cosine is at least `threshold` belong together, and so do their duplicates.
    text_keys
        Shape ``(N,)``, see `text_keys`: rows of one cluster with equal keys belong together.
    threshold
        Above 1 means exact duplicates only.

    Returns
    -------
    ndarray
        Shape ``(N,)``, int64: the first row of each row's group. Across clusters nothing is grouped: such duplicates
        make clusters more alike, which no test mistakes for a difference.
    """
    labels, threshold = integer_array(labels, "labels", low=NOISE), number("threshold", threshold, -1)
    for name, there in (("embeddings", embeddings), ("text keys", text_keys)):
        if there is not None and len(there) != len(labels):
            raise InputError(f"there are {len(there)} {name} and {len(labels)} labels; expected one of each a row")
    first = np.arange(len(labels))
    if text_keys is not None:
        first = _join_equal(first, labels, text_keys)
    if embeddings is not None:
        first = _join_equal(first, labels, _row_digests(embeddings))
        if threshold <= 1:
            first = _join_near(first, labels, embeddings, threshold)
    return first


def _join_equal(first: NDArray[np.int64], labels: NDArray[np.int64], keys: NDArray[Any]) -> NDArray[np.int64]:
    """Join the groups of rows that have the same key in the same cluster."""
    order = np.lexsort((keys, labels))
    same = (labels[order][1:] == labels[order][:-1]) & (keys[order][1:] == keys[order][:-1]) & (labels[order][1:] >= 0)
    return _join(first, order[:-1][same], order[1:][same])


def _join_near(
    first: NDArray[np.int64], labels: NDArray[np.int64], embeddings: Embeddings, threshold: float
) -> NDArray[np.int64]:
    """Join the groups of rows of one cluster whose cosine is at least the threshold."""
    first = first.copy()
    order = np.argsort(labels, kind="stable")
    order = order[labels[order] >= 0]
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        rows = embeddings.unit[members].astype(np.float64)
        own = np.searchsorted(members, first[members])  # members ascend, and hold the first row of each group
        block = max(1, _BLOCK // max(1, len(members)))
        for start in range(0, len(members), block):
            # Exact, so that no machine sees another duplicate; squared norms are 1 but for rounding.
            near = rows[start : start + block] @ rows.T >= threshold
            one, other = np.nonzero(near & (own[start : start + block, None] != own))
            if len(one):
                own = _join(own, one + start, other)
        first[members] = members[own]
    return first


def _join(first: NDArray[np.int64], one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """Join groups, given by (n,) their first rows, that (m,) pairs of rows connect."""
    n = len(first)
    ends = np.concatenate([np.arange(n), one]), np.concatenate([first, other])
    graph = sp.coo_array((np.ones(len(ends[0]), dtype=np.int8), ends), shape=(n, n))
    component = connected_components(graph, directed=False)[1]
    return np.asarray(np.unique(component, return_index=True)[1][component], dtype=np.int64)


def text_keys(texts: Iterable[str]) -> NDArray[Any]:
    """Return a 16-byte key of each text, the same for texts that agree but for case and white space."""
    return _digests(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass") for text in texts)


def _digests(keys: Iterable[bytes]) -> NDArray[Any]:
    return np.frombuffer(b"".join(hashlib.blake2b(key, digest_size=16).digest() for key in keys), dtype="S16")


def _row_digests(embeddings: Embeddings) -> NDArray[Any]:
    rows = embeddings.unit + np.float32(0)  # -0.0 becomes 0.0
    digests = _digests(row.tobytes() for row in rows).copy()
    alone = np.flatnonzero(~embeddings.valid)
    digests[alone] = [f"row {i}".encode() for i in alone]
    return digests


def _first_centres(rows: NDArray[np.float64], k: int, seed: int) -> NDArray[np.float64]:
    """Draw k of the distinct rows, or all if there are fewer.

    Of a handful of rows drawn with probability proportional to the squared distance to the centres so far, the one that
    leaves the least distance becomes a centre. Successive weighted draws without replacement are the smallest of
    exponential variates divided by their weights.
    """
    distinct = np.unique(_digests(row.tobytes() for row in rows), return_index=True)[1]
    candidates = rows[np.sort(distinct)[: max(k, _ROWS_TO_START * k)]]
    if len(candidates) <= k:
        return candidates
    pairs = _Pairs(candidates)
    waiting = exponentials(raw_keys(seed, _CLUSTERS, 1, len(candidates)))
    chosen = [int(waiting.argmin())]
    squared = np.full(len(candidates), np.inf)
    pairs.shorten(squared, np.array(chosen))
    at_once, trials = -(-k // _ROUNDS), 2 + (k - 1).bit_length()
    turn = 1
    while len(chosen) < k:
        turn += 1
        wanted = min(at_once, k - len(chosen))
        waiting = exponentials(raw_keys(seed, _CLUSTERS, turn, len(candidates)))
        free = np.flatnonzero(squared > 0)
        drawn = free[np.argsort(waiting[free] / squared[free], kind="stable")[: trials * wanted]]
        gain = np.zeros(len(drawn))
        for row, column, away in pairs.nearer(squared, drawn):
            # On a coarse grid sums are exact, so that every machine finds the same largest one.
            less = np.rint(squared[row] * _COARSE) - np.rint(away * _COARSE)
            gain += np.bincount(column, less, len(drawn))
        groups = np.array_split(np.arange(len(drawn)), wanted)
        winners = drawn[[group[gain[group].argmax()] for group in groups]]
        chosen += winners.tolist()
        pairs.shorten(squared, winners)
    return np.asarray(candidates[np.sort(chosen)])


class _Pairs:
    """Exact squared distances between (n, d) rows, of which products in float32 say which matter."""

    def __init__(self, rows: NDArray[np.float64]) -> None:
        self.rows = rows
        self.narrow = rows.astype(np.float32)
        self.own = _square_lengths(rows)

    def nearer(
        self, squared: NDArray[np.float64], others: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]]:
        """Yield the pairs of a row and one of the others, by position, less than `squared` apart, and how far."""
        centres, length = self.rows[others], self.own[others]
        # Whatever is nearer has a product above this.
        least = (self.own + length.min() - squared) / 2 - _product_error(self.own, length, self.rows.shape[1])
        narrow_least = least.astype(np.float32)
        block = max(1, _BLOCK // len(others))
        for start in range(0, len(self.rows), block):
            part = slice(start, start + block)
            products = self.narrow[part] @ self.narrow[others].T
            row, column = np.divmod(np.flatnonzero(products >= narrow_least[part, None]), len(others))
            if len(row) * _FEW_PAIRS < products.size:
                dots = exact_dots(self.rows, row + start, centres, column)
            else:
                dots = (self.rows[part] @ centres.T)[row, column]
            row += start
            away = self.own[row] + length[column] - 2.0 * dots
            inside = away < squared[row]
            yield row[inside], column[inside], away[inside]

    def shorten(self, squared: NDArray[np.float64], others: NDArray[np.int64]) -> None:
        """Lower `squared`, in place, to the distances from the others where those are less."""
        for row, _, away in self.nearer(squared, others):
            np.minimum.at(squared, row, away)


def _square_lengths(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.einsum("ij,ij->i", rows, rows))


def _product_error(left: NDArray[np.float64], right: NDArray[np.float64], d: int) -> float:
    """Return by how much a float32 product of two rows of d entries errs at most, rounding the rows included.

    `left` and `right` hold squared lengths; see `sdo.neighbors.exact.error_bound`.
    """
    return float(1.01 * (d + 4) * 2.0**-24 * np.sqrt(left.max() * right.max()))


def _nearest(
    rows: NDArray[Any], centres: NDArray[np.float64], some: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the nearest centre of each row, or of some, ties to the lower, and the squared distance; all exact."""
    n = len(rows) if some is None else len(some)
    label = np.empty(n, dtype=np.int64)
    squared = np.empty(n)
    length = _square_lengths(centres)
    narrow, narrow_length = centres.astype(np.float32), length.astype(np.float32)
    block = max(1, _BLOCK // max(len(centres), rows.shape[1]))
    for start in range(0, n, block):
        stop = min(start + block, n)
        part = rows[start:stop] if some is None else rows[some[start:stop]]
        away = part.astype(np.float32) @ narrow.T
        part = part.astype(np.float64)
        own = _square_lengths(part)
        away *= -2
        away += narrow_length
        # The least and another may both err, by twice the product's error and the rounding of sums.
        slack = np.float32(4 * (_product_error(own, length, rows.shape[1]) + 2.0**-22 * length.max()))
        row, column = np.divmod(np.flatnonzero(away <= away.min(axis=1)[:, None] + slack), len(centres))
        if len(row) * _FEW_PAIRS < away.size:
            distance = length[column] - 2.0 * exact_dots(part, row, centres, column)
            # Rows ascend, and within them centres: of the least of a row the first comes first.
            order = np.lexsort((distance, row))
            best = order[np.flatnonzero(np.diff(row, prepend=-1))]
            label[start:stop], squared[start:stop] = column[best], own + distance[best]
        else:
            exact = length - 2.0 * (part @ centres.T)
            first = exact.argmin(axis=1)
            label[start:stop], squared[start:stop] = first, own + exact[np.arange(len(part)), first]
    return label, squared


def _lloyd(rows: NDArray[np.float64], centres: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """Move centres to the means of their rows until no label changes; centres, and how often they moved."""
    before = np.full(len(rows), NOISE)
    own = _square_lengths(rows)
    label, squared = _nearest(rows, centres)
    for iteration in range(_ITERATIONS):
        counts = np.bincount(label, minlength=len(centres))
        empty = np.flatnonzero(counts == 0)
        if len(empty):
            far = np.argsort(-squared, kind="stable")[: len(empty)]
            label[far] = empty
            squared[far] = -np.inf  # maybe not the nearest centre: compared with all next time
            counts = np.bincount(label, minlength=len(centres))
        if np.array_equal(label, before):
            return centres, iteration
        before = label.copy()
        order = np.argsort(label, kind="stable")
        there = np.flatnonzero(counts)
        # Sums of multiples of 2**-24 are exact below 2**29 rows, in any order.
        sums = np.add.reduceat(rows[order], np.searchsorted(label[order], there), axis=0)
        last, centres = centres, centres.copy()
        centres[there] = np.rint(sums / counts[there, None] * _GRID) / _GRID
        if iteration + 1 < _ITERATIONS:
            _follow(rows, own, centres, np.flatnonzero((centres != last).any(axis=1)), label, squared)
    return centres, _ITERATIONS


def _follow(
    rows: NDArray[np.float64],
    own: NDArray[np.float64],
    centres: NDArray[np.float64],
    moved: NDArray[np.int64],
    label: NDArray[np.int64],
    squared: NDArray[np.float64],
) -> None:
    """Bring each row's nearest centre, and the squared distance to it, up to date in place, after some centres moved.

    Where a row's own centre is no farther than before, no centre that stayed can have become its nearest, and the row
    is compared with those that moved alone; else with all. Late iterations move few centres.
    """
    going = np.zeros(len(centres), dtype=np.bool_)
    going[moved] = True
    with_it = np.flatnonzero(going[label] | np.isneginf(squared))
    dots = exact_dots(rows, with_it, centres, label[with_it])
    now = own[with_it] + _square_lengths(centres)[label[with_it]] - 2.0 * dots
    left = np.zeros(len(rows), dtype=np.bool_)
    left[with_it] = now > squared[with_it]
    squared[with_it] = now
    if len(moved):
        others = np.flatnonzero(~left)
        nearest, away = _nearest(rows, centres[moved], others)
        nearest = moved[nearest]
        better = (away < squared[others]) | ((away == squared[others]) & (nearest < label[others]))
        label[others[better]], squared[others[better]] = nearest[better], away[better]
    alone = np.flatnonzero(left)
    label[alone], squared[alone] = _nearest(rows, centres, alone)
