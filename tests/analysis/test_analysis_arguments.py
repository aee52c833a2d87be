"""Every array and number that a public function takes, given as what would be read as something else."""

import re

import numpy as np
import pytest

import analysis
from analysis import Prompts
from sdo import SDO, Embeddings, InputError
from tests import run_folders

RANDOM = np.random.default_rng(0)
ROWS = RANDOM.standard_normal((12, 5))
SCORE, LABEL = np.tile([1.0, 0.0, 1.0], 4), np.repeat([0, 1, 2], 4)
EMBEDDINGS = Embeddings.from_array(ROWS)
PAIRS = analysis.all_pairs(ROWS, ROWS)
BALANCE = analysis.cluster_balance(SCORE, LABEL, resamples=99)
GRAM = ROWS @ ROWS.T
MEASURES = ["m_coherence", "gradient_diversity", "noise_scale", "conflict_share", "gradient_confusion", "gram_measures"]

# Function and usable arguments; then which of them are numbers, integers and single whole numbers.
CASES = [
    ("step_coherence", {"sketch": ROWS, "smooth": 2}, ["sketch"], [], ["smooth"]),
    ("step_coherence_blocks", {"sketch": ROWS, "smooth": 2, "size": 3}, ["sketch"], [], ["smooth", "size"]),
    ("mean_pairwise_cosine", {"vectors": ROWS}, ["vectors"], [], []),
    ("gram_matrix", {"sketch": ROWS, "norm": np.ones(12)}, ["sketch", "norm"], [], []),
    *((name, {"K": GRAM}, ["K"], [], []) for name in MEASURES),
    ("describe", {"values": SCORE}, ["values"], [], []),
    ("gini", {"values": SCORE}, ["values"], [], []),
    ("all_pairs", {"unit": ROWS, "sketch": ROWS, "sample_ids": np.arange(12)}, ["unit", "sketch"], ["sample_ids"], []),
    ("mantel_test", {"unit": ROWS, "sketch": ROWS, "permutations": 3, "seed": 1}, ["unit", "sketch"], [],
     ["permutations", "seed"]),
    ("binned_pairs", {"pairs": PAIRS, "bins": 3}, [], [], ["bins"]),
    ("compare_paired", {"baseline": SCORE, "against": ROWS[:, 0]}, ["baseline", "against"], [], []),
    ("wilson", {"mean": SCORE, "n": np.full(12, 3)}, ["mean", "n"], [], []),
    ("cluster_balance", {"score": SCORE, "label": LABEL, "group": np.arange(12), "resamples": 99, "seed": 1},
     ["score"], ["label", "group"], ["resamples", "seed"]),
    ("compare_balance", {"baseline": SCORE, "run": 1 - SCORE, "label": LABEL, "group": np.arange(12), "resamples": 99},
     ["baseline", "run"], ["label", "group"], ["resamples"]),
    ("cluster", {"embeddings": EMBEDDINGS, "k": 3, "seed": 1}, [], [], ["k", "seed"]),
    ("given_labels", {"labels": LABEL}, [], ["labels"], []),
    ("duplicate_groups", {"labels": LABEL, "embeddings": EMBEDDINGS}, [], ["labels"], []),
    ("cluster_sizes", {"size": LABEL}, [], ["size"], []),
    ("ranked_clusters", {"balance": BALANCE, "rows": 2}, [], [], ["rows"]),
    ("heat_map", {"matrix": GRAM, "limit": 1.0, "steps": np.arange(12)}, ["matrix"], ["steps"], []),
    ("shared_limit", {"matrices": [GRAM], "size": 3}, [], [], ["size"]),
    ("batch_coherence_series", {"series": {}, "window": 3}, [], [], ["window"]),
    ("locality_series", {"series": {"x": (np.arange(3), np.arange(3.0))}, "window": 2}, [], [], ["window"]),
    ("design_probe", {"plan": SDO(RANDOM.standard_normal((60, 4))).plan(4), "samples": 40, "steps": 20}, [], [],
     ["samples", "steps"]),
]  # fmt: skip
MORE = {"design_probe": "analysis.probe.design"}


def masked(values):
    return np.ma.masked_array(values, mask=np.arange(values.size).reshape(values.shape) == 1)


def function(name):
    return getattr(analysis, name, None) or getattr(__import__(MORE[name], fromlist=[name]), name)


@pytest.mark.parametrize(("name", "usable", "numbers", "integers", "whole"), CASES, ids=[case[0] for case in CASES])
def test_what_would_be_read_as_something_else_is_refused(name, usable, numbers, integers, whole):
    call = function(name)
    call(**usable)
    odd = [(key, masked(usable[key]), "masked") for key in numbers + integers]
    odd += [(key, usable[key].astype(str), "hold <U") for key in numbers + integers]
    odd += [(key, usable[key].astype(complex), "hold complex") for key in numbers]
    for key in integers:
        odd += [(key, usable[key] == 1, "True and False"), (key, usable[key] + 0.5, "hold float64")]
        odd += [(key, usable[key][:, None], "shape"), (key, usable[key].astype("u8") + 2**63, "hold uint64")]
    odd += [(key, value, f"is {value!r}; expected a whole number") for key in whole for value in (True, 2.5, "2")]
    odd += [(key, -1, "-1") for key in whole]
    for key, value, message in odd:
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            call(**{**usable, key: value})
        assert "\n" not in str(caught.value)


def test_masks_of_rows_are_true_and_false():
    for odd in (np.array([0, 1, 2]), np.ones(12), np.ma.masked_array(np.ones(12, bool), mask=np.arange(12) == 1)):
        with pytest.raises(InputError, match="defined"):
            analysis.step_coherence(ROWS, odd)
    assert np.isnan(analysis.step_coherence(ROWS, np.arange(12) > 0)[0]).all()


@pytest.mark.parametrize("label", [-2, -1000])
def test_a_label_below_noise_is_no_noise(label):
    labels = LABEL.copy()
    labels[5] = label
    for call in (
        lambda: analysis.cluster_balance(SCORE, labels, resamples=99),
        lambda: analysis.compare_balance(SCORE, SCORE, labels, resamples=99),
        lambda: analysis.duplicate_groups(labels),
        lambda: analysis.given_labels(labels),
    ):
        with pytest.raises(InputError, match=f"hold {label}"):
            call()


def test_lengths_that_differ_are_refused():
    for call, message in (
        (lambda: analysis.gram_matrix(ROWS, np.ones(3)), "there are 3 norms; expected one for each of 12"),
        (lambda: analysis.m_coherence(ROWS), r"shape \(12, 5\); expected as many rows as columns"),
        (lambda: analysis.all_pairs(ROWS, ROWS[:5]), "there are 12 embeddings, 5 gradients and 12 sample ids"),
        (lambda: analysis.mantel_test(ROWS, ROWS[:5]), "there are 12 embeddings and 5 gradients"),
        (lambda: analysis.duplicate_groups(LABEL[:5], embeddings=EMBEDDINGS), "there are 12 embeddings and 5 labels"),
        (lambda: analysis.duplicate_groups(LABEL, text_keys=np.array(["a"])), "there are 1 text keys and 12 labels"),
        (lambda: analysis.heat_map(GRAM, limit=1.0, steps=[1, 2]), "there are 2 step numbers; expected one"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_shares_outside_their_range_are_refused():
    for mean, n, level in ((1.2, 5, 0.95), (-0.1, 5, 0.95), (np.nan, 5, 0.95), (0.5, 0, 0.95), (0.5, 5, 1.0)):
        with pytest.raises(InputError, match=r"expected|must lie"):
            analysis.wilson([mean], [n], level)
    for threshold in (np.nan, "0.9", None):
        with pytest.raises(InputError, match="threshold is"):
            analysis.duplicate_groups(LABEL, embeddings=EMBEDDINGS, threshold=threshold)


def test_positions_of_rows_are_no_mask(tmp_path):
    run = analysis.Run.open(run_folders.write_training(tmp_path / "run", steps=4).path)
    prompts = Prompts.of(["a", "b", "c", "d"])
    for take in (run.gradients("hidden").take, prompts.take):
        for odd in (np.array([True, False, True, False]), np.array([0.0]), np.array([4]), np.array([-1])):
            with pytest.raises(InputError, match="expected whole numbers"):
                take(odd)
    assert prompts.take(np.array([2, 0])).texts == ["c", "a"]
    for number in (True, 1.5, -1):
        with pytest.raises(InputError, match="step is"):
            analysis.read_predictions(tmp_path / "run", step=number)
        with pytest.raises(InputError, match="redraws is"):
            analysis.run_locality(run, redraws=number)
        with pytest.raises(InputError, match="workers is"):
            analysis.run_locality(run, workers=number)
