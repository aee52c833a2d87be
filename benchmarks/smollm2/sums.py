"""Write one-digit arithmetic that SmolLM2-135M partly solves: prompts with a checkable answer, for a GRPO run.

GSM8K is out of reach of so small a model in short completions: of 128 sampled ones a single was right, so that nearly
every group ties and nothing is learnt.

Run: ``python -m benchmarks.smollm2.sums runs/sums.jsonl``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

_FORMS = (
    ("What is {a} + {b}?", lambda a, b: a + b),
    ("Add {a} and {b}.", lambda a, b: a + b),
    ("What is {c} - {a}?", lambda a, b: b),
    ("You have {c} apples and eat {a}. How many are left?", lambda a, b: b),
    ("What is {a} times {b}?", lambda a, b: a * b),
)


def write(out: Path) -> None:
    """Write 405 questions, each form with all pairs of digits from 1 to 9.

    Parameters
    ----------
    out
        A .jsonl file with the columns question and answer.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for form, answer in _FORMS:
            for a in range(1, 10):
                for b in range(1, 10):
                    row = {"question": form.format(a=a, b=b, c=a + b), "answer": str(answer(a, b))}
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
