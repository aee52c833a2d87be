"""Text to embeddings: latent semantic analysis (LSA), which needs no model, no GPU and no network.

LSA is TF-IDF followed by a truncated singular value decomposition (Deerwester et al. 1990, "Indexing by
latent semantic analysis"); the decomposition is the randomised one of Halko, Martinsson and Tropp (2011).
scikit-learn is loaded when :func:`lsa` runs, not before.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from sdo.checks import whole_number
from sdo.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Every run of letters or digits is a term. scikit-learn's default drops single characters, and with them the
# single digits that arithmetic is made of.
_TOKEN = r"(?u)\b\w+\b"  # noqa: S105 - a token pattern, not a secret
# Only the most frequent terms are kept: the decomposition holds terms x dim float64 numbers, here 200 MB at
# dim 256.
_MAX_TERMS = 100_000
_MAX_SEED = 2**32 - 1
# The fit holds all texts and their sparse weights in memory, so it cannot stream. With word pairs that hardly
# repeat it took 0.9 GB and 20 bytes a character (measured at 4.8 and 14 million); this is about 5 GB, and sdo
# embed refuses more.
LSA_MAX_CHARACTERS = 200_000_000


def lsa(texts: Sequence[str], *, dim: int = 256, seed: int = 0) -> NDArray[np.float32]:
    """Embed texts by latent semantic analysis.

    Terms are lower-cased words and pairs of neighboring words, the 100,000 most frequent at most. Weights
    are ``(1 + ln count) * idf``, rows have unit length before and after the decomposition.

    Parameters
    ----------
    texts
        N texts, in the order in which the rows are wanted.
    dim
        Wanted number of columns. Lowered, with a warning, to what the texts can carry: the smaller of the
        number of distinct documents and the number of distinct terms.
    seed
        Seed of the randomised decomposition, 0 to 2**32 - 1.

    Returns
    -------
    NDArray[np.float32], shape (N, min(dim, feasible))
        Rows of unit Euclidean length. A text in which no known term occurs, or none that the kept dimensions
        carry, has a zero row; a warning says how many there are and :func:`zero_rows` which. In each column
        the entry of largest magnitude is positive, so that signs do not depend on the library. The same
        texts, options and seed give the same matrix on one machine; other library versions may differ in the
        last bits, so keep the file rather than the recipe.

    Raises
    ------
    InputError
        If an option is out of range, a text is not a string, or fewer than two distinct documents are left.

    Examples
    --------
    >>> rows = lsa(["red apples", "green apples", "fast trains"], dim=2)
    >>> rows.shape
    (3, 2)
    """
    _check_options(texts, dim, seed)
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), token_pattern=_TOKEN, max_features=_MAX_TERMS)
    # A vectorizer that finds no term at all raises; the check on distinct documents below would say it
    # better.
    if not any(map(vectorizer.build_analyzer(), texts)):
        raise InputError(f"no words in the texts (rows: {len(texts)}); LSA needs at least two distinct documents")
    weights = vectorizer.fit_transform(texts)
    distinct = _distinct_documents(weights)
    if distinct < 2:
        raise InputError(
            f"the texts hold a single distinct document (rows: {len(texts)}); LSA needs at least two "
            "distinct documents; check that the column is the one with the texts"
        )
    feasible = min(distinct, weights.shape[1])
    if dim > feasible:
        warnings.warn(
            f"dim lowered from {dim} to {feasible}: {distinct} distinct documents with {weights.shape[1]} "
            "distinct terms carry no more",
            UserWarning,
            stacklevel=2,
        )
    svd = TruncatedSVD(min(dim, feasible), algorithm="randomized", random_state=seed)
    rows = _unit_rows(svd.fit_transform(weights), np.asarray(weights.getnnz(axis=1)) == 0)
    empty = zero_rows(rows).size
    if empty:
        warnings.warn(
            f"{empty} of {len(texts)} texts hold no known term, or none that the {rows.shape[1]} dimensions "
            "carry; their rows are zero and have no cosine",
            UserWarning,
            stacklevel=2,
        )
    return rows


def zero_rows(embeddings: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Return the indices of the rows that are zero throughout, ascending.

    Parameters
    ----------
    embeddings
        Matrix of shape (N, d).

    Returns
    -------
    NDArray[np.int64], shape (n_zero,)
        Rows of texts without a known term; an organizer refuses or isolates them.
    """
    return np.flatnonzero(~embeddings.any(axis=1)).astype(np.int64)


def _check_options(texts: Sequence[str], dim: int, seed: int) -> None:
    """Refuse options and texts of a wrong type or range."""
    whole_number("dim", dim, 1)
    whole_number("seed", seed, 0, _MAX_SEED)
    if isinstance(texts, str):
        raise InputError("texts is one string, expected a sequence of strings")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text {index} is {text!r:.60} ({type(text).__name__}), expected a string")


def _distinct_documents(weights: Any) -> int:
    """Count the distinct rows of a CSR matrix with sorted indices, rows without a term left out."""
    bounds = weights.indptr
    return len({(weights.indices[a:b].tobytes(), weights.data[a:b].tobytes()) for a, b in pairwise(bounds) if b > a})


def _unit_rows(scores: NDArray[np.float64], empty: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Fix the columns' signs and scale the rows to unit length; rows marked empty become zero."""
    largest = np.abs(scores).argmax(axis=0)
    signs = np.where(scores[largest, np.arange(scores.shape[1])] < 0, -1.0, 1.0)
    norms = np.linalg.norm(scores, axis=1, keepdims=True)
    # A document with terms whose projection is rounding noise has no direction: it counts as empty too.
    blank = empty[:, None] | (norms < 1e-12)
    unit = np.where(blank, 0.0, scores * signs / np.where(blank, 1.0, norms))
    rows: NDArray[np.float32] = unit.astype(np.float32)
    return rows
