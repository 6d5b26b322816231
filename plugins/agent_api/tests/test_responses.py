"""Responses, as OpenAI's own SDK sees them: every answer and every event is of its types."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.sdk_types import as_typed, data_of
from plugins.agent_api.tests.served_api import api_of

FIND: Any = {"type": "function", "name": "find", "description": "d", "parameters": {"type": "object"}, "strict": False}
CRM: Any = {"type": "namespace", "name": "crm", "description": "d", "tools": [FIND]}
SEARCH: Any = {"type": "web_search"}
SAYS = {
    "plain": "Rain.",
    "tools": '<think>Hm.</think>Wait. <tool_call>\n{"name": "find", "arguments": {"q": "ø"}}\n</tool_call>',
    "namespaced": '<tool_call>\n{"name": "crm__find", "arguments": {"q": 1}}\n</tool_call>',
}


def says(prompt: str, seed: int) -> str:
    if "tool\n" in prompt:
        return SAYS["plain"]
    return SAYS["namespaced" if "crm__find" in prompt else "tools" if '"find"' in prompt else "plain"]


@pytest.mark.parametrize("tools", [[], [FIND], [CRM, SEARCH]], ids=["plain", "tools", "namespaced"])
async def test_every_answer_and_event_is_of_the_sdks_type(qwen: ChatTokenizer, tools: Any):
    async with api_of(qwen, says) as api:
        body = {"model": "m", "instructions": "be brief", "input": "hi", "tools": tools}
        body |= {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}
        raw = (await api.post("/v1/responses", body)).json()
        whole = as_typed(Response, raw)
        streamed = await api.post("/v1/responses", {**body, "stream": True})
        names = [line.removeprefix("event: ") for line in streamed.text.split("\n") if line.startswith("event: ")]
        events = [as_typed(ResponseStreamEvent, one) for one in data_of(streamed.text)]
        assert names == [one.type for one in events] and [one.sequence_number for one in events] == [
            *range(len(events))
        ]
        assert events[0].type == "response.created" and events[-1].type == "response.completed"
        shown = [one.model_dump(exclude={"id", "call_id"}) for one in whole.output]
        done = [one.item for one in events if one.type == "response.output_item.done"]
        for of in (done, events[-1].response.output):
            assert [one.model_dump(exclude={"id", "call_id", "content"}) for one in of] == [
                {key: value for key, value in one.items() if key != "content"} for one in shown
            ]
        assert len({one.id for one in done}) == len(done)
        said = "".join(one.delta for one in events if one.type == "response.output_text.delta")
        assert said == whole.output_text


async def test_the_sdks_stream_accumulates_to_the_answer(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        async with api.openai.responses.stream(model="m", input="hi", tools=[FIND]) as stream:
            async for _ in stream:
                pass
            made = await stream.get_final_response()
        reasoning, message, call = made.output
        assert (reasoning.type, message.type, call.type) == ("reasoning", "message", "function_call")
        assert reasoning.content[0].text == "Hm." and made.output_text.strip() == "Wait."
        assert json.loads(call.arguments) == {"q": "ø"} and made.usage.total_tokens > 0


@pytest.mark.parametrize("tools", [[FIND], [CRM]], ids=["tools", "namespaced"])
@pytest.mark.parametrize("keeps_content", [True, False])
async def test_an_echoed_reply_is_continued(qwen: ChatTokenizer, tools: Any, keeps_content: bool):
    async with api_of(qwen, says) as api:
        include: Any = ["reasoning.encrypted_content"]
        first = await api.openai.responses.create(model="m", input="hi", tools=tools, include=include)
        echo: Any = [item.model_dump(exclude_none=True) for item in first.output]
        for item in echo:
            if item["type"] == "reasoning" and not keeps_content:
                del item["content"]
        call: Any = first.output[-1]
        assert (getattr(call, "namespace", None), call.name) == ("crm" if tools == [CRM] else None, "find")
        result: Any = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": [{"type": "input_text", "text": "x"}],
        }
        opening: Any = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
        second = await api.openai.responses.create(model="m", input=[opening, *echo, result], tools=tools)
        assert second.output_text == "Rain."
        assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
        [rollout] = api.session.record().rollouts
        assert rollout.tokens[rollout.trained].tolist() == [token for one in api.engine.ledger for token in one.tokens]


async def test_hosted_tools_are_left_out_and_counted_or_refused(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        await api.openai.responses.create(model="m", input="hi", tools=[SEARCH])
        assert "web_search" not in qwen.decode(api.engine.ledger[0].prompt)
        assert api.session.record().calls[0].overruled == {"tools: web_search": "left out"}
        with pytest.raises(openai.BadRequestError, match="web_search"):
            await api.openai.responses.create(
                model="m", input="hi", tools=[SEARCH], tool_choice={"type": "web_search_preview"}
            )
    async with api_of(qwen, says, client_sampling="refuse") as api:
        with pytest.raises(openai.BadRequestError, match="web_search"):
            await api.openai.responses.create(model="m", input="hi", tools=[SEARCH])


async def test_an_answer_that_was_cut_is_incomplete(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        made = await api.openai.responses.create(model="m", input="hi", max_output_tokens=1)
        assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        body = {"model": "m", "input": "hi", "max_output_tokens": 1, "stream": True}
        last = data_of((await api.post("/v1/responses", body)).text)[-1]
        assert as_typed(ResponseStreamEvent, last).type == "response.incomplete"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"include": ["everything"]}, "include[0]"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0]"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0]"),
        ({"tools": [FIND, FIND]}, "tools[1]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": ""}, "input"),
        ({"reasoning": {"depth": 3}}, "reasoning.depth"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(qwen: ChatTokenizer, more: dict[str, Any], field: str):
    async with api_of(qwen, says) as api:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await api.openai.post(
                    "/responses", cast_to=Response, body={"model": "m", "input": "hi", "stream": stream, **more}
                )
            assert refused.value.param == field
