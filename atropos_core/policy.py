"""The model, as an environment sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from atropos_core.types import Completion, Message, Sampling, Tokens


class Policy(Protocol):
    """Renders messages to prompt ids, samples replies and parses them."""

    sampling: Sampling

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        after: Tokens | None = None,
    ) -> Tokens:
        """Return prompt ids for a reply. With `after` (a history that ends in a sampled reply), return only the ids that
        extend it by `messages`: sampled tokens are never encoded again. Raises DataError if the chat template rewrites
        history, because the prompt then does not extend `after`."""

    async def sample(
        self,
        prompt: Tokens,
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        seed: int,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        """Sample `n` continuations. Without `sampling`, use the run's settings."""

    async def parse(self, tokens: Tokens, *, prompt: Tokens | None = None) -> Message:
        """Parse sampled ids into an assistant message: content, reasoning_content, and tool_calls with arguments as dicts.
        Pass the `prompt` that they continue: if it ends in an open `<think>`, the reply begins as reasoning."""
