"""The report as a file: what it holds, what it must never hold, and what becomes of a part that fails."""

import base64
import json
import re
import warnings
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pyarrow.compute as pc
import pytest
import run_folders
from PIL import Image

from analysis import (
    Predictions,
    Prompts,
    Run,
    exposure_entry,
    given_labels,
    run_exposure,
    summarize_balance,
)
from analysis.balance.words import CAVEAT, WORDS
from analysis.coherence.plots import coherence_heat_maps
from analysis.report import build_report
from analysis.report.material import ReportMaterial
from analysis.report.seeds import seeds_section
from analysis.report.settings import arms_of
from analysis.run_folder.curves import evaluation_curves
from sdo import Embeddings, Uniform

MARKUP = "</title><script>alert('x')</script><img src=x onerror=alert(1)> $a_b$ \u202e"


class Page(HTMLParser):
    """Collects tags, attributes and visible text."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.text = [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def runs(make_training):
    kinds = {"uniform": 0.2, "sdo": 1.0}
    return {
        name: Run.open(make_training(name, pull=pull, organizer={"name": name, "options": {"seed": 1}}).path)
        for name, pull in kinds.items()
    }


def test_the_page_needs_no_script_and_no_network(runs):
    page = Page(build_report(runs).html)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "form", "base"}
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,"))
    policy = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy[0].startswith("default-src 'none'")


def test_print_shows_what_is_folded_away(runs):
    html = build_report(runs).html
    printed = "".join(re.findall(r"@media print\{(.*)\}", html))
    # A closed details hides the box around its content, whatever its children are.
    assert "details::details-content{content-visibility:visible;block-size:auto}" in printed
    # Where that box cannot be named, the heading stays: it says that something is missing.
    assert "@supports selector(::details-content){summary{display:none}}" in printed
    assert printed.count("summary{display:none}") == 1
    assert "<details>" in html


def test_words_in_tables_keep_a_width_to_read_them(runs):
    html = build_report(runs).html
    assert "td:not(.n){min-width:6rem}" in html
    assert ".words td{min-width:11rem}" in html
    for caption, words in (("Runs", True), ("What each run trained on", False)):
        assert (f'<table class="words">\n<caption>{caption}<' in html) is words
        assert f"<caption>{caption}<" in html


def test_pictures_have_words_and_true_sizes(runs):
    pictures = Page(build_report(runs).html).all("img")
    assert len(pictures) == 5
    for picture in pictures:
        assert len(picture["alt"]) > 20
        with Image.open(BytesIO(base64.b64decode(picture["src"].split(",")[1]))) as image:
            assert image.size == (int(picture["width"]), int(picture["height"]))


def test_numbers_in_the_page_and_beside_it_are_the_same(runs, tmp_path):
    report = build_report(runs, command=["sdo", "report", "a b"])
    record = report.write(tmp_path / "report.html")
    numbers = json.loads(record.read_text(), parse_constant=pytest.fail)
    words = Page((tmp_path / "report.html").read_text()).words
    signals = numbers["sections"]["coherence"]["signals"]["hidden"]
    for entry in signals.values():
        for value in (entry["step_coherence"]["mean"], entry["batch_coherence"]["mean"]):
            assert f"{value:+.3f}".replace("-", "−") in words
    assert numbers["sections"]["training"]["runs"]["sdo"]["distinct"] == 40
    assert "sdo report 'a b'" in words
    assert numbers["verdict"][0]["tone"] == "undetermined"
    assert report.failed == ()


def test_micro_batches_are_not_called_samples(runs, tmp_path):
    rng = np.random.default_rng(0)
    writer = run_folders.RunWriter(tmp_path / "halves", {"hidden": runs["sdo"].info["signals"]["hidden"]["stored"]})
    rows = [
        {"step": t, "kind": kind, "micro_batch": i, "sketch": rng.normal(size=writer.signals["hidden"])}
        for t in range(5)
        for kind, count in (("step", 1), ("micro_batch", 2))
        for i in range(count)
    ]
    writer.info().gradients("hidden", rows, 0, 4)
    writer.steps(0, 4, [[0, 1]] * 5)
    halves = Run.open(writer.path)
    words = Page(build_report({"halves": halves}).html).words
    assert "gradients of micro-batches of one batch have a mean cosine of" in words
    assert "within batches (between micro-batches)" in words
    assert "samples of one batch" not in words
    words = Page(build_report({"sdo": runs["sdo"], "halves": halves}).html).words
    assert re.search(r"gradients of samples of one batch have a mean cosine of \S+ in sdo; ", words)
    assert re.search(r"gradients of micro-batches of one batch have a mean cosine of \S+ in halves\.", words)
    assert "within batches (between samples in sdo, between micro-batches in halves)" in words


def test_texts_are_shown_and_never_markup(make_training):
    info = {"model": {"class": MARKUP, "parameters": 5}, "organizer": {"name": MARKUP, "options": {}}}
    run = Run.open(make_training("run", **info).path)
    page = Page(build_report({MARKUP: run}, title=MARKUP).html)
    assert not page.all("script")
    assert all(picture["src"].startswith("data:") for picture in page.all("img"))
    assert "onerror=alert(1)" in page.words


def test_nothing_in_a_name_is_obeyed_by_who_reads_the_page(make_training, tmp_path):
    name = "a\x1b[31m\x07\u202e\x9b\udcff<b>"
    run = Run.open(make_training("one").path)
    report = build_report({name: run}, title=name, redraws=0, command=["sdo", name])
    shown = r"a\x1b[31m\x07\u202e\x9b\udcff&lt;b&gt;"
    assert f"<title>{shown}</title>" in report.html
    assert report.html.count(shown) > 5  # the run's name in tables and words, and the command
    assert not set(name) - set("a[31m<b>") & set(report.html)
    record = report.write(tmp_path / "page.html")
    assert json.loads(record.read_text(encoding="utf-8"))["title"] == name


def test_a_section_that_fails_is_shown_and_the_others_stand(runs, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no <ink>\nleft")

    monkeypatch.setattr("analysis.coherence.study.step_coherence_blocks", fail)
    report = build_report(runs)
    page = Page(report.html)
    assert report.failed == ("Coherence",)
    assert "RuntimeError: no <ink> left" in page.words
    assert "This page is incomplete: Coherence could not be computed." in page.words
    assert report.numbers["sections"]["coherence"]["state"] == "failed"
    assert report.numbers["sections"]["training"]["runs"]["sdo"]["steps"] == 60


def test_a_broken_part_of_a_run_fails_its_section_alone(runs):
    part = next((runs["sdo"].path / "gradients" / "hidden").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-20])
    report = build_report(runs)
    assert report.failed == ("Coherence",)
    assert part.name in report.numbers["sections"]["coherence"]["reason"]


def test_what_is_missing_is_named(make_run):
    report = build_report({"empty": Run.open(make_run("empty").path)})
    sections = report.numbers["sections"]
    absent = [key for key, part in sections.items() if part["state"] == "absent"]
    assert absent == ["balance", "seeds", "training", "coherence", "locality", "exposure", "weakest"]
    assert sections["provenance"]["state"] == "shown"
    assert "no signal in common" in sections["coherence"]["reason"]
    assert "it holds no gradients" in sections["locality"]["reason"]
    assert "no recorded step has sample ids" in sections["exposure"]["reason"]
    assert "--predictions" in sections["balance"]["reason"]
    assert report.failed == ()


def test_runs_whose_losses_are_different_things_are_said(make_training):
    words = {"a": "nats", "b": "DPO's <b>loss</b>, mean over pairs", "c": "nats"}
    runs = {name: Run.open(make_training(name, meaning={"loss": text}).path) for name, text in words.items()}
    shown = Page(build_report(runs).html).words
    assert "different things and cannot be compared: in a and c nats; in b DPO's <b>loss</b>, mean over pairs." in shown
    assert "Training loss, of different kinds." in shown
    shown = Page(build_report({name: runs[name] for name in ("a", "c")}).html).words
    assert "cannot be compared" not in shown
    assert "Training loss: nats." in shown


def test_evaluations_have_the_unit_of_run_json(make_training, monkeypatch):
    nats = "mean negative log-likelihood per token, nats"
    writer = make_training("a", meaning={"trainer": "SFTTrainer", "score": nats})
    writer.evaluations("eval_loss", {5: [3.0], 10: [2.0]}).evaluations("eval_correct", {7: [1.0]})
    labels = []

    def remember(*arguments, **options):
        figure, axes = evaluation_curves(*arguments, **options)
        labels.append(" ".join(axes.get_ylabel().split()))
        return figure, axes

    monkeypatch.setattr("analysis.report.sections.evaluation_curves", remember)
    report = build_report({"a": Run.open(writer.path)})
    assert labels == ["eval_correct, mean over samples", f"eval_loss: {nats}; mean over samples"]
    entries = report.numbers["sections"]["training"]["runs"]["a"]["evaluations"]
    assert entries["eval_loss"]["meaning"] == nats
    assert "meaning" not in entries["eval_correct"]
    assert f"<caption>eval_loss, {nats}</caption>" in report.html
    assert f"<figcaption>eval_loss, {nats}: mean over" in report.html


def test_one_run_is_described_and_not_judged(runs):
    findings = build_report({"sdo": runs["sdo"]}).numbers["verdict"]
    assert [finding["tone"] for finding in findings] == ["plain"]


def test_alerts_name_what_makes_runs_differ(make_training):
    a = make_training("a", trainer={"learning_rate": 1e-4}, status="running")
    b = make_training("b", trainer={"learning_rate": 2e-4}, sketch_check={"hidden": {"rmse": 0.5}})
    rows = [{"step": 60, "kind": "step", "sketch": [0.0] * 16}]
    b.gradients("hidden", rows, 60, 60)
    alerts = "\n".join(build_report({"a": Run.open(a.path), "b": Run.open(b.path)}).numbers["alerts"])
    assert "a is 'running', not finished: it holds steps up to 59." in alerts
    assert "trainer learning_rate is 0.0001 in a and 0.0002 in b." in alerts
    assert "b: 1 of 61 gradients of hidden have no direction" in alerts
    assert "off by 0.500" in alerts


def test_runs_that_differ_in_their_seed_alone_are_one_kind(make_training):
    def run(name, organizer, seed):
        options = {"seed": seed, "k": 4}
        return Run.open(make_training(name, organizer={"name": organizer, "options": options}).path)

    alike = {f"s{seed}": run(f"s{seed}", "sdo", seed) for seed in (1, 2)}
    assert [f["tone"] for f in build_report(alike).numbers["verdict"]] == ["plain"]
    mixed = {**alike, "u": run("u", "uniform", 1)}
    assert "one run of uniform cannot tell" in build_report(mixed).numbers["verdict"][0]["words"]


def pictures(report):
    return [base64.b64decode(a["src"].split(",")[1]) for a in Page(report.html).all("img")]


def test_pictures_are_scaled_until_the_page_can_be_sent(runs, monkeypatch):
    whole = build_report(runs)
    assert whole.numbers["picture_scale"] == 1.0
    assert len(whole.html) < 1_000_000
    budget = int(0.95 * len(whole.html))  # how large pictures are is matplotlib's affair
    monkeypatch.setattr("analysis.report.build._PAGE_BYTES", budget)
    report = build_report(runs)
    assert 0.4 <= report.numbers["picture_scale"] < 1
    assert len(report.html) <= budget + 2000
    assert len(pictures(report)) == 5


def test_of_many_runs_some_are_drawn_each_kind_in_turn_and_the_page_says_so(make_training, monkeypatch):
    cells = {}

    def heat_maps(matrices, **options):
        cells.update({name: len(one.cells) for name, one in matrices.items()})
        return coherence_heat_maps(matrices, **options)

    monkeypatch.setattr("analysis.report.sections.coherence_heat_maps", heat_maps)
    runs = {}
    for i in range(20):
        kind = "uniform" if i < 10 else "sdo"
        organizer = {"name": kind, "options": {"seed": i % 10}}
        writer = make_training(f"{kind}-{i % 10}", steps=140, seed=i, organizer=organizer)
        runs[writer.path.name] = Run.open(writer.path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = build_report(runs, redraws=0)
    assert report.failed == ()
    assert len(report.html) < 1_000_000
    assert list(cells) == ["uniform-0", "uniform-1", "uniform-2", "sdo-0", "sdo-1", "sdo-2"]
    assert set(cells.values()) == {70}  # 140 steps in blocks of 2: at most 95 cells a side
    words = Page(report.html).words
    assert "Drawn: 6 of 20 runs; the others by sdo coherence RUN… --out DIR." in words
    entries = report.numbers["sections"]["coherence"]["signals"]["hidden"]
    means = [entries[f"sdo-{i}"]["step_coherence"]["mean"] for i in range(10)]
    assert f"{min(means):+.3f} to {max(means):+.3f} in 10 runs of sdo" in words
    for one in pictures(report):
        with Image.open(BytesIO(one)) as image:
            assert image.width >= 500


@pytest.fixture
def predictions():
    """Two runs over 12 clusters of 10 questions; the second is better, and much better where the first was weak."""
    rng = np.random.default_rng(5)
    label = np.repeat(np.arange(12), 10)
    weak = np.where(label < 4, 0.05, 0.85)
    runs = [
        Predictions("before", np.arange(120), (rng.random(120) < weak).astype(float)),
        Predictions("after", np.arange(120), (rng.random(120) < 0.8).astype(float)),
    ]
    texts = [f"{MARKUP} question {i} about topic{label[i]}" for i in range(120)]
    return lambda **options: summarize_balance(
        runs, given_labels(label), prompts=Prompts.of(texts), resamples=199, **options
    )


def test_balance_gives_the_verdict_and_needs_no_run(predictions):
    report = build_report({}, balance=predictions())
    page = Page(report.html)
    numbers = report.numbers["sections"]["balance"]
    compared = numbers["comparisons"][0]
    assert report.numbers["verdict"][0]["tone"] == compared["balance"] == "better"
    assert f"{compared['metrics']['spread']['difference']:+.3f}".replace("-", "−") in page.words
    for name in ("before", "after"):
        for metric in ("mean", "b20", "cv", "gini"):
            assert f"{numbers['runs'][name][metric]['value']:.3f}" in page.words
        assert f"{100 * numbers['runs'][name]['gap']['latent']['value']:.1f}" in page.words
        one = numbers["accuracy"][name]
        low, high = one["interval"]
        told = f"Accuracy over questions: {one['accuracy']:.3f}, 95 % interval {low:.3f} to {high:.3f}."
        assert told in page.words
    accuracy = compared["accuracy"]
    assert f"accuracy over questions {accuracy['verdict']} (" in page.words
    assert f"mean over clusters {compared['metrics']['mean']['verdict']} (" in page.words
    assert not page.all("script")
    assert len(page.all("img")) == 5


def test_the_verdict_on_predictions_says_what_it_is_on(predictions):
    report = build_report({}, balance=predictions())
    assert report.numbers["verdict"][1] == {"tone": "plain", "words": CAVEAT}
    assert "that takes several seeds" in CAVEAT
    words = Page(report.html).words
    for paragraph in WORDS:
        assert paragraph in words


def test_the_weakest_clusters_come_with_three_prompts(predictions):
    report = build_report({}, balance=predictions(baseline="after"))
    weakest = report.numbers["sections"]["weakest"]
    ends = {
        c["cluster"]: c["runs"]["after"]["interval"][1] for c in report.numbers["sections"]["balance"]["per_cluster"]
    }
    assert weakest["run"] == "after"
    assert weakest["clusters"] == sorted(ends, key=lambda cluster: (ends[cluster], cluster))[:5]
    page = Page(report.html)
    assert len(page.all("blockquote")) == 15
    assert f"question {10 * weakest['clusters'][0]}" in page.words


def test_one_cluster_is_no_balance():
    score = np.arange(12) % 2.0
    runs = [Predictions(name, np.arange(12), one) for name, one in (("before", score), ("after", 1 - score))]
    summary = summarize_balance(runs, given_labels(np.zeros(12, dtype=int)), resamples=99)
    page = build_report({}, balance=summary).html
    assert "balance undetermined (it needs at least two clusters)" in page
    assert "No homogeneity test for before and after: it needs at least two clusters." in page
    assert "12 questions (12 distinct) in 1 cluster<" in page
    assert "after has one cluster, so none is weaker than another." in page
    assert "1 clusters" not in page


def test_balance_that_fails_leaves_the_runs_standing(runs, predictions, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no ink")

    monkeypatch.setattr("analysis.report.balance.lorenz", fail)
    report = build_report(runs, balance=predictions())
    assert report.failed == ("Balance over clusters",)
    assert report.numbers["sections"]["coherence"]["state"] == "shown"
    assert report.numbers["sections"]["weakest"]["state"] == "shown"


def test_exposure_counts_are_those_of_the_batches_under_the_names_of_the_command(runs):
    times = np.bincount(np.concatenate(runs["sdo"].steps().column("sample_ids").to_pylist()), minlength=40)
    entry = build_report(runs).numbers["sections"]["exposure"]["runs"]["sdo"]
    assert entry == exposure_entry(run_exposure(runs["sdo"]))
    assert {one["times"]: one["samples"] for one in entry["histogram"]} == dict(enumerate(np.bincount(times).tolist()))
    assert (entry["never"], entry["max"]) == (int((times == 0).sum()), times.max())
    assert entry["mean"] == pytest.approx(times.mean())


@pytest.fixture
def organized(make_training, tmp_path):
    """A run that followed a uniform plan of 40 samples for 300 steps, with the embeddings it names."""
    matrix = np.random.default_rng(1).normal(size=(40, 6))
    np.save(tmp_path / "E.npy", matrix)
    embeddings = Embeddings.read(tmp_path / "E.npy")
    plan = Uniform(embeddings, seed=3).plan(4)
    noted = {"path": str(tmp_path / "E.npy"), "fingerprint": embeddings.fingerprint}
    batches = [plan.batch(step) for step in range(300)]
    writer = make_training("planned", steps=300, batches=batches, organizer=plan.describe(), embeddings=noted)
    return Run.open(writer.path)


def test_locality_is_tested_against_the_runs_own_plan(organized):
    report = build_report({"planned": organized}, redraws=39)
    entry = report.numbers["sections"]["locality"]["runs"]["planned"]
    series = entry["signals"]["hidden"]["series"]
    page = Page(report.html)
    assert entry["redraws"] == 39
    assert 1 / 40 <= series["p"] <= 1
    assert f"{series['value']:+.3f}".replace("-", "−") in page.words
    assert f"{entry['signals']['hidden']['pairs']['value']:+.3f}".replace("-", "−") in page.words
    assert report.failed == ()


def test_locality_without_embeddings_says_which_run_lacks_them(runs, organized):
    sections = build_report({**runs, "planned": organized}, redraws=0).numbers["sections"]
    entries = sections["locality"]["runs"]
    assert "planned" in entries
    assert entries["sdo"]["signals"] is None
    assert "embeddings" in entries["sdo"]["reason"]


def test_rewards_in_training_are_not_shown_as_evaluations(make_training):
    runs = {}
    for name in ("uniform", "sdo"):
        writer = make_training(name, steps=20, trainer={"num_generations": 2}, organizer={"name": name, "options": {}})
        writer.evaluations("reward", {step: np.full(2, step / 20) for step in range(20)})
        runs[name] = Run.open(writer.path)
    report = build_report(runs)
    entry = report.numbers["sections"]["training"]["runs"]["sdo"]
    assert "evaluations" not in entry
    assert entry["rewards"]["reward"] == pytest.approx({"steps": 20, "first": 0.025, "last": 0.925})
    words = Page(report.html).words
    assert "No run was evaluated on held-out samples; scores of your own" in words
    assert "other prompts at every step: no held-out score" in words
    assert "eval_dataset" not in words


def test_evaluations_at_other_steps_are_no_comparison(make_training):
    runs = {}
    for name, steps in (("uniform", (5, 10)), ("sdo", (5, 15)), ("third", (5, 15))):
        writer = make_training(name, steps=20, organizer={"name": name, "options": {}})
        writer.evaluations("eval_loss", {step: np.full(3, 1 / step) for step in steps})
        runs[name] = Run.open(writer.path)
    words = Page(build_report(runs).html).words
    assert "Last is not the same step in all runs, so it compares none: 10 of uniform and 15 of sdo and third." in words
    assert "First is not the same" not in words
    del runs["uniform"]
    assert "not the same step" not in Page(build_report(runs).html).words


@pytest.fixture
def scored(make_training):
    """Six seeds of two kinds of run, evaluated twice; the second kind is better by about 0.5."""
    rng = np.random.default_rng(2)
    runs = {}
    for kind, level in (("uniform", 2.0), ("sdo", 1.5)):
        for seed in range(6):
            organizer = {"name": kind, "options": {"seed": seed}}
            writer = make_training(f"{kind}-{seed}", steps=10, organizer=organizer, seeds={"seed": seed})
            writer.evaluations("eval_loss", {5: 3.0 + rng.normal(size=4), 10: level + 0.05 * rng.normal(size=4)})
            runs[writer.path.name] = Run.open(writer.path)
    return runs


def test_several_seeds_give_a_verdict(scored):
    report = build_report(scored)
    entry = report.numbers["sections"]["seeds"]["against"]["sdo"]["measures"]["eval_loss"]
    means = {
        name: np.mean(run.evaluations().filter(pc.field("step") == 10).column("score").to_pylist())
        for name, run in scored.items()
    }
    slow = np.mean([means[f"sdo-{seed}"] - means[f"uniform-{seed}"] for seed in range(6)])
    assert entry[-1]["step"] == 10
    assert entry[-1]["mean"] == pytest.approx(slow)
    assert entry[-1]["sign_flip_p"] == 2 / 2**6
    finding = report.numbers["verdict"][0]
    assert finding["tone"] == "better"
    assert f"{slow:+.4g}".replace("-", "−") in finding["words"]


def test_two_seeds_can_give_no_verdict(scored):
    few = {name: run for name, run in scored.items() if name[-1] in "01"}
    report = build_report(few)
    assert report.numbers["verdict"][0]["tone"] == "undetermined"
    assert "cannot reach 0.05" in report.numbers["verdict"][0]["words"]


def test_common_seeds_are_compared_and_the_others_named(scored):
    def compared(keep):
        section = seeds_section(ReportMaterial({name: run for name, run in scored.items() if keep(name)}))
        return section.data["against"]["sdo"], " ".join(section.words)

    entry, words = compared(lambda name: name not in ("sdo-0", "sdo-5"))
    assert (entry["pairs"], entry["left_out"]) == (4, ["uniform-0", "uniform-5"])
    assert entry["measures"] == compared(lambda name: name[-1] in "1234")[0]["measures"]
    assert "no run of their seed: uniform-0 and uniform-5." in words
    as_many, _ = compared(lambda name: name not in ("sdo-0", "uniform-5"))
    assert (as_many["paired_by"], as_many["left_out"]) == ("seed", ["uniform-0", "sdo-5"])
    assert as_many["measures"] == entry["measures"]


def test_runs_that_seeds_do_not_pair_are_compared_as_groups(scored):
    uneven = {
        name: run for name, run in scored.items() if name in ("sdo-0", "sdo-1", "uniform-3", "uniform-4", "uniform-5")
    }
    report = build_report(uneven)
    assert report.failed == ()
    entry = report.numbers["sections"]["seeds"]["against"]["sdo"]
    assert (entry["pairs"], entry["paired_by"]) == (None, None)
    assert entry["paired_by_reason"] == "the sides have no seed in common"
    assert [one["n_baseline"] for one in entry["measures"]["eval_loss"]] == [3, 3]
    assert "as two groups, since seeds do not pair them" in report.html


def of_dataset(make_training, name, fingerprint, seed=1, organizer="sdo"):
    organizer = {"name": organizer, "options": {"seed": seed}}
    return Run.open(make_training(name, organizer=organizer, dataset={"rows": 40, "fingerprint": fingerprint}).path)


def test_fingerprints_of_one_process_are_not_compared(make_training):
    runs = {name: of_dataset(make_training, name, 4 * name) for name in ("abcd", "cdef", "fade")}
    assert arms_of(runs) == {"sdo": ["abcd", "cdef", "fade"]}
    runs["new"] = of_dataset(make_training, "new", 64 * "a")
    assert arms_of(runs) == {"sdo": ["abcd", "cdef", "fade", "new"]}
    alerts = build_report(runs).numbers["alerts"]
    assert not [alert for alert in alerts if "differ in more than" in alert]
    assert [alert for alert in alerts if "not known: run.json of abcd, cdef and fade has no SHA-256" in alert]


def test_contents_of_datasets_are_compared(make_training):
    runs = {name: of_dataset(make_training, f"run-{name}", 64 * name) for name in "ab"}
    assert list(arms_of(runs).values()) == [["a"], ["b"]]
    assert "dataset is aaaaaaaaaaaaaaaa in a and bbbbbbbbbbbbbbbb in b." in "".join(
        build_report(runs).numbers["alerts"]
    )


def test_runs_of_other_embeddings_or_models_are_other_kinds(make_training):
    def run(name, **changes):
        organizer = {"name": "sdo", "options": {"seed": 1}, "embeddings": "a", "batch_size": 8}
        organizer |= {key: value for key, value in changes.items() if key in organizer}
        rest = {key: value for key, value in changes.items() if key not in organizer}
        return Run.open(make_training(name, organizer=organizer, **rest).path)

    changed = [{"embeddings": "b"}, {"batch_size": 4}, {"model": {"parameters": 7}}, {"trainer": {"learning_rate": 1}}]
    runs = {f"r{i}": run(f"r{i}", **changes) for i, changes in enumerate([{}, *changed])}
    assert list(arms_of(runs).values()) == [["r0"], ["r1"], ["r2"], ["r3"], ["r4"]]


def test_names_keep_their_hyphens(make_training):
    runs = {name: Run.open(make_training(name, pull=-1.0).path) for name in ("uni-form-1", "sdo-1")}
    page = Page(build_report(runs).html)
    assert "in uni-form-1 and" in page.words
    assert "uni−form" not in page.words


def test_a_run_whose_steps_are_torn_leaves_the_verdict_standing(runs, predictions):
    for part in (runs["sdo"].path / "steps").glob("*.parquet"):
        part.write_bytes(b"PAR1")
    report = build_report(runs, balance=predictions())
    assert report.numbers["verdict"][1]["tone"] == "better"
    assert "could not be collected" in report.numbers["alerts"][0]
