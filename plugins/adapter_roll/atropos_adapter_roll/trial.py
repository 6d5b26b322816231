"""A small environment of three turns and two tools, which `doctor` runs; also an example.

env_config: {environment: "atropos_adapter_roll.trial:Stock", max_steps: 3}
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from atropos_core.conversation import Conversation, Policy
from atropos_core.interfaces import Environment
from atropos_core.seeds import derive
from atropos_core.types import Episode, Message, Score, Split, Task

TRIAL = f"{__name__}:Stock"
FULL = 20
SYSTEM = (
    f"You run a shop. Every shelf holds {FULL}. Look a shelf up, order what is missing, then say how many you ordered."
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in takes.items()}},
        },
    }
    for name, what, takes in (
        ("look_up", "how many of an item are on the shelf", {"item": "string"}),
        ("order", "order so many of an item", {"item": "string", "count": "integer"}),
    )
]


class Stock(Environment):
    """Look up, order, report. An order is a side effect: `orders` holds every one that was ever placed."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, object]] = []  # task and count

    def tasks(self, split: Split) -> Sequence[Task]:
        return shelves(split)

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed, tools=TOOLS)
        reply = await talk.reply(*task.messages)
        ordered: list[object] = []
        for _ in range(2):
            results = [self._call(task, call["function"], ordered) for call in reply.get("tool_calls", ())]
            reply = await talk.reply(
                *(results or [{"role": "user", "content": "Call a tool, or say how many you ordered."}])
            )
        right = reply["content"].strip() == task.answer and [str(count) for count in ordered] == [task.answer]
        return talk.episode(Score(float(right), right, metrics={"orders": len(ordered)}))

    def _call(self, task: Task, call: Message, ordered: list[object]) -> Message:
        arguments = call["arguments"] if isinstance(call["arguments"], dict) else {}
        if call["name"] == "look_up":
            return {"role": "tool", "content": f"{task.data['there']} on the shelf"}
        if call["name"] == "order":
            self.orders.append((task.id, arguments.get("count")))
            ordered.append(arguments.get("count"))
            return {"role": "tool", "content": "ordered"}
        return {"role": "tool", "content": f"there is no tool {call['name']!r}"}


@functools.cache
def shelves(split: Split) -> Sequence[Task]:
    return [shelf(split, number) for number in range(1000)]


def shelf(split: Split, number: int) -> Task:
    there = derive(0, split, number) % FULL
    ask = {"role": "user", "content": f"Fill the shelf of item {number}."}
    return Task(f"{split}-{number}", ({"role": "system", "content": SYSTEM}, ask), str(FULL - there), {"there": there})


def right_replies(task: Task) -> list[str]:
    """Replies that earn 1."""
    return [
        '<tool_call>{"name": "look_up", "arguments": {"item": "it"}}</tool_call>',
        f'<tool_call>{{"name": "order", "arguments": {{"item": "it", "count": {task.answer}}}}}</tool_call>',
        str(task.answer),
    ]
