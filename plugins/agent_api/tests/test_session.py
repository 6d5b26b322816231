"""A session: what it answers, what it refuses, and what its record says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from atropos_agent_api.calls import Answer, Call, CallRefused
from atropos_agent_api.sessions.options import SessionOptions
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.tokens.formats import TemplateFormat
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.turn_rewards import turns_in_order
from plugins.agent_api.tests.ledger_engine import LedgerEngine, policy_of
from plugins.agent_api.tests.models import qwen_like

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASKS_WEATHER = (
    '<think>Look.</think>Wait. <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return qwen_like(tmp_path_factory.mktemp("qwen"))


def said(*messages: Any, **more: Any) -> Call:
    """A call with these messages; a text is the user's."""
    full = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
    return Call("chat", "policy", tuple(full), **more)


def session_of(engine: LedgerEngine, tokenizer: ChatTokenizer, seed: int = 3, **options: Any) -> Session:
    policy = policy_of(engine, tokenizer)
    return Session(policy, TemplateFormat(policy, tokenizer), SessionOptions(**options), seed=seed, name="test")


def reply(answer: Answer) -> dict[str, Any]:
    return dict(answer.choices[0].message)


def as_clients_echo(message: dict[str, Any]) -> dict[str, Any]:
    """Keys reordered, arguments as text, ids renamed, reasoning left out, white space trimmed."""
    calls = [
        {
            "id": f"renamed-{number}",
            "function": {
                "arguments": json.dumps(dict(reversed(call["function"]["arguments"].items()))),
                "name": call["function"]["name"],
            },
            "type": "function",
        }
        for number, call in enumerate(message.get("tool_calls", []))
    ]
    return {"role": "assistant", "content": message["content"].strip() or None, "tool_calls": calls or None}


async def test_an_echo_in_other_words_extends_the_stored_ids(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: ASKS_WEATHER if "tool\n" not in prompt else "Rain. ")
    session = session_of(engine, tokenizer)
    first = reply(await session.answer(said("Oslo?", tools=(WEATHER,))))
    echo = as_clients_echo(first)
    result = {"role": "tool", "tool_call_id": "renamed-0", "content": "wet"}
    answer = await session.answer(said("Oslo?", echo, result, tools=(WEATHER,)))
    assert first["reasoning_content"] == "Look." and first["tool_calls"][0]["function"]["arguments"]["city"] == "Oslo"
    assert reply(answer)["content"] == "Rain. "
    one, two = engine.ledger
    assert two.prompt[: len(one.prompt) + len(one.tokens)].tolist() == [*one.prompt, *one.tokens]
    [rollout] = session.record().rollouts
    assert rollout.tokens.tolist() == [*two.prompt, *two.tokens]
    assert rollout.tokens[rollout.trained].tolist() == [*one.tokens, *two.tokens]
    assert rollout.logprobs is not None
    assert rollout.logprobs[rollout.trained].tolist() == [*one.logprobs, *two.logprobs]
    assert rollout.policy_version[rollout.trained].tolist() == [*one.versions, *two.versions]
    assert answer.cached_tokens == len(one.prompt) + len(one.tokens) and answer.prompt_tokens == len(two.prompt)
    assert session.record().metrics["agent/delivered_share"] == 1.0


async def test_branches_train_what_they_share_once(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: f"answer {len(prompt)}")
    session = session_of(engine, tokenizer)
    first = reply(await session.answer(said("a")))
    for more in ("b", "c"):
        await session.answer(said("a", first, more))
    record = session.record()
    trained = np.sort(np.concatenate([one.logprobs[one.trained] for one in record.rollouts]))
    assert trained.tolist() == sorted(float(one) for entry in engine.ledger for one in entry.logprobs)
    assert sorted(int(one.sampled.sum()) for one in record.rollouts) == [
        len(engine.ledger[2].tokens),
        len(engine.ledger[0].tokens) + len(engine.ledger[1].tokens),
    ]
    assert record.metrics["agent/branches"] == 2


async def test_calls_of_a_sub_agent_between_those_of_its_lead_are_in_the_order_of_time(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: f"answer {len(prompt)}")
    session = session_of(engine, tokenizer)
    plan = reply(await session.answer(said("plan")))
    book = reply(await session.answer(said("read a book")))
    await session.answer(said("read a book", book, "more"))
    await session.answer(said("plan", plan, "go on"))
    record = session.record()
    assert [one.turn_order.tolist() for one in record.rollouts if one.turn_order is not None] in (
        [[0, 3], [1, 2]],
        [[1, 2], [0, 3]],
    )
    in_order = [record.rollouts[number].tokens[:end] for number, end in turns_in_order(record.rollouts)]
    assert [one.tolist() for one in in_order] == [[*entry.prompt, *entry.tokens] for entry in engine.ledger]


async def test_a_client_that_goes_away_leaves_an_orphan_that_is_recorded(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: "late")
    session = session_of(engine, tokenizer)
    engine.hold.clear()
    gone = asyncio.create_task(session.answer(said("a")))
    await engine.until_asked(1)
    gone.cancel()
    engine.hold.set()
    await session.answer(said("a", hints={"retry": "1"}))
    record = session.record()
    assert len(engine.ledger) == 2
    [rollout], [orphan] = record.rollouts, record.account.dropped
    assert (orphan.why, orphan.tokens.tolist()) == ("orphan", engine.ledger[0].tokens.tolist())
    assert rollout.logprobs is not None
    assert rollout.logprobs[rollout.trained].tolist() == engine.ledger[1].logprobs.tolist()
    assert record.metrics["agent/orphans"] == 1


async def test_a_session_that_has_ended_refuses_calls_in_flight_and_late_ones(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: "late")
    session = session_of(engine, tokenizer)
    engine.hold.clear()
    waiting = asyncio.create_task(session.answer(said("a")))
    await engine.until_asked(1)
    session.end("the program has exited")
    for call in (waiting, session.answer(said("b"))):
        with pytest.raises(CallRefused, match="the program has exited") as refused:
            await call
        assert (refused.value.status, refused.value.code) == (409, "session_ended")
    assert session.record().rollouts == ()


async def test_a_stop_text_cuts_behind_the_token_that_completes_it(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: "one END two")
    session = session_of(engine, tokenizer)
    answer = await session.answer(said("count", stop=("END", "two")))
    assert (reply(answer)["content"], answer.choices[0].finish) == ("one ", "stop")
    record = session.record()
    [entry], [cut] = engine.ledger, record.account.dropped
    assert tokenizer.decode(answer.choices[0].tokens) == "one END"
    assert (cut.why, tokenizer.decode(cut.tokens)) == ("past a stop", " two")
    [rollout] = record.rollouts
    assert rollout.tokens[rollout.trained].tolist() + cut.tokens.tolist() == entry.tokens.tolist()
    assert record.metrics["agent/dropped_tokens"] == len(cut.tokens)
    await session.answer(said("count", reply(answer), "go on"))
    again = tokenizer.decode(engine.ledger[1].prompt, keep_special=True)
    assert again.endswith("assistant\none END<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")


REPLY = "a: b, O: c\nObs: d"


def goes_on(prompt: str, seed: int) -> str:
    """The part of `REPLY` that the prompt does not have yet."""
    said = prompt.rpartition("assistant\n")[2]
    return REPLY.removeprefix(said)


async def test_an_engine_that_knows_stop_ids_samples_nothing_past_a_stop_text(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, goes_on)
    engine.knows_stop_ids = True
    session = session_of(engine, tokenizer)
    answer = await session.answer(said("?", stop=("\nObs:",)))
    assert reply(answer)["content"] == "a: b, O: c" and answer.choices[0].finish == "stop"
    record = session.record()
    assert [tokenizer.decode(entry.tokens) for entry in engine.ledger] == ["a:", " b, O:", " c\nObs:"], (
        "ended, and continued"
    )
    assert len({entry.seed for entry in engine.ledger}) == 3
    assert record.account.dropped == () and record.metrics["agent/dropped_tokens"] == 0
    [rollout] = record.rollouts
    assert rollout.tokens[rollout.trained].tolist() == np.concatenate([one.tokens for one in engine.ledger]).tolist()
    assert rollout.logprobs is not None
    assert (
        rollout.logprobs[rollout.trained].tolist() == np.concatenate([one.logprobs for one in engine.ledger]).tolist()
    )


async def test_a_reply_that_is_continued_keeps_to_its_bound(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, goes_on)
    engine.knows_stop_ids = True
    answer = await session_of(engine, tokenizer).answer(said("?", stop=("\nObs:",), max_tokens=4))
    assert (tokenizer.decode(answer.choices[0].tokens), answer.choices[0].finish) == ("a: b", "length")


async def test_a_reply_is_continued_eight_times_and_then_sampled_to_its_end(tokenizer: ChatTokenizer):
    text = ":" * 12 + "END:x"
    engine = LedgerEngine(tokenizer, lambda prompt, seed: text.removeprefix(prompt.rpartition("assistant\n")[2]))
    engine.knows_stop_ids = True
    session = session_of(engine, tokenizer)
    answer = await session.answer(said("?", stop=("END:",)))
    assert reply(answer)["content"] == ":" * 12 and len(engine.ledger) == 9
    assert [tokenizer.decode(cut.tokens) for cut in session.record().account.dropped] == ["x"]


async def test_where_one_call_at_a_time_may_be_made_the_reply_ends_with_the_first(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: ASKS_WEATHER * 2)
    session = session_of(engine, tokenizer)
    answer = await session.answer(said("Oslo?", tools=(WEATHER,), parallel_tool_calls=False))
    assert len(reply(answer)["tool_calls"]) == 1 and answer.choices[0].finish == "tool_calls"
    assert tokenizer.decode(answer.choices[0].tokens) == ASKS_WEATHER


@pytest.mark.parametrize(("wanted", "cut"), [(None, False), (4, True), (1000, False)])
async def test_the_smaller_bound_of_run_and_call_cuts_a_reply(tokenizer: ChatTokenizer, wanted: int | None, cut: bool):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: "a long answer")
    answer = await session_of(engine, tokenizer).answer(said("?", max_tokens=wanted))
    assert answer.choices[0].finish == ("length" if cut else "stop")
    assert len(answer.choices[0].tokens) == (4 if cut else len("a long answer") + 1)


async def test_a_client_s_temperature_is_overruled_and_counted_or_refused_by_name(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: "ok")
    session = session_of(engine, tokenizer)
    await session.answer(said("?", sampling={"temperature": 0.2, "top_p": 1.0}))
    [call] = session.record().calls
    assert (call.overruled, session.record().metrics["agent/overruled_calls"]) == ({"temperature": 0.2}, 1)
    session = session_of(engine, tokenizer, client_sampling="refuse")
    with pytest.raises(CallRefused, match="temperature is 0.2, but this run samples with 1") as refused:
        await session.answer(said("?", sampling={"temperature": 0.2}))
    assert refused.value.field == "temperature"
    assert session.record().metrics["agent/refused_calls"] == 1 and len(engine.ledger) == 1


async def test_several_choices_are_siblings_and_each_is_trained(tokenizer: ChatTokenizer):
    engine = LedgerEngine(tokenizer, lambda prompt, seed: f"number {seed % 97}")
    session = session_of(engine, tokenizer)
    answer = await session.answer(said("?", n=3))
    assert len(answer.choices) == 3
    record = session.record()
    assert sorted(one.tokens[one.trained].tolist() for one in record.rollouts) == sorted(
        entry.tokens.tolist() for entry in engine.ledger
    )
