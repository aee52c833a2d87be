"""A language model of about a million parameters, built on the spot: the demo and the tests need no download.

A byte-level BPE tokenizer is trained on the given texts and a small Llama gets random weights. torch,
transformers and tokenizers are loaded when :func:`build` runs, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdo.checks import whole_number
from sdo.errors import InputError

_PAD, _EOS, _UNK = "<pad>", "<eos>", "<unk>"
_SPECIAL = (_PAD, _EOS, _UNK)
_BYTES = 256  # a byte-level tokenizer starts from one token a byte
_HEADS = 4
_POSITIONS = 512


def build(texts: Sequence[str], *, seed: int, hidden: int = 128, layers: int = 4, vocab: int = 1024) -> tuple[Any, Any]:
    """Train a tokenizer on texts and build a small causal language model with random weights for it.

    Parameters
    ----------
    texts
        Texts of the kind that the model will read, at least one.
    seed
        Seed of the weights; the global random state stays as it was.
    hidden
        Width, a multiple of 8 (four heads of an even size).
    layers
        Number of decoder layers.
    vocab
        Tokens at most, at least 259: 256 bytes and three special tokens.

    Returns
    -------
    model : transformers.LlamaForCausalLM
        float32 on the CPU, in training mode, input and output embeddings tied, 512 positions. With the
        defaults about 1.2 million parameters.
    tokenizer : transformers.PreTrainedTokenizerFast
        Every digit is a token of its own; any text can be encoded. It has a padding, an end and an unknown
        token and adds none of them by itself. No chat template.

    Raises
    ------
    InputError
        If there are no texts, or a size is out of range.
    """
    if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
        raise InputError("texts must be a non-empty sequence of strings")
    if hidden < 2 * _HEADS or hidden % (2 * _HEADS):
        raise InputError(f"hidden is {hidden}, expected a positive multiple of {2 * _HEADS}")
    whole_number("layers", layers, 1)
    whole_number("vocab", vocab, _BYTES + len(_SPECIAL))  # the bytes and special tokens
    tokenizer = _tokenizer(texts, vocab)
    return _model(tokenizer, seed, hidden, layers), tokenizer


def _tokenizer(texts: Sequence[str], vocab: int) -> Any:
    """Train the byte-level BPE tokenizer; the result depends on the texts and `vocab` alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token=_UNK))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=_PAD,
        eos_token=_EOS,
        unk_token=_UNK,
        model_max_length=_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _model(tokenizer: Any, seed: int, hidden: int, layers: int) -> Any:
    """Build the model under its own seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    # The weights are drawn on the CPU: its generator alone is seeded and restored, GPUs are not touched.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return LlamaForCausalLM(config).float().train()
