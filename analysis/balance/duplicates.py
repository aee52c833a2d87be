"""Questions that are the same, or the same reworded: exact and near duplicates within clusters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from sdo.checks import integer_array, number
from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError

NOISE = -1  # the label of rows that are in no cluster
NEAR_DUPLICATE = 0.95  # cosine: at 0.93 GSM8K's questions share a pattern, at 0.95 they are the same question reworded

_BLOCK = 2**20  # numbers in a block of cosines: 8 MiB of float64


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
    return digests(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass") for text in texts)


def digests(keys: Iterable[bytes]) -> NDArray[Any]:
    """Return 16 bytes for each key, which tell it from all others."""
    return np.frombuffer(b"".join(hashlib.blake2b(key, digest_size=16).digest() for key in keys), dtype="S16")


def _row_digests(embeddings: Embeddings) -> NDArray[Any]:
    rows = embeddings.unit + np.float32(0)  # -0.0 becomes 0.0
    found = digests(row.tobytes() for row in rows).copy()
    alone = np.flatnonzero(~embeddings.valid)
    found[alone] = [f"row {i}".encode() for i in alone]
    return found
