"""One HTML file that people send to each other: verdict, alerts, numbers, pictures, and how to make it again.

``content`` says what a report is made of, ``sections`` and ``verdict`` fill it from run folders and predictions,
``page`` turns it into HTML, ``build`` puts them together and survives a section that fails.
"""

from __future__ import annotations

from analysis.report.build import Report, build_report

__all__ = ["Report", "build_report"]
