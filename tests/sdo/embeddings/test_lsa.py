import numpy as np
import pytest

from sdo.demo.word_problems import generate
from sdo.embeddings.lsa import lsa, zero_rows
from sdo.errors import InputError


def test_lsa_rows_have_unit_length_and_repeat_exactly():
    texts = [problem.prompt for problem in generate(64, seed=0)]
    rows = lsa(texts, dim=16, seed=3)
    assert rows.shape == (64, 16)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(rows, lsa(texts, dim=16, seed=3))


def test_lsa_with_full_rank_keeps_the_tfidf_cosines():
    # Two terms in common out of known idf weights; computed here from the definition, without scikit-learn.
    texts = ["red fox", "red fox red", "blue fox", "grey owl"]
    with pytest.warns(UserWarning, match="dim lowered from 99 to 4"):
        rows = lsa(texts, dim=99)
    terms = [
        {"red": 1, "fox": 1, "red fox": 1},
        {"red": 2, "fox": 1, "red fox": 1, "fox red": 1},
        {"blue": 1, "fox": 1, "blue fox": 1},
        {"grey": 1, "owl": 1, "grey owl": 1},
    ]
    names = sorted(set().union(*terms))
    counts = np.array([[document.get(name, 0) for name in names] for document in terms], float)
    idf = np.log((1 + 4) / (1 + (counts > 0).sum(axis=0))) + 1
    weights = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * idf
    weights /= np.linalg.norm(weights, axis=1, keepdims=True)
    np.testing.assert_allclose(rows @ rows.T, weights @ weights.T, atol=1e-6)


def test_lsa_neighbors_share_the_family_of_word_problems():
    problems = generate(240, seed=1)
    rows = lsa([problem.prompt for problem in problems], dim=64)
    cosine = rows @ rows.T
    np.fill_diagonal(cosine, -2)
    family = np.array([problem.family for problem in problems])
    nearest = np.argsort(-cosine, axis=1)[:, :4]
    assert (family[nearest] == family[:, None]).mean() > 0.95


def test_lsa_column_signs_follow_the_convention():
    rows = lsa([problem.prompt for problem in generate(64, seed=0)], dim=1)
    assert rows.max() > 0


def test_lsa_keeps_zero_rows_and_warns_with_their_number():
    with pytest.warns(UserWarning, match="2 of 5 texts hold no known term"):
        rows = lsa(["red apple", "", "green apple", "?!", "fast train"], dim=2)
    assert rows.shape == (5, 2)
    assert zero_rows(rows).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no words"),
        (["", "  "], "no words"),
        (["one text"], "single distinct document"),
        (["same words", "Same words!"], "single distinct document"),
        ("one string", "expected a sequence"),
        (["a", None], "text 1 is None"),
    ],
)
def test_lsa_refuses_texts_without_two_documents(texts, message):
    with pytest.raises(InputError, match=message):
        lsa(texts, dim=1)


@pytest.mark.parametrize("options", [{"dim": 0}, {"dim": True}, {"dim": 2.0}, {"seed": -1}, {"seed": 2**32}])
def test_lsa_refuses_options_out_of_range(options):
    with pytest.raises(InputError, match="expected a whole number from "):
        lsa(["a b", "c d"], **options)
