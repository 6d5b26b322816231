"""Where a reply ends for its call, though the policy sampled on: after one tool call where only one may be; what is shown of one
that ends at a stop text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from atropos_core.rollouts.stop_texts import smallest
from atropos_core.types import Message, Tokens

Parse = Callable[[Tokens], Awaitable[Message]]


async def end_after_one_call(tokens: Tokens, parse: Parse) -> int:
    """How many tokens make the first call whole; all of them where there is at most one."""
    if len((await parse(tokens)).get("tool_calls") or ()) < 2:
        return len(tokens)

    async def has_one(size: int) -> bool:
        return bool((await parse(tokens[:size])).get("tool_calls"))

    return await smallest(len(tokens), has_one)


def without_stop(message: Message, stop: str) -> Message:
    """The message as it stands before the stop text."""
    shown = dict(message)
    for name in ("reasoning_content", "content", "text"):
        if stop and stop in (said := str(shown.get(name) or "")):
            shown[name] = said[: said.index(stop)]
    return shown
