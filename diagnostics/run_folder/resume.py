"""Whether a run folder holds the run that a checkpoint belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.errors import InputError
from sdo.organizers.plan import describe_difference
from sdo.run_format import read_run_json

if TYPE_CHECKING:
    from diagnostics.recording.recorder import GradientRecorder


def require_same_run(out: Path, state: Any, recorder: GradientRecorder, organizer: dict[str, Any] | None) -> None:
    """Refuse to continue a run folder of another plan, or of another run.

    Parameters
    ----------
    out
        The run folder.
    state
        The trainer's state, with what the checkpoint kept of its callbacks.
    recorder
        The recorder, whose own state is among it.
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
    resumed = _runs_of_checkpoint(state, recorder)
    if run_id is None or run_id not in resumed:
        raise InputError(
            f"{out} holds another run ({run_id}) than the checkpoint at step {state.global_step} "
            f"({', '.join(resumed) or 'none'}); expected the run that is resumed; fix: choose another folder"
        )


def _runs_of_checkpoint(state: Any, recorder: GradientRecorder) -> list[str]:
    """The runs that a checkpoint belongs to, as the trainer's recorders stored them there, under their class's name.

    transformers keeps a list where a trainer has several of them, and lets it grow at each save (transformers#33875).
    """
    entries = state.stateful_callbacks.get(type(recorder).__name__) or []
    entries = entries if isinstance(entries, list) else [entries]
    found = [entry.get("attributes", {}).get("run_id") for entry in entries if isinstance(entry, dict)]
    return list(dict.fromkeys(run for run in found if run is not None)) if state.global_step > 0 else []
