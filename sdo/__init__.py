"""Organise: what each mini-batch of LLM post-training should hold.

``SDO`` and ``Uniform`` decide, ``Plan`` is what they decide, ``attach`` binds them to a trainer. Importing the package
loads numpy and faiss alone; ``attach`` and ``OrganizedSampler`` load torch when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sdo.embeddings import Embeddings
from sdo.errors import InputError, absent_package
from sdo.organizer import SDO, Organizer, Uniform
from sdo.plan import EpochPlan, Layout, Plan, StepPlan, Steps
from sdo.registry import OrganizerInputs, OrganizerSpec, register_organizer

if TYPE_CHECKING:
    from sdo.sampler import OrganizedSampler
    from sdo.trl import Handle, attach

__all__ = [
    "SDO",
    "Embeddings",
    "EpochPlan",
    "Handle",
    "InputError",
    "Layout",
    "OrganizedSampler",
    "Organizer",
    "OrganizerInputs",
    "OrganizerSpec",
    "Plan",
    "StepPlan",
    "Steps",
    "Uniform",
    "attach",
    "register_organizer",
]

_LAZY = {"Handle": "sdo.trl", "attach": "sdo.trl", "OrganizedSampler": "sdo.sampler"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        try:
            return getattr(importlib.import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            absent = absent_package(error)
            if absent not in ("torch", "transformers"):
                raise
            needed = f"sdo.{name} needs {absent}; fix: pip install 'sdo-toolkit[train]'"
            raise ModuleNotFoundError(needed, name=absent) from None
    raise AttributeError(f"module 'sdo' has no attribute {name!r}")
