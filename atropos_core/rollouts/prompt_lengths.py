"""Find prompts that have too many tokens. Texts with so few characters that they must be short enough are not tokenised."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Task


@dataclass
class LongPrompts:
    """The tasks whose prompt, with the chat template, has more than `most` tokens."""

    most: int
    looked_at: int = 0  # tasks; fewer than all if the deadline came first
    tokens: dict[int, int] = field(default_factory=dict)  # number of the task -> tokens of its prompt


def long_prompts(
    tasks: Sequence[Task],
    tokenizer: ChatTokenizer,
    most: int,
    tools_of: Callable[[Task], Sequence[Mapping[str, Any]]] = lambda task: (),
    *,
    deadline_s: float = math.inf,
) -> LongPrompts:
    """Check all tasks, or as many as `deadline_s` seconds suffice for, from all parts of the split. 100,000 short ones take 0.7 s.
    Raises DataError for a conversation that the chat template refuses."""
    found, until = LongPrompts(most), time.monotonic() + deadline_s
    frame = len(tokenizer.render([{"role": "user", "content": "."}]))
    for number in _spread(len(tasks)):
        if time.monotonic() > until:
            break
        task = tasks[number]
        found.looked_at += 1
        tools = tools_of(task)
        # a token is a byte at least, and the names of the keys outweigh what a template writes around a message
        size = frame + sum(
            len(json.dumps(message, ensure_ascii=False, default=str).encode()) for message in task.messages
        )
        if (tools or size > most) and (count := len(tokenizer.render(task.messages, tools or None))) > most:
            found.tokens[number] = count
    found.tokens = dict(sorted(found.tokens.items()))
    return found


def _spread(count: int) -> Iterator[int]:
    """Yield each number below `count` once. Any first part of them is spread evenly over the range (steps of the golden ratio)."""
    step = max(round(count * (math.sqrt(5) - 1) / 2), 1)
    while math.gcd(step, count) > 1:
        step += 1
    return (number * step % count for number in range(count))
