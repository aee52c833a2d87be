"""What a cluster is about: keywords that set it apart, and prompts from its middle."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.balance.duplicates import text_keys
from sdo.checks import integer_array
from sdo.embeddings.matrix import Embeddings

KEPT_CHARACTERS = 2000  # of a prompt, for keywords and examples
SHOWN_CHARACTERS = 300
_TEXTS_PER_CLUSTER = 100  # that keywords are taken from
_WORD = (
    r"(?u)\b[^\W\d_][\w'’-]{1,29}\b"  # begins with a letter; a script without spaces gives no words of 1,000 letters
)
_GRID = 2.0**24


@dataclass(frozen=True, eq=False)
class Prompts:
    """The texts of N rows, cut, and keys of the whole texts for finding duplicates.

    Attributes
    ----------
    texts
        N texts of at most 2,000 characters.
    keys
        Shape ``(N,)``, as `text_keys` returns them.
    """

    texts: list[str]
    keys: NDArray[Any]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Prompts:
        """Take texts in, one after the other; long ones are not kept whole."""
        kept: list[str] = []

        def each() -> Iterable[str]:
            for text in texts:
                kept.append(text[:KEPT_CHARACTERS])
                yield text

        keys = text_keys(each())
        return cls(kept, keys)

    def take(self, rows: NDArray[np.int64]) -> Prompts:
        """Return the prompts of the given rows, in that order."""
        rows = integer_array(rows, "rows", low=0, high=len(self.texts) - 1)
        return Prompts([self.texts[i] for i in rows.tolist()], self.keys[rows])


def shown_text(text: str, longest: int = SHOWN_CHARACTERS) -> str:
    """Return text as one line, cut, without control characters, lone surrogates and overrides of the direction."""
    line = " ".join("".join(c for c in text[: 8 * longest] if _harmless(c)).split())
    return line if len(line) <= longest and len(text) <= 8 * longest else line[: longest - 1] + "…"


def _harmless(character: str) -> bool:
    if character in "\n\r\t":
        return True
    overrides = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return character not in overrides and unicodedata.category(character) not in ("Cc", "Cs")


def keywords(texts: Sequence[str], labels: NDArray[np.int64], *, top: int = 5) -> dict[int, list[str]]:
    """Return the words that set each cluster apart: the highest TF-IDF, a cluster's prompts taken as one document.

    Parameters
    ----------
    texts
        N texts.
    labels
        Shape ``(N,)``, clusters; -1 is left out.
    top
        Words a cluster.

    Returns
    -------
    dict
        Label to at most `top` words, best first; none where a cluster's prompts hold no word of two letters besides
        English function words. Of a cluster the first 100 prompts are read.
    """
    from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer

    names, cluster = np.unique(labels[labels >= 0], return_inverse=True)
    rows = np.flatnonzero(labels >= 0)
    order = np.argsort(cluster, kind="stable")
    place = np.arange(len(order)) - np.searchsorted(cluster[order], cluster[order])
    read = order[place < _TEXTS_PER_CLUSTER]
    documents: list[list[str]] = [[] for _ in names]
    for position in read.tolist():
        documents[cluster[position]].append(texts[rows[position]])
    found: dict[int, list[str]] = {int(name): [] for name in names}
    vectorizer = CountVectorizer(token_pattern=_WORD, stop_words="english")
    try:
        counts = vectorizer.fit_transform("\n".join(one) for one in documents)
    except ValueError:  # no words at all
        return found
    weights = TfidfTransformer(sublinear_tf=True).fit_transform(counts).tocsr()
    words = vectorizer.get_feature_names_out()
    for position, name in enumerate(names.tolist()):
        part = slice(weights.indptr[position], weights.indptr[position + 1])
        column, weight = weights.indices[part], weights.data[part]
        # Columns are in alphabetical order: equal weights come in that order too.
        found[name] = [str(words[i]) for i in column[np.lexsort((column, -weight))[:top]]]
    return found


def central_rows(
    labels: NDArray[np.int64], embeddings: Embeddings | None = None, *, count: int = 3
) -> dict[int, list[int]]:
    """Return the rows nearest to the mean of their cluster, or its first rows without embeddings.

    Parameters
    ----------
    labels
        Shape ``(N,)``; -1 is left out.
    embeddings
        N rows.
    count
        Rows a cluster, at most.
    """
    order = np.argsort(labels, kind="stable")
    order = order[labels[order] >= 0]
    central: dict[int, list[int]] = {}
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        if not len(members):
            continue
        chosen = members[:count]
        if embeddings is not None:
            rows = embeddings.unit[members].astype(np.float64)
            middle = np.rint(rows.mean(axis=0) * _GRID) / _GRID
            chosen = members[np.argsort(-(rows @ middle), kind="stable")[:count]]
        central[int(labels[members[0]])] = chosen.tolist()
    return central
