"""Prompts with more tokens than there is room for: all are found, and short texts are not tokenised for it."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np

from atropos_core.rollouts.prompt_lengths import long_prompts
from atropos_core.types import Task
from tests.unit.parts import TOKENIZER

TOOL = {"type": "function", "function": {"name": "add"}}


def tasks(*lengths: int) -> list[Task]:
    return [Task(str(n), ({"role": "user", "content": "é" * length},)) for n, length in enumerate(lengths)]


def test_exactly_the_prompts_with_more_tokens_are_found() -> None:
    given = tasks(*range(60))
    lengths = {at: len(TOKENIZER.render(task.messages)) for at, task in enumerate(given)}
    for most in (3, 20, 41, 100):
        found = long_prompts(given, TOKENIZER, most)
        assert found.tokens == {at: length for at, length in lengths.items() if length > most}
        assert (found.looked_at, found.most) == (60, most)


def test_short_texts_are_not_tokenised_and_tools_always_are() -> None:
    rendered: list[Any] = []

    class Counted:
        def render(self, messages: Any, tools: Any = None) -> Any:
            rendered.append(tools)
            return TOKENIZER.render(messages)

    long_prompts(tasks(1, 2, 500), Counted(), 300)  # type: ignore[arg-type]
    assert len(rendered) == 2, "the frame, and the long one"
    long_prompts(tasks(1), Counted(), 300, lambda task: [TOOL])  # type: ignore[arg-type]
    assert rendered[-1] == [TOOL]


def test_looking_ends_at_its_deadline() -> None:
    assert long_prompts(tasks(*[1] * 1000), TOKENIZER, 300, deadline_s=-1.0).looked_at == 0


def test_a_short_look_sees_tasks_from_every_part_of_the_split() -> None:
    class Slow(list[Task]):
        seen: ClassVar[list[int]] = []

        def __getitem__(self, at: Any) -> Any:
            self.seen.append(at)
            time.sleep(0.001)
            return super().__getitem__(at)

    found = long_prompts(Slow(tasks(*[1] * 10_000)), TOKENIZER, 300, deadline_s=0.1)
    assert 10 < found.looked_at == len(Slow.seen) < 1000
    assert max(np.diff(sorted([*Slow.seen, 0, 9_999]))) < 3 * 10_000 / found.looked_at


def test_every_task_is_looked_at_once_however_many_there_are() -> None:
    for count in (0, 1, 2, 3, 10, 61, 1000):
        assert long_prompts(tasks(*[400] * count), TOKENIZER, 300).tokens.keys() == set(range(count))
