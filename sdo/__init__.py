"""Organize: what each mini-batch of LLM post-training should hold.

``SDO`` and ``Uniform`` decide, ``Plan`` is what they decide, ``attach`` binds them to a trainer. Each name is loaded
when it is first asked for: ``import sdo`` loads next to nothing, ``attach`` and ``OrganizedSampler`` load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from sdo.embeddings.matrix import Embeddings
    from sdo.errors import InputError
    from sdo.organizers.plan import Organizer, Plan
    from sdo.organizers.registry import OrganizerInputs, OrganizerSpec, register_organizer
    from sdo.organizers.sdo import SDO
    from sdo.organizers.steps import EpochPlan, Layout, StepPlan, Steps
    from sdo.organizers.uniform import Uniform
    from sdo.selectors.random import RandomSelect
    from sdo.selectors.selector import Selector
    from sdo.trainers.attach import Handle, attach
    from sdo.trainers.inside import OrganizeAndRecord
    from sdo.trainers.sampler import OrganizedSampler
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "SDO",
    "Embeddings",
    "EpochPlan",
    "Handle",
    "InputError",
    "Layout",
    "OrganizeAndRecord",
    "OrganizedSampler",
    "Organizer",
    "OrganizerInputs",
    "OrganizerSpec",
    "Plan",
    "RandomSelect",
    "Selector",
    "StepPlan",
    "Steps",
    "Uniform",
    "attach",
    "register_organizer",
]

__version__ = "0.1.0"
