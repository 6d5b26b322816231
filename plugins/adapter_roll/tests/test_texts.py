"""A conversation as ids and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_adapter_roll import texts
from atropos_adapter_roll.threaded_rollout import AskingPolicy, completion
from atropos_core.errors import DataError
from atropos_core.types import Sampling

ANY = st.text(st.characters(exclude_categories=()))  # lone surrogates as well


@given(question=ANY, answer=ANY, more=ANY)
async def test_messages_and_replies_are_read_back_to_the_letter(question, answer, more):
    policy = AskingPolicy(lambda pending: None, 1.0)
    tools = [{"name": "t"}]
    first = await policy.render([{"role": "user", "content": question}], tools=tools)
    reply = completion(answer, Sampling()).tokens
    history = np.concatenate([first, reply])
    prompt = np.concatenate(
        [history, await policy.render([{"role": "user", "content": more}], tools=tools, after=history)]
    )
    talk = texts.read(prompt)
    assert [message["content"] for message in talk.messages] == [question, answer, more]
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "user"]
    assert talk.tools == tools


@pytest.mark.parametrize(
    "ids", [[], [65], [texts.MESSAGE_START, 65], [texts.MESSAGE_END], [texts.MESSAGE_START, 123, 125, texts.REPLIED]]
)
def test_ids_that_are_no_conversation_are_refused(ids):
    with pytest.raises(DataError, match="not what render"):
        texts.read(np.array(ids, np.int32))


def test_a_prompt_that_ends_in_a_reply_is_refused():
    prompt = texts.rendered([{"role": "user", "content": "a"}], None)
    with pytest.raises(DataError, match="not what render"):
        texts.read(np.concatenate([prompt, texts.replied("b")]))


async def test_reasoning_and_tool_calls_are_parsed_as_in_a_run():
    policy = AskingPolicy(lambda pending: None, 1.0)
    text = '<think>hm</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    message = await policy.parse(completion(text, Sampling()).tokens)
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_the_owner_of_a_reply_is_known():
    assert texts.member_of(np.concatenate([texts.rendered([], None), texts.replied("x", 5)])) == 5
    assert texts.member_of(texts.rendered([], None)) is None


def test_a_message_that_is_not_json_is_refused():
    with pytest.raises(DataError, match="passed on as JSON"):
        texts.rendered([{"role": "user", "content": object()}], None)
