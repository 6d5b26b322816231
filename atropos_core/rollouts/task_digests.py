"""Digests of an environment's tasks. A checkpoint keeps them, so that a resume can tell that tasks have changed, and which."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from atropos_core.types import Task

AT_ONCE = 256  # tasks, before the event loop has its turn
MOST_BLOCKS = 4096  # of one split, 8 characters each: with more tasks, a block is of several


async def digests_of(tasks: Sequence[Task]) -> dict[str, Any] | None:
    """Return {"size", "block", "blocks"} of tasks that are in memory: their number, the tasks per block, and 8 hexadecimal digits for
    each block. None for lazy tasks. A million tasks take 5 s."""
    if not isinstance(tasks, list | tuple):
        return None
    block = 1
    while block * MOST_BLOCKS < len(tasks):
        block *= 2
    return {"size": len(tasks), "block": block, "blocks": "".join(await _blocks(tasks, block))}


async def digest_of(tasks: Sequence[Task], most: int | None = None) -> str:
    """Return one digest of the first `most` tasks, or of all; "" for lazy tasks."""
    found = await digests_of(tasks[:most] if isinstance(tasks, list | tuple) else tasks)
    return "" if found is None else blake2b(json.dumps(found).encode(), digest_size=8).hexdigest()


async def changes(had: Mapping[str, Any], tasks: Sequence[Task]) -> str:
    """Say which tasks differ from those of `had`, comparing numbers that both have; "" if they are the same."""
    if not isinstance(tasks, list | tuple):
        return ""
    size, block, blocks = min(had["size"], len(tasks)), had["block"], had["blocks"]
    whole = size // block if had["size"] != len(tasks) else -(-size // block)
    now = await _blocks(tasks[: whole * block], block)
    other = [at for at in range(whole) if now[at] != blocks[8 * at : 8 * at + 8]]
    if not other:
        return ""
    first = other[0] * block
    where = f"the first is number {first + 1}, with the id {tasks[first].id!r:.60}"
    if block > 1:
        where = f"the first is one of the numbers {first + 1:,} to {min(first + block, size):,}"
    return f"{'' if block == 1 else 'at least '}{len(other):,} of {size:,} are others: {where}"


async def _blocks(tasks: Sequence[Task], block: int) -> list[str]:
    found = []
    for start in range(0, len(tasks), block):
        digest = blake2b(digest_size=4)
        for number, task in enumerate(tasks[start : start + block], start):
            digest.update(_text(task))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        found.append(digest.hexdigest())
    return found


def _text(task: Task) -> bytes:
    """Return the whole task as JSON with sorted keys. Values that JSON lacks are replaced by their type."""
    whole = [task.id, list(task.messages), task.answer, task.data]
    try:
        return json.dumps(whole, sort_keys=True, default=_type).encode() + b"\n"
    except (TypeError, ValueError, RecursionError):  # keys of several types, or values within themselves
        return json.dumps(whole[:3], default=_type).encode() + b"\n"


def _type(value: Any) -> str:
    return type(value).__qualname__
