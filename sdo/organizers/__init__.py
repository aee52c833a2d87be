"""What each mini-batch holds: organizers and their plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from sdo.organizers.plan import Organizer, Plan
    from sdo.organizers.registry import (
        OrganizerInputs,
        OrganizerSpec,
        SDOOptions,
        UniformOptions,
        make_organizer,
        organizer_names,
        organizer_spec,
        register_organizer,
    )
    from sdo.organizers.sdo import SDO
    from sdo.organizers.steps import EpochPlan, Layout, StepPlan, Steps
    from sdo.organizers.uniform import Uniform
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "SDO",
    "EpochPlan",
    "Layout",
    "Organizer",
    "OrganizerInputs",
    "OrganizerSpec",
    "Plan",
    "SDOOptions",
    "StepPlan",
    "Steps",
    "Uniform",
    "UniformOptions",
    "make_organizer",
    "organizer_names",
    "organizer_spec",
    "register_organizer",
]
