"""Plain trainers of models whose labels are not shifted, or are none of positions: losses, tokens, scores, gradients.

The truth is the model's own loss of each sample alone, and plain autograd of it.
"""

from __future__ import annotations

import copy
import json
import re
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl", reason="needs the extra train")

import torch
import transformers as tf
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainingArguments

from diagnostics import GradientRecorder, doctor
from diagnostics.signals import objectives
from diagnostics.signals.objectives import shifts_labels
from sdo.errors import InputError

ROWS, LENGTH, VOCABULARY, WIDTH = 12, 9, 60, 16
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def t5():
    config = tf.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return tf.T5ForConditionalGeneration(config)


def bart():
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    wide = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0}
    return tf.BartForConditionalGeneration(tf.BartConfig(vocab_size=VOCABULARY, d_model=WIDTH, **sizes, **wide))


def bert(cls, **options):
    return lambda: cls(tf.BertConfig(**BERT, **options))


def gpt2():
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = tf.GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=16, **still, **ends)
    return tf.GPT2LMHeadModel(config)


def mixtral():
    """A mixture of experts, whose own loss is that of the tokens and a bit of its router's."""
    config = tf.MixtralConfig(**LLAMA, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)
    return tf.MixtralForCausalLM(config)


def vit():
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return tf.ViTForImageClassification(tf.ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes, **still))


RANDOM = np.random.default_rng(0)
TEXTS = {
    "input_ids": RANDOM.integers(5, VOCABULARY, (ROWS, LENGTH)).tolist(),
    "attention_mask": [[1] * LENGTH] * ROWS,
}
# Samples have 1 to 7 labels, the first position's among them.
SPARSE = [[x if j % (1 + n % 5) == 0 else -100 for j, x in enumerate(row)] for n, row in enumerate(TEXTS["input_ids"])]
CLASSES = RANDOM.integers(0, 3, ROWS).tolist()


def of_labels(labels, **more):
    return {**TEXTS, **more, "labels": labels}


def labeled(row):
    return sum(label != -100 for label in row["labels"])


CASES = {
    "t5": (t5, of_labels(SPARSE), labeled, lambda m: m.decoder),
    "bart": (bart, of_labels(SPARSE), labeled, lambda m: m.model),
    "masked": (bert(tf.BertForMaskedLM), of_labels(SPARSE), labeled, lambda m: m.bert),
    "tokens": (
        bert(tf.BertForTokenClassification, num_labels=VOCABULARY),
        of_labels(SPARSE),
        labeled,
        lambda m: m.bert,
    ),
    "causal": (gpt2, of_labels(SPARSE), lambda row: sum(x != -100 for x in row["labels"][1:]), lambda m: m.transformer),
    "experts": (mixtral, of_labels(SPARSE), lambda row: sum(x != -100 for x in row["labels"][1:]), lambda m: m.model),
    "classes": (
        bert(tf.BertForSequenceClassification, num_labels=3),
        of_labels(CLASSES),
        lambda row: 1,
        lambda m: m.bert,
    ),
    "classes of a decoder": (
        lambda: tf.LlamaForSequenceClassification(tf.LlamaConfig(**LLAMA, num_labels=3)),
        of_labels(CLASSES),
        lambda row: 1,
        lambda m: m.model,
    ),
    "value": (
        bert(tf.BertForSequenceClassification, num_labels=1),
        of_labels(RANDOM.standard_normal(ROWS).tolist()),
        lambda row: 1,
        lambda m: m.bert,
    ),
    "values": (
        bert(tf.BertForSequenceClassification, num_labels=3, problem_type="regression"),
        of_labels(RANDOM.standard_normal((ROWS, 3)).tolist()),
        lambda row: 3,
        lambda m: m.bert,
    ),
    "many labels": (
        bert(tf.BertForSequenceClassification, num_labels=3, problem_type="multi_label_classification"),
        of_labels(RANDOM.integers(0, 2, (ROWS, 3)).astype(float).tolist()),
        lambda row: 3,
        lambda m: m.bert,
    ),
    "answers": (
        bert(tf.BertForQuestionAnswering),
        {**TEXTS, "start_positions": [n % 4 for n in range(ROWS)], "end_positions": [4 + n % 4 for n in range(ROWS)]},
        lambda row: 2,
        None,
    ),
    "images": (
        vit,
        {"pixel_values": RANDOM.standard_normal((ROWS, 3, 8, 8)).tolist(), "labels": CLASSES},
        lambda row: 1,
        lambda m: m.vit,
    ),
    "choices": (
        bert(tf.BertForMultipleChoice),
        {
            "input_ids": RANDOM.integers(5, VOCABULARY, (ROWS, 3, LENGTH)).tolist(),
            "attention_mask": [[[1] * LENGTH] * 3] * ROWS,
            "labels": CLASSES,
        },
        lambda row: 1,
        None,
    ),
}
WITH_HEAD = {"t5", "bart", "masked", "causal", "experts"}


def make(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = CASES[name][0]()
        for parameter in model.parameters():  # the default weights are so small that all kinds of loss look alike
            if parameter.ndim > 1:
                parameter.data.mul_(4)
        return model


def make_trainer(folder, model, columns, **args):
    options = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "max_steps": 2,
        "learning_rate": 0.0,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 5,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        **args,
    }
    data = Dataset.from_dict(columns)
    return Trainer(model=model, args=TrainingArguments(**options), train_dataset=data, eval_dataset=data)


def signals_of(name):
    signals = ["weight"] if CASES[name][3] is None else ["weight", "hidden"]
    return signals + (["head_only"] if name in WITH_HEAD else [])


def batch_of(row):
    return {key: torch.tensor([value]) for key, value in row.items()}


@pytest.fixture(scope="module", params=list(CASES))
def trained(request, tmp_path_factory):
    """A run of each model, and the loss and number of targets of each sample by the model alone."""
    name, folder = request.param, tmp_path_factory.mktemp("objective")
    _, columns, count, final = CASES[name]
    model = make(name)
    trainer = make_trainer(folder / "trainer", model, columns)
    recorder = GradientRecorder(folder / "run", signals=signals_of(name), sample_every=1)
    trainer.add_callback(recorder)
    trainer.train()
    model.eval()
    rows = Dataset.from_dict(columns)
    losses = []
    for row in rows:
        with torch.no_grad():
            output = model(**batch_of(row))
        losses.append(float(output.loss) - 0.5 * float(getattr(output, "aux_loss", 0.0)))
    return SimpleNamespace(
        name=name,
        model=model,
        rows=rows,
        losses=losses,
        counts=[count(row) for row in rows],
        final=final,
        read=lambda stream: pq.read_table(folder / "run" / stream).to_pylist(),
        meaning=json.loads((folder / "run" / "run.json").read_text())["meaning"],
    )


def test_losses_and_tokens_are_the_models_own(trained):
    for step in trained.read("steps"):
        counts = [trained.counts[i] for i in step["sample_ids"]]
        losses = [trained.losses[i] for i in step["sample_ids"]]
        assert step["tokens"] == sum(counts)
        assert step["loss"] == pytest.approx(np.dot(losses, counts) / sum(counts), rel=1e-5)


def test_held_out_scores_are_the_models_own(trained):
    scores = {row["sample_id"]: row["score"] for row in trained.read("evaluations")}
    truth = {i: loss for i, loss in enumerate(trained.losses) if trained.counts[i]}
    assert scores == pytest.approx(truth, rel=1e-5)


def test_run_json_says_what_was_found(trained):
    kinds = {
        "t5": objectives.SAME_POSITION,
        "bart": objectives.SAME_POSITION,
        "masked": objectives.SAME_POSITION,
        "tokens": objectives.SAME_POSITION,
        "causal": objectives.NEXT_TOKEN,
        "experts": objectives.NEXT_TOKEN,
        "value": objectives.SQUARED_ERROR,
        "values": objectives.SQUARED_ERROR,
        "many labels": objectives.MANY_LABELS,
        "answers": objectives.ANSWER_SPAN,
    }
    kind = kinds.get(trained.name, objectives.ONE_LABEL)
    said = trained.meaning
    assert (said["loss"], said["tokens"], said["score"]) == (kind.loss, kind.tokens, kind.score)
    assert said["trainer"] == "Trainer"
    assert "loss_reason" not in said


def gradient_of(trained, sample, what):
    """Plain autograd of the mean loss of one sample alone: at the final states, or of a head that is a trained copy."""
    model = copy.deepcopy(trained.model).train()
    kept, head = [], None
    if what == "hidden":

        def keep(module, args, output):
            output.last_hidden_state.retain_grad()
            kept.append(output.last_hidden_state)

        trained.final(model).register_forward_hook(keep)
    else:
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
    model(**batch_of(trained.rows[sample])).loss.backward()
    return kept[0].grad[0].sum(dim=0) if what == "hidden" else head.weight.grad


def test_signals_are_those_of_autograd_sample_by_sample(trained):
    """A sample's share of the step is its own gradient times one factor a micro-batch, whatever the loss divides by."""
    for signal in set(signals_of(trained.name)) - {"weight"}:
        rows = [row for row in trained.read(f"gradients/{signal}") if row["kind"] == "sample"]
        assert len(rows) == 8
        factors = {}
        for row in rows:
            (sample,) = row["sample_ids"]
            if not trained.counts[sample]:
                continue
            truth = gradient_of(trained, sample, signal).double().reshape(-1) * trained.counts[sample]
            found = torch.tensor(row["sketch"]).double()  # as it is: both signals are short
            assert float(torch.nn.functional.cosine_similarity(found, truth, dim=0)) == pytest.approx(1, abs=1e-5)
            assert row["norm"] == pytest.approx(float(found.norm()), rel=1e-5)
            assert row["norm_state"] == "raw"
            factor = float(found.norm() / truth.norm())
            assert factors.setdefault((row["step"], row["micro_batch"]), factor) == pytest.approx(factor, rel=1e-4)


def test_the_doctor_agrees(trained, tmp_path):
    model = make(trained.name)
    trainer = make_trainer(tmp_path, model, CASES[trained.name][1])
    trainer.add_callback(GradientRecorder(tmp_path / "run", signals=signals_of(trained.name)))
    diagnosis = doctor(trainer)
    assert diagnosis.ok, diagnosis.refused
    assert all(finding.fires for finding in diagnosis.signals)
    step = diagnosis.micro_step
    assert step.loss_reason is None
    assert step.tokens == sum(trained.counts[i] for i in step.sample_ids)


# ---------------------------------------------------------------------- what is not known


class Weighted(tf.BertForMaskedLM):
    """A masked language model whose loss counts some tokens twice."""

    def forward(self, labels=None, **kwargs):
        output = super().forward(**kwargs)
        weight = torch.ones(VOCABULARY)
        weight[:20] = 2.0
        flat = output.logits.reshape(-1, VOCABULARY), labels.reshape(-1)
        return {"loss": nn.functional.cross_entropy(*flat, weight=weight), "logits": output.logits}


def weighted():
    model = Weighted(tf.BertConfig(**BERT))
    model.cls.predictions.decoder.weight.data.mul_(20)
    return model


UNKNOWN = {
    "another loss": (weighted, {}, r"the model's own loss is .*, and its outputs give .* not shifted.*, nats, or"),
    "smoothed": (bert(tf.BertForMaskedLM), {"label_smoothing_factor": 0.1}, "the model's call has no labels: the trai"),
}


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_a_loss_that_is_not_known_is_null_with_a_reason(name, tmp_path):
    build, args, why = UNKNOWN[name]
    trainer = make_trainer(tmp_path, build(), of_labels(SPARSE), **args)
    trainer.add_callback(GradientRecorder(tmp_path / "run"))
    seen = doctor(trainer)
    assert seen.ok, seen.refused
    assert "losses      of steps and samples will be null" in str(seen)
    with pytest.warns(UserWarning, match="not recorded") as caught:
        trainer.train()
    texts = [str(one.message) for one in caught]
    expected = ["the losses of the steps are not recorded: ", "the evaluation's losses per sample are not recorded: "]
    assert [text.startswith(start) for text, start in zip(texts, expected, strict=True)] == [True, True], texts
    meaning = json.loads((tmp_path / "run" / "run.json").read_text())["meaning"]
    assert (meaning["loss"], meaning["score"]) == (None, None)
    for text in (*texts, meaning["loss_reason"], meaning["score_reason"], seen.micro_step.loss_reason):
        assert re.search(why, text)
    steps = pq.read_table(tmp_path / "run" / "steps").to_pylist()
    for step in steps:
        assert step["loss"] is None
        # The model's class says that its labels are not shifted.
        assert step["tokens"] == sum(x != -100 for i in step["sample_ids"] for x in SPARSE[i])
    assert not (tmp_path / "run" / "evaluations").exists()
    rows = pq.read_table(tmp_path / "run" / "gradients" / "hidden").to_pylist()
    assert [row["reason"] for row in rows] == [None] * len(rows)  # gradients need no loss


def test_an_answer_outside_the_text_counts_for_nothing(tmp_path):
    columns = {
        **CASES["answers"][1],
        "start_positions": [99, *[1] * (ROWS - 1)],
        "end_positions": [99, *[5] * (ROWS - 1)],
    }
    trainer = make_trainer(tmp_path, make("answers"), columns, gradient_accumulation_steps=6, max_steps=1, eval_steps=1)
    trainer.add_callback(GradientRecorder(tmp_path / "run", signals=["weight"]))
    trainer.train()
    (step,) = pq.read_table(tmp_path / "run" / "steps").to_pylist()
    assert step["tokens"] == 2 * (ROWS - 1)
    rows = pq.read_table(tmp_path / "run" / "evaluations").to_pylist()
    assert sorted(row["sample_id"] for row in rows) == list(range(1, ROWS))
    assert step["loss"] == pytest.approx(np.mean([row["score"] for row in rows]), rel=1e-5)


# ---------------------------------------------------------------------- refusals


def test_a_model_without_vectors_of_one_width_is_refused_by_name(tmp_path):
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3, layer_type="basic")
    columns = {"pixel_values": RANDOM.standard_normal((ROWS, 3, 32, 32)).tolist(), "labels": CLASSES}
    trainer = make_trainer(tmp_path, tf.ResNetForImageClassification(config), columns, eval_strategy="no")
    assert "ResNetForImageClassification has no hidden_size" in doctor(trainer).refused[0]
    trainer.add_callback(GradientRecorder(tmp_path / "run"))
    with pytest.raises(InputError, match=r"has no hidden_size.*fix: signals=\['weight'\]"):
        trainer.train()


def test_gradients_of_answers_cancel_over_positions(tmp_path):
    trainer = make_trainer(tmp_path, make("answers"), CASES["answers"][1])
    (refusal,) = doctor(trainer).refused
    assert "a softmax over the positions, so that their gradients sum to zero; fix: signals=['weight']" in refusal
    trainer.add_callback(GradientRecorder(tmp_path / "run"))
    with pytest.raises(InputError, match="a softmax over the positions"):
        trainer.train()


def test_several_texts_a_sample_have_no_hidden_row(tmp_path):
    trainer = make_trainer(tmp_path, make("choices"), CASES["choices"][1])
    trainer.add_callback(GradientRecorder(tmp_path / "run"))
    (refusal,) = doctor(trainer).refused
    assert "the hidden states have shape (6, 9, 16) for 2 samples; expected one row a sample" in refusal


def test_a_model_without_a_head_for_tokens_has_no_head_only(tmp_path):
    trainer = make_trainer(tmp_path, make("classes"), CASES["classes"][1])
    trainer.add_callback(GradientRecorder(tmp_path / "run", signals=["weight", "head_only"]))
    assert "BertForSequenceClassification has no language-model head" in doctor(trainer).refused[0]
    with pytest.raises(InputError, match="has no language-model head"):
        trainer.train()


@pytest.mark.parametrize("name", sorted(set(CASES) - {"choices"}))
def test_the_class_says_whether_labels_are_shifted(name):
    assert shifts_labels(make(name)) is (name in {"causal", "experts"})


def test_a_users_own_class_counts_as_what_it_descends_from():
    assert weighted().loss_type is None
    assert not shifts_labels(weighted())


def test_a_class_that_says_nothing_counts_as_a_causal_language_model(kit):
    assert shifts_labels(nn.Linear(1, 1))
    assert shifts_labels(kit.make_model())
