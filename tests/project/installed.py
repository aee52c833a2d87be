"""A user's first steps with the installed package, from a folder that holds nothing of it; run by `make test-core`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = ("analysis", "diagnostics", "sdo")


def sdo(*arguments: str) -> str:
    """Run the installed command, which must succeed."""
    command = str(Path(sys.executable).with_name("sdo"))
    done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"sdo {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def check_contents() -> None:
    """Three packages, typed, complete, and nothing else; none of them comes from the source tree."""
    packed = {str(file) for file in importlib.metadata.files("sdo-toolkit") or []}
    tops = {file.split("/")[0] for file in packed if ".dist-info" not in file and not file.startswith("..")}
    assert tops == set(TOP_LEVEL), tops
    tracked = {
        str(file.relative_to(ROOT))
        for top in TOP_LEVEL
        for file in (ROOT / top).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert not tracked - packed, f"not in the wheel: {sorted(tracked - packed)}"
    for top in TOP_LEVEL:
        spec = importlib.util.find_spec(top)
        assert spec is not None
        assert spec.origin is not None
        assert ROOT not in Path(spec.origin).parents or ".venv" in spec.origin, spec.origin


def main() -> None:
    """Embed, plan and explain without torch."""
    check_contents()
    assert importlib.util.find_spec("torch") is None, "this check is of an install without extras"
    with tempfile.TemporaryDirectory() as desk:
        os.chdir(desk)
        import analysis
        import sdo as package

        assert package.__all__
        assert analysis.__all__
        words = ("add", "apples", "boats", "carry", "days", "eggs", "fences", "give")
        texts = [f"{words[n % 8]} {words[n * 3 % 8]} and {n} {words[n * 5 % 8]}" for n in range(64)]
        Path("train.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
        assert "coherence" in sdo("--help")
        sdo("embed", "train.jsonl", "--column", "question", "--out", "E.npy", "--no-cache")
        sdo(
            "plan", "--embeddings", "E.npy", "--batch-size", "4", "--epochs", "2", "--seed", "617", "--out", "P.parquet"
        )
        assert Path("P.parquet").stat().st_size > 0
        for command in ("coherence", "sft", "doctor", "demo"):
            sdo(command, "--help")
    print("the installed package embeds and plans without torch; its wheel is complete")


if __name__ == "__main__":
    main()
