import itertools
import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from sdo import SDO, Uniform
from sdo.cli.main import main

N, B = 60, 8
MATRIX = np.random.default_rng(1).standard_normal((N, 6)).astype(np.float32)
# The command as the project's description gives it.
ISSUE = ["--batch-size", "8", "--epochs", "4", "--k", "4", "--delta-tau", "2", "--retain", "0.2", "--seed", "617"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("E.npy", MATRIX)
    return tmp_path


def plan(*argv, embeddings="E.npy", out="PLAN.parquet"):
    return main(["plan", "--embeddings", str(embeddings), *map(str, argv), "--out", str(out)])


def read(name="PLAN.parquet"):
    table = pq.read_table(name)
    return {column: table.column(column).to_numpy() for column in table.column_names}


VARIANTS = [
    ([], {}),
    (["--graph", "static"], {"graph": "static"}),
    (["--locality", "random"], {"locality": "random"}),
    (["--locality", "shuffle"], {"locality": "shuffle"}),
    (["--no-exposure"], {"exposure": False}),
    (["--visit", "anchor"], {"visit": "anchor"}),
    (["--on-invalid", "isolate"], {"on_invalid": "isolate"}),
    (["--delta-tau", "1.5", "--retain", "1"], {"delta_tau": 1.5, "retain": 1.0}),
    (["--k", "2", "--seed", str(2**64 - 1)], {"k": 2, "seed": 2**64 - 1}),
]


@pytest.mark.parametrize(("extra", "options"), VARIANTS)
def test_the_files_agree_with_the_api(here, capsys, extra, options):
    assert plan(*ISSUE, *extra) == 0
    expected = SDO(MATRIX, **{"k": 4, "delta_tau": 2, "retain": 0.2, "seed": 617, **options}).plan(B)
    epochs = [expected.epoch(e) for e in range(4)]
    steps = sum(len(epoch.steps) for epoch in epochs)
    rows = read()
    assert list(rows) == ["organizer_epoch", "step", "slot", "sample_id"]
    assert all(column.dtype == np.int64 for column in rows.values())
    assert rows["sample_id"].tolist() == expected.batches(0, steps).ravel().tolist()
    assert rows["step"].tolist() == [step for step in range(steps) for _ in range(B)]
    assert rows["slot"].tolist() == list(range(B)) * steps
    assert rows["organizer_epoch"].tolist() == [e for e in range(4) for _ in range(len(epochs[e].steps) * B)]
    record = json.loads((here / "PLAN.json").read_text())
    assert record["fingerprint"] == expected.fingerprint
    assert record["options"] == expected.describe()["options"]
    assert (record["batch_size"], record["n_samples"], record["name"]) == (B, N, "sdo")
    assert record["embeddings_path"] == "E.npy"
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in here.iterdir()) == ["E.npy", "PLAN.json", "PLAN.parquet"]


def mean_cosine(batches):
    """Mean over batches of the mean cosine over pairs, pair by pair, from the matrix itself."""
    unit = MATRIX / np.linalg.norm(MATRIX, axis=1, keepdims=True)
    means = [np.mean([unit[i] @ unit[j] for i, j in itertools.combinations(batch, 2)]) for batch in batches]
    return float(np.mean(means))


@pytest.mark.parametrize(("extra", "exposure"), [([], True), (["--visit", "anchor"], True), (["--no-exposure"], False)])
def test_the_figures_follow_from_the_parquet(here, extra, exposure):
    assert plan(*ISSUE, *extra) == 0
    rows = read()
    uniform = Uniform(N, seed=617).plan(B)
    u = np.zeros(N, dtype=int)
    pool, first = N, 0
    figures = json.loads((here / "PLAN.json").read_text())["epochs"]
    for e, figure in enumerate(figures):
        batches = rows["sample_id"][rows["organizer_epoch"] == e].reshape(-1, B)
        assert figure["organizer_epoch"] == e
        assert figure["steps"] == len(batches)
        # Every member of the pool appears in its epoch, and no other sample does.
        assert figure["pool"] == len(set(batches.ravel().tolist()))
        u += np.bincount(batches.ravel(), minlength=N)
        assert (figure["exposure_min"], figure["exposure_max"]) == (u.min(), u.max())
        assert figure["exposure_mean"] == pytest.approx(u.mean())
        if exposure:
            assert figure["pool"] == pool
            cold = int((u < (e + 1) * 2).sum())
            assert (figure["cold"], figure["hot"]) == (cold, N - cold)
            pool = max(B, cold + int(np.ceil(0.2 * (N - cold))))
        else:
            assert not {"cold", "hot"} & set(figure)
        assert figure["within_batch_cosine"] == pytest.approx(mean_cosine(batches), abs=1e-6)
        same_steps = uniform.batches(first, first + len(batches))
        assert figure["uniform_within_batch_cosine"] == pytest.approx(mean_cosine(same_steps), abs=1e-6)
        first += len(batches)
    assert len(figures) == 4
    assert figures[0]["within_batch_cosine"] > figures[0]["uniform_within_batch_cosine"]


def test_the_table_shows_the_figures(here, capsys):
    assert plan(*ISSUE) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = json.loads((here / "PLAN.json").read_text())["epochs"]
    assert re.split(r"\s{2,}", lines[0].strip()) == [
        *("epoch", "steps", "pool", "cold", "hot", "exposure min/mean/max", "cosine", "uniform"),
    ]
    for line, f in zip(lines[1:5], figures, strict=True):
        assert re.split(r"\s{2,}", line.strip()) == [
            *(str(f[name]) for name in ("organizer_epoch", "steps", "pool", "cold", "hot")),
            f"{f['exposure_min']} / {f['exposure_mean']:.2f} / {f['exposure_max']}",
            f"{f['within_batch_cosine']:.3f}",
            f"{f['uniform_within_batch_cosine']:.3f}",
        ]
    assert len({len(line) for line in lines[:5]}) == 1  # aligned
    assert lines[-1] == f"PLAN.parquet ({sum(f['steps'] for f in figures)} steps), PLAN.json"


def test_uniform(here, capsys):
    assert plan("--organizer", "uniform", "--batch-size", 7, "--epochs", 3, "--seed", 5) == 0
    expected = Uniform(N, seed=5).plan(7)
    rows = read()
    assert rows["sample_id"].tolist() == expected.batches(0, len(rows["step"]) // 7).ravel().tolist()
    record = json.loads((here / "PLAN.json").read_text())
    assert (record["name"], record["options"]) == ("uniform", {"seed": 5})
    for figure in record["epochs"]:
        assert not {"cold", "hot"} & set(figure)
        assert figure["within_batch_cosine"] == figure["uniform_within_batch_cosine"]
    assert "cold" not in capsys.readouterr().out


def test_the_papers_shuffle_is_said_to_be_uniform(here, capsys):
    """With the defaults nothing ever turns hot, so the ablation of the paper equals uniform shuffling."""
    assert plan("--batch-size", 6, "--locality", "shuffle") == 0
    assert "so this plan is uniform shuffling" in capsys.readouterr().out
    assert all(f["hot"] == 0 for f in json.loads((here / "PLAN.json").read_text())["epochs"])
    assert plan("--batch-size", 6) == 2  # exists
    assert plan("--batch-size", 6, out="Q.parquet") == 0
    assert "uniform shuffling" not in capsys.readouterr().out


def test_one_sample_a_batch_has_no_cosine(here, capsys):
    assert plan("--batch-size", 1, "--epochs", 1) == 0
    (figure,) = json.loads((here / "PLAN.json").read_text())["epochs"]
    assert figure["within_batch_cosine"] is figure["uniform_within_batch_cosine"] is None
    assert "nan" not in capsys.readouterr().out.lower()


def test_a_batch_of_all_samples(here):
    assert plan("--batch-size", N, "--epochs", 2) == 0
    assert sorted(read()["sample_id"][:N].tolist()) == list(range(N))


def test_a_lowered_k_is_noted(here, capsys):
    np.save("small.npy", MATRIX[:5])
    assert plan("--batch-size", 2, "--k", 9, embeddings="small.npy") == 0
    captured = capsys.readouterr()
    note = "k = 9, but a sample has only 4 other usable pool members; using k = 4"
    assert f"note: {note}" in captured.out
    assert captured.err == ""
    assert note in json.loads((here / "PLAN.json").read_text())["notes"]


def test_defaults_are_those_of_the_api(here):
    assert plan("--batch-size", B) == 0
    record = json.loads((here / "PLAN.json").read_text())
    assert record["fingerprint"] == SDO(MATRIX).plan(B).fingerprint
    assert len(record["epochs"]) == 4


def test_the_same_command_writes_the_same_bytes(here):
    assert plan(*ISSUE) == 0
    first = [(here / name).read_bytes() for name in ("PLAN.parquet", "PLAN.json")]
    assert plan(*ISSUE, "--overwrite") == 0
    assert [(here / name).read_bytes() for name in ("PLAN.parquet", "PLAN.json")] == first


def test_others_open_the_parquet(here):
    pandas = pytest.importorskip("pandas")
    assert plan(*ISSUE) == 0
    frame = pandas.read_parquet("PLAN.parquet")
    assert frame.groupby("step")["sample_id"].nunique().eq(B).all()
    assert frame["sample_id"].between(0, N - 1).all()


# ---------------------------------------------------------------------- wrong input


def refused(capsys, argv):
    """Run a command that must be refused in one line; return the line."""
    status = main(argv)
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(("sdo plan: ", "sdo: "))  # the parser speaks before it knows the command
    return line


def matrices():
    nan, infinite, zero = MATRIX.copy(), MATRIX.copy(), MATRIX.copy()
    nan[3, 1], infinite[5, 0], zero[[7, 9]] = np.nan, -np.inf, 0
    objects = np.empty((4, 2), dtype=object)
    objects[:] = 1.0
    return {
        "1-D": (MATRIX[0], r"have shape \(6,\); expected \(N, d\)"),
        "3-D": (MATRIX[None], "expected"),
        "0-D": (np.float32(1), "expected"),
        "no rows": (MATRIX[:0], "are empty"),
        "no columns": (MATRIX[:, :0], "are empty"),
        "objects": (objects, "holds Python objects"),
        "integers": (np.ones((9, 3), dtype=int), "hold int64; expected float16"),
        "NaN": (nan, "1 of 60 embedding rows hold NaN or infinity or are zero: 3;"),
        "infinite": (infinite, "are zero: 5;"),
        "zero": (zero, r"2 of 60 .* are zero: 7, 9;"),
    }


@pytest.mark.parametrize("kind", list(matrices()))
def test_matrices_that_cannot_be_used(here, capsys, kind):
    matrix, message = matrices()[kind]
    np.save("bad.npy", matrix)
    line = refused(capsys, ["plan", "--embeddings", "bad.npy", "--batch-size", "2", "--out", "P.parquet"])
    assert re.search(message, line)
    assert sorted(path.name for path in here.iterdir()) == ["E.npy", "bad.npy"]


def test_isolating_plans_what_raising_refuses(here):
    matrix = MATRIX.copy()
    matrix[3, 1], matrix[7] = np.nan, 0
    np.save("bad.npy", matrix)
    assert plan("--batch-size", 4, "--on-invalid", "isolate", embeddings="bad.npy") == 0
    assert set(read()["sample_id"].tolist()) == set(range(N))  # nobody is lost


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is not a readable .npy file"), (b"question,answer\n", "is not a readable"), (None, "no such file")],
    ids=["empty file", "text", "missing"],
)
def test_files_that_are_no_matrix(here, capsys, content, message):
    if content is not None:
        (here / "bad.npy").write_bytes(content)
    line = refused(capsys, ["plan", "--embeddings", "bad.npy", "--batch-size", "2", "--out", "P.parquet"])
    assert message in line
    assert not (here / "P.parquet").exists()


def test_a_truncated_matrix(here, capsys):
    data = (here / "E.npy").read_bytes()
    (here / "bad.npy").write_bytes(data[:-100])
    assert "bad.npy" in refused(capsys, ["plan", "--embeddings", "bad.npy", "--batch-size", "2", "--out", "P.parquet"])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--batch-size", "61"], "batch size 61 is larger than the 60 samples"),
        (["--batch-size", "0"], "batch size is 0"),
        (["--batch-size", "-3"], "batch size is -3"),
        (["--batch-size", "2.5"], "--batch-size"),
        (["--batch-size", "many"], "--batch-size"),
        (["--epochs", "0"], "--epochs is 0; expected a whole number from 1"),
        (["--epochs", "-1"], "--epochs is -1"),
        (["--epochs", "1.5"], "--epochs"),
        (["--k", "0"], "k is 0"),
        (["--k", "-4"], "k is -4"),
        (["--delta-tau", "0"], "delta_tau is 0"),
        (["--delta-tau", "-2"], "delta_tau is -2"),
        (["--delta-tau", "nan"], "--delta-tau: got 'nan' (str), expected float"),
        (["--delta-tau", "inf"], "--delta-tau: got 'inf'"),
        (["--retain", "1.01"], "retain is 1.01"),
        (["--retain", "-0.1"], "retain is -0.1"),
        (["--retain", "nan"], "--retain: got 'nan'"),
        (["--seed", "-1"], "seed is -1"),
        (["--seed", str(2**64)], "seed is 18446744073709551616"),
        (["--visit", "all"], "--visit"),
        (["--graph", "fixed"], "--graph"),
        (["--locality", "none"], "--locality"),
        (["--on-invalid", "drop"], "--on-invalid"),
        (["--organizer", "random"], "--organizer: no organizer 'random'; known: sdo, uniform"),
        (
            ["--organizer", "uniform", "--k", "3"],
            "organizer uniform has no options of its own",
        ),
        (["--kk", "3"], "unexpected argument '--kk'; did you mean '--k'? its options are --embeddings"),
        (["--samples", "9"], "--samples is 9, but E.npy has 60 rows; expected as many"),
        (["--epoch", "3"], "--epoch"),  # no abbreviations
        (["--nonsense"], "--nonsense"),
        (["surplus"], "surplus"),
    ],
)
def test_options_out_of_range(here, capsys, extra, message):
    argv = ["plan", "--embeddings", "E.npy", "--batch-size", "8", *extra, "--out", "P.parquet"]
    assert message in refused(capsys, argv)
    assert sorted(path.name for path in here.iterdir()) == ["E.npy"]


@pytest.mark.parametrize("missing", ["--embeddings", "--batch-size", "--out"])
def test_options_that_must_be_given(here, capsys, missing):
    argv = ["plan", "--embeddings", "E.npy", "--batch-size", "8", "--out", "P.parquet"]
    at = argv.index(missing)
    assert missing in refused(capsys, argv[:at] + argv[at + 2 :])


@pytest.mark.parametrize("existing", ["P.parquet", "P.json"])
def test_an_existing_output_is_kept(here, capsys, existing):
    (here / existing).write_bytes(b"mine")
    line = refused(capsys, ["plan", "--embeddings", "E.npy", "--batch-size", "8", "--out", "P.parquet"])
    assert f"{existing} exists" in line
    assert (here / existing).read_bytes() == b"mine"
    assert sorted(path.name for path in here.iterdir()) == sorted(["E.npy", existing])


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("E.npy/P.parquet", "E.npy"),
        ("P.csv", "expected a name that ends in .parquet"),
        ("P", "expected a name that ends in .parquet"),
        (".parquet", "expected a name that ends in .parquet"),
        ("folder.parquet", "folder.parquet is a folder"),
    ],
)
def test_outputs_that_cannot_be_written(here, capsys, out, message):
    (here / "folder.parquet").mkdir()
    for extra in ([], ["--overwrite"]):
        line = refused(capsys, ["plan", "--embeddings", "E.npy", "--batch-size", "8", "--out", out, *extra])
        assert message in line
    assert sorted(path.name for path in here.iterdir()) == ["E.npy", "folder.parquet"]


@pytest.mark.parametrize("fails", ["pyarrow.parquet.write_table", "pathlib.Path.write_text"])
def test_a_full_disk_is_one_line_and_leaves_the_old_files(here, capsys, monkeypatch, fails):
    assert plan("--batch-size", 8) == 0
    before = {path.name: path.read_bytes() for path in here.iterdir()}
    capsys.readouterr()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fails, full)
    status = plan("--batch-size", 4, "--overwrite")
    captured = capsys.readouterr()
    assert status in (1, 2)
    assert "No space left" in captured.err
    assert len(captured.err.splitlines()) == 1
    # Both files belong to one plan: never a new one beside an old one.
    assert {path.name: path.read_bytes() for path in here.iterdir()} == before


def test_a_failed_write_leaves_no_half_plan(here, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    assert plan("--batch-size", 4) in (1, 2)
    assert "No space left" in capsys.readouterr().err
    assert sorted(path.name for path in here.iterdir()) == ["E.npy"]


def test_neighbors_that_rounding_decides_are_noted(here, capsys):
    rows = 1 + 1e-3 * np.random.default_rng(0).standard_normal((200, 64))
    np.save("close.npy", rows)
    np.save("centered.npy", rows - rows.mean(axis=0))
    assert plan("--batch-size", 8, "--epochs", 2, embeddings="close.npy", out="p.parquet") == 0
    (note,) = json.loads((here / "p.json").read_text())["notes"]
    assert "so nearly parallel that rounding to multiples of 2**-24 decides who is a neighbor" in note
    assert f"\nnote: {note}\n" in capsys.readouterr().out
    assert plan("--batch-size", 8, "--epochs", 2, embeddings="centered.npy", out="q.parquet") == 0
    assert json.loads((here / "q.json").read_text())["notes"] == []
