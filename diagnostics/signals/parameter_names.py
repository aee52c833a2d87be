"""Names of parameters, with and without what wrappers add to them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from torch import nn

from sdo.errors import InputError

# In front of a whole name: DistributedDataParallel, torch.compile, a PEFT model.
_PREFIXES = ("module.", "_orig_mod.", "base_model.model.")
# Within a name: what PEFT puts between a module and its weights.
_INSERTED = ("modules_to_save", "original_module", "base_layer")


def adapter_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a PEFT model's adapters, ``("default",)`` as a rule; none for a plain model."""
    inner = getattr(model, "module", model)
    return tuple(getattr(inner, "peft_config", None) or ())


def plain_name(name: str, adapters: Collection[str] = ()) -> str:
    """Return a parameter's name without what wrappers add to it.

    Parameters
    ----------
    name
        As ``named_parameters()`` has it, or as a user writes it.
    adapters
        Names of the model's adapters, which stand inside parameter names too.

    Examples
    --------
    >>> plain_name("base_model.model.lm_head.modules_to_save.default.weight", ["default"])
    'lm_head.weight'
    >>> plain_name("module.base_model.model.model.layers.1.mlp.down_proj.lora_B.default.weight", ["default"])
    'model.layers.1.mlp.down_proj.lora_B.weight'
    """
    while prefix := next((p for p in _PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    return ".".join(part for part in name.split(".") if part not in _INSERTED and part not in adapters)


def resolve_name(name: str, known: Collection[str], trainable: Collection[str], adapters: Collection[str] = ()) -> str:
    """Find the trainable parameter that a name means.

    Parameters
    ----------
    name
        A full name, or one without what wrappers add.
    known
        Names of all parameters.
    trainable
        Those that are trained.
    adapters
        Names of the model's adapters.

    Returns
    -------
    str
        One of ``trainable``: ``name`` itself where it is there, else the only one that equals it without wrappers.

    Raises
    ------
    InputError
        If there is none, there are several, or it is frozen.
    """
    if name in trainable:
        return name
    wanted = plain_name(name, adapters)
    matches = [n for n in known if plain_name(n, adapters) == wanted]
    trained = [n for n in matches if n in trainable]
    if name in known or (matches and not trained):
        raise InputError(
            f"parameter {name!r} is frozen and gets no gradient; nearest trainable names: {_nearest(name, trainable)}"
        )
    if len(trained) > 1:
        raise InputError(
            f"{name!r} means several trainable parameters: {', '.join(trained)}; expected one; fix: give the full name"
        )
    if not trained:
        raise InputError(f"there is no parameter {name!r}; nearest trainable names: {_nearest(name, trainable)}")
    return trained[0]


def _nearest(name: str, known: Collection[str], count: int = 3) -> str:
    names: Sequence[str] = list(known)
    close = difflib.get_close_matches(name, names, n=count, cutoff=0.3)
    return ", ".join(close or names[-count:])
