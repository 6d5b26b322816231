"""Word problems with a calculator: the policy may call it twice before it answers. Three replies at most."""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Sequence
from typing import Any

from atropos_core import Environment, Score, Task
from atropos_core.builtin.numbers import last_number
from atropos_core.conversation import Conversation, Policy
from atropos_core.types import Episode, Split

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an expression of numbers, + - * / and parentheses.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
TURNS = 3
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Calculator(Environment):
    """Prices and quantities that are too large for the head."""

    def tasks(self, split: Split) -> Sequence[Task]:
        chance = random.Random(split)
        return [self._task(f"{split}-{number}", chance) for number in range(5000 if split == "train" else 200)]

    def _task(self, name: str, chance: random.Random) -> Task:
        boxes, price, paid = chance.randrange(120, 990), chance.randrange(120, 990), chance.randrange(11, 99)
        question = (
            f"A shop sells {boxes} boxes at {price} coins each, and pays {paid} coins of each box to its supplier. How "
            "many coins does it keep? Use the calculator, then end with the number."
        )
        return Task(name, ({"role": "user", "content": question},), answer=f"#### {boxes * (price - paid)}")

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed, tools=[TOOL])
        reply = await talk.reply(*task.messages)
        calls = 0
        for _turn in range(TURNS - 1):
            if not reply.get("tool_calls"):
                break
            calls += len(reply["tool_calls"])
            answers = [
                {"role": "tool", "content": answer(call["function"]["arguments"])} for call in reply["tool_calls"]
            ]
            reply = await talk.reply(*answers)
        correct = last_number(reply["content"]) == last_number(task.answer)
        return talk.episode(Score(float(correct), correct=correct, metrics={"calls": float(calls)}))


def answer(arguments: Any) -> str:
    """The value, or what is wrong with the expression: the policy reads either."""
    try:
        return f"{value(ast.parse(str(arguments['expression'])[:200], mode='eval').body):g}"
    except (SyntaxError, ValueError, TypeError, KeyError, ZeroDivisionError, OverflowError, RecursionError) as error:
        return f"error: {type(error).__name__}"


def value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            found: float = _OPERATORS[type(sign)](value(left), value(right))
            return found
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
    raise ValueError("no expression of numbers")
