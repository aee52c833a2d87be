import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from sdo.demo.tiny_model import build
from sdo.demo.word_problems import generate
from sdo.errors import InputError

PROBLEMS = generate(64, seed=0)
TEXTS = [problem.prompt + problem.completion for problem in PROBLEMS]


def test_size_tying_and_special_tokens():
    model, tokenizer = build(TEXTS, seed=0)
    assert 1e6 < model.num_parameters() < 2e6
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) <= 1024
    ids = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert None not in ids
    assert len(set(ids)) == 3


def test_tokenizer_splits_digits_and_gives_every_text_back():
    _, tokenizer = build(TEXTS, seed=0, hidden=16, layers=1)
    for text in (*TEXTS[:8], "1234 é 漢  x\n"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
    assert [token for token in tokenizer.tokenize("a 1234") if token.isdigit()] == list("1234")


def test_prompt_tokens_are_a_prefix_of_the_whole():
    # TRL finds the completion by this.
    _, tokenizer = build(TEXTS, seed=0, hidden=16, layers=1)
    for problem, text in zip(PROBLEMS, TEXTS, strict=True):
        prompt = tokenizer(problem.prompt)["input_ids"]
        assert tokenizer(text)["input_ids"][: len(prompt)] == prompt


def test_seed_fixes_weights_and_leaves_the_global_state():
    before = torch.get_rng_state()
    first, tokenizer = build(TEXTS, seed=1, hidden=16, layers=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, tokenizer_again = build(TEXTS, seed=1, hidden=16, layers=1)
    other, _ = build(TEXTS, seed=2, hidden=16, layers=1)
    assert tokenizer.get_vocab() == tokenizer_again.get_vocab()
    weights = first.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in again.state_dict().items())
    assert not torch.equal(weights["model.embed_tokens.weight"], other.state_dict()["model.embed_tokens.weight"])


# TRL's own default sets the argument that transformers renamed; older transformers do not know the new name.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
def test_sft_trainer_takes_two_steps(tmp_path):
    model, tokenizer = build(TEXTS, seed=0)
    before = model.get_input_embeddings().weight.detach().clone()
    rows = [{"prompt": problem.prompt, "completion": problem.completion} for problem in PROBLEMS]
    args = SFTConfig(
        output_dir=str(tmp_path),
        bf16=False,
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    # At the start every token is about equally likely: the loss is near ln(vocabulary).
    assert float(losses[0]) == pytest.approx(torch.tensor(float(len(tokenizer))).log().item(), abs=0.5)
    assert not torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize(
    "arguments",
    [
        {"texts": []},
        {"texts": "one string"},
        {"texts": [None]},
        {"hidden": 12},
        {"hidden": 0},
        {"layers": 0},
        {"vocab": 100},
    ],
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(InputError):
        build(**{"texts": TEXTS, "seed": 0, **arguments})
