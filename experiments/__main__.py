"""Run, check and write up the paper's experiment.

::

    python -m experiments check sft --scale paper            # run files and schedules; no model, nothing written
    python -m experiments run families --scale small         # train and measure the cells that are missing
    python -m experiments table families --scale small       # their tables
    python -m experiments status                             # which cells are measured, which are still to run
    python -m experiments page                               # docs/results.md and its pictures

``--work DIR`` (runs/paper) keeps material, run folders and checkpoints; in ``DIR/shared`` lie ``smollm2`` and
``gsm8k``, where a setting wants them. Figures of finished cells go to experiments/results.

Several processes share the cells; give each ``OMP_NUM_THREADS=1``. Where page faults are dear, as in a virtual machine,
``MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=20000000000`` makes a step of SmolLM2 a quarter faster.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

from experiments import settings
from experiments.cell import RESULTS, finished, joins, result_file, run, run_file
from experiments.material import Material, prepare
from experiments.settings import SCALES, Setting, load
from sdo.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Do what the command line says; 2 for wrong input, 1 where a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=(__doc__ or "").split("::")[0])
    parser.add_argument("what", choices=("check", "run", "table", "status", "page"))
    parser.add_argument("setting", nargs="?", help=f"one of {', '.join(sorted(p.stem for p in _files()))}")
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--group", action="append", default=[], help="only this group of arms; may be repeated")
    parser.add_argument("--seeds", type=int, metavar="N", help="only the first N seeds of each group")
    parser.add_argument("--arm", action="append", default=[], help="only this arm; may be repeated")
    parser.add_argument("--work", type=Path, default=Path("runs/paper"), metavar="DIR")
    args = parser.parse_args(argv)
    try:
        return _do(args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _do(args: argparse.Namespace) -> int:
    if args.what == "status":
        return _status()
    if args.what == "page":
        from experiments.page import write

        for file in write():
            print(f"written: {file}")
        return 0
    if args.setting is None:
        raise InputError(f"{args.what} needs the name of a setting")
    setting = load(args.setting, args.scale)
    unknown = sorted(set(args.group) - set(setting.arms))
    if unknown:
        raise InputError(f"there is no group {unknown[0]!r} in {setting.name}; expected {', '.join(setting.arms)}")
    if args.what == "check":
        return _check(setting, args)
    if args.what == "table":
        from experiments.tables import markdown

        print(markdown(setting, finished(setting)))
        return 0
    return _run(setting, args)


def _run(setting: Setting, args: argparse.Namespace) -> int:
    """Train and measure the cells that are missing; one that fails is named, and the others go on."""
    missing = [cell for cell in _chosen(setting, args) if not result_file(setting, cell).is_file()]
    if not missing:
        print(f"{setting.label}: every cell is measured")
        return 0
    material = prepare(setting.material, args.work / setting.label / "material", args.work / "shared")
    joins(setting, material)
    failed = 0
    for cell in missing:
        claim = args.work / setting.label / f"{cell.name}.claim"
        if result_file(setting, cell).is_file() or not _claim(claim):
            continue
        started = time.perf_counter()
        try:
            run(setting, cell, material, args.work / setting.label)
            print(f"{setting.label} {cell.name}: {time.perf_counter() - started:.0f} s", flush=True)
        except (InputError, RuntimeError, ValueError, OSError) as error:
            failed += 1
            print(f"{setting.label} {cell.name} failed: {error}", file=sys.stderr, flush=True)
        finally:
            claim.unlink(missing_ok=True)
    return 1 if failed else 0


def _claim(file: Path) -> bool:
    """Take a cell, so that two processes share the work; a claim of a process that has died counts for nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        try:
            with file.open("x", encoding="ascii") as stream:
                stream.write(str(os.getpid()))
            return True
        except FileExistsError:
            try:
                os.kill(int(file.read_text(encoding="ascii") or 0), 0)
                return False
            except (ProcessLookupError, ValueError):
                file.unlink(missing_ok=True)
    return False


def _chosen(setting: Setting, args: argparse.Namespace) -> list[settings.Cell]:
    cells = [cell for cell in setting.cells(tuple(args.group)) if not args.arm or cell.arm in args.arm]
    if args.seeds is not None:
        cells = [cell for cell in cells if cell.seed in setting.seeds[cell.group][: args.seeds]]
    return cells


def _check(setting: Setting, args: argparse.Namespace) -> int:
    """Check every cell's run file as the training command would, without model, data or network."""
    import importlib

    import torch
    import trl
    import yaml

    from sdo.cli.training.run_file import read_options

    method = importlib.import_module(f"sdo.cli.{setting.method}").METHOD
    classes = (trl.ScriptArguments, getattr(trl, method.config), trl.ModelConfig, method.columns)
    place = args.work / setting.label
    material = Material(place / "material", str(setting.material.get("model", "MODEL")), {})
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "run.yaml"
        for cell in _chosen(setting, args):
            options = run_file(setting, cell, material, place)
            file.write_text(yaml.safe_dump(options), encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the device here, which is not the one that trains
                read_options(str(file), [] if torch.cuda.is_available() else ["--use_cpu", "true"], classes)
            done = "measured" if result_file(setting, cell).is_file() else "to run"
            print(
                f"{setting.label} {cell.group:12} {cell.arm:18} seed {cell.seed:4} {options['max_steps']} steps  {done}"
            )
    return 0


def _status() -> int:
    """Print how many cells of each setting and scale are measured."""
    print(f"{'setting':18} {'group':12} {'measured':>8} {'to run':>7}")
    for path in _files():
        for scale in SCALES:
            try:
                setting = load(path.stem, scale)
            except InputError:
                continue
            for group in setting.arms:
                cells = list(setting.cells((group,)))
                done = sum(result_file(setting, cell).is_file() for cell in cells)
                print(f"{setting.label:18} {group:12} {done:8} {len(cells) - done:7}")
    print(f"figures: {RESULTS}")
    return 0


def _files() -> list[Path]:
    return sorted(settings.FOLDER.glob("*.yaml"))


if __name__ == "__main__":
    raise SystemExit(main())
