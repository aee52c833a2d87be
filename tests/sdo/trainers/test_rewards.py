"""Reading the final number of an answer, and the rewards made of it."""

import json
import sys
from fractions import Fraction

import pytest

from sdo.errors import InputError
from sdo.trainers.rewards import check_answers, completion_text, final_number, gsm8k, load_reward, math_verify

CASES = {
    "10-3": 3,
    "10 - 3": 3,
    "= -3": -3,
    "−7": -7,
    "+5": 5,
    "-$5": -5,
    "$-5": -5,
    "(5)": 5,
    "- 5 apples": 5,
    "$1,234.50 in total": Fraction("1234.5"),
    "€12": 12,
    "20%": 20,
    "100.00": 100,
    ".5": Fraction(1, 2),
    "is 5.": 5,
    "**72**": 72,
    "72!": 72,
    "3/4 of it": Fraction(3, 4),
    "$2.50/hour": Fraction(5, 2),
    "5/0": 0,
    "1,2": 2,
    "5, 6": 6,
    "12,345,678": 12345678,
    "1234,567": 567,
    "8:30": 30,
    "H2O and v1.2.3": None,
    "": None,
    "none": None,
    "9" * 5000: None,
    "#### 72": 72,
    "####72 dollars in 2 parts": 72,
    "#### $1,080.\nQ: and 3?": 1080,
    "so 4 #### none": 4,
    r"\boxed{18} or 19": 18,
    r"\boxed{3} then \boxed{\text{about } 18\%}": 18,
    r"$\boxed{1{,}000}$": 1000,
    r"\boxed{\frac{3}{4}}": Fraction(3, 4),
    r"\boxed{-\frac{1}{2}}": Fraction(-1, 2),
    r"$-\dfrac{1}{2}$": Fraction(-1, 2),
    r"x=-\tfrac{ 1 }{ 2 }": Fraction(-1, 2),
    r"\boxed{\frac{-1}{2}}": Fraction(-1, 2),
    r"\boxed{+\frac{1}{2}}": Fraction(1, 2),
    r"1-\frac{1}{2}": Fraction(1, 2),
    r"x\frac{1}{2}": Fraction(1, 2),
    r"2.5\frac{1}{2}": Fraction(1, 2),
    r"\boxed{2\frac{1}{2}}": Fraction(5, 2),
    r"\boxed{-2\frac{1}{2}}": Fraction(-5, 2),
    r"\boxed{-2\,\dfrac{1}{2}\text{ cups}}": Fraction(-5, 2),
    r"2 \tfrac{1}{2}": Fraction(5, 2),
    r"\$1{,}000\frac{1}{2}": Fraction(2001, 2),
    r"10-2\frac{1}{2}": Fraction(5, 2),
    r"3/4 \frac{1}{2}": Fraction(1, 2),  # a number below a line is no whole one
    r"2\frac{3}{2}": Fraction(3, 2),  # an improper one makes no mixed number
    r"2\frac{x}{4}": 4,
    "step 2\n\\frac{1}{2}": Fraction(1, 2),
    r"#### -3\frac{1}{4}": Fraction(-13, 4),
    "2\\frac{1}{" + "9" * 5000 + "}": 2,
    r"\boxed{x = -5}": -5,
    r"\boxed{7": 7,
}


@pytest.mark.parametrize("text", CASES)
def test_the_final_number_is_read(text):
    assert final_number(text) == CASES[text]


def test_long_and_hostile_texts_are_read_in_passing():
    for text in (
        "1," * 50_000,
        "$" * 50_000,
        "\\boxed{" * 10_000,
        "-" * 50_000 + "5",
        "\\frac{" * 10_000,
        "1,111" * 10_000 + "\\frac",
        "-1 \\frac{1}{2}" * 10_000,
        "1" * 50_000,
    ):
        final_number(text)  # a pattern that backtracks, or int() of 4,300 digits, would not come back


@pytest.mark.gsm8k
def test_every_known_answer_of_gsm8k_is_read(gsm8k):
    """The number behind ``####``; and it is the last of the text, however it is announced."""
    count = 0
    for split in ("train", "test"):
        for line in (gsm8k / f"{split}.jsonl").read_text().splitlines():
            answer = json.loads(line)["answer"]
            known = Fraction(answer.rsplit("####", 1)[1].strip().replace(",", ""))
            assert final_number(answer) == known
            assert final_number(answer.replace("####", "The answer is")) == known
            count += 1
    assert count == 7473 + 1319


@pytest.mark.gsm8k
def test_real_solutions_are_judged_as_they_were(gsm8k):
    """Four models' solutions with a judgment of their own: all 5,276 agree."""
    reward, agree = load_reward("gsm8k", "truth"), []
    for line in (gsm8k / "example_model_solutions.jsonl").read_text().splitlines():
        row = json.loads(line)
        found = [value for value in row.values() if isinstance(value, dict)]
        texts = [value["solution"] for value in found]
        scores = reward(completions=texts, truth=[row["ground_truth"]] * len(texts))
        agree += [score == float(value["is_correct"]) for score, value in zip(scores, found, strict=True)]
    assert len(agree) == 5276
    assert all(agree)


def test_a_reward_takes_texts_and_chats():
    reward = gsm8k()
    chat = [{"role": "assistant", "content": "it is 5"}]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "it is"}, {"type": "text", "text": "6"}]}]
    assert reward(completions=[chat, parts, "5"], answer=[5, "#### 6", "#### 7"], prompts=[""] * 3) == [1.0, 1.0, 0.0]
    assert reward.__name__ == "gsm8k"
    assert completion_text([]) == ""


def test_answers_without_a_number_are_refused():
    with pytest.raises(InputError, match="column 'key' holds 'none', which has no number"):
        gsm8k("key")(completions=["1"], key=["none"])
    with pytest.raises(InputError, match="no column 'answer', where the reward looks"):
        gsm8k()(completions=["1"])
    with pytest.raises(InputError, match="fix: name the column of answers with answer_column"):
        check_answers(["1", "two"])


def test_rewards_are_found_by_name_and_by_module(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text(
        "def score(completions, **kwargs):\n    return [1.0 for _ in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_reward("rewards_of_mine:score", "answer")(completions=["", ""]) == [1.0, 1.0]
    for name, message in {
        "gsm8": "expected gsm8k, math_verify or module:function",
        "rewards_of_mine:other": "has no other",
        "no_such_module:score": "there is no module 'no_such_module'; expected one that can be imported from here",
        "json.none:score": r"there is no module 'json\.none'; .* the folder that holds json/none\.py",
        ":score": "expected gsm8k",
        ".x:y": r"reward is '\.x:y'; expected gsm8k, math_verify or module:function",
        "a..b:y": "expected gsm8k",
        "a b:y": "expected gsm8k",
        "no-such-file:y": "there is no module 'no-such-file'",
        "x:y z": "expected gsm8k",
    }.items():
        with pytest.raises(InputError, match=message):
            load_reward(name, "answer")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", r"broken\.py, line 1: invalid syntax; expected Python; fix: "),
        (
            "import os\nimport no_such_package.part\n",
            r"broken\.py, line 2: there is no module 'no_such_package', which broken ",
        ),
        ("from os import nothing\n", r"broken\.py, line 1: ImportError: cannot import name 'nothing'"),
        ("x = 1\n\nx / 0\n", r"broken\.py, line 3: ZeroDivisionError: division by zero; expected a module that is"),
        ("raise ValueError('a\\nb')\n", r"broken\.py, line 1: ValueError: a; expected"),
        ("raise KeyError\n", r"broken\.py, line 1: KeyError; expected"),
        ("x = 1\0", r"broken.*null bytes"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line_with_its_place(tmp_path, monkeypatch, text, message):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(InputError, match=f"^reward broken:f: .*{message}") as refusal:
        load_reward("broken:f", "answer")
    assert "\n" not in str(refusal.value)
    assert "None" not in str(refusal.value)


def test_math_verify_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(InputError, match=r"pip install 'sdo-toolkit\[math\]'"):
        math_verify()


def test_math_verify_judges_more_than_numbers():
    pytest.importorskip("math_verify", reason="the package math-verify is not installed")
    reward = math_verify()
    assert reward(completions=["$x + 1$", "$0.5$", "7"], answer=["1 + x", "so #### 1/2", "8"]) == [1.0, 1.0, 0.0]
