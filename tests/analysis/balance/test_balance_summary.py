import json
from dataclasses import replace

import numpy as np
import pytest

from analysis import Predictions, Prompts, given_labels, summarize_balance, wilson
from analysis.balance.per_cluster import cluster_balance, compare_balance
from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError

N = 60
LABELS = np.repeat(np.arange(6), 10)
METRICS = ["mean", "b20", "cv", "gini", "gap", "spread"]


def run(name, ids=None, seed=0, p=0.6):
    rows = np.arange(N) if ids is None else np.asarray(ids)
    score = (np.random.default_rng(seed).random(N) < p).astype(float)
    return Predictions(name, rows, score[rows])


def summary(runs, labels=LABELS, **options):
    found = summarize_balance(runs, given_labels(labels), resamples=99, **options)
    json.dumps(found.content, allow_nan=False)
    return found


def every_null_has_a_reason(node):
    if isinstance(node, dict):
        if any(value is None for key, value in node.items() if key not in ("requested_clusters",)):
            assert "reason" in node or "latent" in node, node
        for key, value in node.items():
            if key == "latent" and None in value.values():
                assert "reason" in node
            elif key != "latent":
                every_null_has_a_reason(value)
    elif isinstance(node, list):
        for value in node:
            every_null_has_a_reason(value)


def test_content_has_the_promised_shape():
    content = summary([run("a"), run("b", seed=1)]).content
    assert content["clusters"] == 6
    assert content["n"] == N
    assert list(content["homogeneity"]) == list(content["runs"]) == ["a", "b"]
    assert set(content["homogeneity"]["a"]) == {"statistic", "p"}
    for metrics in content["runs"].values():
        assert list(metrics) == METRICS
        for entry in metrics.values():
            assert set(entry) - {"reason"} == {"value", "equal_band", "latent"}
            assert set(entry["latent"]) == {"value", "interval"}
            assert len(entry["latent"]["interval"]) == 2
        assert metrics["mean"]["equal_band"] is None  # clusters of one size
        assert len(metrics["gini"]["equal_band"]) == 2
    (comparison,) = content["comparisons"]
    assert (comparison["baseline"], comparison["run"]) == ("a", "b")
    assert list(comparison["metrics"]) == METRICS
    for name, entry in comparison["metrics"].items():
        assert {"difference", "interval", "p", "verdict"} <= set(entry)
        assert entry["verdict"] in ("better", "worse", "undetermined")
        assert ("note" in entry) == (name in ("b20", "cv", "gini", "gap"))
    assert set(content["accuracy"]["a"]) == {"n", "accuracy", "interval"}
    assert {"difference", "interval", "p", "verdict"} <= set(comparison["accuracy"])
    assert comparison["balance"] == comparison["metrics"]["spread"]["verdict"]
    assert len(content["per_cluster"]) == 6
    assert content["requested_clusters"] is None
    every_null_has_a_reason(content)


def test_numbers_are_those_of_the_functions():
    a, b = run("a"), run("b", seed=1)
    found = summary([a, b], seed=4)
    one = cluster_balance(a.score, LABELS, resamples=99, seed=4)
    assert found.balances["a"].metrics == one.metrics
    entry = found.content["runs"]["a"]["gini"]
    assert entry["value"] == one.metrics["gini"].value
    assert entry["equal_band"] == list(one.metrics["gini"].equal_band)
    assert entry["latent"] == {
        "value": one.metrics["gini"].latent,
        "interval": list(one.metrics["gini"].latent_interval),
    }
    both = compare_balance(a.score, b.score, LABELS, resamples=99, seed=4)
    assert found.comparisons["b"].metrics == both.metrics
    interval = list(one.question_interval)
    assert found.content["accuracy"]["a"] == {"n": N, "accuracy": a.score.mean(), "interval": interval}
    assert found.content["comparisons"][0]["accuracy"]["p"] == both.question_accuracy.p
    cluster = found.content["per_cluster"][2]
    accuracy = a.score[LABELS == 2].mean()
    assert cluster["cluster"] == 2
    assert cluster["runs"]["a"] == {"n": 10, "accuracy": accuracy, "interval": wilson([accuracy], [10])[0].tolist()}
    assert not cluster["small"]
    assert cluster["keywords"] is None
    assert "fix: --prompts" in cluster["reason"]


def test_a_run_does_not_depend_on_its_company():
    alone = summary([run("a")])
    together = summary([run("b", seed=1), run("a")])
    assert alone.content["runs"]["a"] == together.content["runs"]["a"]
    assert alone.content["comparisons"] == []


def test_baseline_by_name():
    found = summary([run("a"), run("b", seed=1), run("c", seed=2)], baseline="c")
    assert [(one["baseline"], one["run"]) for one in found.content["comparisons"]] == [("c", "a"), ("c", "b")]
    with pytest.raises(InputError, match="no run is called 'd'; expected one of a, b; fix: --baseline"):
        summary([run("a"), run("b")], baseline="d")


def test_different_questions_are_paired_on_the_common_ones():
    a, b = run("a", np.arange(0, 50)), run("b", np.arange(59, 9, -1), seed=1)
    found = summary([a, b])
    assert found.content["n"] == 60
    (comparison,) = found.content["comparisons"]
    assert comparison["n"] == 40
    assert comparison["clusters"] == 4
    common = np.arange(10, 50)
    expected = compare_balance(a.score[common], b.score[::-1][common - 10], LABELS[common], resamples=99)
    assert found.comparisons["b"].metrics == expected.metrics
    notes = " | ".join(found.notes)
    assert "a answers 50 of 60 questions; its own values are on these" in notes
    assert "b against a: compared on the 40 questions that both answered (others: 10 of a, 10 of b)" in notes
    last = found.content["per_cluster"][5]["runs"]
    assert last["a"] == {"n": 0, "accuracy": None, "interval": None, "reason": "no question of the run is here"}
    assert last["b"]["n"] == 10
    every_null_has_a_reason(found.content)
    with pytest.raises(InputError, match="no question of a cluster in common"):
        summary([run("a", np.arange(10)), run("b", np.arange(30, 40))])


def test_noise_is_shown_apart():
    labels = LABELS.copy()
    labels[:10] = -1
    found = summary([run("a")], labels)
    assert found.content["n"] == 50
    assert found.content["clusters"] == 5
    assert found.content["noise"]["n"] == 10
    assert found.content["noise"]["runs"]["a"]["accuracy"] == run("a").score[:10].mean()
    assert [entry["cluster"] for entry in found.content["per_cluster"]] == [1, 2, 3, 4, 5]
    assert "noise (-1), shown apart, in no metric: 10 questions" in found.notes
    with pytest.raises(InputError, match="no question of a is in a cluster"):
        summary([run("a", np.arange(5))], labels)


def test_clusters_without_predictions_and_small_ones_are_said():
    labels = LABELS.copy()
    labels[10:17], labels[18:20] = 0, 9
    found = summary([run("a", np.arange(5, 40))], labels)
    notes = " | ".join(found.notes)
    assert "rows without a prediction in any run: 25 of 60" in notes
    assert "clusters without a prediction in any run, left out: 2" in notes
    assert "clusters of fewer than 5 questions: 2, of one: 1" in notes
    assert {entry["cluster"]: entry["small"] for entry in found.content["per_cluster"]} == {
        0: False, 1: True, 2: False, 3: False, 9: True,
    }  # fmt: skip


def test_prompts_give_keywords_examples_and_duplicates():
    texts = [f"question {i} about {'ducks' if i < 10 else 'trains'}" for i in range(N)]
    texts[3] = texts[2].upper()
    rng = np.random.default_rng(0)
    embeddings = Embeddings.from_array(rng.standard_normal((N, 8)))
    found = summary([run("a")], prompts=Prompts.of(texts), embeddings=embeddings, near_duplicate=2)
    first = found.content["per_cluster"][0]
    assert first["keywords"][0] == "ducks"
    assert len(first["examples"]) == len(first["example_rows"]) == 3
    assert all(" about " in one.lower() for one in first["examples"])
    assert found.content["distinct"] == N - 1
    assert "duplicates of another question of their cluster, dealt as one with it: 1 of 60" in found.notes
    assert found.keywords[1][0] in ("trains", "question")
    assert "duplicates were not looked for: that takes --embeddings or --prompts" in summary([run("a")]).notes


def test_texts_that_would_break_a_terminal_or_a_page():
    texts = ["a\x1b[2Jb \ud800 <script>$x$"] * N
    content = summary([run("a")], prompts=Prompts.of(texts)).content
    example = content["per_cluster"][0]["examples"][0]
    assert example == "a[2Jb <script>$x$"
    json.dumps(content, ensure_ascii=False).encode("utf-8")


def test_single_answers_beside_averages_are_warned_of():
    averages = Predictions("b", np.arange(N), np.full(N, 0.25))
    found = summary([run("a"), averages])
    assert any("runs decoded in different ways differ in spread" in note for note in found.notes)
    assert not any("decoded" in note for note in summary([run("a"), run("b", seed=1)]).notes)


def test_runs_that_are_not_measured_alike_are_said():
    one, two, three, python = (run(name, seed=i) for i, name in enumerate("abcd"))
    strict = replace(one, source={"format": "sample log", "metric": "acc", "filter": "none"}, notes=("said once",))
    other = replace(two, source=dict(strict.source), notes=("said once",))
    alike = summary([strict, other, python]).notes
    assert not any("not measured alike" in note for note in alike)
    assert alike.count("said once") == 1
    folder = replace(three, source={"format": "run folder", "evaluation": "judge", "step": 3})
    note = "the runs are not measured alike, and differ by that too (a: metric acc, filter none; c: evaluation judge, "
    assert note + "step 3)" in summary([strict, folder]).notes


def test_refuses_lengths_that_differ():
    embeddings = Embeddings.from_array(np.eye(5))
    with pytest.raises(InputError, match="embeddings have 5 rows, labels 60"):
        summary([run("a")], embeddings=embeddings)
    with pytest.raises(InputError, match="prompts have 1 rows, labels 60"):
        summary([run("a")], prompts=Prompts.of(["x"]))
    with pytest.raises(InputError, match=r"sample id 30 of a \(and 29 others\) is unknown: .* have 30 rows"):
        summary([run("a")], LABELS[:30])


def test_one_cluster_says_why_nothing_else_is_defined():
    content = summary([run("a"), run("b", seed=1)], np.zeros(N, dtype=int)).content
    every_null_has_a_reason(content)
    for name in METRICS[1:]:
        nothing = {"value": None, "equal_band": None, "latent": {"value": None, "interval": None}}
        assert content["runs"]["a"][name] == nothing | {"reason": "it needs at least two clusters"}
        compared = content["comparisons"][0]["metrics"][name]
        assert (compared["difference"], compared["p"]) == (None, None)
        assert compared["reason"] == "it needs at least two clusters"
    assert content["runs"]["a"]["mean"]["value"] is not None
    assert content["comparisons"][0]["metrics"]["mean"]["p"] is not None


def test_one_cluster_and_no_right_answer():
    found = summary([Predictions("a", np.arange(N), np.zeros(N))], np.zeros(N, dtype=int))
    assert found.content["clusters"] == 1
    assert found.content["runs"]["a"]["cv"]["value"] is None
    assert found.content["homogeneity"]["a"]["p"] is None
    every_null_has_a_reason(found.content)
