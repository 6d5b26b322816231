"""Prompts with more tokens than there is room for: all are found, and short texts are not tokenised for it."""

from __future__ import annotations

from typing import Any

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
