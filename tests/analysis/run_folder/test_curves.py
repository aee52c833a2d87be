import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure

from analysis import Run
from analysis.run_folder.curves import Training, evaluation_curves, evaluations, loss_curves, loss_label, training


@pytest.fixture
def run(make_run):
    writer = make_run()
    batches = [[0, 1], [1, 2], [2, 2], [5, 0], []]
    writer.steps(0, 4, batches, losses=[3.0, None, 2.0, float("nan"), 1.0])
    folder = writer.path / "evaluations"
    folder.mkdir()
    rows = [
        {"step": 0, "name": "a", "sample_id": 0, "score": 1.0},
        {"step": 0, "name": "a", "sample_id": 1, "score": 2.0},
        {"step": 4, "name": "a", "sample_id": 0, "score": None},
        {"step": 4, "name": "a", "sample_id": 1, "score": 0.5},
        {"step": 4, "name": "b", "sample_id": 1, "score": None},
    ]
    schema = pa.schema(
        [("step", pa.int64()), ("name", pa.string()), ("sample_id", pa.int64()), ("score", pa.float64())]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / "part-00000000-00000004.parquet")
    return Run.open(writer.path)


def test_what_a_run_had_seen_counts_repetition_apart(run):
    went = training(run)
    assert went.step.tolist() == [0, 1, 2, 3, 4]
    assert went.samples.tolist() == [2, 4, 6, 8, 8]
    seen, slow = set(), []
    for ids in run.steps().column("sample_ids").to_pylist():
        seen |= set(ids)
        slow.append(len(seen))
    assert went.distinct.tolist() == slow == [2, 3, 3, 4, 4]
    assert went.tokens.tolist() == [80, 160, 240, 320, 400]
    assert np.isnan(went.loss).tolist() == [False, True, False, True, False]


def test_a_run_without_steps_has_no_training(make_run):
    went = training(Run.open(make_run().path))
    assert [len(values) for values in (went.step, went.loss, went.distinct, went.samples, went.tokens)] == [0] * 5


def test_evaluations_are_means_over_the_samples_with_a_score(run):
    found = evaluations(run)
    assert list(found) == ["a", "b"]
    assert found["a"].step.tolist() == [0, 4]
    assert found["a"].mean.tolist() == [1.5, 0.5]
    assert found["a"].count.tolist() == [2, 1]
    assert np.isnan(found["b"].mean).tolist() == [True]


def test_curves_leave_out_what_is_not_known(run):
    figure, axes = loss_curves({"_x": training(run)})
    assert isinstance(figure, Figure)
    assert axes.get_lines()[0].get_xdata().tolist() == [0, 2, 4]
    assert axes.get_legend().get_texts()[0].get_text() == "_x"
    _, axes = evaluation_curves({"r": evaluations(run)["a"]}, "a")
    assert axes.get_lines()[1].get_ydata().tolist() == [1.5, 0.5]
    own = Figure().subplots()
    assert evaluation_curves({"r": evaluations(run)["b"]}, "b", ax=own)[1] is own
    assert "nothing to draw" in own.texts[0].get_text()


@pytest.fixture(scope="module")
def kinds():
    """What the recorder says of each trainer."""
    pytest.importorskip("torch", reason="needs the extra train")
    return pytest.importorskip("sdo.trainers.trainer_types", reason="needs the extra train")


def test_the_loss_has_the_words_of_run_json(make_run, kinds):
    def went(name, **info):
        writer = make_run(name).info(**info)
        writer.steps(0, 2, [[0], [1], [2]])
        return training(Run.open(writer.path))

    plain, dpo = (
        went(n, meaning={"loss": words}) for n, words in (("a", kinds.PLAIN.loss), ("b", "DPO's loss, mean over"))
    )
    silent = [went("c"), went("d", meaning=None), went("e", meaning={"loss": 3})]
    assert plain.meaning == kinds.PLAIN.loss
    assert [one.meaning for one in silent] == [None] * 3
    assert loss_label(silent) == "training loss"
    assert loss_label([plain, plain]) == "training loss: mean negative log-likelihood per trained token, nats"
    assert loss_label([dpo]) == "training loss: DPO's loss"
    assert loss_label([plain, dpo]) == loss_label([plain, silent[0]]) == "training loss, of different kinds"
    assert loss_curves({"b": dpo})[1].get_ylabel() == "training loss: DPO's loss"
    assert loss_curves({"c": silent[0]})[1].get_ylabel() == "training loss"
    lines = loss_curves({"a": plain})[1].get_ylabel().split("\n")
    assert " ".join(lines) == loss_label([plain])
    assert max(map(len, lines)) <= 40


def test_labels_of_every_trainer_are_short(kinds):
    nothing = np.zeros(0)
    for kind in kinds.SUPPORTED:
        label = loss_label([Training(nothing, nothing, nothing, nothing, nothing, kind.describe()["loss"])])
        assert len("training loss: ") < len(label) < 80
        assert "micro-batch" not in label
