"""Bounds of a session with many calls at once and several choices, and what headers cannot do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from atropos_agent_api.calls import CallRefused
from atropos_agent_api.sessions.options import trained_calls
from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.ledger_engine import LedgerEngine
from plugins.agent_api.tests.test_session import said, session_of


def sampled(engine: LedgerEngine) -> int:
    return sum(len(entry.tokens) for entry in engine.ledger)


@pytest.mark.parametrize(("calls", "n"), [(1, 128), (20, 128), (100, 1), (7, 3)])
async def test_calls_at_once_with_several_choices_sample_no_more_than_the_limit(
    qwen: ChatTokenizer, calls: int, n: int
):
    engine = LedgerEngine(qwen, lambda prompt, seed: "long " * 100)
    session = session_of(engine, qwen, max_sampled_tokens=100)
    asked = (session.answer(said(f"call {at}", n=n)) for at in range(calls))
    given = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
    refused = [one.code for one in given if isinstance(one, CallRefused)]
    assert sampled(engine) <= 100 and set(refused) <= {"token_limit"}
    assert sampled(engine) > 90 or n > 100, "a limit is used up before calls are refused"


async def test_what_a_call_did_not_sample_is_there_for_the_next_and_those_at_once_wait_for_it(qwen: ChatTokenizer):
    engine = LedgerEngine(qwen, lambda prompt, seed: "ok")  # 3 tokens of 400
    session = session_of(engine, qwen, max_sampled_tokens=500)
    answers = await asyncio.wait_for(asyncio.gather(*(session.answer(said(f"{at}")) for at in range(30))), 20)
    assert all(answer.choices[0].finish == "stop" for answer in answers), "none is cut because others are under way"


async def test_a_call_that_waits_for_tokens_hears_that_its_session_has_ended(qwen: ChatTokenizer):
    engine = LedgerEngine(qwen, lambda prompt, seed: "ok")
    engine.hold.clear()
    session = session_of(engine, qwen, max_sampled_tokens=400)
    asked = [asyncio.create_task(session.answer(said(f"{at}"))) for at in range(3)]
    await engine.until_asked(1)  # the others wait for the tokens that it may sample
    session.end("its program has ended")
    given = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)
    assert [getattr(one, "code", one) for one in given] == ["session_ended"] * 3


async def test_calls_at_once_do_not_pass_the_limit_of_calls(qwen: ChatTokenizer):
    engine = LedgerEngine(qwen, lambda prompt, seed: "ok")
    session = session_of(engine, qwen, max_calls=3)
    given = await asyncio.gather(*(session.answer(said(f"{at}")) for at in range(20)), return_exceptions=True)
    assert len(engine.ledger) == 3 and sum(isinstance(one, CallRefused) for one in given) == 17


async def test_requests_that_are_refused_are_bounded_as_well(qwen: ChatTokenizer):
    session = session_of(LedgerEngine(qwen, lambda prompt, seed: "ok"), qwen, max_calls=3)
    for _ in range(6):
        session.arrived()
    with pytest.raises(CallRefused, match="as many requests that are refused") as refused:
        session.arrived()
    assert (refused.value.status, refused.value.code) == (403, "call_limit")


@pytest.mark.parametrize("hints", [{"retry": "1"}, {"retry": "9", "session": "a"}, {"kind": "retry", "agent": "b"}])
async def test_no_header_drops_an_answer_that_was_given(qwen: ChatTokenizer, hints: dict[str, str]):
    engine = LedgerEngine(qwen, lambda prompt, seed: "ok")
    session = session_of(engine, qwen)
    for more in ({}, hints, hints):
        await session.answer(said("a", hints=more))
    record = session.record()
    assert record.metrics["agent/trained_tokens"] == sampled(engine) and record.metrics["agent/orphans"] == 0


@pytest.mark.parametrize(
    ("context", "size", "why"),
    [
        (1000, 100_000, "48 for each of the 1000 tokens"),
        (0, 2_100_000, "more than 2,000,000 characters: send"),
        (1_000_000, 7_000_000, "more than 2,000,000 characters: send"),
    ],
)
async def test_a_prompt_that_no_context_holds_is_refused_before_it_is_rendered(
    qwen: ChatTokenizer, context: int, size: int, why: str
):
    session = session_of(LedgerEngine(qwen, lambda prompt, seed: "ok"), qwen, context_tokens=context)
    for call in (said("x" * size), replace(said(""), messages=(), prompt="x" * size)):
        with pytest.raises(CallRefused, match=why) as refused:
            await session.answer(call)
        assert refused.value.code == "context_length_exceeded"


async def test_a_call_that_names_a_model_that_is_not_trained_is_answered_and_left_out(qwen: ChatTokenizer):
    engine = LedgerEngine(qwen, lambda prompt, seed: "ok")
    session = session_of(engine, qwen, trained_calls=trained_calls("all", (), ("untrained", "small")))
    for name in ("untrained", "small", "policy"):
        await session.answer(replace(said(f"for {name}"), model=name))
    record = session.record()
    assert [call.is_trained for call in record.calls] == [False, False, True]
    assert len(record.rollouts) == 1 and record.metrics["agent/untrained_calls"] == 2


@pytest.mark.parametrize("depth", [90, 110, 500, 900, 5000])
async def test_arguments_of_any_depth_are_answered(qwen: ChatTokenizer, depth: int):
    """As text in a client's history, and as the policy writes them."""
    deep = '{"a": ' * depth + "1" + "}" * depth
    call = f'<tool_call>\n{{"name": "f", "arguments": {deep}}}\n</tool_call>'
    from plugins.agent_api.tests.served_api import api_of

    function = {"name": "f", "arguments": deep}
    history: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    async with api_of(qwen, lambda prompt, seed: call) as api:
        answer = await api.post("/v1/chat/completions", {"model": "m", "messages": history})
        assert answer.status_code == 200 and api.session.failure is None, answer.text[:300]
        for body in (
            {"model": "m", "messages": history[:1], "metadata": {"x": "["}},
            {
                "model": "m",
                "messages": history[:1],
                "tools": [{"type": "function", "function": {"name": "f", "x": "["}}],
            },
        ):
            raw = str(body).replace("'", '"').replace('"["', "[" * depth + "]" * depth).encode()
            answer = await api.post("/v1/chat/completions", raw)
            assert answer.status_code in ((200, 400) if depth < 120 else (400,)), answer.text[:300]
