"""What differs between the supported versions of transformers, in one place.

Supported are transformers 5.0 and later with TRL from :data:`OLDEST_TRL`: its SFT outputs carry log-probabilities of
single tokens, which losses per sample are read off. TRL 1.12 to 1.14 return neither those nor logits, and 1.15 trains
on CUDA alone.
"""

from __future__ import annotations

from typing import Any

OLDEST_TRL = "1.16"  # pyproject.toml has the same; a test compares them


def checkpointing_name(args: Any) -> str:
    """Return the argument of TrainingArguments that recomputes activations in backward.

    Parameters
    ----------
    args
        TrainingArguments, or a class of them.

    Returns
    -------
    str
        ``"activation_checkpointing"`` where transformers knows it (the older name is an alias that warns there), else
        ``"gradient_checkpointing"``. Models have a method of that name with ``_enable`` at its end, and there are
        arguments with ``_kwargs`` at theirs.

    Examples
    --------
    >>> from transformers import TrainingArguments
    >>> checkpointing_name(TrainingArguments).endswith("_checkpointing")
    True
    """
    new = "activation_checkpointing"
    return new if hasattr(args, new) else "gradient_checkpointing"


def enable_checkpointing(args: Any, model: Any) -> None:
    """Recompute activations in backward where training would; transformers turns that on when training begins.

    Parameters
    ----------
    args
        The trainer's TrainingArguments.
    model
        Its model; one without a method for it is left alone.
    """
    name = checkpointing_name(args)
    enable = getattr(model, f"{name}_enable", None)
    if not getattr(args, name, False) or enable is None:
        return
    options = dict(getattr(args, f"{name}_kwargs", None) or {})
    apart = {key: options.pop(key) for key in ("every_n_layers", "offload") if key in options}
    enable(**{f"{name}_kwargs": options or None}, **apart)
