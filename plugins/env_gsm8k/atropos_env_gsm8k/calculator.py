"""Word problems with a calculator: the policy calls it, reads the result, and answers in the end."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Sequence
from typing import Any

from atropos_core import Conversation, Environment, Episode, Score, Task
from atropos_core.builtin.numbers import last_number
from atropos_core.conversation import Policy
from atropos_core.types import Split

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "One operation on two numbers.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
OPERATION = re.compile(r"\s*(-?\d{1,12})\s*([-+*/])\s*(-?\d{1,12})\s*")
NOT_READ = "not one operation on two numbers"
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def calculate(expression: str) -> str:
    """The tool. Raises ValueError, TypeError or ZeroDivisionError if it cannot work the expression out."""
    found = OPERATION.fullmatch(expression)
    if found is None:
        raise ValueError(NOT_READ)
    return f"{SIGNS[found[2]](int(found[1]), int(found[3])):.12g}"


def result_of(call: dict[str, Any]) -> str:
    """The tool's result for a call, or its error: the policy reads either and may try again."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if name != "calculate":
        return f"error: there is no tool {name!r}"
    try:
        return calculate(**arguments)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        return f"error: {error}"


# A question, and the operations that answer it: `x` is the result of the first.
STORIES = (
    ("{who} has {a} coins and finds {c} more. How many coins is that?", ("{a}+{c}",)),
    ("{who} fills {b} boxes with {a} pins each. How many pins is that?", ("{a}*{b}",)),
    ("{who} fills {b} boxes with {a} nuts each and loses {c} nuts. How many are left?", ("{a}*{b}", "{x}-{c}")),
    ("{who} buys {b} lamps for {a} dollars each and a table for {c}. What is to pay?", ("{a}*{b}", "{x}+{c}")),
    ("{who} has {b} bags with {a} red and {c} green beans each. How many beans is that?", ("{a}+{c}", "{x}*{b}")),
)
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivy", "Jack", "Kim")
TRAIN, TEST = 10_000, 500
# Drawn once, without repetition and with a seed: no problem is in both splits, and a resumed run gets the same ones.
ALL_CODES = len(STORIES) * 900 * 89 * 900
CODES = random.Random(0).sample(range(ALL_CODES), TEST + TRAIN)


def problem(code: int) -> tuple[str, list[str], str]:
    """A question, its operations in order, and its answer."""
    rest, story = divmod(code, len(STORIES))
    rest, a = divmod(rest, 900)
    c, b = divmod(rest, 89)
    known: dict[str, Any] = {"who": NAMES[code % len(NAMES)], "a": 100 + a, "b": 11 + b, "c": 100 + c}
    text, steps = STORIES[story]
    operations = []
    for step in steps:
        operations.append(step.format(**known))
        known["x"] = calculate(operations[-1])
    return text.format(**known), operations, known["x"]


class Calculator(Environment):
    """Scores 1 for the right number in the last reply, with or without the tool."""

    turns = 4  # most replies of the policy

    def tasks(self, split: Split) -> Sequence[Task]:
        codes = CODES[:TEST] if split == "test" else CODES[TEST:]
        return [self.task(code) for code in codes]

    def task(self, code: int) -> Task:
        question, _, answer = problem(code)
        return Task(str(code), ({"role": "user", "content": question},), answer=f"#### {answer}")

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed, tools=[CALCULATE])
        reply = await talk.reply(*task.messages)
        results: list[str] = []
        for _ in range(self.turns - 1):
            calls = reply.get("tool_calls", [])
            if not calls:
                break  # it has answered
            new = [result_of(call) for call in calls]
            results += new
            reply = await talk.reply(*({"role": "tool", "content": result} for result in new))
        answered = not reply.get("tool_calls")
        correct = answered and last_number(reply["content"]) == last_number(task.answer or "")
        metrics = {
            "tools/calls": float(len(results)),
            "tools/errors": float(sum(result.startswith("error") for result in results)),
            "tools/out_of_turns": float(not answered),
        }
        return talk.episode(Score(float(correct), correct=correct, metrics=metrics))
