"""The small Llama that trainers are tried on, and its shape for the other families of models."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def tiny_llama(seed=0):
    """Two layers, 32 wide, 300 tokens; the end token is the tests' tokenizer's, so that nothing is left to align."""
    config = LlamaConfig(**SHAPE, vocab_size=300, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
