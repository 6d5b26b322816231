"""Requests that are refused: the error of each API says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.served_api import api_of

USER: Any = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "Send at least one message"),
    (CHAT, {"n": 0}, "must be an integer from 1|Send 1 or more"),
    (CHAT, {"nonsense": 1}, "leave it out"),
    (CHAT, {"response_format": {"type": "json_object"}}, "Leave it out"),
    (CHAT, {"tools": [{"type": "custom", "custom": {}}]}, "Describe the tool as a function"),
    (CHAT, {"tool_choice": "required"}, "Send tools, or leave it out"),
    (CHAT, {"tool_choice": {"type": "allowed_tools"}}, "Use auto, none, required or a function"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "Send it in tools, or choose another"),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "Send it as text"),
    (CHAT, {"messages": [{"role": "user", "content": "hi " * 300}]}, "Send a shorter one"),
    (TEXT, {"logprobs": 3}, "Send 0, or leave it out"),
    (TEXT, {"prompt": ""}, "a text"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "Send one of these"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "f"}]}, "Describe the tool as a function"),
    (RESPONSES, {"tool_choice": {"type": "web_search"}}, "Ask for a function of yours"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f"}] * 2}, "Rename one of the two"),
    (MESSAGES, {"max_tokens": None}, "Send the most tokens that the reply may have"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "Send tools, or leave it out"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "Send it as text"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "what_to_do"), REFUSED)
async def test_a_request_that_is_refused_says_what_to_do(
    qwen: ChatTokenizer, path: str, more: dict[str, Any], what_to_do: str
) -> None:
    body: dict[str, Any] = {"model": "m"}
    body |= {TEXT: {"prompt": "hi"}, RESPONSES: {"input": "hi"}, MESSAGES: {"max_tokens": 9}}.get(path, {})
    if path in (CHAT, MESSAGES):
        body["messages"] = USER
    async with api_of(qwen, lambda prompt, seed: "Rain.", context_tokens=200) as api:
        answer = await api.post(path, body | more)
        assert 400 <= answer.status_code < 500, answer.text
        assert any(one in answer.json()["error"]["message"] for one in what_to_do.split("|")), answer.text


@pytest.mark.parametrize(
    ("options", "what_to_do"),
    [
        ({"max_calls": 1}, "have the run allow more: limits.calls"),
        ({"max_sampled_tokens": 1}, "have the run allow more: limits.tokens"),
    ],
)
async def test_a_session_that_has_used_its_limit_says_what_to_do(
    qwen: ChatTokenizer, options: dict[str, Any], what_to_do: str
) -> None:
    async with api_of(qwen, lambda prompt, seed: "Rain.", **options) as api:
        answers = [await api.post(CHAT, {"model": "m", "messages": USER}) for _ in range(2)]
        assert answers[1].status_code == 403
        assert what_to_do in answers[1].json()["error"]["message"]


async def test_a_wrong_key_and_an_ended_session_say_what_to_do(qwen: ChatTokenizer) -> None:
    async with api_of(qwen, lambda prompt, seed: "Rain.") as api:
        body = {"model": "m", "messages": USER}
        wrong = await api.post(CHAT, body, headers={"authorization": "Bearer wrong"})
        assert wrong.status_code == 401 and "the URL with which this agent was started" in wrong.text
        api.sessions.end(api.session, "its program has exited")
        ended = await api.post(CHAT, body)
        assert ended.status_code == 409 and "Start another episode" in ended.text
