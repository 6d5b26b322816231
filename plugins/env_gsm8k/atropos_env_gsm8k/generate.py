"""Word problems made by rule, in GSM8K's schema: as many as requested, with no file and no download.

A problem is one of the stories below, filled with numbers, names and things. A hash of the story and its numbers, without names,
decides its split. So a problem of one split cannot come back in the other, not even with Tom renamed to Ann.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, shake_128
from typing import Literal, TypeVar

Split = Literal["train", "test"]
T = TypeVar("T")

TEST_SHARE = 8  # one in so many combinations of story and numbers belongs to the test split
LARGEST = 999  # no intermediate result is larger

NAMES = (
    "Ann Ben Carla David Emma Felix Grace Hugo Ivy Jack Kim Leo Mia Noah Olga Paul "
    "Rosa Sam Tina Tom Uma Vera Will Zoe Amy Bob Clara Dan Eva Finn Gus Hana"
).split()
THINGS = (
    "apples books cards coins cookies eggs flowers marbles nuts pencils plums shells "
    "stamps stones toys tulips beans buttons keys leaves pears pins roses shirts"
).split()

FEW = range(2, 10)
DOZEN = range(3, 20)
MANY = range(11, 100)


@dataclass(frozen=True)
class Story:
    """`steps` are (what is found, how): `how` joins two of the numbers a to d and the earlier results x and y."""

    text: str
    numbers: Mapping[str, Sequence[int]]
    steps: Sequence[tuple[str, str]]


STORIES: tuple[Story, ...] = (
    Story(
        "{A} has {a} {things} and buys {b} more. How many {things} does {A} have now?",
        {"a": MANY, "b": FEW},
        [("{A} has", "a + b")],
    ),
    Story(
        "{A} had {a} {things} and gave {b} of them to {B}. How many {things} are left?",
        {"a": MANY, "b": MANY},
        [("{A} has", "a - b")],
    ),
    Story(
        "{A} fills {a} bags with {b} {things} each. How many {things} is that?",
        {"a": FEW, "b": DOZEN},
        [("The bags hold", "a * b")],
    ),
    Story(
        "{A} has {a} {things}, finds {b} more and gives {c} to {B}. How many {things} does {A} have now?",
        {"a": MANY, "b": FEW, "c": DOZEN},
        [("{A} has", "a + b"), ("{A} keeps", "x - c")],
    ),
    Story(
        "{A} buys {a} boxes of {b} {things} and loses {c} {things}. How many {things} are left?",
        {"a": FEW, "b": DOZEN, "c": FEW},
        [("{A} buys", "a * b"), ("{A} keeps", "x - c")],
    ),
    Story(
        "{A} has {a} {things}. {B} has {b} more than {A}. How many {things} do they have together?",
        {"a": MANY, "b": FEW},
        [("{B} has", "a + b"), ("They have", "a + x")],
    ),
    Story(
        "{A} has {a} {things}. {B} has {b} times as many. How many {things} do they have together?",
        {"a": DOZEN, "b": FEW},
        [("{B} has", "a * b"), ("They have", "a + x")],
    ),
    Story(
        "{A} has {a} {things} and {B} has {b}. They share all of them equally with {C}. How many {things} does each get?",
        {"a": MANY, "b": DOZEN, "c": [3]},
        [("They have", "a + b"), ("Each gets", "x / c")],
    ),
    Story(
        "{A} had {a} {things}, lost {b} and put the rest into bags of {c}. How many bags are there?",
        {"a": MANY, "b": FEW, "c": FEW},
        [("{A} has", "a - b"), ("{A} fills", "x / c")],
    ),
    Story(
        "{A} sells {a} {things} for {b} dollars each and {c} cakes for {d} dollars each. How many dollars does {A} get?",
        {"a": FEW, "b": DOZEN, "c": FEW, "d": FEW},
        [("{A} gets", "a * b"), ("The cakes bring", "c * d"), ("{A} gets", "x + y")],
    ),
    Story(
        "{A} finds {a} {things} a day for {b} days, then {c} more, and gives {d} to {B}. How many {things} does {A} keep?",
        {"a": DOZEN, "b": FEW, "c": MANY, "d": FEW},
        [("{A} finds", "a * b"), ("{A} has", "x + c"), ("{A} keeps", "y - d")],
    ),
)


def problem(split: Split, index: int, seed: int = 0) -> dict[str, str]:
    """The `index`-th problem of `split`: `question` and `answer`, found without the ones before it (15 µs in train, 65 µs in test).

    The same on every machine and Python. Raises ValueError for another split or a negative index.
    """
    if split not in ("train", "test"):
        raise ValueError(f"Generated problems have the splits 'train' and 'test', not {split!r}.")
    if index < 0:
        raise ValueError(f"Generated problems are counted from 0, so {index} is not one of them.")
    story = _Draws(f"{seed}/{split}/{index}").one_of(STORIES)
    attempt = 0
    while True:
        draws = _Draws(f"{seed}/{split}/{index}/{attempt}")
        numbers = {letter: draws.one_of(choices) for letter, choices in story.numbers.items()}
        lines = _work_out(story, numbers)
        if lines is not None and split_of(story, numbers) == split:
            return _narrate(story, numbers, lines, draws)
        attempt += 1


def split_of(story: Story, numbers: Mapping[str, int]) -> Split:
    """The split of this story with these numbers, under any names."""
    digest = blake2b(f"{story.text}{sorted(numbers.items())}".encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"


def _work_out(story: Story, numbers: Mapping[str, int]) -> list[tuple[str, int]] | None:
    """Each step as (expression, result). None if a result is not a whole number from 1 to LARGEST."""
    known = dict(numbers)
    lines: list[tuple[str, int]] = []
    for result, (_, how) in zip("xyz", story.steps, strict=False):
        left, operator, right = how.split()
        value = _calculate(known[left], operator, known[right])
        if value is None or not 1 <= value <= LARGEST:
            return None
        known[result] = value
        lines.append((f"{known[left]}{operator}{known[right]}", value))
    return lines


def _calculate(left: int, operator: str, right: int) -> int | None:
    if operator == "/":
        return None if left % right else left // right
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _narrate(
    story: Story, numbers: Mapping[str, int], lines: Sequence[tuple[str, int]], draws: _Draws
) -> dict[str, str]:
    names = list(NAMES)
    people = {role: names.pop(draws.below(len(names))) for role in "ABC"}
    things = draws.one_of(THINGS)
    reasoning = [
        f"{found.format(**people)} {expression}=<<{expression}={value}>>{value}."
        for (found, _), (expression, value) in zip(story.steps, lines, strict=True)
    ]
    return {
        "question": story.text.format(**people, **numbers, things=things),
        "answer": "\n".join([*reasoning, f"#### {lines[-1][1]}"]),
    }


class _Draws:
    """Numbers from a name, by SHAKE: `random` does not promise the same sequence from one Python to the next."""

    def __init__(self, name: str) -> None:
        self._bytes = shake_128(name.encode()).digest(64)
        self._at = 0

    def below(self, bound: int) -> int:
        word = int.from_bytes(self._bytes[self._at : self._at + 4], "big")
        self._at += 4
        return word % bound

    def one_of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]
