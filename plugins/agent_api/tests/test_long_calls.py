"""Long calls: they are refused by their size, or read and rendered apart from the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from atropos_agent_api.calls import CallRefused
from atropos_agent_api.server.requests import MOST_DEPTH, MOST_VALUES, check_size
from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.models import qwen_like
from plugins.agent_api.tests.served_api import api_of

USER = {"role": "user", "content": ""}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
SAID = {"role": "assistant", "content": "a word or two"}
BLOCKED_S = 0.5  # each of these took 1 to 30 s
LONG: dict[str, tuple[str, Any]] = {
    "messages": ("/v1/chat/completions", {"messages": [USER] * 15_000}),
    "replies in a row": ("/v1/chat/completions", {"messages": [USER, *[SAID] * 12_000]}),
    "tools": ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL] * 10_000}),
    "a choice of tools": (
        "/v1/chat/completions",
        {
            "messages": [USER],
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": f"f{at}"}} for at in range(300)],
        },
    ),
    "text": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "lorem ipsum " * 50_000}]}),
    "choices with logprobs": ("/v1/chat/completions", {"messages": [USER], "n": 128, "logprobs": True}),
    "items": ("/v1/responses", {"input": [{"role": "user", "content": "a"}, *[CALL] * 8_000]}),
    "blocks": ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 15_000}]}),
    "text prompt": ("/v1/completions", {"prompt": "lorem ipsum " * 50_000}),
}


@pytest.mark.parametrize("what", LONG)
async def test_a_long_call_does_not_keep_the_event_loop(qwen: ChatTokenizer, what: str):
    path, body = LONG[what]
    body = {"model": "m", **body, **({"max_tokens": 9} if path == "/v1/messages" else {})}
    answer, blocked_s = await answered(qwen, path, body)
    assert answer.status_code == 200, answer.text[:300]
    assert blocked_s < BLOCKED_S


async def test_a_short_call_that_a_template_takes_long_for_does_not_keep_the_event_loop(tmp_path: Path):
    """A template may do anything, on any words; here it is ended after a second."""
    qwen_like(tmp_path)
    template = tmp_path / "chat_template.jinja"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    source = template.read_text() if template.exists() else config["chat_template"]
    endless = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    template.write_text("{% if messages[-1].content == 'weak' %}" + endless + "{% endif %}" + source)
    body = {"model": "m", "messages": [{"role": "user", "content": "weak"}]}
    answer, blocked_s = await answered(ChatTokenizer(tmp_path), "/v1/chat/completions", body)
    assert answer.status_code == 400 and "CPU time" in answer.json()["error"]["message"]
    assert blocked_s < BLOCKED_S


async def answered(tokenizer: ChatTokenizer, path: str, body: Any) -> tuple[httpx.Response, float]:
    """Return the answer, and for how many seconds this process kept its event loop waiting at most: time that other processes had the
    processors does not count."""
    longest, is_over = 0.0, False

    async def beat() -> None:
        nonlocal longest
        while not is_over:
            since, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            longest = max(longest, min(time.perf_counter() - since, time.process_time() - cpu))

    data = json.dumps(body).encode()
    async with api_of(tokenizer, lambda prompt, seed: "long " * 60) as api:
        beating = asyncio.create_task(beat())
        answer = await api.post(path, data)
        is_over = True
        await beating
    return answer, longest


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b'"",' * MOST_VALUES + b'""]}',
        b'{"a":[' + b'"\\\\",' * MOST_VALUES + b'""]}',
        b'{"a":[' + b"[]," * MOST_VALUES + b"[]]}",
        b'{"a":[' + b"{}," * MOST_VALUES + b"{}]}",
        b'{"a":[' + b"1," * 1_000_001 + b"1]}",
        b'{"a":' + b"[" * (MOST_DEPTH + 1) + b"]" * (MOST_DEPTH + 1) + b"}",
        b'{"a":' * (MOST_DEPTH + 1),
    ],
)
def test_a_body_with_too_much_in_it_is_refused_before_it_is_read(body: bytes):
    with pytest.raises(CallRefused, match="the body has (more than|values nested)") as refused:
        check_size(body)
    assert refused.value.status == 400


@pytest.mark.parametrize("text", ["[" * 500_000, '{[,"' * 300_000, '\\"' * 400_000, "\\" * 200_001])
def test_what_stands_in_a_text_is_no_value(text: str):
    check_size(json.dumps({"a": text, "b": [text]}).encode())
