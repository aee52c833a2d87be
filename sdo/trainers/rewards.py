"""Rewards for answers that can be checked: the final number, or mathematics through ``math-verify``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

from sdo.errors import InputError
from sdo.imports import imported

Reward = Callable[..., list[float | None]]

# A sign counts unless it is an operator, as in 10-3; digits inside words, as in H2O, are no numbers.
_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>(?<![\w)%])[-+])?(?:[$€£¥₹]\s?(?P<inner>-)?)?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:\s?/\s?(?P<below>0*[1-9]\d*))?"
)
# A number before it makes a mixed number of it.
_FRACTION = re.compile(
    r"(?:(?<![\w.,^/])(?P<whole>\d{1,3}(?:,\d{3})+|\d+) *)?"
    r"\\[dt]?frac\s*\{(?P<above>[^{}]*)\}\s*\{(?P<below>[^{}]*)\}"
)
_LATEX = (("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\\%", "%"), ("−", "-"), ("–", "-"))
_MARK, _BOX = "####", "\\boxed{"
_DIGITS = 100  # no answer is longer; int() refuses 4,300 digits


def final_number(text: str) -> Fraction | None:
    r"""Read the number that an answer ends in.

    Parameters
    ----------
    text
        A solution. What follows the first ``####`` counts, as in GSM8K's own evaluation; else what is in the last
        ``\boxed{}``; else the last number of the text.

    Returns
    -------
    fractions.Fraction or None
        The exact value: ``3``, ``3.0`` and ``6/2`` are equal. Thousands separators, currency and percent signs are
        read over: ``20%`` is 20. LaTeX's fractions are read with their sign, and as mixed numbers after a whole
        number. None where there is no number.

    Examples
    --------
    >>> [str(final_number(text)) for text in ("so 2 * 9 = $18.50.", "#### 1,080 eggs", r"\boxed{\frac{3}{4}}", "-$5")]
    ['37/2', '1080', '3/4', '-5']
    >>> [str(final_number(text)) for text in (r"\boxed{-\frac{1}{2}}", r"\boxed{2\frac{1}{2}}")]
    ['-1/2', '5/2']
    >>> final_number("none") is None
    True
    """
    for raw, plain in _LATEX:
        text = text.replace(raw, plain)
    text = _FRACTION.sub(_plain_fraction, text)
    if _MARK in text:
        line = text.split(_MARK, 1)[1].strip().split("\n", 1)[0]
        marked = _first(_NUMBER.finditer(line))
        if marked is not None:
            return marked
    if _BOX in text:
        boxed = _last(_inside(text[text.rindex(_BOX) + len(_BOX) :]))
        if boxed is not None:
            return boxed
    return _last(text)


def _plain_fraction(found: re.Match[str]) -> str:
    """A fraction of LaTeX as ``above/below``; a mixed number, of a whole number and a proper fraction, as one too."""
    whole, above, below = (found["whole"] or "").replace(",", ""), found["above"].strip(), found["below"].strip()
    if all(part.isdecimal() and len(part) <= _DIGITS for part in (whole, above, below)) and int(above) < int(below):
        return f"{int(whole) * int(below) + int(above)}/{below} "
    before = found["whole"] or found.string[: found.start()][-1:]
    # What stands before must not run into the number, unless it is its sign.
    return f"{found['whole'] or ''}{'' if before in ('', '-', '+') else ' '}{above}/{below} "


def _last(text: str) -> Fraction | None:
    return _first(reversed(list(_NUMBER.finditer(text))))


def _first(matches: Iterable[re.Match[str]]) -> Fraction | None:
    for match in matches:
        digits, below = match["digits"].replace(",", ""), match["below"] or "1"
        if len(digits) + len(below) <= _DIGITS:
            value = Fraction(digits) / int(below)
            return -value if (match["sign"] == "-") != (match["inner"] == "-") else value
    return None


def _inside(text: str) -> str:
    """The text up to the brace that closes one opened before it."""
    depth = 1
    for position, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return text[:position]
    return text


def gsm8k(answer_column: str = "answer") -> Reward:
    """Make the reward for GSM8K: 1 where a completion's final number equals the answer's, else 0.

    Parameters
    ----------
    answer_column
        Column of the reference answers: texts that :func:`final_number` reads, or numbers.

    Returns
    -------
    callable
        A reward function as TRL calls it. It raises :class:`~sdo.InputError` for a reference without a number.

    Examples
    --------
    >>> gsm8k()(completions=["It is 72.", "71"], answer=["48 + 24 = 72 #### 72"] * 2)
    [1.0, 0.0]
    """

    def score(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        references = [_reference(answer, answer_column) for answer in _answers(columns, answer_column)]
        return [
            float(final_number(completion_text(completion)) == reference)
            for completion, reference in zip(completions, references, strict=True)
        ]

    score.__name__ = "gsm8k"
    return score


def math_verify(answer_column: str = "answer") -> Reward:
    """Make the reward of the package ``math-verify``: 1 where both answers mean the same, else 0.

    Parameters
    ----------
    answer_column
        Column of the reference answers; of a text with ``####``, what follows it.

    Raises
    ------
    InputError
        If the package is missing.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise InputError(
            "the reward math_verify needs the package math-verify; fix: pip install 'sdo-toolkit[math]'"
        ) from error

    def score(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        scores: list[float | None] = []
        for completion, answer in zip(completions, _answers(columns, answer_column), strict=True):
            gold = parse(f"${str(answer).split(_MARK)[-1].strip()}$")
            if not gold:
                raise InputError(f"column {answer_column!r} holds {str(answer)[:60]!r}, which math-verify cannot read")
            scores.append(float(verify(gold, parse(completion_text(completion)))))
        return scores

    score.__name__ = "math_verify"
    return score


READY: dict[str, Callable[[str], Reward]] = {"gsm8k": gsm8k, "math_verify": math_verify}


def load_reward(name: str, answer_column: str) -> Reward:
    """Return a ready reward by name, or a function of the user's own.

    Parameters
    ----------
    name
        ``gsm8k``, ``math_verify``, or ``module:function`` for a function that TRL can call; its module is imported,
        from the current folder too.
    answer_column
        Column of the reference answers, for the ready ones.

    Raises
    ------
    InputError
        If there is no such reward, or its module cannot be imported; file and line are named where they are known.
    """
    if name in READY:
        return READY[name](answer_column)
    found = imported(name, "reward", expected=f"{', '.join(READY)} or module:function")
    if not callable(found):
        raise InputError(f"reward {name} is {type(found).__name__}; expected a function")
    reward: Reward = found
    return reward


def check_answers(answers: Sequence[Any], answer_column: str = "answer") -> None:
    """Refuse reference answers without a number, before anything is generated.

    Parameters
    ----------
    answers
        The column.
    answer_column
        Its name.

    Raises
    ------
    InputError
        Naming the first such answer.
    """
    for answer in answers:
        _reference(answer, answer_column)


def completion_text(completion: Any) -> str:
    """Return the text of a completion, which is a string or, in a chat, a list of messages."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "") for part in content or ())


def _answers(columns: dict[str, Any], answer_column: str) -> Sequence[Any]:
    if answer_column not in columns:
        raise InputError(f"the dataset has no column {answer_column!r}, where the reward looks for answers")
    answers: Sequence[Any] = columns[answer_column]
    return answers


def _reference(answer: Any, answer_column: str) -> Fraction:
    number = final_number(str(answer))
    if number is None:
        raise InputError(
            f"column {answer_column!r} holds {str(answer)[:60]!r}, which has no number; expected an answer that ends "
            "in one; fix: name the column of answers with answer_column"
        )
    return number
