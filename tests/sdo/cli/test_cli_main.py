import argparse
import importlib
import os
import subprocess
import sys

import pytest

from sdo.cli import main as main_module
from sdo.cli.commands import COMMANDS
from sdo.cli.main import build_parser, main
from sdo.errors import InputError


def test_no_command_shows_the_commands(capsys):
    assert main([]) == 2
    shown = "".join(capsys.readouterr())
    assert "usage: sdo" in shown
    for command in COMMANDS:
        assert command in shown


PLAN = ["plan", "--embeddings", "E.npy", "--batch-size", "8", "--out", "P.parquet"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plna"], "invalid choice: 'plna'"),
        (["--nonsense"], "--nonsense"),
        (["coherence", "--nonsense", "run", "--out", "x"], "unexpected argument '--nonsense'"),
        (["embed", "--nonsense"], "see sdo embed --help"),
        ([*PLAN, "--neighbors", "4"], "its options are --embeddings, --samples, "),
        ([*PLAN, "--delta-tao", "4"], "did you mean '--delta-tau'? its options are"),
        (["probe", "--model", "m"], "sdo probe: the following arguments are required"),
        (["sft", "--nonsense", "1"], "unknown key 'nonsense'"),
        (["sft", "nonsense"], "unexpected argument 'nonsense'"),
    ],
)
def test_what_nobody_knows_is_one_line(capsys, tmp_path, monkeypatch, argv, message):
    if argv[0] == "sft":
        pytest.importorskip("trl", reason="the extra train knows the keys")
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"sdo {argv[0]}: " if argv[0] in COMMANDS else "sdo: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_has_an_example(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([*([command] if command else []), "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    text = " ".join(shown.out.split())  # argparse wraps the line
    assert f"example: sdo {command or ''}".rstrip() in text


def options_of(command):
    """Return the parser of one command."""
    (subparsers,) = (a for a in build_parser(command)._actions if isinstance(a, argparse._SubParsersAction))
    return subparsers.choices[command]


def test_help_shows_a_line_of_each_command_and_imports_none(tmp_path):
    code = """
import sys
from sdo.cli.main import build_parser
print(build_parser(None).format_help())
assert not {"numpy", *(f"sdo.cli.{name}" for name in ("plan", "sft", "report"))} & sys.modules.keys()
"""
    done = python(tmp_path, code)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    for command, line in COMMANDS.items():
        assert f" {command} {line} " in f"{shown} "


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command):
    """`--help` is the reference: an option without a word, or without its choices, is a riddle."""
    for action in options_of(command)._actions:
        assert action.help or action.choices, action.option_strings


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_is_understood(command):
    """An example that its own parser refuses teaches mistakes."""
    words = options_of(command).epilog.partition("example: sdo ")[2].split()
    args, rest = build_parser(command).parse_known_args(words)
    assert args.command == command
    assert rest == [] or args.takes_overrides


def stand_in(monkeypatch, run):
    """Put a command of our own in the place of `sdo plan`."""

    def add_parser(subparsers):
        subparsers.add_parser("plan").set_defaults(run=run)

    monkeypatch.setattr(importlib.import_module("sdo.cli.plan"), "add_parser", add_parser)


def test_interrupting_is_status_130(capsys, monkeypatch):
    def run(args):
        raise KeyboardInterrupt

    stand_in(monkeypatch, run)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "sdo plan: interrupted\n"


def test_wrong_input_is_one_line_however_the_message_is_broken(capsys, monkeypatch):
    def run(args):
        raise InputError("came\n  a;   expected\tb\n")

    stand_in(monkeypatch, run)
    assert main(["plan"]) == 2
    assert capsys.readouterr().err == "sdo plan: came a; expected b\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "a\x1bb"),
            r"a\x1bb: No such file or directory; expected files",
        ),
        (OSError(36, "File name too long", "a", None, "b"), "a: b: File name too long; expected files"),
        (OSError(28, "No space left on device"), "No space left on device; expected files"),
        (OSError("no reason"), "no reason; expected files"),
        (MemoryError(), "not enough memory; expected input that fits"),
        (MemoryError("Unable to allocate 1. TiB"), "not enough memory: Unable to allocate 1. TiB; expected"),
        (RecursionError("maximum recursion depth exceeded"), "maximum recursion depth exceeded; expected less deeply"),
    ],
)
def test_what_the_machine_refuses_is_one_line(capsys, monkeypatch, error, words):
    def run(args):
        raise error

    stand_in(monkeypatch, run)
    assert main(["plan"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sdo plan: {words}")


def test_names_cannot_control_the_terminal(capsys, monkeypatch):
    def run(args):
        print("run \x1b[31mred")
        raise InputError("no such file: \x1b[2J")

    stand_in(monkeypatch, run)
    assert main(["plan"]) == 2
    assert capsys.readouterr() == ("run \\x1b[31mred\n", "sdo plan: no such file: \\x1b[2J\n")
    assert main(["\x1b[31m"]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1])
def test_the_commands_status_is_passed_on(monkeypatch, status):
    stand_in(monkeypatch, lambda args: status)
    assert main(["plan"]) == status


def test_a_mistake_of_ours_is_not_hidden(monkeypatch):
    """Only wrong input becomes one line; anything else keeps its traceback, without which nobody could fix it."""

    def run(args):
        raise ZeroDivisionError

    stand_in(monkeypatch, run)
    with pytest.raises(ZeroDivisionError):
        main(["plan"])


def test_arguments_come_from_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sdo", "plan"])
    assert main() == 2
    assert "--batch-size" in capsys.readouterr().err
    assert main_module.main is main


# ---------------------------------------------------------------------- the installed package


def python(tmp_path, code, *flags):
    """Run code in a fresh interpreter in an empty folder, with what is installed and nothing else."""
    return subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_packages_come_from_the_distribution(tmp_path):
    """`analysis` and `diagnostics` are common names: another installed package must not be taken for ours."""
    pytest.importorskip("torch", reason="diagnostics needs it; installed.py looks at an install without extras")
    code = """
import importlib.metadata, pathlib, sys
import sdo, analysis
assert "torch" not in sys.modules and "transformers" not in sys.modules
import diagnostics
found = [pathlib.Path(p.__file__).resolve().parents[1] for p in (sdo, diagnostics, analysis)]
assert len(set(found)) == 1, found
assert importlib.metadata.version("sdo-toolkit")
(entry,) = importlib.metadata.entry_points(group="console_scripts", name="sdo")
assert entry.load().__module__ == "sdo.cli.main"
print(found[0])
"""
    # -P: not even the working folder is searched.
    done = python(tmp_path, code, "-P")
    if "PackageNotFoundError" in done.stderr or "ModuleNotFoundError: No module named 'sdo'" in done.stderr:
        pytest.skip("sdo-toolkit is not installed here")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_parser_loads_nothing_heavy(tmp_path):
    """`sdo --help` answers at once."""
    code = """
import sys
from sdo.cli.commands import COMMANDS
from sdo.cli.main import build_parser
for command in COMMANDS:
    build_parser(command)
print(sorted({"torch", "transformers", "trl", "datasets", "sklearn", "matplotlib", "pandas"} & sys.modules.keys()))
"""
    done = python(tmp_path, code)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("order", ["import torch, faiss", "import faiss, torch"])
def test_torch_and_faiss_live_together_in_either_order(tmp_path, order):
    """Each brings an OpenMP runtime; where they clash the process dies without a traceback."""
    pytest.importorskip("torch")
    code = f"""
{order}
import numpy as np
x = np.random.default_rng(0).standard_normal((2000, 32), dtype=np.float32)
index = faiss.IndexFlatIP(32)
index.add(x)
found = index.search(x[:200], 5)[1]
y = torch.from_numpy(x)
best = (y[:200] @ y.T).topk(5).indices.numpy()
assert (np.sort(found) == np.sort(best)).mean() > 0.99
from sdo import SDO
assert SDO(x, k=4).plan(8).epoch(0).batches.shape[1] == 8
print("alive")
"""
    done = python(tmp_path, code)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_an_output_that_is_full_is_one_line(tmp_path):
    code = """
import sys
from sdo.cli.main import main
import numpy as np
np.save("E.npy", np.random.default_rng(0).standard_normal((20, 4)))
status = main("plan --embeddings E.npy --batch-size 4 --out P.parquet".split())
sys.exit(status)
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith("sdo plan: standard output: No space left on device; expected")
    assert len(done.stderr.splitlines()) == 1


def test_as_a_process(tmp_path):
    """Status, and one line on standard error, as a shell script sees them."""
    code = "import sys; from sdo.cli.main import main; sys.exit(main(['plan', '--batch-size', '8']))"
    done = python(tmp_path, code)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
