"""Gradients as short vectors that keep their cosines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from diagnostics.sketches.accuracy import SketchCheck
    from diagnostics.sketches.count_sketch import GradientSketch
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "GradientSketch",
    "SketchCheck",
]
