"""One cell: its run file for ``sdo sft`` (or dpo, grpo), its training, and its figures as a small JSON file."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from experiments.material import Material
from experiments.on_cpu import answers_alone
from experiments.settings import Cell, Setting, merged
from sdo.atomic import write_atomically
from sdo.errors import InputError
from sdo.trainers.checkpoints import last_checkpoint

RESULTS = Path(__file__).parent / "results"
_VERSIONS = ("torch", "transformers", "trl", "accelerate", "numpy")


def result_file(setting: Setting, cell: Cell, results: Path = RESULTS) -> Path:
    """Return where the figures of a cell are kept."""
    return results / setting.label / f"{cell.name}.json"


def run_file(setting: Setting, cell: Cell, material: Material, work: Path) -> dict[str, Any]:
    """Return what the training command is given, the same that a user would write.

    Parameters
    ----------
    work
        Folder of this setting's runs.
    """
    steps = int(setting.run["max_steps"])
    decided = {
        "model_name_or_path": material.model,
        "dataset_name": str(material.folder.resolve()),
        "output_dir": str(work / f"{cell.name}-output"),
        "seed": cell.seed,
        "eval_strategy": "steps",
        "eval_steps": -(-steps // setting.checkpoints),
        "eval_on_start": True,
        "organizer": {"embeddings": str((material.folder / "embeddings.npy").resolve()), **cell.organizer},
        "recorder": {"out": str(work / cell.name)},
    }
    return merged(setting.run, decided)


def train(setting: Setting, cell: Cell, material: Material, work: Path) -> tuple[Path, dict[str, Any]]:
    """Train a cell; a training that was cut off continues from its last checkpoint.

    Parameters
    ----------
    work
        Folder of this setting's runs.

    Returns
    -------
    tuple
        The run folder, and how it was trained: ``answers_alone`` (see :mod:`experiments.on_cpu`) and ``resumed``,
        the step at which this call took up the training.
    """
    from sdo.cli.training import build as training

    work.mkdir(parents=True, exist_ok=True)
    options = run_file(setting, cell, material, work)
    folder, output = work / cell.name, Path(options["output_dir"])
    checkpoint, resumed = last_checkpoint(str(output)) if output.is_dir() else None, 0
    if checkpoint is not None:
        options["resume_from_checkpoint"] = "true"
        resumed = int(Path(checkpoint).name.rpartition("-")[2])
    else:
        shutil.rmtree(folder, ignore_errors=True)
    file = work / f"{cell.name}.yaml"
    file.write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")
    method = importlib.import_module(f"sdo.cli.{setting.method}").METHOD
    setup = training.prepare(method, argparse.Namespace(config=str(file), overrides=[]))
    if setting.method == "sft" and material.groups is not None:
        from experiments.correctness import Correctness

        setup.trainer.add_callback(Correctness(setup.trainer))
    model = setup.trainer.model
    with answers_alone(model.config.vocab_size) if model.device.type == "cpu" else nullcontext(False) as alone:
        training.train(setup)
    # What the trainer says of its evaluations, rewards and margins for instance, is in no run folder.
    logged = [entry for entry in setup.trainer.state.log_history if any(key.startswith("eval_") for key in entry)]
    (work / f"{cell.name}-log.json").write_text(json.dumps(logged), encoding="utf-8")
    return folder, {"answers_alone": alone, "resumed": resumed}


def run(setting: Setting, cell: Cell, material: Material, work: Path, results: Path = RESULTS) -> dict[str, Any]:
    """Train and measure a cell, and keep its figures.

    Parameters
    ----------
    work, results
        Folder of this setting's runs, and of all settings' figures.
    """
    from experiments.measure import measure

    started, cpu = time.perf_counter(), time.process_time()
    folder, how = train(setting, cell, material, work)
    trained, cpu_trained = time.perf_counter() - started, time.process_time() - cpu
    logged = json.loads((work / f"{cell.name}-log.json").read_text(encoding="utf-8"))
    figures = measure(folder, logged=logged, groups=material.groups)
    record = {
        "setting": setting.name,
        "scale": setting.scale,
        "group": cell.group,
        "arm": cell.arm,
        "seed": cell.seed,
        "organizer": dict(cell.organizer),
        "material": dict(material.about),
        "versions": _versions(),
        "run": dict(setting.run),
        **how,
        "training_seconds": round(trained, 1),
        "training_cpu_seconds": round(cpu_trained, 1),
        **figures,
    }
    file = result_file(setting, cell, results)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rounded(record), indent=1, allow_nan=False) + "\n"
    write_atomically({file: lambda path: path.write_text(text, encoding="utf-8")})
    return record


def rounded(value: Any) -> Any:
    """Return figures with seven significant digits, so that committed files stay small."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [rounded(one) for one in value]
    return value


def finished(setting: Setting, results: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the figures of a setting's finished cells, in the order of its cells.

    Raises
    ------
    InputError
        Cells differ in their start, in their material, in versions or in how they were trained: they cannot be
        compared.
    """
    files = [file for cell in setting.cells() if (file := result_file(setting, cell, results)).is_file()]
    cells = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file, cell in zip(files, cells, strict=True):
        _comparable(setting, (file.name, cell), (files[0].name, cells[0]))
    return cells


def joins(setting: Setting, material: Material, results: Path = RESULTS) -> None:
    """Refuse material whose cells could not be compared with the finished ones, before anything is trained.

    Parameters
    ----------
    material
        Of the cells to train.
    results
        Folder of all settings' figures.
    """
    before = finished(setting, results)
    if before:
        new = {"material": dict(material.about), "versions": _versions(), "run": dict(setting.run)}
        _comparable(setting, ("a new cell", new), (f"{before[0]['arm']}-{before[0]['seed']}.json", before[0]))


def start_of(setting: Setting, cell: Mapping[str, Any]) -> str | None:
    """Return the digest of the weights that a cell started from.

    Early cells of weights made here recorded that of the file; those of a package recorded none, and count as started
    from what the setting names.
    """
    material = cell.get("material", {})
    found = material.get("start") or material.get("weights") or setting.material.get("digests", {}).get("start")
    return None if found is None else str(found)


def _comparable(setting: Setting, one: tuple[str, Mapping[str, Any]], first: tuple[str, Mapping[str, Any]]) -> None:
    """Refuse two cells, each with its name, that were not made in the same way."""
    (name, cell), (other, reference) = one, first
    start, expected = start_of(setting, cell), start_of(setting, reference)
    if start != expected:
        raise InputError(
            f"{name} starts from weights {start}, {other} from {expected}; expected one start for all cells of a "
            "setting; fix: give the new ones a setting of their own, or remove the older ones and run them again"
        )
    pairs = [
        (key, cell[key], reference[key])
        for key in ("versions", "run", "answers_alone")
        if {key} <= cell.keys() & reference.keys()
    ]
    made, before = cell.get("material", {}), reference.get("material", {})
    pairs += [(key, made[key], before[key]) for key in made if key in before]
    for key, value, usual in pairs:
        if value != usual:
            raise InputError(
                f"{name} was made with {key} = {value}, {other} with {usual}; expected one for all cells of a setting; "
                "fix: remove the older one and run it again"
            )


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _VERSIONS} | {"python": platform.python_version()}
