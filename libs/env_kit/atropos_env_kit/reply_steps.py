"""The steps of replies, for rewards of a process: where in the tokens each step ends.

async def each_step(task, episodes):
    scores = []
    for episode in episodes:
        [rollout] = episode.rollouts
        ends = step_ends(rollout, tokenizer.decode)
        values = [...]  # one for each of these steps
        scores.append(Score(sum(values), turns=[turn_rewards(ends, values)]))
    return scores
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from atropos_core.turn_rewards import turn_ends
from atropos_core.types import Rollout, Tokens


def step_ends(rollout: Rollout, decode: Callable[[Tokens], str], separator: str = "\n\n") -> list[int]:
    """Return the position after the last token of each step of the policy's turns. A step ends with the token that completes a
    `separator`, or with its turn."""
    before = np.insert(rollout.sampled[:-1], 0, False)
    begins = np.flatnonzero(rollout.sampled & ~before).tolist()
    ends: list[int] = []
    for begin, end in zip(begins, turn_ends(rollout).tolist(), strict=True):
        sizes = _sizes(rollout.tokens[begin:end], decode, separator)
        ends += [begin + size for size in sizes if begin + size < end] + [end]
    return ends


def _sizes(ids: Tokens, decode: Callable[[Tokens], str], separator: str) -> list[int]:
    """Return how many tokens there are up to each separator, each number once."""
    text = decode(ids)
    found: dict[int, None] = {}
    at = text.find(separator)
    while at >= 0:
        said = text[: at + len(separator)]

        def has_it(size: int, said: str = said) -> bool:
            return decode(ids[:size]).startswith(said)

        found[bisect_left(range(len(ids)), True, key=has_it)] = None
        at = text.find(separator, len(said))
    return list(found)
