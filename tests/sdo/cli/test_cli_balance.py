import csv
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.balance.words import CAVEAT
from sdo.cli import balance
from sdo.cli.common import outputs
from sdo.cli.main import main

N = 90


def read(out):
    def refuse(constant):
        raise AssertionError(constant)

    return json.loads((out / "balance.json").read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.fixture(autouse=True)
def _pictures_where_wanted(request, monkeypatch):
    """Drawing takes most of the time: only tests that ask for `pictures` draw."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(balance, "_plot", lambda *_: outputs.Outputs("balance"))


@pytest.fixture
def pictures():
    """Draw in this test."""


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Two runs, embeddings in six clusters, labels and prompts."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    kind = rng.permutation(np.repeat(np.arange(6), N // 6))
    matrix = rng.standard_normal((6, 16))[kind] + 0.05 * rng.standard_normal((N, 16))
    np.save("E.npy", matrix.astype(np.float32))
    np.save("L.npy", kind)
    (tmp_path / "q.jsonl").write_text(
        "".join(json.dumps({"id": i, "question": f"word{kind[i]} number {i}"}) + "\n" for i in range(N))
    )
    for name, p in (("uniform", 0.5), ("sdo", 0.7)):
        rows = [{"sample_id": i, "correct": bool(rng.random() < p)} for i in range(N)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def call(text, *more):
    return main(["balance", *text.split(), "--resamples", "99", *more])


def test_clusters_embeddings_and_writes_everything(desk, pictures, capsys):
    assert call("uniform.jsonl sdo.jsonl --embeddings E.npy --clusters 6 --seed 3 --out out --near-duplicate 2") == 0
    content = read(desk / "out")
    expected = {"clusters-uniform.png", "clusters-sdo.png", "lorenz.png", "sizes.png", "against-uniform-sdo.png"}
    assert {file.name for file in (desk / "out").iterdir()} == expected | {"balance.json", "labels.npy"}
    assert set(content["files"]) == expected | {"labels.npy"}
    assert content["failed"] == []
    assert (content["format"], content["clusters"], content["n"], content["requested_clusters"]) == (
        "sdo-balance",
        6,
        N,
        6,
    )
    assert list(content["runs"]) == ["uniform", "sdo"]
    assert content["baseline"] == "uniform"
    labels, kind = np.load(desk / "out" / "labels.npy"), np.load("L.npy")
    assert len({*zip(labels.tolist(), kind.tolist(), strict=True)}) == 6
    scores = [json.loads(line)["correct"] for line in (desk / "sdo.jsonl").read_text().splitlines()]
    accuracy = [np.mean([s for s, c in zip(scores, labels, strict=True) if c == k]) for k in range(6)]
    assert content["runs"]["sdo"]["mean"]["value"] == pytest.approx(np.mean(accuracy))
    assert content["runs"]["sdo"]["gap"]["value"] == pytest.approx(max(accuracy) - min(accuracy))
    printed = capsys.readouterr()
    assert CAVEAT in " ".join(printed.out.split())
    assert printed.err == ""
    assert "90 questions in 6 clusters" in printed.out
    assert f"  {100 * (max(accuracy) - min(accuracy)):.1f}" in printed.out  # the gap in points
    assert printed.out.count("moves with the mean)") == 4
    assert f"accuracy over questions {np.mean(scores):.3f}, 95 % interval " in printed.out
    assert "  accuracy over questions  " in printed.out.partition(" against ")[2]
    assert f"verdict on balance: {content['comparisons'][0]['balance']}" in printed.out


def test_given_labels_prompts_and_baseline(desk):
    argv = "uniform.jsonl sdo.jsonl --labels L.npy --prompts q.jsonl --column question --baseline sdo --out out"
    assert call(argv) == 0
    content = read(desk / "out")
    assert [(one["baseline"], one["run"]) for one in content["comparisons"]] == [("sdo", "uniform")]
    for entry in content["per_cluster"]:
        assert entry["keywords"][0] in (f"word{entry['cluster']}", "number")
        assert len(entry["examples"]) == 3
        assert f"word{entry['cluster']} " in entry["examples"][0]
    assert np.array_equal(np.load(desk / "out" / "labels.npy"), np.load("L.npy"))


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_prompts_in_another_order_by_their_ids(desk, kind):
    rows = [json.loads(line) for line in (desk / "q.jsonl").read_text().splitlines()][::-1]
    if kind == "csv":
        with (desk / "r.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "question"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        (desk / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert call("sdo.jsonl --labels L.npy --prompts q.jsonl --column question --out a") == 0
    assert call(f"sdo.jsonl --labels L.npy --prompts r.{kind} --column question --id-column id --out b") == 0
    assert read(desk / "a")["per_cluster"] == read(desk / "b")["per_cluster"]


def test_keys_of_embeddings(desk):
    from sdo.embeddings.files import write_matrix_file

    keys = np.array([f"q{i:03}" for i in range(N)])
    write_matrix_file(desk / "E.npz", np.load("E.npy"), keys, suffix=".npz")
    order = np.random.default_rng(1).permutation(N)
    rows = [json.loads(line) for line in (desk / "sdo.jsonl").read_text().splitlines()]
    table = pa.table({"sample_id": keys[order].tolist(), "correct": [rows[i]["correct"] for i in order]})
    pq.write_table(table, "keyed.parquet")
    assert call("sdo.jsonl --embeddings E.npy --clusters 6 --out a") == 0
    assert call("keyed.parquet --embeddings E.npz --clusters 6 --out b") == 0
    a, b = read(desk / "a"), read(desk / "b")
    assert a["runs"]["sdo"] == b["runs"]["keyed"]
    assert call("sdo.jsonl --embeddings E.npz --clusters 6 --out c") == 2


def test_sample_logs_and_run_folders_beside_files(desk, capsys):
    rows = [json.loads(line) for line in (desk / "sdo.jsonl").read_text().splitlines()]
    log = [
        {"doc_id": row["sample_id"], "resps": [[""]], "filtered_resps": [""], "filter": "none", "metrics": ["acc"],
         "acc": float(row["correct"])}
        for row in rows
    ]  # fmt: skip
    (desk / "samples_gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    folder = desk / "runs" / "one" / "evaluations"
    folder.mkdir(parents=True)
    (folder.parent / "run.json").write_text(json.dumps({"format": "sdo-run", "format_version": 1, "signals": {}}))
    table = pa.table(
        {
            "step": [7] * N,
            "name": ["correct"] * N,
            "sample_id": list(range(N)),
            "score": [float(row["correct"]) for row in rows],
        }
    )
    pq.write_table(table, folder / "part-00000007-00000007.parquet")
    assert call("sdo.jsonl harness=samples_gsm8k.jsonl runs/one --labels L.npy --out out") == 0
    content = read(desk / "out")
    assert content["runs"]["sdo"] == content["runs"]["harness"] == content["runs"]["one"]
    assert {one["balance"] for one in content["comparisons"]} == {"undetermined"}
    assert any("metric acc, filter none" in note for note in content["notes"])
    assert "evaluation correct, step 7" in capsys.readouterr().out
    (folder / "part-00000007-00000007.parquet").write_bytes(b"PAR1 cut off")
    assert call("runs/one --labels L.npy --out again") == 2
    assert "cut off in writing" in capsys.readouterr().err


def test_logs_of_one_model_whose_filters_stand_in_another_order_do_not_differ(desk, capsys):
    rng = np.random.default_rng(0)
    strict = rng.random(N) < 0.4
    right = {"strict-match": strict, "flexible-extract": strict | (rng.random(N) < 0.3)}
    for name, order in (("a", list(right)), ("b", list(right)[::-1])):
        rows = [
            {"doc_id": i, "resps": [], "filter": one, "metrics": ["exact_match"], "exact_match": float(right[one][i])}
            for one in order
            for i in range(N)
        ]
        (desk / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert call("a.jsonl b.jsonl --labels L.npy --out out") == 0
    content, printed = read(desk / "out"), capsys.readouterr().out
    (compared,) = content["comparisons"]
    assert compared["metrics"]["mean"]["difference"] == 0
    assert {one["verdict"] for one in compared["metrics"].values()} == {"undetermined"}
    said = "one measure for the 2 sample logs: metric exact_match, filter strict-match"
    assert content["notes"].count(said) == printed.count(f"note: {said}\n") == 1
    assert call("a.jsonl b.jsonl --labels L.npy --out again --filter flexible-extract") == 0
    assert read(desk / "again")["runs"]["b"]["mean"]["value"] == pytest.approx(
        np.mean([right["flexible-extract"][np.load("L.npy") == k].mean() for k in range(6)])
    )
    (desk / "c.jsonl").write_text("".join(json.dumps(row | {"filter": "none"}) + "\n" for row in rows[:N]))
    capsys.readouterr()
    assert call("a.jsonl c.jsonl --labels L.npy --out never") == 2
    error = capsys.readouterr().err
    assert "a.jsonl: exact_match (filter strict-match), exact_match (filter flexible-extract); c.jsonl: exact" in error
    assert len(error.splitlines()) == 1
    assert not (desk / "never").exists()


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ("uniform.jsonl a/uniform.jsonl", ["desk/uniform", "a/uniform"]),
        ("sdo.jsonl sdo.csv", ["sdo.jsonl", "sdo.csv"]),
        ("base=sdo.jsonl uniform.jsonl", ["base", "uniform"]),
        ("k=v.jsonl", ["k=v"]),
    ],
)
def test_names_of_runs(tmp_path, monkeypatch, argv, names):
    folder = tmp_path / "desk"
    (folder / "a").mkdir(parents=True)
    monkeypatch.chdir(folder)
    rows = "".join(json.dumps({"sample_id": i, "correct": i % 2}) + "\n" for i in range(8))
    for name in ("uniform.jsonl", "a/uniform.jsonl", "sdo.jsonl", "k=v.jsonl"):
        (folder / name).write_text(rows)
    (folder / "sdo.csv").write_text("sample_id,correct\n" + "".join(f"{i},{i % 2}\n" for i in range(8)))
    np.save("L.npy", np.arange(8) // 4)
    assert call(f"{argv} --labels L.npy --out out") == 0
    assert list(read(folder / "out")["runs"]) == names


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("sdo.jsonl --out out", "no clusters: expected --embeddings E.npy --clusters K, or --labels L.npy"),
        ("sdo.jsonl --embeddings E.npy --out out", "--clusters is missing"),
        ("sdo.jsonl --labels L.npy --clusters 3 --out out", "leave --clusters out"),
        ("sdo.jsonl --embeddings E.npy --clusters 0 --out out", "--clusters 0: expected 1 to 90"),
        ("sdo.jsonl --embeddings E.npy --clusters 91 --out out", "--clusters 91: expected 1 to 90"),
        ("sdo.jsonl --embeddings X.npy --clusters 3 --out out", "X.npy: no such file"),
        ("sdo.jsonl --labels X.npy --out out", "X.npy: no such file"),
        ("sdo.jsonl --labels L.npy --prompts q.jsonl --out out", "--prompts and --column belong together"),
        ("sdo.jsonl --labels L.npy --prompts q.jsonl --column x --out out", "no column 'x'"),
        (
            "sdo.jsonl --labels L.npy --baseline uniform --out out",
            "--baseline 'uniform' is no run; expected one of sdo",
        ),
        ("sdo.jsonl sdo.jsonl --labels L.npy --out out", "came twice"),
        ("a=sdo.jsonl a=uniform.jsonl --labels L.npy --out out", "two runs are called 'a'"),
        ("x.jsonl --labels L.npy --out out", "no such file or folder"),
        ("sdo.jsonl --labels L.npy --seed -1 --out out", "--seed is -1"),
        ("sdo.jsonl --labels L.npy --near-duplicate 0 --out out", "--near-duplicate 0.0"),
        ("sdo.jsonl --labels L.npy --near-duplicate nan --out out", "--near-duplicate nan"),
        ("sdo.jsonl --labels L.npy --step 5 --out out", "--step 5: it is for run folders, and none came"),
        ("sdo.jsonl --labels L.npy --evaluation x --out out", "--evaluation x: it is for run folders"),
        ("sdo.jsonl --labels L.npy --metric acc --out out", "--metric acc: it is for sample logs of lm-eval"),
        ("sdo.jsonl --labels L.npy --out q.jsonl", "is a file; expected a folder"),
        ("sdo.jsonl --labels L.npy --out .", "holds files"),
        ("sdo.jsonl --labels short.npy --out out", "sample id 5 of sdo (and 84 others) is unknown"),
        ("sdo.jsonl --labels L.npy --prompts few.jsonl --column question --out out", "holds 1 text,"),
        ("sdo.jsonl --embeddings E.npy --labels short.npy --out out", "embeddings have 90 rows, labels 5"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(desk, capsys, argv, message):
    np.save("short.npy", np.zeros(5, dtype=int))
    (desk / "few.jsonl").write_text('{"question": "x"}\n')
    assert call(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (desk / "out").exists()


def test_one_cluster_is_said_in_the_singular_and_with_reasons(desk, pictures, capsys):
    np.save("one.npy", np.append(np.zeros(N - 1, dtype=int), -1))
    assert call("uniform.jsonl sdo.jsonl --labels one.npy --out out") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("89 questions in 1 cluster\n")
    assert "in no metric: 1 question\n" in printed
    assert printed.count("  - for B-20%, CV, Gini, gap, latent spread: it needs at least two clusters\n") == 3
    assert "verdict on balance: undetermined: it needs at least two clusters" in printed
    assert "0.000" not in printed
    assert read(desk / "out")["failed"] == []


def test_a_dash_has_its_reason_below(desk, capsys):
    (desk / "none.jsonl").write_text("".join(json.dumps({"sample_id": i, "correct": 0}) + "\n" for i in range(N)))
    assert call("none.jsonl sdo.jsonl --labels L.npy --out out") == 0
    printed = capsys.readouterr().out
    assert "  - for CV, Gini: the mean is 0\n" in printed
    assert "  - for CV, Gini: the metric is undefined in one of the runs\n" in printed


def test_too_few_resamples(desk, capsys):
    assert main(["balance", "sdo.jsonl", "--labels", "L.npy", "--resamples", "98", "--out", "out"]) == 2
    assert "--resamples 98: expected at least 99" in capsys.readouterr().err


def test_a_picture_that_fails_is_named_and_the_numbers_stay(desk, pictures, capsys, monkeypatch):
    from analysis.balance import plots as balance_plots

    def fail(*_, **__):
        raise RuntimeError("no\nink")

    monkeypatch.setattr(balance_plots, "lorenz", fail)
    assert call("sdo.jsonl --labels L.npy --out out") == 1
    assert capsys.readouterr().err == "sdo balance: lorenz.png failed: no ink\n"
    content = read(desk / "out")
    assert content["failed"] == ["lorenz.png"]
    assert "clusters-sdo.png" in content["files"]
    assert not (desk / "out" / "lorenz.png").exists()


def test_texts_of_any_kind(desk, pictures):
    rows = [json.loads(line) for line in (desk / "q.jsonl").read_text().splitlines()]
    rows[0]["question"] = "<script>alert(1)</script> $\\frac{1}{2}$ " + "x" * 10**6
    rows[1]["question"] = "\u05e9\u05dc\u05d5\u05dd \u202e \u0645\u0631\u062d\u0628\u0627"
    rows[2]["question"] = "\x1b[31m \ud800"
    (desk / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = "<b>$x$\u202e"
    argv = ["--labels", "L.npy", "--prompts", "q.jsonl", "--column", "question", "--out", "out", "--resamples", "99"]
    assert main(["balance", f"{name}=sdo.jsonl", *argv]) == 0
    assert (desk / "out" / "balance.json").stat().st_size < 100_000
    assert list(read(desk / "out")["runs"]) == [r"<b>$x$\u202e"]


def test_overwrite(desk):
    assert call("sdo.jsonl --labels L.npy --out out") == 0
    assert call("sdo.jsonl --labels L.npy --out out") == 2
    assert call("sdo.jsonl --labels L.npy --out out --overwrite") == 0


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from sdo.cli.main import main\n"
        "try:\n    main(['balance', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print([m for m in ('analysis', 'matplotlib', 'sklearn', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "example: sdo balance" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


@pytest.mark.gsm8k
def test_gsm8k_models(gsm8k, tmp_path, monkeypatch):
    write_predictions = pytest.importorskip("benchmarks.gsm8k_predictions", reason="benchmarks/ is not installed").main

    if not (gsm8k / "example_model_solutions.jsonl").is_file():
        pytest.skip("the example solutions are not here")
    write_predictions(str(gsm8k), str(tmp_path))
    monkeypatch.chdir(tmp_path)
    argv = f"6b_finetuning.jsonl 175b_verification.jsonl --embeddings {gsm8k / 'test_minilm.npy'} --clusters 164"
    assert main(["balance", *argv.split(), "--seed", "617", "--out", "out"]) == 0
    content = read(tmp_path / "out")
    assert (content["clusters"], content["n"], content["distinct"]) == (164, 1319, 1318)
    assert content["accuracy"]["6b_finetuning"]["accuracy"] == pytest.approx(286 / 1319)
    assert content["homogeneity"]["6b_finetuning"]["p"] > 0.05
    assert content["homogeneity"]["175b_verification"]["p"] < 0.01
    (comparison,) = content["comparisons"]
    assert comparison["accuracy"]["difference"] == pytest.approx((742 - 286) / 1319)
    assert comparison["accuracy"]["verdict"] == comparison["metrics"]["mean"]["verdict"] == "better"
    assert comparison["metrics"]["gap"]["interval"] is None  # 100 points in both, and after every swap
    assert comparison["balance"] == "undetermined"
