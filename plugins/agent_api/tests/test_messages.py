"""Anthropic's messages, as its own SDK sees them: every answer and every event is of its types."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent

from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.sdk_types import as_typed, data_of
from plugins.agent_api.tests.served_api import api_of

FIND: Any = {
    "name": "find",
    "description": "d",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
USER: Any = [{"role": "user", "content": "hi"}]
CALLS = (
    '<think>Hm.</think>Wait. <tool_call>\n{"name": "find", "arguments": {"q": "ø"}}\n</tool_call>'
    '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
)


def says(prompt: str, seed: int) -> str:
    return CALLS if '"find"' in prompt and "tool\n" not in prompt else "Rain, I think."


@pytest.mark.parametrize("tools", [[], [FIND]], ids=["plain", "tools"])
async def test_every_answer_and_event_is_of_the_sdks_type(qwen: ChatTokenizer, tools: Any):
    async with api_of(qwen, says) as api:
        body = {
            "model": "m",
            "max_tokens": 300,
            "messages": USER,
            "tools": tools,
            "system": [{"type": "text", "text": "be brief"}],
        }
        whole = as_typed(Message, (await api.post("/v1/messages", body)).json())
        assert whole.stop_reason == ("tool_use" if tools else "end_turn")
        streamed = await api.post("/v1/messages", {**body, "stream": True})
        names = [line.removeprefix("event: ") for line in streamed.text.split("\n") if line.startswith("event: ")]
        events = [as_typed(RawMessageStreamEvent, one) for one in data_of(streamed.text)]
        assert names == [one.type for one in events]
        assert (events[0].type, events[-1].type) == ("message_start", "message_stop")


async def test_the_sdks_stream_accumulates_to_the_answer(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        async with api.anthropic.messages.stream(model="m", max_tokens=300, messages=USER, tools=[FIND]) as stream:
            made = await stream.get_final_message()
        thinking, text, first, second = made.content
        assert (thinking.thinking, text.text.strip(), first.input, second.input) == ("Hm.", "Wait.", {"q": "ø"}, {})
        assert made.stop_reason == "tool_use" and thinking.signature
        [entry] = api.engine.ledger
        assert (made.usage.input_tokens, made.usage.output_tokens) == (len(entry.prompt), len(entry.tokens))


async def test_an_echoed_reply_is_continued(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        create = api.anthropic.messages.create
        first = await create(model="m", max_tokens=300, messages=USER, tools=[FIND], system="be brief")
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "wet"}]}
            for block in first.content
            if block.type == "tool_use"
        ]
        echo: Any = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
        messages: Any = [*USER, echo, {"role": "user", "content": results}]
        second = await create(model="m", max_tokens=300, messages=messages, tools=[FIND], system="be brief")
        assert second.content[0].text == "Rain, I think."
        assert second.usage.cache_read_input_tokens == first.usage.input_tokens + first.usage.output_tokens
        of_second = second.usage.input_tokens + second.usage.cache_read_input_tokens
        assert of_second == len(api.engine.ledger[1].prompt)
        [rollout] = api.session.record().rollouts
        assert rollout.tokens[rollout.trained].tolist() == [token for one in api.engine.ledger for token in one.tokens]
        count = await api.anthropic.messages.count_tokens(model="m", messages=messages, tools=[FIND], system="be brief")
        assert count.input_tokens == len(api.engine.ledger[1].prompt) and len(api.engine.ledger) == 2


async def test_a_stop_sequence_is_named(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        made = await api.anthropic.messages.create(model="m", max_tokens=9, messages=USER, stop_sequences=["?", ", I"])
        assert (made.stop_reason, made.stop_sequence, made.content[0].text) == ("stop_sequence", ", I", "Rain")
        cut = await api.anthropic.messages.create(model="m", max_tokens=1, messages=USER)
        assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


async def test_what_anthropics_servers_run_and_how_much_to_think_is_left_out_and_counted(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        await api.anthropic.messages.create(
            model="m", max_tokens=20, messages=USER, tools=[SEARCH], thinking={"type": "enabled", "budget_tokens": 1024},
            metadata={"user_id": "u"}, output_config={"effort": "high"},
        )  # fmt: skip
        overruled = api.session.record().calls[0].overruled
        assert overruled == {"tools: web_search_20250305": "left out", "thinking": "enabled", "output_config": "high"}
        assert "web_search" not in qwen.decode(api.engine.ledger[0].prompt)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": 1.5}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(qwen: ChatTokenizer, more: dict[str, Any], named: str):
    async with api_of(qwen, says) as api:
        body = {"model": "m", "max_tokens": 9, "messages": USER, **more}
        with pytest.raises(anthropic.BadRequestError) as refused:
            await api.anthropic.post("/v1/messages", cast_to=Message, body=body)
        assert refused.value.body["error"]["type"] == "invalid_request_error" and named in refused.value.message
