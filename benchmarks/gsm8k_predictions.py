"""Write the four models of GSM8K's example_model_solutions.jsonl as predictions: ``python -m … GSM8K_FOLDER OUT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(source: str, out: str) -> None:
    """Write one file a model: the position of the question, and whether the model's answer is correct."""
    lines = (Path(source) / "example_model_solutions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for model in (name for name, value in rows[0].items() if isinstance(value, dict)):
        predictions = [{"sample_id": i, "correct": row[model]["is_correct"]} for i, row in enumerate(rows)]
        text = "".join(json.dumps(one) + "\n" for one in predictions)
        (folder / f"{model}.jsonl").write_text(text, encoding="utf-8")
        print(f"{folder / model}.jsonl: {len(rows)} answers, {sum(one['correct'] for one in predictions)} correct")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("expected two arguments: the folder of example_model_solutions.jsonl, and one to write into")
    main(*sys.argv[1:])
