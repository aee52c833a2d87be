import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import Predictions, read_all_predictions, read_predictions
from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def harness(doc_id, under="strict-match", **metrics):
    row = {"doc_id": doc_id, "doc": {"q": "x"}, "target": "1", "arguments": {}, "resps": [["1"]]}
    row |= {"filtered_resps": ["1"], "filter": under, "metrics": list(metrics), "doc_hash": "h", **metrics}
    return row


def evaluations(run, rows):
    folder = run.path / "evaluations"
    folder.mkdir(exist_ok=True)
    schema = pa.schema(
        [("step", pa.int64()), ("name", pa.string()), ("sample_id", pa.int64()), ("score", pa.float64())]
    )
    names = schema.names
    pq.write_table(
        pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], schema=schema),
        folder / "part-00000000-00000000.parquet",
    )
    return run.path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_reads_all_three_formats_alike(tmp_path, kind):
    rows = [{"sample_id": 7, "correct": 1}, {"sample_id": 2, "correct": 0}, {"sample_id": 11, "correct": 0.25}]
    path = tmp_path / f"some.run.{kind}"
    if kind == "jsonl":
        jsonl(path, rows)
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["correct", "sample_id", "more"])
            writer.writeheader()
            writer.writerows({**row, "more": "a, b"} for row in rows)
    else:
        pq.write_table(pa.Table.from_pylist([{**row, "correct": float(row["correct"])} for row in rows]), path)
    got = read_predictions(path)
    assert got.name == "some.run"
    assert got.ids.tolist() == [7, 2, 11]
    assert got.ids.dtype == np.int64
    assert got.score.tolist() == [1, 0, 0.25]
    assert not got.by_position
    assert got.notes == ()
    assert len(got) == 3
    assert read_predictions(path, name="mine").name == "mine"


@pytest.mark.parametrize(
    ("value", "score"),
    [(True, 1), (False, 0), (1, 1), (0.5, 0.5), ("true", 1), ("False", 0), (" 1 ", 1), ("0.75", 0.75)],
)
def test_words_for_scores(tmp_path, value, score):
    path = jsonl(tmp_path / "a.jsonl", [{"sample_id": "x", "correct": value}])
    got = read_predictions(path)
    assert got.score.tolist() == [score]
    assert got.ids.tolist() == ["x"]


def test_whole_floats_are_ids_and_strings_in_csv_stay_strings(tmp_path):
    assert read_predictions(jsonl(tmp_path / "a.jsonl", [{"sample_id": 3.0, "correct": 1}])).ids.tolist() == [3]
    (tmp_path / "b.csv").write_text("sample_id,correct\n007,1\n8,0\n")
    assert read_predictions(tmp_path / "b.csv").ids.tolist() == ["007", "8"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"sample_id": 1, "correct": 1.5},
            r"line 2: correct is 1.5; expected 0, 1, true, false or a score in \[0, 1\]",
        ),
        ({"sample_id": 1, "correct": -1}, "line 2: correct is -1"),
        ({"sample_id": 1, "correct": float("nan")}, "line 2: correct is nan"),
        ({"sample_id": 1, "correct": None}, "line 2: correct is missing"),
        ({"sample_id": 1, "correct": ""}, "line 2: correct is missing"),
        ({"sample_id": 1, "correct": "yes"}, "line 2: correct is 'yes'"),
        ({"sample_id": 1, "correct": [1]}, r"line 2: correct is \[1\]"),
        ({"sample_id": None, "correct": 1}, "line 2: sample_id is missing"),
        ({"sample_id": float("nan"), "correct": 1}, "line 2: sample_id is missing"),
        ({"sample_id": True, "correct": 1}, "line 2: sample_id is True"),
        ({"sample_id": 1.5, "correct": 1}, "line 2: sample_id is 1.5"),
        (
            {"sample_id": 2**63, "correct": 1},
            "line 2: sample_id is 9223372036854775808; expected an integer of 64 bits or a string; fix",
        ),
        ({"sample_id": -(2**63) - 1, "correct": 1}, "line 2: sample_id is -9223372036854775809; expected"),
        ({"sample_id": 1e300, "correct": 1}, "line 2: sample_id is 1"),
        ({"correct": 1}, "line 2: no column 'sample_id'; columns there: 'correct'"),
        ({"sample_id": 1, "is_correct": 1}, "line 2: no column 'correct'; columns there: 'sample_id', 'is_correct'"),
        (
            {"sample_id": 0, "correct": 1},
            r"sample ids come more than once: 0 \(1 of them\); expected each once; fix",
        ),
        ({"sample_id": "a", "correct": 1}, "mix integers and strings"),
    ],
)
def test_refuses_a_wrong_row_by_its_line(tmp_path, row, message):
    path = jsonl(tmp_path / "a.jsonl", [{"sample_id": 0, "correct": 1}, row])
    with pytest.raises(InputError, match=message):
        read_predictions(path)


def test_refuses_what_is_no_file_of_predictions(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        read_predictions(tmp_path / "missing.jsonl")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match=r"ends in \.txt; expected a \.jsonl"):
        read_predictions(tmp_path / "a.txt")
    for name in ("empty.jsonl", "empty.csv"):
        (tmp_path / name).write_text("")
        with pytest.raises(InputError, match="holds no rows"):
            read_predictions(tmp_path / name)
    pq.write_table(pa.table({"sample_id": [1], "score": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="no column 'correct'"):
        read_predictions(tmp_path / "a.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="no readable Parquet"):
        read_predictions(tmp_path / "broken.parquet")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"no run\.json"):
        read_predictions(tmp_path / "folder")


def test_sample_log_of_the_harness(tmp_path):
    rows = [
        harness(i, under, exact_match=float(i == (under == "strict-match")))
        for i in (0, 1, 2)
        for under in ("strict-match", "flexible-extract")
    ]
    path = jsonl(tmp_path / "samples_gsm8k_2026-11-29T12-00-00.000000.jsonl", rows)
    got = read_predictions(path)
    assert got.ids.tolist() == [0, 1, 2]
    assert got.score.tolist() == [0, 1, 0]
    assert got.by_position
    assert "metric exact_match, filter strict-match; also there: filter flexible-extract" in got.notes[0]
    assert read_predictions(path, filter="flexible-extract").score.tolist() == [1, 0, 0]
    with pytest.raises(InputError, match="no filter 'none'; filters there: strict-match, flexible-extract"):
        read_predictions(path, filter="none")
    with pytest.raises(InputError, match="no metric 'acc'; metrics in \\[0, 1\\] there: exact_match; fix: --metric"):
        read_predictions(path, metric="acc")


def test_metric_of_the_harness(tmp_path):
    several = jsonl(tmp_path / "a.jsonl", [harness(3, perplexity=12.0, acc_norm=0.0, acc=1.0, f1=[1, 0])])
    assert read_predictions(several).score.tolist() == [1]
    assert "metric acc, filter strict-match; also there: acc_norm" in read_predictions(several).notes[0]
    assert read_predictions(several, metric="acc_norm").score.tolist() == [0]
    with pytest.raises(InputError, match=r"perplexity is 12\.0"):
        read_predictions(several, metric="perplexity")
    # Logs of before the keys `filter` and `metrics`.
    old = {"doc_id": 0, "doc": {}, "target": 1, "arguments": [], "resps": [], "filtered_resps": [], "acc": 0.0}
    assert read_predictions(jsonl(tmp_path / "old.jsonl", [old])).score.tolist() == [0]
    nothing = jsonl(tmp_path / "none.jsonl", [harness(0, bleu=31.0)])
    with pytest.raises(InputError, match="there: none"):
        read_predictions(nothing)


def test_default_metric_is_a_score_in_all_rows(tmp_path):
    # The first row of bleu_diff looks like a score.
    rows = [harness(i, bleu_diff=0.0 if i == 0 else -1.5, bleu_acc=i % 2) for i in range(4)]
    path = jsonl(tmp_path / "samples_t.jsonl", rows)
    assert read_predictions(path).score.tolist() == [0, 1, 0, 1]
    assert read_predictions(path).source["metric"] == "bleu_acc"
    with pytest.raises(InputError, match=r"line 2: bleu_diff is -1\.5; .*; metrics in \[0, 1\] there: bleu_acc; fix"):
        read_predictions(path, metric="bleu_diff")
    # Under the first filter nothing is a score in all rows; a hole is none.
    rows = [harness(i, "none", acc=None if i else 1.0) for i in range(2)] + [
        harness(i, "strict", acc=1) for i in (0, 1)
    ]
    got = read_predictions(jsonl(tmp_path / "b.jsonl", rows))
    assert (got.source["filter"], got.score.tolist()) == ("strict", [1, 1])
    only = jsonl(tmp_path / "c.jsonl", [harness(i, bleu=float(30 * i)) for i in range(2)])
    with pytest.raises(
        InputError, match=r"c\.jsonl: no metric whose values lie in \[0, 1\] in all rows; .* none \(filter"
    ):
        read_predictions(only)


def filtered(path, *filters, n=6, **more):
    """A log in which the answer of question i is right under a filter where i is at least its length, modulo 5."""
    return jsonl(
        path, [harness(i, one, exact_match=float(i >= len(one) % 5), **more) for one in filters for i in range(n)]
    )


def test_logs_whose_filters_stand_in_another_order_are_read_by_one(tmp_path):
    paths = [
        filtered(tmp_path / "a.jsonl", "strict-match", "flexible-extract"),
        filtered(tmp_path / "b.jsonl", "flexible-extract", "strict-match"),
    ]
    first, second = read_all_predictions(paths)
    assert first.score.tolist() == second.score.tolist() == [0, 0, 1, 1, 1, 1]
    said = "one measure for the 2 sample logs: metric exact_match, filter strict-match"
    assert first.notes[0] == second.notes[0] == said
    assert [one.source["path"] for one in (first, second)] == [str(path) for path in paths]
    asked = read_all_predictions(paths, names=["x", "y"], filter="flexible-extract")
    assert [one.score.tolist() for one in asked] == [[0, 1, 1, 1, 1, 1]] * 2
    assert [one.name for one in asked] == ["x", "y"]


def test_one_measure_from_what_all_logs_have(tmp_path):
    one = filtered(tmp_path / "a.jsonl", "strict-match", "none")
    two = filtered(tmp_path / "b.jsonl", "none")
    assert {got.source["filter"] for got in read_all_predictions([one, two])} == {"none"}
    several = jsonl(tmp_path / "c.jsonl", [harness(0, "none", acc=1.0, acc_norm=0.0)])
    other = jsonl(tmp_path / "d.jsonl", [harness(0, "none", acc=7.0, acc_norm=1.0)])
    assert [got.source["metric"] for got in read_all_predictions([several, other])] == ["acc_norm"] * 2
    assert read_predictions(several).source["metric"] == "acc"
    with pytest.raises(InputError, match=r"d\.jsonl, line 1: acc is 7\.0"):
        read_all_predictions([several, other], metric="acc")
    with pytest.raises(InputError) as caught:
        read_all_predictions([one, several])
    assert "a.jsonl: exact_match (filter strict-match), exact_match (filter none); " in str(caught.value)
    assert "c.jsonl: acc, acc_norm (filter none); fix: --metric" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(InputError, match=r"b\.jsonl has no filter 'strict-match'; filters there: none; fix"):
        read_all_predictions([one, two], filter="strict-match")
    with pytest.raises(
        InputError, match=r"c\.jsonl, line 1: no metric 'exact_match'; metrics in \[0, 1\] there: acc, acc"
    ):
        read_all_predictions([one, several], metric="exact_match")


def test_options_of_another_kind_of_file_are_refused(tmp_path):
    table = jsonl(tmp_path / "a.jsonl", [{"sample_id": 0, "correct": 1}])
    log = jsonl(tmp_path / "b.jsonl", [harness(0, acc=1)])
    for option in ({"metric": "acc"}, {"filter": "none"}, {"evaluation": "x"}, {"step": 3}):
        with pytest.raises(InputError, match=r"^--\w+ \w+: it is for (sample logs|run folders).*, and none came; fix"):
            read_predictions(table, **option)
    assert [len(one) for one in read_all_predictions([table, log], metric="acc")] == [1, 1]
    for wrong in ({"paths": []}, {"paths": str(table)}, {"paths": [table], "names": ["a", "b"]}):
        with pytest.raises(InputError, match="with one for each run"):
            read_all_predictions(**wrong)


def test_run_folder(make_run):
    run = make_run()
    path = evaluations(
        run,
        [
            *((4, "loss", i, 2.5) for i in range(3)),
            *((4, "correct", i, 0.0) for i in range(3)),
            *((9, "correct", i, float(i == 1)) for i in range(3)),
            *((9, "judge", i, 0.5) for i in range(3)),
        ],
    )
    got = read_predictions(path)
    assert got.name == "run"
    assert got.score.tolist() == [0, 1, 0]
    assert got.by_position
    assert got.notes == ("run: run folder, evaluation correct, step 9, of 2 evaluated steps",)
    assert read_predictions(path, step=4).score.tolist() == [0, 0, 0]
    assert read_predictions(path, evaluation="judge").score.tolist() == [0.5, 0.5, 0.5]
    with pytest.raises(InputError, match=r"correct was not evaluated at step 5; the last steps are 4, 9; fix: --step"):
        read_predictions(path, step=5)
    with pytest.raises(
        InputError, match=r"no evaluation 'x'; there: correct, loss, judge \(with all .*: correct, judge\)"
    ):
        read_predictions(path, evaluation="x")
    with pytest.raises(InputError, match=r"score is 2\.5"):
        read_predictions(path, evaluation="loss")


def test_run_folders_are_read_at_the_latest_step_that_all_have(make_run):
    one = evaluations(make_run("one"), [(step, "correct", 0, step / 100) for step in (10, 20, 30)])
    two = evaluations(make_run("two"), [(step, "correct", 0, step / 100) for step in (10, 20)])
    got = read_all_predictions([one, two])
    assert [run.score.tolist() for run in got] == [[0.2], [0.2]]
    assert got[0].notes[0] == (
        "one measure for the 2 run folders: evaluation correct, step 20, the latest that all have "
        "(the last of any is 30)"
    )
    assert read_predictions(one).source["step"] == 30
    assert [run.source["step"] for run in read_all_predictions([one, two], step=10)] == [10, 10]
    with pytest.raises(InputError, match=r"not evaluated at step 30 in all of them; .*one: 10, 20, 30; .*two: 10, 20;"):
        read_all_predictions([one, two], step=30)
    three = evaluations(make_run("three"), [(15, "correct", 0, 1.0), (15, "judge", 0, 0.25)])
    with pytest.raises(
        InputError, match=r"at no step that all have; the last steps are .*one: 10, 20, 30; .*three: 15; f"
    ):
        read_all_predictions([one, three])


def test_run_folders_are_read_by_an_evaluation_that_all_have(make_run):
    both = [(5, "correct", 0, 1.0), (5, "judge", 0, 0.25), (5, "loss", 0, 2.5)]
    one, two = evaluations(make_run("one"), both), evaluations(make_run("two"), both[1:])
    got = read_all_predictions([one, two])
    assert [run.source["evaluation"] for run in got] == ["judge", "judge"]
    assert "one measure for the 2 run folders: evaluation judge, step 5" in got[1].notes
    assert read_predictions(one).source["evaluation"] == "correct"
    three = evaluations(make_run("three"), both[2:])
    with pytest.raises(InputError) as caught:
        read_all_predictions([one, three])
    assert "one: correct, judge, loss (with all scores in [0, 1]: correct, judge); " in str(caught.value)
    assert "three: loss (with all scores in [0, 1]: none); fix: --evaluation NAME" in str(caught.value)
    with pytest.raises(InputError, match="no evaluation 'correct' in all of them; there: "):
        read_all_predictions([one, two], evaluation="correct")


def test_run_folder_without_an_evaluation_that_fits(make_run):
    run = make_run()
    with pytest.raises(InputError, match=r"logged no evaluations; fix: recorder\.log_evaluation"):
        read_predictions(run.path)
    evaluations(run, [(0, "a", 0, 1.0), (0, "b", 0, 0.0)])
    with pytest.raises(InputError, match="which evaluation is meant is open; there: a, b"):
        read_predictions(run.path)
    part = evaluations(run, [(0, "a", 0, 1.0)]) / "evaluations" / "part-00000000-00000000.parquet"
    assert read_predictions(run.path).score.tolist() == [1]
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(InputError, match="cut off in writing"):
        read_predictions(run.path)


def predictions(ids, **options):
    return Predictions("run", np.array(ids), np.zeros(len(ids)), **options)


def test_rows_by_number():
    assert predictions([2, 0]).rows(3).tolist() == [2, 0]
    with pytest.raises(InputError, match=r"sample id 3 of run \(and 1 other\) is unknown: .* expected 0 to 2"):
        predictions([2, 3, -1]).rows(3)
    with pytest.raises(InputError, match="are strings such as 'a'"):
        predictions(["a", "b"]).rows(3)


def test_rows_by_key():
    embeddings = Embeddings.from_array(np.eye(3), ids=["a", "b", "c"])
    assert predictions(["c", "a"]).rows(3, embeddings).tolist() == [2, 0]
    assert predictions([1, 0], by_position=True).rows(3, embeddings).tolist() == [1, 0]
    with pytest.raises(InputError, match=r"'d'.*is not among the 3 ids"):
        predictions(["d"]).rows(3, embeddings)


def test_ids_reach_to_the_ends_of_64_bits(tmp_path):
    rows = [{"sample_id": one, "correct": 1} for one in (2**63 - 1, -(2**63))]
    assert read_predictions(jsonl(tmp_path / "a.jsonl", rows)).ids.tolist() == [2**63 - 1, -(2**63)]
    pq.write_table(pa.table({"sample_id": pa.array([2**63], type=pa.uint64()), "correct": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="sample_id is 9223372036854775808"):
        read_predictions(tmp_path / "a.parquet")
