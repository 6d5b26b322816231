"""Chat completions, as OpenAI's own SDK sees them: every answer and every event is of its types."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.sdk_types import as_typed, data_of
from plugins.agent_api.tests.served_api import api_of

WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object"}},
}
CALLS = (
    '<think>Look.</think>Wait. <tool_call>\n{"name": "weather", "arguments": {"city": "Tromsø"}}\n</tool_call>'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
USER: Any = [{"role": "user", "content": "hi"}]


def says(prompt: str, seed: int) -> str:
    return CALLS if "weather" in prompt and "tool\n" not in prompt else "Rain."


async def test_an_answer_is_of_the_sdks_type_and_says_what_was_sampled(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        raw = (
            await api.post(
                "/v1/chat/completions", {"model": "m", "messages": USER, "tools": [WEATHER], "logprobs": True}
            )
        ).json()
        made = as_typed(ChatCompletion, raw, besides=("reasoning_content",))
        [choice] = made.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content.strip() == "Wait."
        assert raw["choices"][0]["message"]["reasoning_content"] == "Look."
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
            {"city": "Tromsø"},
            {"city": "Oslo"},
        ]
        assert len({call.id for call in choice.message.tool_calls}) == 2
        [entry] = api.engine.ledger
        assert made.usage.prompt_tokens == len(entry.prompt) and made.usage.completion_tokens == len(entry.tokens)
        assert [one.logprob for one in choice.logprobs.content] == entry.logprobs.tolist()


async def test_a_stream_accumulates_to_the_answer(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        async with api.openai.chat.completions.stream(
            model="m", messages=USER, tools=[WEATHER], stream_options={"include_usage": True}
        ) as stream:
            async for _ in stream:
                pass
            made = await stream.get_final_completion()
        again = await api.openai.chat.completions.create(model="m", messages=USER, tools=[WEATHER])
        shown = made.choices[0].message
        assert (made.choices[0].finish_reason, shown.content.strip()) == ("tool_calls", "Wait.")
        assert [call.function.arguments for call in shown.tool_calls] == [
            call.function.arguments for call in again.choices[0].message.tool_calls
        ]
        assert made.usage == again.usage or made.usage.total_tokens == again.usage.total_tokens


@pytest.mark.parametrize("usage", [False, True])
async def test_every_event_is_of_the_sdks_type(qwen: ChatTokenizer, usage: bool):
    async with api_of(qwen, says) as api:
        more = {"stream_options": {"include_usage": True}} if usage else {}
        body = {"model": "m", "messages": USER, "tools": [WEATHER], "stream": True, "n": 2, "logprobs": True, **more}
        answer = await api.post("/v1/chat/completions", body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.endswith("data: [DONE]\n\n")
        chunks = [as_typed(ChatCompletionChunk, one, besides=("reasoning_content",)) for one in data_of(answer.text)]
        assert len({chunk.id for chunk in chunks}) == 1
        for at in (0, 1):
            of = [choice for chunk in chunks for choice in chunk.choices if choice.index == at]
            assert of[0].delta.role == "assistant" and [one.finish_reason for one in of][-1] == "tool_calls"
            assert sum(len(one.logprobs.content) for one in of if one.logprobs) == len(api.engine.ledger[at].tokens)
        assert (chunks[-1].usage is not None) == usage and (not chunks[-1].choices) == usage


async def test_a_conversation_with_tools_is_one_branch(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        first = await api.openai.chat.completions.create(model="m", messages=USER, tools=[WEATHER])
        results: Any = [
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "wet"}]}
            for call in first.choices[0].message.tool_calls
        ]
        echo: Any = first.choices[0].message.model_dump()
        answer = await api.openai.chat.completions.create(model="m", messages=[*USER, echo, *results], tools=[WEATHER])
        assert answer.choices[0].message.content == "Rain."
        assert answer.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens
        [rollout] = api.session.record().rollouts
        assert rollout.tokens[rollout.trained].tolist() == [
            token for entry in api.engine.ledger for token in entry.tokens
        ]


async def test_stop_and_length_are_said(qwen: ChatTokenizer):
    async with api_of(qwen, lambda prompt, seed: "one two three") as api:
        create = api.openai.chat.completions.create
        stopped = await create(model="m", messages=USER, stop=" two")
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("one", "stop")
        cut = await create(model="m", messages=USER, max_completion_tokens=2)
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"store": True}, "store"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"chunk": 1}}, "stream_options.chunk"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "cache_control": {}}]}, "messages[0].cache_control"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0]"),
    ],
)  # fmt: skip
async def test_what_is_not_supported_is_refused_by_name(qwen: ChatTokenizer, more: dict[str, Any], field: str):
    async with api_of(qwen, says) as api:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await api.openai.post(
                    "/chat/completions",
                    cast_to=ChatCompletion,
                    body={"model": "m", "messages": USER, "stream": stream, **more},
                )
            assert refused.value.param == field and field.split("[")[0].split(".")[0] in refused.value.message
        assert not api.engine.ledger


async def test_what_has_no_effect_on_tokens_is_taken(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        await api.openai.chat.completions.create(
            model="m", messages=USER, user="u", metadata={"a": "b"}, store=False, service_tier="auto", frequency_penalty=0,
            prompt_cache_key="k", safety_identifier="s", logit_bias={}, top_logprobs=0,
        )  # fmt: skip
        assert not api.session.record().calls[0].overruled


async def test_sampling_of_the_clients_own_is_overruled_and_counted_or_refused(qwen: ChatTokenizer):
    wanted: Any = {"temperature": 0.25, "reasoning_effort": "high", "seed": 5}
    async with api_of(qwen, says) as api:
        await api.openai.chat.completions.create(model="m", messages=USER, **wanted)
        assert api.session.record().calls[0].overruled == wanted
    async with api_of(qwen, says, client_sampling="refuse") as api:
        for name, value in wanted.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await api.openai.chat.completions.create(model="m", messages=USER, **{name: value})
            assert refused.value.param == name
        strict_tool: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
        with pytest.raises(openai.BadRequestError, match="strict"):
            await api.openai.chat.completions.create(model="m", messages=USER, tools=[strict_tool])
