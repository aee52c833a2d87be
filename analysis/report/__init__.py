"""One HTML file that people send to each other: verdict, alerts, numbers, pictures, and how to make it again.

``material`` is what it is made from, ``content`` what it is made of; ``sections`` and ``verdict`` fill it from run
folders and predictions, ``page`` turns it into HTML, ``build`` puts them together and survives a section that fails. A
section of your own is a :class:`SectionSpec` in ``build_report(…, sections=[*SECTIONS, mine])`` or named by
``sdo report --section``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from analysis.report.build import SECTIONS, Report, build_report
    from analysis.report.content import Absent, Cell, Finding, Picture, Quotes, Section, SectionSpec, Table
    from analysis.report.material import ReportMaterial
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "SECTIONS",
    "Absent",
    "Cell",
    "Finding",
    "Picture",
    "Quotes",
    "Report",
    "ReportMaterial",
    "Section",
    "SectionSpec",
    "Table",
    "build_report",
]
