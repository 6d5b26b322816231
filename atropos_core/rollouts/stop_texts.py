"""Where a reply ends for whoever named stop texts, though the policy sampled on: behind the first token that completes one.

No token is split.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from atropos_core.types import Tokens


async def end_at_stop(
    tokens: Tokens, stops: Sequence[str], text: Callable[[Tokens], Awaitable[str]]
) -> tuple[int, str]:
    """How many tokens are kept, and the stop text that they end with; all of them and "" where there is none."""
    said = await text(tokens)
    found = [(said.index(stop) + len(stop), stop) for stop in stops if stop and stop in said]
    if not found:
        return len(tokens), ""
    stop = min(found)[1]

    async def has_it(size: int) -> bool:
        return stop in await text(tokens[:size])

    return await smallest(len(tokens), has_it), stop


async def smallest(most: int, holds: Callable[[int], Awaitable[bool]]) -> int:
    """The smallest size up to `most` for which it holds; it holds for `most`, and for every size above one where it does."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if await holds(middle):
            high = middle
        else:
            low = middle
    return high
