"""Messages that are the same in other words, and messages that are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_agent_api.tokens.canonical import is_same_reply, units_of

ASKED = {"role": "user", "content": "Oslo?"}


def call(arguments: Any, id: str = "call_1", name: str = "weather") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(content: Any = "", *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def keys(*messages: dict[str, Any]) -> list[bytes]:
    return [unit.key for unit in units_of(messages)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([said("", call({"a": 1, "b": [2]}))], [said("", call({"b": [2], "a": 1}))]),
        ([said("", call({"a": 1.0, "b": {"c": 2.5}}))], [said("", call('{"b": {"c": 2.5}, "a": 1}'))]),
        ([said("", call({}))], [said(None, call(""))]),
        ([said("", call([1]))], [said("", call("[1]"))]),
        ([said("", call("{not json"))], [said("", call(" {not json\n"))]),
        ([said("", call({"a": "ü"}))], [said("", call('{"a": "\\u00fc"}'))]),
        ([said(" hello\n")], [said("hello")]),
        ([said("hello")], [said([{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}])]),
        ([said("hello", reasoning_content="hm")], [said("hello")]),
        ([said("hello", reasoning_content="hm")], [said("<think>\nhm\n</think>\n\nhello")]),
        ([said("I look.", call({}))], [said("I look."), said(None, call({}))]),
        ([said("", call({}), call({}, "call_2"))], [said("", call({})), said("", call({}, "call_2"))]),
        (
            [said("", call({}, "a")), {"role": "tool", "tool_call_id": "a", "content": "wet"}],
            [said("", call({}, "b")), {"role": "tool", "tool_call_id": "b", "name": "weather", "content": "wet"}],
        ),
        ([{"role": "user", "content": "hi", "name": None}], [{"role": "user", "content": [{"text": "hi"}]}]),
    ],
)
def test_these_are_the_same(one: list[dict[str, Any]], other: list[dict[str, Any]]):
    assert keys(*one) == keys(*other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([said("hello")], [said("hello.")]),
        ([said("hello")], [{"role": "user", "content": "hello"}]),
        ([said("", call({"a": 1}))], [said("", call({"a": 2}))]),
        ([said("", call({"a": 1}))], [said("", call({"a": "1"}))]),
        ([said("", call({"a": True}))], [said("", call({"a": 1}))]),
        ([said("", call({"a": None}))], [said("", call({}))]),
        ([said("", call({}))], [said("", call({}, name="clock"))]),
        ([said("", call({}), call({"a": 1}, "b"))], [said("", call({"a": 1}, "b"), call({}))]),
        ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi "}]),
        ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi", "name": "Ann"}]),
        (
            [said("", call({}, "a"), call({}, "b")), {"role": "tool", "tool_call_id": "a", "content": "wet"}],
            [said("", call({}, "a"), call({}, "b")), {"role": "tool", "tool_call_id": "b", "content": "wet"}],
        ),
    ],
)
def test_these_are_not(one: list[dict[str, Any]], other: list[dict[str, Any]]):
    assert keys(*one) != keys(*other)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), JSON, max_size=4))
def test_arguments_written_as_text_are_the_arguments(arguments: dict[str, Any]):
    assert keys(said("", call(arguments))) == keys(said("", call(json.dumps(arguments, sort_keys=True, indent=1))))


def test_reasoning_that_is_sent_must_be_what_was_sampled():
    sampled = said("hello", reasoning_content="one two")
    assert is_same_reply(said("hello"), sampled)
    assert is_same_reply(said("hello", reasoning_content=" one\ntwo "), sampled)
    assert is_same_reply(said("<think>one two</think>hello"), sampled)
    assert not is_same_reply(said("hello", reasoning_content="three"), sampled)


def test_text_beside_calls_may_be_left_out_but_not_changed():
    sampled = said("I look.", call({}))
    assert keys(said(None, call({}))) == keys(sampled) and is_same_reply(said(None, call({})), sampled)
    assert is_same_reply(said(" I look.\n", call({})), sampled)
    assert not is_same_reply(said("I do not look.", call({})), sampled)


def test_the_name_of_a_tool_is_with_its_result():
    result = {"role": "tool", "tool_call_id": "a", "content": "wet"}
    assert units_of([ASKED, said("", call({}, "a")), result])[-1].message["name"] == "weather"
