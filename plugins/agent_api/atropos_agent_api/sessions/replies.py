"""Turn what was sampled for a call into the reply that is stored, and the choice that the agent sees."""

from __future__ import annotations

import asyncio

import numpy as np

from atropos_agent_api.calls import Call, Choice
from atropos_agent_api.sessions.cuts import end_after_one_call, without_stop
from atropos_agent_api.sessions.prompts import Prompt
from atropos_agent_api.tokens.canonical import digest, units_of
from atropos_agent_api.tokens.formats import ChatFormat
from atropos_agent_api.tokens.token_tree import Reply, Turn
from atropos_core.rollouts.replies import AS_SAMPLED
from atropos_core.rollouts.stop_texts import end_at_stop, first_tokens
from atropos_core.seeds import derive
from atropos_core.types import Completion, Message, Tokens

TOKENS_AT_ONCE = 256  # token texts to make before other tasks get a turn


async def reply_of(call: Call, turn: Turn, prompt: Prompt, sampled: Completion, format: ChatFormat, at: int) -> Reply:
    """Reply number `at` of a turn: cut at the call's end, and with tool call ids that no other reply has."""
    await asyncio.sleep(0)  # there may be many replies: let others run in between
    given = prompt.ids[: len(prompt.ids) - len(prompt.opening)]

    async def text_of(tokens: Tokens) -> str:
        await asyncio.sleep(0)
        return await format.text(tokens)

    async def parse(tokens: Tokens) -> Message:
        await asyncio.sleep(0)
        if call.prompt is not None:
            return {"role": "assistant", "content": await format.text(tokens)}
        return await format.parse(given, np.concatenate([prompt.opening, tokens]), call.tools)

    tokens, stop = sampled.tokens, ""
    if call.stop:
        size, stop = await end_at_stop(tokens, call.stop, text_of)
        tokens = tokens[:size]
    if not call.parallel_tool_calls and call.tool_choice != "none":
        tokens = tokens[: await end_after_one_call(tokens, parse)]
    message = dict(without_stop(await parse(tokens), stop))
    calls = message.pop("tool_calls", None) or []
    if call.tool_choice == "none" and calls:
        message["content"], calls = await format.text(tokens), []
        message = {name: value for name, value in message.items() if name not in AS_SAMPLED}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{derive(turn.seed, at, number):016x}", **one} for number, one in enumerate(calls)
        ]  # a format that samples its own ids keeps them, because it writes them out again
    position = digest(turn.position, units_of([message])[0].key)
    text = None if call.prompt is None else await format.text(tokens)
    cut = sampled.tokens[len(tokens) :]
    kept = first_tokens(sampled, len(tokens)) if len(cut) else sampled
    return Reply(turn, message, position, kept, cut, stop, text)


async def choice_of(call: Call, reply: Reply, format: ChatFormat) -> Choice:
    """The choice that the agent sees of a reply."""
    kept = reply.completion
    texts: list[str] = []
    for at in range(len(kept.tokens)) if call.logprobs else ():
        texts.append(await format.text(kept.tokens[at : at + 1]))
        if at % TOKENS_AT_ONCE == 0:
            await asyncio.sleep(0)
    finish = "tool_calls" if kept.finish == "stop" and reply.message.get("tool_calls") else kept.finish
    return Choice(reply.message, finish, kept.tokens, kept.logprobs, tuple(texts), reply.stop)
