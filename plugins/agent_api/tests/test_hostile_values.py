"""Every field of every API, with values that no client should send: always an answer or our own error, never a crash."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from atropos_agent_api.dialects import (
    chat,
    chat_messages,
    completions,
    message_blocks,
    messages,
    openai,
    response_items,
    responses,
    tools,
)
from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.served_api import Api, api_of

USER = [{"role": "user", "content": "hi"}]
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
THOUGHT = {"type": "thinking", "thinking": "x", "signature": "s"}
TEXT = {"type": "text", "text": "x"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            *USER,
            {"role": "assistant", "content": "", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
        "stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "max_tokens": 3,
    },
    "/v1/completions": {"model": "m", "prompt": "hi", "max_tokens": 3, "stream_options": {"include_usage": True}},
    "/v1/responses": {
        "model": "m",
        "input": [
            *USER,
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
        ],
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}},
        "max_output_tokens": 3,
    },
    "/v1/messages": {
        "model": "m",
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            *USER,
            {"role": "assistant", "content": [THOUGHT, {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "max_tokens": 3,
    },
}  # fmt: skip
BODIES["/v1/messages/count_tokens"] = {
    name: one for name, one in BODIES["/v1/messages"].items() if name != "max_tokens"
}
TABLES = {
    "/v1/chat/completions": chat.FIELDS,
    "/v1/completions": completions.FIELDS,
    "/v1/responses": responses.FIELDS,
    "/v1/messages": messages.FIELDS,
    "/v1/messages/count_tokens": messages.FIELDS,
}
MARK = "\0here\0"
DEEP = "[" * 10_000 + "]" * 10_000
RAW = [
    "1" + "0" * 400, "-1" + "0" * 400, "NaN", "Infinity", "1e999", "-0.0", "0", "1", "-1", "1.5", "true", "null", '""', '"x"', "[]", "{}",
    '"\\ud800"', '"\\udfff x"', '"\\u0000"', '"' + "x" * 100_000 + '"', '"\u202e"', DEEP, '{"a":' * 200 + "1" + "}" * 200,
    "[" * 300 + "]" * 300, "[null]", "[[]]", '[""]', "[1,2,3]", "[1e300]", '{"type":"x"}', '{"type":{}}', '{"type":[]}', '{"type":null}',
    '{"type":"function"}', '{"type":"function","function":3}', '[{"type":"text"}]', '[{"type":"text","text":3}]', '[{"role":"user"}]',
    '[{"role":[],"content":{}}]', '["\\u0000"]', '[{"type":"function","name":{}}]', '{"include_usage":[]}', '"{\\"a\\":" ',
    "9223372036854775808",
    '"' + "{" * 5000 + '"', '"{\\"x\\": \\"\\\\ud800\\"}"', '"[' + "[" * 300 + "]" * 300 + ']"',
]  # fmt: skip


def paths_of(value: Any) -> Iterator[tuple[Any, ...]]:
    """To every value inside."""
    inner: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (key,)
        yield from ((key, *rest) for rest in paths_of(one))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with `new` at that path."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, Mapping) else list(value)
    copy[path[0]] = put(copy[path[0]] if not isinstance(copy, dict) or path[0] in copy else {}, path[1:], new)  # type: ignore[index]
    return copy


def bodies(path: str, chance: random.Random) -> Iterator[bytes]:
    """Every value in every field; in the values inside of those, some."""
    body, table = BODIES[path], TABLES[path]
    names = {*table.read, *table.no_effect, *table.only, *table.sampling, "surprise"}
    places: list[tuple[Any, ...]] = [*((name,) for name in sorted(names)), *paths_of(body)]
    for place in places:
        marked = json.dumps(put(body, place, MARK)).replace(json.dumps(MARK), "%s", 1)
        before, _, after = marked.partition("%s")
        for raw in RAW if len(place) == 1 else chance.sample(RAW, 12):
            yield (before + raw + after).encode("utf-8", "surrogatepass")


async def check(api: Api, path: str, body: bytes) -> None:
    answer = await api.post(path, body)
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (
        answer.status_code,
        body[:300],
        answer.text[:300],
    )
    if answer.status_code != 200:
        assert answer.json()["error"]["message"], body[:300]
        assert len(answer.content) < 20_000


@pytest.mark.parametrize("path", BODIES)
async def test_no_value_of_any_field_is_a_fault_of_ours(qwen: ChatTokenizer, path: str):
    async with api_of(qwen, lambda prompt, seed: "Rain.") as api:
        assert (await api.post(path, BODIES[path])).status_code == 200
        chance = random.Random(path)
        tried = [body for body in bodies(path, chance) if len(body) < 30_000 or chance.random() < 0.2]
        for at in range(0, len(tried), 64):
            await asyncio.gather(*(check(api, path, body) for body in tried[at : at + 64]))
        assert len(tried) > 500
        assert api.session.failure is None
        assert (await api.post(path, BODIES[path])).status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_bodies_that_are_no_object_of_json_are_refused(qwen: ChatTokenizer, path: str):
    async with api_of(qwen, lambda prompt, seed: "Rain.") as api:
        for body in (
            b"",
            b"\xff\xfe",
            b"\0" * 1000,
            b"[",
            b"3",
            b'"x"',
            b"[1]",
            b"null",
            DEEP.encode(),
            b'{"a":' * 5000,
            b"{" * 5000,
        ):
            answer = await api.post(path, body)
            assert answer.status_code == 400 and answer.json()["error"]["message"], body[:50]


def test_every_table_says_what_each_field_is_for():
    for table in (*TABLES.values(), responses.REASONING, openai.STREAM_OPTIONS):
        named = [*table.read, *table.no_effect, *table.only, *table.sampling]
        assert len(named) == len(set(named))
    every = [
        *chat_messages.OF_MESSAGES.values(),
        *message_blocks.BLOCKS.values(),
        *response_items.ITEMS.values(),
        tools.FUNCTION,
    ]
    assert all("type" in one.read or "role" in one.read for one in every)


SAID = [
    *(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>' for name, arguments in [
        ('"f"', '{"x": "\\ud800"}'), ('"f"', '{"\\udfff": 1}'), ('"\\ud800"', "{}"), ('"f"', f'{{"x": {10**400}}}'),
        ('"f"', '{"x": NaN, "y": -Infinity}'), ('"f"', '{"x": 1, "x": 2}'), ('"f"', "[1]"), ('"f"', "null"), ('"f"', '"{"'),
        ('"f"', '{"x": 1e999}'), ('""', "{}"), ("null", "{}"), ("7", "{}"), ('"f"', '{"x": ' * 300 + "1" + "}" * 300),
        ('"f"', '{"x": "\\u0000"}'),
    ]),
    "<tool_call>", "</tool_call>", "<tool_call></tool_call>", "<tool_call>{</tool_call>", "<tool_call>[]</tool_call>",
    "<think>", "</think></think>x", "<think><tool_call>", "<tool_call>{}</tool_call>" * 50, "\0", "",
]  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
async def test_nothing_that_the_model_says_is_a_fault_of_ours(qwen: ChatTokenizer, streams: bool):
    said = ""
    async with api_of(qwen, lambda prompt, seed: said) as api:
        for said in SAID:
            for path, body in BODIES.items():
                if path.endswith("count_tokens"):
                    continue
                whole = {**body, "stream": streams} | (
                    {"max_output_tokens": 900} if "input" in body else {"max_tokens": 900}
                )
                whole = {name: one for name, one in whole.items() if streams or name != "stream_options"}
                answer = await api.post(path, whole)
                assert answer.status_code == 200, (path, said[:200], answer.text[:300])
                assert not streams or b'"error":{' not in answer.content, (path, said[:200], answer.text[-300:])
            assert api.session.failure is None, said[:200]
