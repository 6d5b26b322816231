"""Cut a reply before the end of what was sampled: after one tool call if only one is allowed, and before a stop text in what the
agent sees."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from atropos_core.rollouts.stop_texts import smallest
from atropos_core.types import Message, Tokens

Parse = Callable[[Tokens], Awaitable[Message]]


async def end_after_one_call(tokens: Tokens, parse: Parse) -> int:
    """The number of tokens up to the end of the first call; all tokens if there is at most one call."""
    if len((await parse(tokens)).get("tool_calls") or ()) < 2:
        return len(tokens)

    async def has_one(size: int) -> bool:
        return bool((await parse(tokens[:size])).get("tool_calls"))

    return await smallest(len(tokens), has_one)


def without_stop(message: Message, stop: str) -> Message:
    """The message up to the stop text."""
    shown = dict(message)
    for name in ("reasoning_content", "content", "text"):
        if stop and stop in (said := str(shown.get(name) or "")):
            shown[name] = said[: said.index(stop)]
    return shown
