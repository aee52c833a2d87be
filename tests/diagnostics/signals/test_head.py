"""`head_only`: the head's own gradient against autograd of an untied copy, by sample; its factors, its refusals."""

from __future__ import annotations

import math

import pytest
import torch
import trl.trainer.utils
from transformers import FalconH1Config, GraniteConfig, LlamaConfig

from diagnostics import GradientRecorder
from diagnostics.signals import HeadOnly, Hidden, SignalContext, Weight, head, head_positions
from diagnostics.signals.head_positions import CalledPositions, FusedPositions, LogitForm
from diagnostics.sketches import count_sketch as sketch
from diagnostics.sketches.count_sketch import GradientSketch
from sdo.errors import InputError

fused = pytest.mark.skipif(not hasattr(trl.trainer.utils, "add_fused_lm_head"), reason="needs TRL's fused head")


def samples_of(recorded, row):
    """The samples that a row is about."""
    micros = recorded.truth_of_head.step(row["step"])
    if row["kind"] == "step":
        return [sample for micro in micros for sample in micro]
    if row["kind"] == "micro_batch":
        return micros[row["micro_batch"]]
    place = recorded.micro_ids(row["step"])[row["micro_batch"]].index(row["sample_ids"][0])
    return [micros[row["micro_batch"]][place]]


def assert_rows_are_right(recorded, kit):
    case = recorded.case
    rows = recorded.rows("gradients/head_only")
    for row in rows:
        if row["step"] == case.overflow:
            continue  # the overflow is behind the head: its own gradient is finite, that of the step's loss is not
        gradient = kit.head_gradient(samples_of(recorded, row)) * case.scale(row["step"])
        norm = float(gradient.double().norm())
        if norm == 0.0:
            assert (row["norm"], any(row["sketch"])) == (0.0, False)
            assert row["reason"].startswith("zero gradient")
            continue
        sketched = GradientSketch(gradient.shape, k=case.sketch_size, factored=True).sketch(gradient)
        assert kit.relative_error(row["sketch"], sketched) < case.tolerance
        raw = "raw" if case.overflow is None else "raw, scaled"
        assert row["norm_state"] == raw
        assert row["norm"] == pytest.approx(norm, rel=case.tolerance)
        assert row["reason"] is None
    return rows


def test_rows_are_the_gradients_of_an_untied_head(recorded, kit):
    """Whatever the trainer, the padding side, the batch mates, the accumulation, the precision and the adapter."""
    if "head_only" not in recorded.info["signals"]:
        pytest.skip("needs TRL's fused head")
    rows = assert_rows_are_right(recorded, kit)
    hidden = recorded.rows("gradients/hidden")
    keys = ("step", "kind", "micro_batch", "sample_ids", "tokens")
    assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in hidden]


@fused
def test_run_json_says_which_signal_it_is(runs):
    said = runs("tied").info["signals"]["head_only"]
    assert (said["parameter"], said["shape"]) == (None, list(runs("tied").trainer.model.lm_head.weight.shape))
    assert said["tied"] is False


@fused
def test_the_sketch_is_compared_with_the_gradient_itself(runs, kit):
    recorded = runs("tied")
    found = recorded.info["sketch_check"]["head_only"]
    steps = found["steps"]
    assert steps == list(range(8))
    gradients = [kit.head_gradient(recorded.truth_of_head.samples(step)).double().reshape(-1) for step in steps]
    rows = [recorded.rows("gradients/head_only", step=step, kind="step")[0]["sketch"] for step in steps]
    errors = []
    for i in range(8):
        for j in range(i):
            exact = torch.cosine_similarity(gradients[i], gradients[j], dim=0)
            sketched = torch.cosine_similarity(torch.tensor(rows[i]).double(), torch.tensor(rows[j]).double(), dim=0)
            errors.append(float(sketched - exact))
    assert found["pairs"] == len(errors)
    assert found["rmse"] == pytest.approx(math.sqrt(sum(e * e for e in errors) / len(errors)), rel=1e-3)


@fused
@pytest.mark.parametrize("limits", ["rows are hashed", "few positions at a time"])
def test_large_heads_and_long_batches(kit, tmp_path, monkeypatch, limits):
    if limits == "rows are hashed":
        for name, value in {"ROW_BUCKETS": 64, "PRODUCT_ENTRIES": 300}.items():
            monkeypatch.setattr(sketch, name, value)
        for name, value in {"BLOCK_ENTRIES": 1000, "KEPT_ENTRIES": 0}.items():
            monkeypatch.setattr(head_positions, name, value)
    else:
        monkeypatch.setattr(head, "CHUNK_POSITIONS", 7)
    case = kit.Case(batch=2, accumulation=2, max_steps=2, sample_every=2, sketch_size=256)
    recorded = kit.Recorded(tmp_path, case).train()
    kind = "count_two_stage" if limits == "rows are hashed" else "count"
    assert recorded.info["signals"]["head_only"]["sketch"]["kind"] == kind
    assert {row["kind"] for row in recorded.rows("gradients/head_only", step=1)} == {"step", "micro_batch"}
    if limits == "rows are hashed":
        assert_rows_are_right(recorded, kit)
        return
    for row in recorded.rows("gradients/head_only"):  # nobody knows the norm of a long sample among others
        gradient = kit.head_gradient(samples_of(recorded, row))
        sketched = GradientSketch(gradient.shape, k=256, factored=True).sketch(gradient)
        assert kit.relative_error(row["sketch"], sketched) < 1e-5
        exact = row["kind"] != "sample"
        assert row["norm_state"] == ("raw" if exact else "raw, estimated from the sketch")
        norm = float((gradient.double() if exact else sketched).norm())
        assert row["norm"] == pytest.approx(norm, rel=1e-5)


@fused
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_norms_are_exact_where_the_gradient_or_its_factors_are_at_hand(
    kit, tmp_path, monkeypatch, batch, accumulation, large
):
    """Sketches of 64 numbers are some 10 % off. The gradient of a larger head is never formed, but for its sketch."""
    monkeypatch.setattr(head, "WHOLE_ENTRIES", 0 if large else 1 << 27)
    case = kit.Case(batch=batch, accumulation=accumulation, max_steps=6, sample_every=2, sketch_size=64)
    recorded = kit.Recorded(tmp_path, case).train()
    for row in recorded.rows("gradients/head_only"):
        exact = not large or row["kind"] == "sample"
        if large and row["kind"] == ("step" if accumulation == 1 else "micro_batch"):
            # Of one sample its own; of several where single samples are not recorded and positions are few.
            exact = batch == 1 if row["step"] % 2 == 0 else row["tokens"] <= kit.HIDDEN
        gradient = kit.head_gradient(samples_of(recorded, row))
        sketched = GradientSketch(gradient.shape, k=64, factored=True).sketch(gradient)
        assert row["norm_state"] == ("raw" if exact else "raw, estimated from the sketch")
        assert row["norm"] == pytest.approx(float((gradient if exact else sketched).double().norm()), rel=1e-5)


# ---------------------------------------------------------------------- factors


class Head:
    """Weight and bias of a head."""

    def __init__(self, rows, cols, bias):
        self.weight = torch.randn(rows, cols)
        self.bias = torch.randn(rows) if bias else None


FORMS = {
    "plain": LogitForm(),
    "scaled": LogitForm(scale=0.4),
    "capped": LogitForm(softcap=3.0),
    "everything": LogitForm(scale=2.5, softcap=4.0, temperature=0.7),
}


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_factors_of_the_fused_loss_are_those_of_autograd(monkeypatch, name, entropy, kept):
    monkeypatch.setattr(head_positions, "BLOCK_ENTRIES", 5 * 9)
    monkeypatch.setattr(head_positions, "KEPT_ENTRIES", 1 << 20 if kept else 0)
    torch.manual_seed(4)
    form, module, states, targets = FORMS[name], Head(37, 6, bias=True), torch.randn(9, 6), torch.randint(37, (9,))
    product = (states @ module.weight.T + module.bias).requires_grad_(True)
    logits = product * form.scale
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    log_p = torch.log_softmax(logits / form.temperature, dim=-1)
    label = log_p[torch.arange(9), targets]
    by_label, by_entropy = torch.randn(9), torch.randn(9)
    loss = (label * by_label).sum()
    if entropy:
        loss = loss + (-(log_p.exp() * log_p).sum(dim=-1) * by_entropy).sum()
    loss.backward()
    given = (states, targets, by_label, by_entropy if entropy else None)
    made = FusedPositions(module, form, torch.float32, *given)
    blocks = list(made.gradients())
    assert [first for first, _ in blocks] == list(range(0, 37, 5))
    torch.testing.assert_close(torch.cat([block for _, block in blocks]).T, product.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.log_probs, label.detach(), rtol=1e-4, atol=1e-5)


def test_factors_of_a_called_head_are_its_outputs_gradient(monkeypatch):
    monkeypatch.setattr(head_positions, "BLOCK_ENTRIES", 12)
    grad = torch.randn(4, 10, dtype=torch.bfloat16)
    blocks = list(CalledPositions(torch.randn(4, 3), grad).gradients())
    assert [first for first, _ in blocks] == [0, 3, 6, 9]
    assert torch.equal(torch.cat([block for _, block in blocks]), grad.T.float())


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (LlamaConfig(), LogitForm()),
        (GraniteConfig(logits_scaling=8.0), LogitForm(scale=1 / 8)),
        (FalconH1Config(lm_head_multiplier=0.5), LogitForm(scale=0.5)),
    ],
)
def test_the_form_of_the_logits_is_read_off_the_configuration(config, form):
    assert LogitForm.of(config) == form
    assert LogitForm.of(config, 0.5).temperature == 0.5


def test_a_capped_model_is_read(runs):
    assert LogitForm.of(runs("gemma2").trainer.model.config).softcap == 5.0


# ---------------------------------------------------------------------- refusals


def capture_of(model):
    return HeadOnly().of(SignalContext(model, lambda: (0, []), None, k=64, sample_every=1))


def test_a_model_without_a_head_is_refused(kit):
    model = kit.make_model()
    model.get_output_embeddings = lambda: None
    with pytest.raises(InputError, match="has no language-model head"):
        capture_of(model)


def test_a_sharded_head_is_refused(kit):
    model = kit.make_model(tied=False)
    model.lm_head.weight = torch.nn.Parameter(torch.empty(0))  # what stage 3 of ZeRO leaves of it
    with pytest.raises(InputError, match="the head's weight is sharded"):
        capture_of(model)


@fused
def test_logits_of_an_unknown_form_are_refused(kit, tmp_path, monkeypatch):
    """A rebuilt log-probability is compared with the trainer's: a wrong temperature cannot pass."""
    monkeypatch.setattr(LogitForm, "of", classmethod(lambda cls, config, temperature: cls(temperature=0.9)))
    recorded = kit.Recorded(tmp_path, kit.Case(max_steps=2))
    with pytest.raises(
        InputError, match="'head_only' cannot be rebuilt: log-probabilities made from the head's weight"
    ):
        recorded.train()
    recorded.recorder.close()
    assert recorded.hooks() == recorded.hooks_before


def test_a_head_that_is_neither_called_nor_fused_is_named(kit, tmp_path):
    """As under a kernel that takes weight and states itself."""
    recorded = kit.Recorded(tmp_path, kit.Case(trainer="right", max_steps=2))

    def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        model(input_ids=inputs["input_ids"])
        states = model.base_model(inputs["input_ids"]).last_hidden_state
        return (states @ model.lm_head.weight.T).mean()

    recorded.trainer.compute_loss = compute_loss
    with pytest.raises(
        RuntimeError, match="signal 'head_only' did not fire in the first step: the loss was made neither"
    ):
        recorded.train()
    assert recorded.hooks() == recorded.hooks_before


def test_it_is_not_recorded_unless_asked_for(tmp_path):
    assert GradientRecorder(tmp_path).signals == (Weight(), Hidden())
    assert GradientRecorder(tmp_path, signals=["head_only", "weight"]).signals == (Weight(), HeadOnly())
