"""Completions of a text, as OpenAI's own SDK sees them."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import Completion

from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.sdk_types import as_typed, data_of
from plugins.agent_api.tests.served_api import api_of


def says(prompt: str, seed: int) -> str:
    return " and so on"


async def test_a_text_is_continued_from_its_own_tokens(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        body = {"model": "m", "prompt": "once", "logprobs": 0, "n": 2}
        made = as_typed(Completion, (await api.post("/v1/completions", body)).json())
        assert [choice.text for choice in made.choices] == [" and so on"] * 2
        first = api.engine.ledger[0]
        assert first.prompt.tolist() == qwen.encode("once").tolist()
        logprobs = made.choices[0].logprobs
        assert logprobs.token_logprobs == first.logprobs.tolist() and len(logprobs.text_offset) == len(first.tokens)
        ids = first.prompt.tolist()
        again = await api.openai.completions.create(model="m", prompt=ids, max_tokens=1)
        assert again.choices[0].finish_reason == "length" and api.engine.ledger[-1].prompt.tolist() == ids


async def test_every_event_is_of_the_sdks_type(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        body = {"model": "m", "prompt": ["once"], "stream": True, "stream_options": {"include_usage": True}}
        chunks = [as_typed(Completion, one) for one in data_of((await api.post("/v1/completions", body)).text)]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == " and so on"
        assert chunks[0].choices[0].finish_reason == "stop" and chunks[-1].usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 2}, "logprobs"),
        ({"prompt": ["one", "two"]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(qwen: ChatTokenizer, more: dict[str, Any], field: str):
    async with api_of(qwen, says) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.openai.post("/completions", cast_to=Completion, body={"model": "m", "prompt": "x", **more})
        assert refused.value.param == field
