"""Arithmetic word problems of known families, made on the spot: material for the demo and the tests.

Every problem names its family, so the clusters that an embedding should find are known, and its answer is
right by construction. The texts are the project's own. Each family has its own setting and vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sdo.checks import whole_number
from sdo.errors import InputError

_Item = TypeVar("_Item")
_TRIES = 500  # draws that may repeat in a row before a family counts as exhausted


@dataclass(frozen=True)
class Problem:
    """One word problem.

    Parameters
    ----------
    prompt
        The question.
    completion
        A worked step and, on its own line, ``#### `` with the answer, as in GSM8K. Starts with a space, so
        that prompt + completion is a text.
    family
        Name of the family, one of :data:`FAMILIES`.
    answer
        The number asked for.
    """

    prompt: str
    completion: str
    family: str
    answer: int


class _Dice:
    """Choices that are the same on every machine and Python version.

    Of Python's ``random`` only the stream of ``random()`` is promised to stay; ``choice`` and ``shuffle`` are
    not.
    """

    def __init__(self, seed: int) -> None:
        self._stream = random.Random(seed)  # noqa: S311 - problems, not secrets

    def number(self, low: int, high: int) -> int:
        """Return an integer from low to high, both included."""
        return low + int(self._stream.random() * (high - low + 1))

    def one(self, items: Sequence[_Item]) -> _Item:
        """Return one of the items."""
        return items[self.number(0, len(items) - 1)]

    def order(self, items: Iterable[_Item]) -> list[_Item]:
        """Return the items in random order (Fisher-Yates)."""
        shuffled = list(items)
        for last in range(len(shuffled) - 1, 0, -1):
            other = self.number(0, last)
            shuffled[last], shuffled[other] = shuffled[other], shuffled[last]
        return shuffled


def generate(n: int, *, seed: int, families: Sequence[str] | None = None) -> list[Problem]:
    """Make word problems, the families balanced, no prompt twice.

    Parameters
    ----------
    n
        Number of problems. All eight families together hold more than 10,000 without repetition.
    seed
        The same seed gives the same problems on every machine; fewer of them are the first of more.
    families
        Names out of :data:`FAMILIES`; None takes all.

    Returns
    -------
    list[Problem]
        Any run of ``len(families)`` problems that starts at a multiple of it holds each family once, in
        random order.

    Raises
    ------
    InputError
        If n is negative, the seed is no integer, a family is unknown or given twice, or a family has no
        further problem that is new.

    Examples
    --------
    >>> [problem.family for problem in generate(2, seed=0, families=["speed"])]
    ['speed', 'speed']
    """
    names = list(FAMILIES) if families is None else list(families)
    _check(n, seed, names)
    dice = _Dice(seed)
    seen: set[str] = set()
    problems: list[Problem] = []
    while len(problems) < n:
        # The whole round is drawn even where n ends inside it: fewer problems are then a prefix of more.
        for name in dice.order(names):
            problem = _new(name, dice, seen)
            seen.add(problem.prompt)
            problems.append(problem)
    return problems[:n]


def _check(n: int, seed: int, names: list[str]) -> None:
    """Refuse wrong arguments of `generate`."""
    for label, value in (("n", n), ("seed", seed)):
        whole_number(label, value, 0)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown or not names:
        raise InputError(f"unknown families {unknown}, expected some of {', '.join(FAMILIES)}")
    if len(set(names)) < len(names):
        raise InputError(f"families are {names}, expected each once")


def _new(name: str, dice: _Dice, seen: set[str]) -> Problem:
    """Draw problems of a family until one is new."""
    for _ in range(_TRIES):
        prompt, working, answer = FAMILIES[name](dice)
        if prompt not in seen:
            return Problem(prompt, f" {working}\n#### {answer}", name, answer)
    raise InputError(f"family {name!r} has no new problem left after {len(seen)} problems; ask for fewer")


def _adding(dice: _Dice) -> tuple[str, str, int]:
    """Draw a problem: the sum of all numbers in the text."""
    a, b = dice.number(11, 89), dice.number(11, 89)
    what = dice.one(["loaves", "rolls", "muffins", "pies", "tarts"])
    template = dice.one(
        [
            "A baker takes {a} {what} out of the oven at dawn and {b} more {what} at noon. "
            "How many {what} did the baker bake altogether?",
            "The bakery sold {a} {what} on Saturday and {b} {what} on Sunday. "
            "How many {what} did the bakery sell in total?",
            "On a pastry counter lie {a} {what}; an apprentice adds {b} fresh {what} from the oven. "
            "How many {what} lie there now?",
            "One tray of dough gives {a} {what} and the next tray of dough gives {b}. "
            "How many {what} do both trays give together?",
            "A pastry cook baked {a} {what} for a wedding and {b} for a birthday. How many {what} were baked in all?",
        ]
    )
    return template.format(a=a, b=b, what=what), f"{a} + {b} = {a + b} {what}.", a + b


def _subtracting(dice: _Dice) -> tuple[str, str, int]:
    """Draw a problem: the first number less the second."""
    a = dice.number(41, 199)
    b = dice.number(5, a - 4)
    what = dice.one(["books", "novels", "atlases", "comics", "magazines"])
    template = dice.one(
        [
            "A library owns {a} {what}. Readers borrow {b} of them. How many {what} are left on the shelves?",
            "The librarian counted {a} {what} in the reading room and sent {b} away for repair. "
            "How many {what} remain?",
            "Of {a} {what} in the school library, {b} are on loan. How many {what} stand on the shelf?",
            "A shelf held {a} {what} before visitors took {b} home on their cards. "
            "How many {what} does the shelf still hold?",
            "The library van sets out with {a} {what} and lends {b} on its tour. "
            "How many {what} does the van bring back?",
        ]
    )
    return template.format(a=a, b=b, what=what), f"{a} - {b} = {a - b} {what}.", a - b


def _multiplying(dice: _Dice) -> tuple[str, str, int]:
    """Draw a problem: the product of the two numbers."""
    a, b = dice.number(3, 29), dice.number(3, 29)
    who = dice.one(["gardener", "farmer", "nursery", "park keeper"])
    what = dice.one(["tulips", "cabbages", "lettuces", "carrots", "roses"])
    template = dice.one(
        [
            "A {who} plants {a} rows of {what} with {b} in each row. How many {what} are planted?",
            "The {who} has {a} flower beds, and every bed holds {b} {what}. How many {what} grow there?",
            "In the greenhouse of a {who} stand {a} boxes of seedlings, each with {b} {what}. "
            "How many {what} are in the boxes?",
            "A {who} digs {a} furrows and sets {b} {what} into each furrow. How many {what} does the {who} need?",
            "Along the fence a {who} fills {a} pots with {b} {what} per pot. How many {what} are in the pots?",
        ]
    )
    return template.format(a=a, b=b, who=who, what=what), f"{a} * {b} = {a * b} {what}.", a * b


def _sharing(dice: _Dice) -> tuple[str, str, int]:
    """Draw a problem: the first number divided by the second, without remainder."""
    b, each = dice.number(3, 16), dice.number(3, 40)
    a = b * each
    what = dice.one(["marbles", "stickers", "crayons", "sweets", "balloons"])
    who = dice.one(["children", "pupils", "cousins", "players"])
    template = dice.one(
        [
            "A teacher shares {a} {what} equally among {b} {who}. How many {what} does each of them get?",
            "{a} {what} are divided fairly between {b} {who} at a party. How many {what} does everyone receive?",
            "A bag of {a} {what} is split into equal shares for {b} {who}. How many {what} are in one share?",
            "At the kindergarten {a} {what} are handed out evenly to {b} {who}. "
            "How many {what} go to each of the {who}?",
            "An aunt gives {a} {what} to {b} {who}, the same number to every one. How many {what} does each receive?",
        ]
    )
    return template.format(a=a, b=b, what=what, who=who), f"{a} / {b} = {each} {what}.", each


def _fractions(dice: _Dice) -> tuple[str, str, int]:
    """Draw a problem: a fraction, written n/d, of the whole number in the text."""
    over, under = dice.one([(1, 2), (1, 3), (2, 3), (1, 4), (3, 4), (1, 5), (2, 5), (3, 5), (4, 5), (1, 6), (5, 6)])
    part = dice.number(4, 30)
    whole, answer = part * under, part * over
    what = dice.one(["litres of water", "litres of milk", "litres of juice", "litres of oil", "litres of paint"])
    template = dice.one(
        [
            "A tank holds {whole} {what}, and {over}/{under} of it is pumped out. How many litres are pumped out?",
            "Of a barrel with {whole} {what}, {over}/{under} leaks away overnight. How many litres leak away?",
            "A dealer fills {over}/{under} of a drum that takes {whole} {what}. How many litres are poured in?",
            "From a cistern with {whole} {what} the tap drains {over}/{under}. How many litres does the tap drain?",
            "A vat contains {whole} {what}; {over}/{under} of the vat is drawn off into cans. "
            "How many litres are in the cans?",
        ]
    )
    prompt = template.format(whole=whole, over=over, under=under, what=what)
    return prompt, f"{whole} / {under} = {part}. {part} * {over} = {answer} litres.", answer


def _change(dice: _Dice) -> tuple[str, str, int]:
    """Draw a problem: the change from a payment; the text names count, price, payment in this order."""
    count, price = dice.number(2, 9), dice.number(2, 19)
    cost = count * price
    paid = next(note for note in (10, 20, 50, 100, 200) if note > cost)
    what = dice.one(["shirts", "caps", "scarves", "belts", "towels"])
    template = dice.one(
        [
            "A customer buys {count} {what} at ${price} each and pays with a ${paid} note. "
            "How many dollars of change does the cashier return?",
            "At a market stall {count} {what} go into a bag at ${price} each. "
            "The buyer hands over ${paid}. How much change in dollars is due?",
            "Someone puts {count} {what} on the till. "
            "One costs ${price}, and the purse holds a ${paid} bill. How many dollars remain in the purse?",
            "A shopper orders {count} {what} for ${price} apiece and gives the shopkeeper ${paid}. "
            "How many dollars come back?",
            "The receipt lists {count} {what} at ${price} per piece, paid with ${paid} in cash. "
            "How many dollars did the customer get back?",
        ]
    )
    prompt = template.format(count=count, price=price, paid=paid, what=what)
    return prompt, f"{count} * {price} = {cost}. {paid} - {cost} = {paid - cost} dollars.", paid - cost


def _speed(dice: _Dice) -> tuple[str, str, int]:
    """Draw a problem: distance = speed * time, asked for the distance or (in hours) for the time."""
    hours, speed = dice.number(2, 12), dice.number(6, 60) * 2
    far = hours * speed
    what = dice.one(["train", "bus", "lorry", "ferry", "motorbike"])
    distance = dice.number(0, 1) == 0
    template = dice.one(
        [
            "A {what} travels at {speed} km per hour for {hours} hours. How many kilometres does it cover?",
            "At a steady speed of {speed} km per hour a {what} is on its way for {hours} hours. "
            "How many kilometres long is the journey?",
            "The {what} keeps to {speed} km per hour and arrives after {hours} hours. "
            "How many kilometres has the {what} travelled?",
        ]
        if distance
        else [
            "A {what} travels at {speed} km per hour. How many hours does it need for a journey of {far} km?",
            "A {what} has {far} km to its destination and goes at a steady {speed} km per hour. "
            "How many hours does the journey last?",
            "The route of a {what} is {far} km long and its speed is {speed} km per hour. "
            "How many hours pass until it arrives?",
        ]
    )
    prompt = template.format(what=what, speed=speed, hours=hours, far=far)
    if distance:
        return prompt, f"{speed} * {hours} = {far} kilometres.", far
    return prompt, f"{far} / {speed} = {hours} hours.", hours


def _ages(dice: _Dice) -> tuple[str, str, int]:
    """Draw a problem: the later age of somebody so many years older or younger."""
    younger = dice.number(0, 1) == 0
    gap = dice.number(2, 14)
    first = dice.number(gap + 2 if younger else 4, 45)
    later = dice.number(2, 15)
    one, other = dice.order(["sister", "brother", "niece", "nephew", "uncle", "neighbour"])[:2]
    word = "younger" if younger else "older"
    template = dice.one(
        [
            "The {one} is {first} years old. The {other} is {gap} years {word}. "
            "How old will the {other} be in {later} years?",
            "A family says the {one} is {first} and the {other} {gap} years {word} than that. "
            "What age will the {other} reach in {later} years?",
            "Today the {one} turns {first}; the {other} is {gap} years {word} than the {one}. "
            "How old is the {other} in {later} years?",
            "On the birthday of the {one}, who is now {first}, the {other} is {gap} years {word}. "
            "What will be the age of the {other} in {later} years?",
            "The {one} was born {first} years ago, and the {other} is {gap} years {word}. "
            "In {later} years, how old will the {other} be?",
        ]
    )
    prompt = template.format(one=one, other=other, first=first, gap=gap, word=word, later=later)
    sign, now = ("-", first - gap) if younger else ("+", first + gap)
    return prompt, f"{first} {sign} {gap} = {now}. {now} + {later} = {now + later} years.", now + later


FAMILIES: dict[str, Callable[[_Dice], tuple[str, str, int]]] = {
    "adding": _adding,
    "subtracting": _subtracting,
    "multiplying": _multiplying,
    "sharing": _sharing,
    "fractions": _fractions,
    "change": _change,
    "speed": _speed,
    "ages": _ages,
}
