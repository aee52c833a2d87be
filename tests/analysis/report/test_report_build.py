"""The report as a file: what it holds, what it must never hold, and what becomes of a part that fails."""

import base64
import json
from html.parser import HTMLParser
from io import BytesIO

import pytest
from PIL import Image

from analysis import Run
from analysis.report import build_report

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


def test_pictures_have_words_and_true_sizes(runs):
    pictures = Page(build_report(runs).html).all("img")
    assert len(pictures) == 3
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


def test_texts_are_shown_and_never_markup(make_training):
    info = {"model": {"class": MARKUP, "parameters": 5}, "organizer": {"name": MARKUP, "options": {}}}
    run = Run.open(make_training("run", **info).path)
    page = Page(build_report({MARKUP: run}, title=MARKUP).html)
    assert not page.all("script")
    assert all(picture["src"].startswith("data:") for picture in page.all("img"))
    assert "onerror=alert(1)" in page.words


def test_a_section_that_fails_is_shown_and_the_others_stand(runs, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no <ink>\nleft")

    monkeypatch.setattr("analysis.report.sections.step_coherence_blocks", fail)
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
    states = {key: part["state"] for key, part in report.numbers["sections"].items()}
    assert states["training"] == states["coherence"] == "absent"
    assert states["provenance"] == "shown"
    assert "no signal in common" in report.numbers["sections"]["coherence"]["reason"]


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


def test_large_runs_stay_small(make_training):
    run = Run.open(make_training("long", steps=600, k=8).path)
    assert len(build_report({"a": run, "b": run}).html) < 1_000_000
