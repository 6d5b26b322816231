"""Where a reply ends for its call, though the policy sampled on: at a stop text, and after one call where only one may be.

What was sampled is cut behind the first token that completes the end; no token is split.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from atropos_core.types import Message, Tokens

Text = Callable[[Tokens], Awaitable[str]]
Parse = Callable[[Tokens], Awaitable[Message]]


async def end_at_stop(tokens: Tokens, stops: Sequence[str], text: Text) -> tuple[int, str]:
    """How many tokens are kept, and the stop text that they end with; all of them and "" where there is none."""
    said = await text(tokens)
    found = [(said.index(stop) + len(stop), stop) for stop in stops if stop and stop in said]
    if not found:
        return len(tokens), ""
    stop = min(found)[1]

    async def has_it(size: int) -> bool:
        return stop in await text(tokens[:size])

    return await _least(len(tokens), has_it), stop


async def end_after_one_call(tokens: Tokens, parse: Parse) -> int:
    """How many tokens make the first call whole; all of them where there is at most one."""
    if len((await parse(tokens)).get("tool_calls") or ()) < 2:
        return len(tokens)

    async def has_one(size: int) -> bool:
        return bool((await parse(tokens[:size])).get("tool_calls"))

    return await _least(len(tokens), has_one)


def without_stop(message: Message, stop: str) -> Message:
    """The message as it stands before the stop text."""
    shown = dict(message)
    for name in ("reasoning_content", "content"):
        if stop and stop in (said := str(shown.get(name) or "")):
            shown[name] = said[: said.index(stop)]
    return shown


async def _least(most: int, holds: Callable[[int], Awaitable[bool]]) -> int:
    """The smallest size up to `most` for which it holds; it holds for `most`, and for every size above one where it does."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if await holds(middle):
            high = middle
        else:
            low = middle
    return high
