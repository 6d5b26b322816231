"""Calls outside an episode's task: how they are recognised, and what is trained of them."""

from __future__ import annotations

import html
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from atropos_agent_api.calls import Call
from atropos_agent_api.sessions.options import SessionOptions, trained_calls
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.tokens.formats import TemplateFormat
from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.ledger_engine import LedgerEngine, policy_of
from plugins.agent_api.tests.scenarios import system
from plugins.agent_api.tests.test_session import WEATHER, said

PROMPT = "Find the bug\n in parse_row and fix it."
LEAD = "You are a careful engineer. Work in small steps and test each of them. " * 4
READ, NOTE = ({**WEATHER, "function": {"name": name, "parameters": {"type": "object"}}} for name in ("read", "note"))
Ask = Callable[..., Awaitable[dict[str, Any]]]


def on_task(*more: Any, lead: str = LEAD, prompt: str = PROMPT, tools: Any = (WEATHER, READ), **fields: Any) -> Call:
    """A call of the task's conversation, as most agents make it."""
    return said(system(lead), f"<env>\nlinux\n</env>\n{prompt}\n", *more, tools=tools, **fields)


GREETING = said("hi")
TITLE = said(system("You write titles."), f"A title for: {PROMPT}")
MEMORY = said(system("You keep a memory."), "What of this is worth keeping?", tools=(NOTE,))
SUB_AGENT = said(system("You read files."), "What does row.py do?", tools=(READ,))
SUMMARY = on_task({"role": "assistant", "content": "tried"}, "Sum it up.", tools=())
COMPACTED = said(system(LEAD + "Today is Friday."), "So far: read row.py.", tools=(READ, WEATHER))
RETRY = on_task(lead="You are a bold engineer.")
DEVELOPER = said({"role": "developer", "content": LEAD}, PROMPT, tools=(WEATHER, READ))
WRAPPED = said(system(LEAD), "Find   the bug in\nparse_row and fix it.", tools=(READ, WEATHER))
IN_SYSTEM = said(system(f"Your task: {PROMPT}"), "Begin.", tools=(WEATHER, READ))
PLAIN = said(PROMPT)  # neither tools nor a system prompt
PLAIN_WITH_SYSTEM = said(system(LEAD), PROMPT)


async def record_of(
    qwen: ChatTokenizer, *calls: Call, prompt: str = PROMPT, which: Any = "main", counts: Sequence[Call] = ()
) -> Any:
    engine = LedgerEngine(qwen, lambda text, seed: "ok")
    policy = policy_of(engine, qwen, max_tokens=8)
    made = SessionOptions(trained_calls=trained_calls(which, (), ("small",)), only_main=which == "main")
    session = Session(policy, TemplateFormat(policy, qwen), made, seed=1, name="t", prompt=prompt)
    for call in counts:
        await session.count(call)
    for call in calls:
        await session.answer(call)
    return session.record()


@pytest.mark.parametrize(
    ("calls", "side"),
    [
        ([GREETING, on_task()], [0]),
        ([on_task(), TITLE, on_task({"role": "assistant", "content": "ok"}, "Go on.")], [1]),
        ([TITLE, MEMORY, on_task(), SUB_AGENT], [0, 1, 3]),
        ([on_task(), SUMMARY, COMPACTED], []),
        ([on_task(), RETRY], []),
        ([on_task(), DEVELOPER, WRAPPED], []),
        ([TITLE, IN_SYSTEM], [0]),
        ([GREETING, MEMORY, PLAIN_WITH_SYSTEM], [0, 1]),
        ([said(system(LEAD), "hi", tools=(WEATHER, READ)), on_task(), COMPACTED], [0]),  # before the task is shown
        ([GREETING, PLAIN], [0]),
        ([PLAIN, GREETING], []),  # it may as well be a compaction
        ([said("foo", tools=(WEATHER, READ), max_tokens=1), on_task()], [0]),  # some count their tools' tokens so
        ([on_task(), said(system(LEAD), "Sum up this page: rows."), SUMMARY], [1]),
        ([MEMORY, PLAIN], [0]),
        ([TITLE, PLAIN_WITH_SYSTEM], []),  # nothing tells which of two texts without tools is the answer
        ([replace(TITLE, model="small"), on_task()], []),  # it is left out already
        ([replace(on_task(), model="small"), PLAIN, GREETING], []),  # what is left out does not make others side calls
    ],
)
async def test_conversations_outside_the_task_are_told(qwen: ChatTokenizer, calls: list[Call], side: list[int]):
    record = await record_of(qwen, *calls)
    assert [at for at, call in enumerate(record.calls) if call.is_side] == side
    metrics = record.metrics
    assert metrics["agent/side_calls"] == len(side)
    assert metrics["agent/side_tokens"] == sum(record.calls[at].sampled_tokens for at in side)
    dropped = sum(len(one.tokens) for one in record.account.dropped)
    small = sum(call.sampled_tokens for call, one in zip(record.calls, calls, strict=True) if one.model == "small")
    assert dropped == metrics["agent/side_tokens"] + small, "what is left out is in the account"
    assert metrics["agent/trained_tokens"] + dropped == metrics["agent/sampled_tokens"]


@pytest.mark.parametrize("write", [json.dumps, lambda text: json.dumps(text, ensure_ascii=False), html.escape])
async def test_a_prompt_that_the_program_escapes_is_the_task_s(qwen: ChatTokenizer, write: Callable[[str], str]):
    prompt = 'Mend "a < b && c"\nin größe.py.'
    title = said(system("You write titles."), f"A title for: {prompt}")
    record = await record_of(qwen, title, on_task(prompt=f"<task>{write(prompt)}</task>"), prompt=prompt)
    assert [call.is_side for call in record.calls] == [True, False]


async def test_by_default_side_calls_are_counted_and_trained(qwen: ChatTokenizer):
    record = await record_of(qwen, GREETING, on_task(), which="all")
    assert record.metrics["agent/side_calls"] == 1 and record.metrics["agent/untrained_calls"] == 0
    assert len(record.rollouts) == 2 and record.metrics["agent/delivered_share"] == 1.0


async def test_rewards_read_the_last_reply_of_the_task_and_not_of_a_side_call(qwen: ChatTokenizer):
    calls = [on_task(), MEMORY]
    last = {which: (await record_of(qwen, *calls, which=which)).messages[0] for which in ("main", "all")}
    assert last == {"main": system(LEAD), "all": system("You keep a memory.")}
    assert [(await record_of(qwen, *calls, which=which)).ends_aside for which in ("main", "all")] == [False, True]
    assert not (await record_of(qwen, *calls[::-1], which="all")).ends_aside


@pytest.mark.parametrize(
    "aside",
    [GREETING, TITLE, MEMORY, SUB_AGENT, SUMMARY, said(system(LEAD), f"Remember: {PROMPT}", tools=(NOTE,))],
)
@pytest.mark.parametrize("after", [0, 1])
async def test_a_model_s_name_leaves_any_call_out(qwen: ChatTokenizer, aside: Call, after: int):
    calls = [on_task()]
    calls.insert(after, replace(aside, model="small"))
    for which in ("all", "main", "with_tools"):
        record = await record_of(qwen, *calls, which=which)
        assert [call.is_trained for call in record.calls] == [call.model != "small" for call in calls]
        assert record.messages[0] == system(LEAD) and len(record.rollouts) == 1
        assert record.metrics["agent/side_calls"] == 0.0


async def test_counting_tokens_is_no_call(qwen: ChatTokenizer):
    record = await record_of(qwen, on_task(), counts=[GREETING, on_task(), MEMORY])
    assert len(record.calls) == record.metrics["agent/calls"] == 1.0 and record.metrics["agent/side_calls"] == 0.0


@pytest.mark.parametrize("prompt", ["", "another task", " "])
async def test_where_no_conversation_shows_the_prompt_all_are_trained(qwen: ChatTokenizer, prompt: str):
    record = await record_of(qwen, GREETING, on_task(), prompt=prompt)
    assert len(record.rollouts) == 2 and not record.shows_task and record.metrics["agent/side_calls"] == 0


async def test_a_prompt_that_a_tool_shows_is_the_task_s(qwen: ChatTokenizer):
    """The program tells the policy to read a file."""
    first = said(system(LEAD), "Do what TASK.md says.", tools=(READ,))
    result = said(*first.messages, {"role": "assistant", "content": "ok"}, f"TASK.md: {PROMPT}", tools=(READ,))
    record = await record_of(qwen, first, TITLE, result)
    assert [call.is_side for call in record.calls] == [False, True, False]


async def test_a_record_may_be_taken_before_the_task_is_shown(qwen: ChatTokenizer):
    engine = LedgerEngine(qwen, lambda text, seed: "ok")
    policy = policy_of(engine, qwen)
    session = Session(
        policy, TemplateFormat(policy, qwen), SessionOptions(only_main=True), seed=1, name="t", prompt=PROMPT
    )
    await session.answer(TITLE)
    assert session.record().metrics["agent/side_calls"] == 0
    await session.answer(on_task())
    assert session.record().metrics["agent/side_calls"] == 1
    assert "'You write titles.' and no tools" in session.record().side
