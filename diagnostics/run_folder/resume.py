"""Whether a run folder holds the run that a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdo.errors import InputError
from sdo.organizers.plan import describe_difference
from sdo.run_format import read_run_json


def require_same_run(out: Path, resumed: Sequence[str], step: int, organizer: dict[str, Any] | None) -> None:
    """Refuse to continue a run folder of another plan, or of another run.

    Parameters
    ----------
    out
        The run folder.
    resumed
        The runs that the checkpoint belongs to.
    step
        Updates that its model has had.
    organizer
        The plan of now, as run.json describes it; None without an organizer.

    Raises
    ------
    InputError
        If they differ, or run.json cannot be read.
    """
    stored = read_run_json(out / "run.json")
    run_id, before = stored.get("run_id"), stored.get("organizer")
    difference = describe_difference(before, organizer)
    if difference is not None:
        raise InputError(
            f"{out} holds a run under another plan: {difference}; expected the run that is resumed; "
            "fix: choose another folder"
        )
    if run_id is None or run_id not in resumed:
        raise InputError(
            f"{out} holds another run ({run_id}) than the checkpoint at step {step} "
            f"({', '.join(resumed) or 'none'}); expected the run that is resumed; fix: choose another folder"
        )
