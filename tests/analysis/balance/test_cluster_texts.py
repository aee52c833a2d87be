import math
from collections import Counter

import numpy as np
import pytest

from analysis import Prompts
from analysis.balance.cluster_texts import central_rows, keywords, shown_text
from sdo.embeddings.matrix import Embeddings


def slow_tfidf(documents, word):
    """sublinear tf times smooth idf, by the formulas of scikit-learn's manual; rows are not normalized."""
    counts = [Counter(document.split()) for document in documents]
    held = sum(word in count for count in counts)
    idf = math.log((1 + len(documents)) / (1 + held)) + 1
    return [(1 + math.log(count[word])) * idf if count[word] else 0.0 for count in counts]


def test_keywords_are_ordered_by_tfidf():
    rng = np.random.default_rng(0)
    vocabulary = ["ducks", "trains", "eggs", "miles", "apples", "speed", "market", "station"]
    texts = [" ".join(rng.choice(vocabulary, 12)) for _ in range(40)]
    labels = rng.integers(0, 4, 40)
    documents = [" ".join(t for t, c in zip(texts, labels, strict=True) if c == k) for k in range(4)]
    found = keywords(texts, labels, top=8)
    weight = {word: slow_tfidf(documents, word) for word in vocabulary}
    for k in range(4):
        there = [word for word in vocabulary if weight[word][k] > 0]
        assert found[k] == sorted(there, key=lambda word: (-weight[word][k], word))


def test_keywords_of_unusual_texts():
    texts = ["the a of", "12 34", "", "naïve café café", "العربية لغة", "$x$ <b>bold</b>", "noise words here"]
    found = keywords(texts, np.array([0, 0, 1, 2, 3, 5, -1]))
    assert found[0] == []
    assert found[1] == []
    assert found[2] == ["café", "naïve"]
    assert set(found[3]) == {"العربية", "لغة"}
    assert found[5] == ["bold"]
    assert set(found) == {0, 1, 2, 3, 5}
    assert keywords(["1", "2"], np.array([0, 1])) == {0: [], 1: []}


def test_keywords_read_the_first_hundred_texts_of_a_cluster():
    texts = ["common"] * 100 + ["late"] * 100
    assert keywords(texts, np.zeros(200, dtype=int)) == {0: ["common"]}


def test_prompts_keep_the_beginning_and_tell_the_whole_apart():
    prompts = Prompts.of(iter(["x" * 3000 + "a", "x" * 3000 + "b", "X" * 3000 + "A "]))
    assert [len(text) for text in prompts.texts] == [2000] * 3
    assert prompts.keys[0] != prompts.keys[1]
    assert prompts.keys[0] == prompts.keys[2]
    taken = prompts.take(np.array([2, 0]))
    assert taken.texts == [prompts.texts[2], prompts.texts[0]]
    assert taken.keys.tolist() == [prompts.keys[2], prompts.keys[0]]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n\tb  c", "a b c"),
        ("x" * 301, "x" * 299 + "…"),
        ("x" * 300, "x" * 300),
        ("a\x1b[31mred\x00", "a[31mred"),
        ("\u202eevil\ud800", "evil"),
        ("שלום <b>$x$", "שלום <b>$x$"),
        ("y" * 10**6, "y" * 299 + "…"),
        (" " * 10**6 + "z", "…"),
    ],
)
def test_shown_text(text, shown):
    assert shown_text(text) == shown


def test_central_rows_are_nearest_to_the_mean():
    rng = np.random.default_rng(2)
    embeddings = Embeddings.from_array(rng.standard_normal((30, 5)))
    labels = rng.integers(-1, 4, 30)
    found = central_rows(labels, embeddings)
    assert set(found) == set(labels[labels >= 0].tolist())
    for c, rows in found.items():
        members = np.flatnonzero(labels == c)
        mean = embeddings.unit[members].mean(axis=0)
        assert rows == sorted(members.tolist(), key=lambda i: -float(embeddings.unit[i] @ mean))[:3]
    first = central_rows(labels)
    assert all(first[c] == np.flatnonzero(labels == c)[:3].tolist() for c in first)
