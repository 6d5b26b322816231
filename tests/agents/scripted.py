"""The model of these tests: an engine that says what completes the task, a reply a turn, and keeps a ledger of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Completion, Sampling, Tokens
from plugins.agent_api.tests.ledger_engine import LedgerEngine

TURN = "<|im_start|>assistant\n"
TITLE = "A title"  # what is said to a prompt without tools
RIGHT, WRONG = "42", "41"


class ScriptedEngine(LedgerEngine):
    """Says `replies[k]` to a prompt with k turns of the assistant before it. Every second conversation goes wrong: there are
    no advantages in a group whose rewards are equal."""

    def __init__(self, tokenizer: ChatTokenizer, replies: Sequence[str], *, waits_in_turn: int = 0) -> None:
        """`waits_in_turn`: that turn (of 1, 2, ...) is not sampled before `go_on` is set."""
        super().__init__(tokenizer, self.reply)
        self.is_waiting, self.go_on = asyncio.Event(), asyncio.Event()
        self._waits_in_turn = waits_in_turn
        self._replies = replies
        self._conversations = 0

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        if self.text(prompt).count(TURN) == self._waits_in_turn:
            self.is_waiting.set()
            await self.go_on.wait()
        return await super().sample(prompt, n, sampling, seeds, deadline_s)

    def text(self, ids: Tokens) -> str:
        return self._tokenizer.decode(ids, keep_special=True)

    def reply(self, prompt: str, seed: int) -> str:
        if not has_tools(prompt):
            return TITLE
        turns = prompt.count(TURN)
        said = self._replies[min(turns, len(self._replies)) - 1]
        if turns == 1:
            self._conversations += 1
            said = said if self._conversations % 2 else said.replace(RIGHT, WRONG)
        return _after(said, prompt.rpartition(TURN)[2])


def has_tools(prompt: str) -> bool:
    return '"parameters"' in prompt


def _after(said: str, opening: str) -> str:
    """What is left to say where the prompt has begun the reply already, as it does where a tool must be called."""
    if not opening:
        return said
    call = said[said.find("<tool_call>") :]
    assert call.startswith(opening), f"the reply was begun as {opening!r}, and is {said!r}"
    return call.removeprefix(opening)
