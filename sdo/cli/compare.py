"""``sdo compare``: two kinds of run over several seeds, checkpoint by checkpoint."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdo.atomic import write_atomically
from sdo.cli.commands import COMMANDS
from sdo.cli.common.outputs import aligned, check_out_folder, file_names, json_writer, make_folder
from sdo.cli.common.run_options import unique_names
from sdo.errors import printable

if TYPE_CHECKING:
    from analysis import PairedComparison, Pairing, SeedComparison, UnpairedComparison

_HEADINGS = ("measure", "step", "n", "baseline", "against", "difference", "95 % interval", "t")
_TESTS = {
    True: ("p (paired t)", "d (paired)", "p (sign flip)", "least possible"),
    False: ("p (Welch)", "d (pooled)", "p (labels)", "least possible"),
}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = subparsers.add_parser(
        "compare",
        help=COMMANDS["compare"],
        description="Compare the evaluations of two kinds of run (held-out loss, correctness, whatever was logged): at "
        "each step that all runs have, a paired t-test, Cohen's d of the paired differences, and a sign-flip test with "
        "the smallest p that it can reach. Rewards in training (GRPO, RLOO), of other prompts in each run, are "
        "compared as means over windows of steps. Runs are paired by the seed in run.json, those without a partner "
        "left out; where seeds do not pair them, the two sides are compared as groups (Welch's t, permuted labels). "
        "Prints a table; with --out writes compare.json and a picture of each measure.",
        epilog="example: sdo compare --baseline runs/uniform-1 runs/uniform-2 --against runs/sdo-1 runs/sdo-2 "
        "--out compare",
    )
    parser.add_argument("--baseline", metavar="RUN", nargs="+", type=Path, required=True, help="run folders")
    parser.add_argument("--against", metavar="RUN", nargs="+", type=Path, required=True, help="run folders")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results (default: print only)")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that holds files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, print and write.

    Returns
    -------
    int
        0; every failure is an :class:`InputError`.
    """
    from analysis import Run, compare_seeds, pair_runs

    unique_names([*args.baseline, *args.against])
    baseline, against = ([Run.open(path) for path in side] for side in (args.baseline, args.against))
    for one in (*baseline, *against):
        one.check()
    pairing = pair_runs(baseline, against)
    found = compare_seeds(pairing)
    if args.out is not None:
        check_out_folder(args.out, overwrite=args.overwrite, sources=(*args.baseline, *args.against))
        make_folder(args.out)
    notes = _notes(pairing, found)
    print(_table(found))
    for note in notes:
        print(f"note: {printable(note)}")
    if args.out is not None:
        _write(args.out, pairing, found, notes)
    return 0


def _notes(pairing: Pairing, found: list[SeedComparison]) -> list[str]:
    from analysis.report.settings import arms_of, setting_alerts
    from analysis.seeds.differences import FEW_PAIRS, LEVEL

    notes = [note for one in found for note in one.notes]
    for side, runs in (("--baseline", pairing.baseline), ("--against", pairing.against)):
        arms = list(arms_of({str(run.path): run for run in runs}).values())
        if len(arms) > 1:
            named = "; ".join(", ".join(arm) for arm in arms)
            notes.append(f"{side} holds {len(arms)} kinds of run ({named}): the difference is of all of them together")
    everyone = {str(run.path): run for run in (*pairing.baseline, *pairing.against)}
    notes += [alert.rstrip(".") for alert in setting_alerts(everyone)]
    first = found[0].comparisons[0]
    if pairing.by == "seed":
        seeds = ", ".join(str(run.info["seeds"]["seed"]) for run in pairing.baseline)
        notes.append(f"runs are paired by their seeds: {seeds}")
        if pairing.left_out:
            left_out = ", ".join(str(run.path) for run in pairing.left_out)
            notes.append(f"left out, since the other side has no run of their seed: {left_out}")
    else:
        notes.append(
            f"the seeds in run.json do not pair the runs ({pairing.reason}): the sides are compared as two groups, "
            "which finds less than pairs would"
        )
    if first.smallest_resampling_p >= LEVEL:
        test, enough = "sign-flip", f"{FEW_PAIRS} pairs"
        if pairing.by is None:
            test, enough = "permutation", "4 runs of each side"
        notes.append(
            f"{first.sizes} are few: no {test} p can be below {first.smallest_resampling_p:.3g}, and the t-test leans "
            f"on normal values; {enough} are the least that can reach {LEVEL}"
        )
    tests = sum(len(one.comparisons) for one in found)
    if tests > 1:
        notes.append(f"{tests} comparisons were made; p-values are of each one alone")
    return notes


def _write(out: Path, pairing: Pairing, found: list[SeedComparison], notes: list[str]) -> None:
    from analysis import save, seed_differences

    measures = []
    safe = file_names([one.measure for one in found])
    pictures = []
    for one in found:
        steps = [
            {
                "step": step,
                "baseline": one.baseline[i].tolist(),
                "against": one.against[i].tolist(),
                **asdict(one.comparisons[i]),
            }
            for i, step in enumerate(one.steps)
        ]
        measures.append({"measure": one.measure, "checkpoints": steps})
        picture = f"compare-{safe[one.measure]}.png"
        save(seed_differences(one, title=f"{one.measure}: against minus baseline")[0], out / picture)
        pictures.append(picture)
    content = {
        "format": "sdo-compare",
        "format_version": 1,
        "paired_by": pairing.by,
        "paired_by_reason": pairing.reason,
        "baseline": [str(run.path) for run in pairing.baseline],
        "against": [str(run.path) for run in pairing.against],
        "left_out": [str(run.path) for run in pairing.left_out],
        "notes": notes,
        "measures": measures,
    }
    write_atomically({out / "compare.json": json_writer(content)})
    print(f"written to {out}: {', '.join(['compare.json', *pictures])}")


def _count(one: PairedComparison | UnpairedComparison) -> str:
    from analysis import PairedComparison

    return str(one.n) if isinstance(one, PairedComparison) else f"{one.n_baseline}, {one.n_against}"


def _table(found: list[SeedComparison]) -> str:
    from analysis import PairedComparison

    def number(value: float | None, pattern: str) -> str:
        return "-" if value is None else pattern.format(value)

    lines = [[*_HEADINGS, *_TESTS[isinstance(found[0].comparisons[0], PairedComparison)]]]
    for one in found:
        for i, (step, c) in enumerate(zip(one.steps, one.comparisons, strict=True)):
            interval = "-" if c.low is None else f"{c.low:+.4f} to {c.high:+.4f}"
            lines.append(
                [
                    *(one.measure, str(step), _count(c)),
                    *(f"{values[i].mean():.4f}" for values in (one.baseline, one.against)),
                    *(f"{c.mean:+.4f}", interval, number(c.t, "{:+.2f}"), number(c.p, "{:.3g}")),
                    *(number(c.cohens_d, "{:+.2f}"), f"{c.resampling_p:.3g}", f"{c.smallest_resampling_p:.3g}"),
                ]
            )
    return aligned(lines)
