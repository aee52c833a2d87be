import math
import re
from collections import Counter
from fractions import Fraction

import pytest

from sdo.demo.word_problems import FAMILIES, Problem, generate
from sdo.errors import InputError


def _numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def _fractions(text):
    over, under = re.search(r"(\d+)/(\d+)", text).groups()
    (whole,) = _numbers(text.replace(f"{over}/{under}", ""))
    return whole * Fraction(int(over), int(under))


def _change(text):
    count, price, paid = _numbers(text)
    return paid - sum(price for _ in range(count))


def _speed(text):
    low, high = sorted(_numbers(text))
    return Fraction(high, low) if "How many hours" in text else low * high


def _ages(text):
    gap, word = re.search(r"(\d+) years (older|younger)", text).groups()
    (later,) = re.findall(r"in (\d+) years", text.lower())
    first = _numbers(text)
    first.remove(int(gap))
    first.remove(int(later))
    return first[0] + int(later) + (int(gap) if word == "older" else -int(gap))


# Answers from the numbers in the text alone; nothing of the generator is used.
SOLVERS = {
    "adding": lambda text: sum(_numbers(text)),
    "subtracting": lambda text: 2 * max(_numbers(text)) - sum(_numbers(text)),
    "multiplying": lambda text: math.prod(_numbers(text)),
    "sharing": lambda text: Fraction(*_numbers(text)),
    "fractions": _fractions,
    "change": _change,
    "speed": _speed,
    "ages": _ages,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_follow_from_the_numbers_in_the_text(family):
    for problem in generate(400, seed=11, families=[family]):
        assert SOLVERS[family](problem.prompt) == problem.answer, problem
        assert problem.answer > 0


def test_completions_work_out_the_answer():
    for problem in generate(400, seed=5):
        working, _, last = problem.completion.partition("\n#### ")
        assert working.startswith(" ")
        assert int(last) == problem.answer
        for left, right in re.findall(r"([\d]+ [-+*/] [\d]+) = (\d+)", working):
            a, sign, b = left.split()
            value = {
                "+": int(a) + int(b),
                "-": int(a) - int(b),
                "*": int(a) * int(b),
                "/": Fraction(int(a), int(b)),
            }
            assert value[sign] == int(right), problem
        assert re.findall(r"= (\d+)", working)[-1] == last


def test_families_are_balanced_and_prompts_are_distinct():
    problems = generate(1504, seed=2)
    assert Counter(problem.family for problem in problems) == dict.fromkeys(FAMILIES, 188)
    assert len({problem.prompt for problem in problems}) == 1504
    for start in range(0, 1504, 8):
        assert {problem.family for problem in problems[start : start + 8]} == set(FAMILIES)


def test_every_family_has_several_sentences():
    for family in FAMILIES:
        shapes = {re.sub(r"\d+", "0", problem.prompt) for problem in generate(200, seed=3, families=[family])}
        assert len(shapes) >= 20


def test_no_placeholder_is_left():
    assert not any(re.search(r"[{}]", problem.prompt + problem.completion) for problem in generate(800, seed=9))


def test_same_seed_gives_the_same_problems_and_fewer_are_a_prefix():
    assert generate(100, seed=4)[:37] == generate(37, seed=4)
    assert generate(37, seed=4) != generate(37, seed=5)
    assert generate(0, seed=4) == []


def test_first_problem_is_fixed_on_every_machine():
    assert generate(1, seed=617) == [PINNED]


PINNED = Problem(
    prompt="On the birthday of the brother, who is now 44, the sister is 11 years younger. "
    "What will be the age of the sister in 15 years?",
    completion=" 44 - 11 = 33. 33 + 15 = 48 years.\n#### 48",
    family="ages",
    answer=48,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": -1, "seed": 0}, "n is -1"),
        ({"n": 2.0, "seed": 0}, "n is 2.0"),
        ({"n": 1, "seed": "x"}, "seed is 'x'"),
        ({"n": 1, "seed": 0, "families": ["addition"]}, "unknown families"),
        ({"n": 1, "seed": 0, "families": []}, "unknown families"),
        ({"n": 1, "seed": 0, "families": ["ages", "ages"]}, "each once"),
        ({"n": 20_000, "seed": 0, "families": ["change"]}, "no new problem left"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        generate(**arguments)
