"""A run folder is brought back to a checkpoint: refused where it lost something, cut where it went on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diagnostics.run_folder.parquet import drop_exposure, list_parts, own_parts, read_rows, truncate
from sdo.errors import InputError
from sdo.run_format import FORMAT, FORMAT_VERSION, Stream, check_parts, check_rows, gaps_are_faults, read_run_json

_TEMPORARY = (".run.json.tmp", "*/.part-*.parquet.tmp", "gradients/*/.part-*.parquet.tmp")


def read_info(folder: Path) -> dict[str, Any]:
    """Return run.json of a run that this version can continue."""
    path = folder / "run.json"
    if not path.is_file():
        raise InputError(f"{folder} holds no run: run.json is missing; expected the folder of the run to resume")
    info = read_run_json(path)
    found = (info.get("format"), info.get("format_version"))
    if found != (FORMAT, FORMAT_VERSION):
        raise InputError(
            f"{path} has format {found[0]!r}, version {found[1]!r}; expected {FORMAT!r}, version "
            f"{FORMAT_VERSION}: resume with the version that wrote it, or choose another folder"
        )
    return dict(info)


def check_signals(folder: Path, recorded: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse signals or sketches other than the run's: their rows could not be compared."""
    now = json.loads(json.dumps(given))
    for name in {**recorded, **now}:
        found = _first_difference(recorded.get(name), now.get(name), name)
        if found is not None:
            where, before, after = found
            raise InputError(
                f"{folder} was recorded with {where} = {before}, which is now {after}; expected the same signals and "
                "sketches; fix: resume with the recorder's first options and version, or choose another folder"
            )


def _first_difference(before: Any, after: Any, where: str) -> tuple[str, Any, Any] | None:
    """Return the place of the first value that differs between two descriptions, and both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        parts = (_first_difference(before.get(key), after.get(key), f"{where}.{key}") for key in {**before, **after})
        return next((part for part in parts if part is not None), None)
    return None if before == after else (where, before, after)


def check_whole(
    folder: Path,
    info: Mapping[str, Any],
    streams: Mapping[str, Stream],
    epoch_ends: Mapping[int | None, int],
    step: int,
) -> None:
    """Refuse to continue a folder that has lost or doubled something of the steps before ``step``.

    Parameters
    ----------
    folder
        The run's folder.
    info
        What run.json holds.
    streams
        By folder name.
    epoch_ends
        Organizer epoch to its last step + 1.
    step
        Of the checkpoint.

    Raises
    ------
    InputError
        Naming what is missing.
    """
    first = int(info.get("first_step", 0))
    for stream in (name for name, one in streams.items() if one.by_step):
        part_folder = folder / stream
        names = [part.name for _, _, part in list_parts(part_folder)]
        gaps = gaps_are_faults(info, stream)
        check_parts(part_folder, names, first=min(first, step) if gaps else None, last=step - 1, gaps=gaps)
        if step > first and not names and gaps:
            raise InputError(
                f"{part_folder} lacks the steps {first} to {step - 1}: it holds no part; expected all steps before the "
                "checkpoint; fix: put it back, or choose another folder"
            )
    check_rows(folder, {**info, "status": "running"}, {stream: count_rows(folder / stream) for stream in streams})
    for epoch, end in epoch_ends.items():
        later = [other for other in epoch_ends if epoch is not None and other is not None and other > epoch]
        if later and end <= step and not (folder / "exposure" / f"part-{epoch:05d}.parquet").is_file():
            raise InputError(
                f"{folder / 'exposure'} lacks organizer epoch {epoch}; expected every epoch that ended before "
                "the checkpoint; fix: put it back, or choose another folder"
            )


def cut_back(folder: Path, streams: Mapping[str, Stream], epoch_ends: Mapping[int | None, int], step: int) -> None:
    """Drop what a crash left half written, and what was recorded after the checkpoint at ``step``."""
    for pattern in _TEMPORARY:
        for temporary in folder.glob(pattern):
            temporary.unlink()
    for name, stream in streams.items():
        truncate(folder / name, step + stream.after)
    drop_exposure(folder / "exposure", step, epoch_ends)


def count_rows(folder: Path) -> int:
    """Return the rows on disk of one stream; of gradients those of process 0."""
    return sum(read_rows(part) for part in own_parts(folder, rank=0))
