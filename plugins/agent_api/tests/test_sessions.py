"""Sessions by path and key, their bounds, and what does not depend on which call came first."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from atropos_agent_api.calls import Call, CallRefused
from atropos_agent_api.sessions.options import SessionOptions, trained_calls
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.sessions.sessions import Sessions
from atropos_agent_api.tokens.formats import TemplateFormat
from atropos_core.errors import DeadlineExceeded
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Completion, Sampling, Tokens
from plugins.agent_api.tests.ledger_engine import LedgerEngine, policy_of
from plugins.agent_api.tests.models import qwen_like

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return qwen_like(tmp_path_factory.mktemp("qwen"))


def said(*texts: str, **more: Any) -> Call:
    return Call("chat", "m", tuple({"role": "user", "content": text} for text in texts), **more)


def session_of(engine: LedgerEngine, tokenizer: ChatTokenizer, **options: Any) -> Session:
    policy = policy_of(engine, tokenizer)
    return Session(policy, TemplateFormat(policy, tokenizer), SessionOptions(**options), seed=9, name="test")


def refused(found: Any, id: str | None, key: str) -> tuple[int, str]:
    with pytest.raises(CallRefused) as error:
        found.find(id, key)
    return error.value.status, error.value.code


async def test_a_session_is_found_by_path_and_key_or_by_key_alone(tokenizer: ChatTokenizer):
    policy = policy_of(LedgerEngine(tokenizer, lambda prompt, seed: "ok"), tokenizer)
    sessions = Sessions()
    one, two = (
        sessions.open(policy, TemplateFormat(policy, tokenizer), SessionOptions(), seed=1, name=name) for name in "ab"
    )
    assert len({one.id, two.id, one.key, two.key}) == 4 and len(one.id) >= 24 and len(one.key) >= 32
    assert sessions.find(one.id, one.key) is one and sessions.find(None, two.key) is two
    assert refused(sessions, one.id, two.key) == (401, "invalid_api_key")
    assert refused(sessions, None, "sk-atropos-none") == (401, "invalid_api_key")
    assert refused(sessions, "nothing", one.key) == (404, "no_such_session")
    sessions.end(one, "its program has exited")
    sessions.end(one, "again")
    assert refused(sessions, one.id, one.key) == (409, "session_ended")
    assert refused(sessions, None, one.key) == (409, "session_ended")
    assert refused(sessions, one.id, two.key) == (401, "invalid_api_key")
    assert len(sessions) == 1 and one.ended == "its program has exited"


@pytest.mark.parametrize(
    ("options", "call", "status", "code", "field"),
    [
        ({"max_calls": 1}, said("b"), 403, "call_limit", ""),
        ({"max_sampled_tokens": 6}, said("b"), 403, "token_limit", ""),
        ({"context_tokens": 60}, said("b" * 50), 400, "context_length_exceeded", "messages"),
        ({}, said(), 400, "invalid_request", "messages"),
        ({}, said("b", max_tokens=0), 400, "invalid_request", "max_tokens"),
        ({}, said("b", n=0), 400, "invalid_request", "n"),
        ({}, said("b\ud800"), 400, "invalid_request", "messages"),
        ({}, said("b", tool_choice="tool:clock", tools=(TOOL,)), 400, "invalid_request", "tool_choice"),
        (
            {"client_sampling": "refuse"},
            said("b", left_out=("tools: web_search",)),
            400,
            "unsupported_parameter",
            "tools",
        ),
    ],
)
async def test_what_a_call_may_not_have_is_refused_by_name(
    tokenizer: ChatTokenizer, options: dict[str, Any], call: Call, status: int, code: str, field: str
):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: "hello")
    session = session_of(engine, tokenizer, **options)
    await session.answer(said("a"))
    with pytest.raises(CallRefused) as error:
        await session.answer(call)
    assert (error.value.status, error.value.code, error.value.field) == (status, code, field)
    assert len(engine.ledger) == 1 and session.record().metrics["agent/refused_calls"] == 1


async def test_a_reply_is_no_longer_than_the_context_and_the_session_leave(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: "a long answer")
    session = session_of(engine, tokenizer, max_sampled_tokens=16)
    first, second = await session.answer(said("a")), await session.answer(said("b"))
    assert (len(first.choices[0].tokens), len(second.choices[0].tokens)) == (14, 2)
    size = await session_of(engine, tokenizer).count(said("a"))
    session = session_of(engine, tokenizer, context_tokens=size + 5)
    assert len((await session.answer(said("a"))).choices[0].tokens) == 5
    assert [call.is_cut for call in session.record().calls] == [True]


async def test_count_is_what_a_prompt_has_and_changes_nothing(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: "ok")
    session = session_of(engine, tokenizer)
    first = await session.answer(said("a"))
    more = Call("chat", "m", (*said("a").messages, first.choices[0].message, *said("b").messages))
    counted = await session.count(more)
    assert (await session.answer(more)).prompt_tokens == counted
    assert session.record().metrics["agent/calls"] == 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
async def test_seeds_and_rollouts_do_not_depend_on_which_call_came_first(
    tokenizer: ChatTokenizer, order: tuple[int, ...]
):
    async def rollouts(order: tuple[int, ...]) -> list[list[int]]:
        engine = LedgerEngine(tokenizer, lambda prompt, seed: f"{seed:x}")
        session = session_of(engine, tokenizer)
        first = (await session.answer(said("start"))).choices[0].message
        history = (*said("start").messages, first)
        calls = [Call("chat", "m", (*history, *said(text).messages)) for text in ("a", "b", "a")]
        await asyncio.gather(*(session.answer(calls[at]) for at in order))
        return [[*one.tokens.tolist(), *one.trained.tolist()] for one in session.record().rollouts]

    assert await rollouts(order) == await rollouts((0, 1, 2))


async def test_the_same_prompt_again_has_another_seed_and_another_id(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: "ok")
    session = session_of(engine, tokenizer)
    answers = await asyncio.gather(*(session.answer(said("a")) for _ in range(3)))
    assert len({answer.id for answer in answers}) == len({entry.seed for entry in engine.ledger}) == 3


async def test_a_text_prompt_extends_the_text_that_it_begins_with(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: " there was")
    session = session_of(engine, tokenizer)
    first = await session.answer(Call("completions", "m", prompt="Once"))
    text = "Once" + first.choices[0].message["content"]
    await session.answer(Call("completions", "m", prompt=text + " a cat"))
    stored = np.concatenate([engine.ledger[1].prompt, engine.ledger[1].tokens]).astype(np.int32)
    await session.answer(Call("completions", "m", prompt=np.append(stored, stored[:2]).astype(np.int32)))
    await session.answer(Call("completions", "m", prompt="Twice"))
    record = session.record()
    assert [call.beginning for call in record.calls] == ["new", "extended", "extended", "new"]
    assert sorted(len(one.tokens[one.trained]) for one in record.rollouts) == sorted(
        [len(engine.ledger[3].tokens), sum(len(entry.tokens) for entry in engine.ledger[:3])]
    )


@pytest.mark.parametrize(
    ("which", "agents", "trained"),
    [("all", (), [True] * 3), ("with_tools", (), [False, True, True]), ("all", ("build",), [False, False, True])],
)
async def test_which_calls_are_trained_is_a_named_choice(
    tokenizer: ChatTokenizer, which: Any, agents: tuple[str, ...], trained: list[bool]
):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: "ok")
    session = session_of(engine, tokenizer, trained_calls=trained_calls(which, agents))
    await session.answer(said("title"))
    await session.answer(said("work", tools=(TOOL,)))
    await session.answer(said("build", tools=(TOOL,), hints={"agent": "build"}))
    record = session.record()
    assert [call.is_trained for call in record.calls] == trained
    assert len(record.rollouts) == sum(trained)
    assert [part.why for part in record.account.dropped] == ["its call is not trained"] * (3 - sum(trained))
    written = json.loads(json.dumps(record.as_json()))
    assert [len(part["tokens"]) for part in written["dropped"]] == [len("ok") + 1] * (3 - sum(trained))
    assert [call["is_trained"] for call in written["calls"]] == trained


async def test_a_call_that_is_not_trained_is_context_where_one_that_is_continues_it(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: "ok")
    session = session_of(engine, tokenizer, trained_calls=trained_calls("all", ("build",)))
    first = await session.answer(said("a"))
    more = Call(
        "chat", "m", (*said("a").messages, first.choices[0].message, *said("b").messages), hints={"agent": "build"}
    )
    await session.answer(more)
    [rollout], account = session.record().rollouts, session.record().account
    assert rollout.tokens[rollout.trained].tolist() == engine.ledger[1].tokens.tolist()
    assert [(span.fate, span.why) for span in account.spans] == [
        ("context", "rendered"), ("context", "its call is not trained"), ("context", "rendered"), ("trained", "sampled")
    ]  # fmt: skip
    assert account.dropped == ()


class FailingEngine(LedgerEngine):
    """Fails at its first sample."""

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Any, deadline_s: float
    ) -> list[Completion]:
        if not self.ledger and not getattr(self, "failed", False):
            self.failed = True
            raise DeadlineExceeded("the engine gave no answer")
        return await super().sample(prompt, n, sampling, seeds, deadline_s)


async def test_a_call_that_the_policy_fails_is_an_error_and_leaves_nothing(tokenizer: ChatTokenizer):
    engine = FailingEngine(tokenizer, lambda prompt, seed: "ok")
    session = session_of(engine, tokenizer)
    with pytest.raises(CallRefused, match="the engine gave no answer") as error:
        await session.answer(said("a"))
    assert (error.value.status, error.value.code) == (500, "policy_failed")
    assert isinstance(session.failure, DeadlineExceeded)
    await session.answer(said("a", hints={"retry": "1"}))
    record = session.record()
    assert (len(record.rollouts), record.metrics["agent/failed_calls"], record.metrics["agent/orphans"]) == (1, 1, 0)


async def test_reasoning_that_the_client_changed_is_another_history(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: "<think>one</think>ok")
    session = session_of(engine, tokenizer)
    first = dict((await session.answer(said("a"))).choices[0].message)
    for reasoning in ("one", "two"):
        messages = (*said("a").messages, {**first, "reasoning_content": reasoning}, *said("b").messages)
        await session.answer(Call("chat", "m", messages))
    assert [call.beginning for call in session.record().calls] == ["new", "extended", "edited"]


async def test_of_two_replies_that_say_the_same_the_call_ids_tell_which_is_continued(tokenizer: ChatTokenizer):
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    engine = LedgerEngine(tokenizer, lambda prompt, seed: call)
    session = session_of(engine, tokenizer)
    answers = [await session.answer(said("a", tools=(TOOL,))) for _ in range(3)]
    for answer in reversed(answers):
        message = answer.choices[0].message
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "wet"}
        await session.answer(Call("chat", "m", (*said("a").messages, message, result), tools=(TOOL,)))
    parents = [one.parent for one in session.record().calls[3:]]
    assert parents == [answer.id for answer in reversed(answers)]
