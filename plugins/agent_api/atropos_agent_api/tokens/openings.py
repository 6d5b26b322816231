"""The ids with which a tool call begins in a model's format. A reply that starts with them must continue as a call.

They are the common part of renderings of different calls, so nothing about the format needs to be known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atropos_agent_api.tokens.formats import ChatFormat, Tools
from atropos_core.errors import DataError
from atropos_core.types import Message, Tokens

_QUESTION: Message = {"role": "user", "content": "."}
_ARGUMENTS: tuple[dict[str, int], ...] = (
    {},
    {"x": 1},
    {"y": 2},
)  # calls with these share nothing but their beginning


async def opening_of(format: ChatFormat, names: Sequence[str]) -> Tokens | None:
    """The beginning of a call of any of these tools. None if the format has no beginning that is specific to calls."""
    empty = {"type": "object", "properties": {}}
    tools = [
        {"type": "function", "function": {"name": name, "description": "", "parameters": empty}} for name in names
    ]  # a schema does not affect how a call begins
    try:
        start = await format.render([_QUESTION], tools)
        calls = [await format.render([_QUESTION, _call(name, some)], tools) for name in names for some in _ARGUMENTS]
        texts = [
            await format.render([_QUESTION, {"role": "assistant", "content": said}], tools) for said in ("a", "Zz")
        ]
        framing = _common(
            [ids[::-1] for ids in (*calls, *texts)]
        )  # after a reply: the end of its turn, and the start of the next one
        opening = await _after(format, start, calls[0][: _common(calls)])
        if opening is None or _common(calls) <= max(_common([calls[0], text]) for text in texts):
            return None
        for name, ids in zip(np.repeat(names, len(_ARGUMENTS)), calls, strict=True):
            replies = [await _after(format, start, ids[: len(ids) - cut]) for cut in (framing, 0)]
            if not any([await _calls(format, start, reply, tools) == [name] for reply in replies if reply is not None]):
                return None
    except DataError:
        return None
    return opening


async def _calls(format: ChatFormat, start: Tokens, reply: Tokens, tools: Tools) -> list[str]:
    return [call["function"]["name"] for call in (await format.parse(start, reply, tools)).get("tool_calls") or ()]


async def _after(format: ChatFormat, start: Tokens, ids: Tokens) -> Tokens | None:
    """The part of `ids` after `start`. If a token crosses the end of `start`, the text after it is encoded again. None if `ids`
    begin differently."""
    if _common([start, ids]) == len(start):
        return ids[len(start) :] if len(ids) > len(start) else None
    before, said = await format.framed_text(start), await format.framed_text(ids)
    return await format.encode(said[len(before) :]) if said.startswith(before) and said != before else None


def _call(name: str, arguments: object) -> Message:
    call = {"id": f"functions.{name}:0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _common(all_ids: Sequence[Tokens]) -> int:
    """The number of equal ids at the beginning."""
    size = min(map(len, all_ids))
    differing = np.any(np.stack([ids[:size] for ids in all_ids]) != all_ids[0][:size], axis=0)
    return int(differing.argmax()) if differing.any() else size
