"""Organise: what each mini-batch of LLM post-training should hold.

``SDO`` and ``Uniform`` decide, ``Plan`` is what they decide, ``attach`` binds them to a trainer. Importing the package
loads numpy and faiss alone; ``attach`` and ``OrganizedSampler`` load torch when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sdo.embeddings.matrix import Embeddings
from sdo.errors import InputError, absent_package
from sdo.organizers.plan import Organizer, Plan
from sdo.organizers.registry import OrganizerInputs, OrganizerSpec, register_organizer
from sdo.organizers.sdo import SDO
from sdo.organizers.steps import EpochPlan, Layout, StepPlan, Steps
from sdo.organizers.uniform import Uniform

if TYPE_CHECKING:
    from sdo.trainers.attach import Handle, attach
    from sdo.trainers.sampler import OrganizedSampler

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

_LAZY = {"Handle": "sdo.trainers.attach", "attach": "sdo.trainers.attach", "OrganizedSampler": "sdo.trainers.sampler"}


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
