"""Make preference pairs from the solutions of GSM8K's test questions that four models wrote.

A question is kept where at least one model solved it and at least one did not: the first correct solution is the chosen
answer, the first wrong one the rejected, in the file's order of models. The embeddings of the kept questions are picked
from those of all test questions, so that row i of the matrix belongs to line i of the pairs.

Run: ``python -m benchmarks.smollm2.pairs GSM8K pairs`` with GSM8K the folder of ``example_model_solutions.jsonl`` and
``test_minilm.npy``; it writes ``pairs/train.jsonl`` and ``pairs/minilm.npy``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def pair_of(row: dict[str, Any]) -> dict[str, str] | None:
    """Return a question with a correct and a wrong solution, or None where all solutions are right or all wrong.

    Parameters
    ----------
    row
        With ``question`` and one mapping with ``is_correct`` and ``solution`` for each model.
    """
    solutions = [value for value in row.values() if isinstance(value, dict)]
    right = [s["solution"] for s in solutions if s["is_correct"]]
    wrong = [s["solution"] for s in solutions if not s["is_correct"]]
    if not right or not wrong:
        return None
    return {"question": row["question"], "correct": right[0], "wrong": wrong[0]}


def write_pairs(source: Path, out: Path) -> int:
    """Write the pairs and their embeddings; return how many.

    Parameters
    ----------
    source
        Folder of the solutions and the embeddings.
    out
        Folder to make.
    """
    lines = (source / "example_model_solutions.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [pair_of(json.loads(line)) for line in lines]
    kept = [number for number, pair in enumerate(pairs) if pair is not None]
    embeddings = np.load(source / "test_minilm.npy", allow_pickle=False)
    if len(embeddings) != len(pairs):
        raise SystemExit(f"{len(embeddings)} embeddings for {len(pairs)} questions; expected one each")
    out.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(pairs[number]) + "\n" for number in kept)
    (out / "train.jsonl").write_text(text, encoding="utf-8")
    np.save(out / "minilm.npy", embeddings[kept])
    return len(kept)


if __name__ == "__main__":
    count = write_pairs(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{count} pairs, in {sys.argv[2]}/train.jsonl; their embeddings in {sys.argv[2]}/minilm.npy")
