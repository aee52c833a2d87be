"""From a report's content to one HTML file: no script, no network, every text escaped."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from analysis.balance.cluster_texts import shown_text
from analysis.report.content import Absent, Failed, Finding, Place
from sdo.errors import printable


def render(
    title: str, subtitle: str, verdict: Sequence[Finding], alerts: Sequence[str], places: Sequence[Place]
) -> str:
    """Return the page.

    Parameters
    ----------
    title, subtitle
        The heading and the line below it.
    verdict, alerts
        What stands first.
    places
        The sections in their order.
    """
    folder = files("analysis.report")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
        finalize=_harmless,
    )
    environment.filters |= {"base64": _base64, "size_attributes": _size_attributes, "shown_text": shown_text}
    template = environment.from_string((folder / "page.html.jinja").read_text(encoding="utf-8"))
    css = Markup((folder / "page.css").read_text(encoding="utf-8"))  # noqa: S704 - our own file
    shown: list[dict[str, Any]] = [
        {"key": place.key, "title": place.title, "content": place.content, "state": state(place)} for place in places
    ]
    return template.render(title=title, subtitle=subtitle, verdict=verdict, alerts=alerts, places=shown, css=css)


def state(place: Place) -> str:
    """Return ``"shown"``, ``"absent"`` or ``"failed"``."""
    if isinstance(place.content, Failed):
        return "failed"
    return "absent" if isinstance(place.content, Absent) else "shown"


def _harmless(value: Any) -> Any:
    """Show what a browser or an editor would obey as an escape; what is markup already is our own."""
    return printable(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def _base64(png: bytes) -> str:
    return base64.b64encode(png).decode("ascii")


def _size_attributes(png: bytes) -> Markup:
    """Say a picture's size, so that the page does not jump while it loads."""
    width, height = struct.unpack(">II", png[16:24])
    return Markup(' width="{}" height="{}"').format(width, height)
