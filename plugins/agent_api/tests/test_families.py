"""Each family's format both ways: what is sampled is parsed as its message, and extended by ids that leave it unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_agent_api.tokens.openings import opening_of
from atropos_agent_api.tokens.renderer_format import FETCHES, RendererFormat, renderer_names
from atropos_core.errors import ConfigError, MessageDropped
from atropos_core.types import Tokens
from plugins.agent_api.tests.families import write

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ASKED = {"role": "user", "content": "The weather in Oslo?"}
CALL = {
    "id": "functions.weather:0",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}},
}
RESULT = {"role": "tool", "tool_call_id": "functions.weather:0", "name": "weather", "content": "It is wet."}
SAYS: dict[str, Any] = {"role": "assistant", "content": "I look it up.", "reasoning_content": "Oslo, then."}
TURNS = {  # what the assistant says, and what comes after it
    "a call with reasoning": ({**SAYS, "tool_calls": [CALL]}, RESULT),
    "a call": ({"role": "assistant", "content": "I look it up.", "tool_calls": [CALL]}, RESULT),
    "text with reasoning": (SAYS, {"role": "user", "content": "Sure?"}),
    "text": ({"role": "assistant", "content": "I look it up."}, {"role": "user", "content": "Sure?"}),
}
# Families whose template opens reasoning for the reply and then leaves it out of its history: no rendering holds a reply
# as it is sampled, so it is written by hand.
NO_TOOLS = {"deepseek-v3", "deepseek-r1"}  # these prompts have no place for tools
BY_HAND = {"deepseek-r1": "Oslo, then.\n</think>\n\nI look it up.<｜end▁of▁sentence｜>"}
NO_OPENING = {*NO_TOOLS, "minimax-m2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5", "glm-5"}
FAMILIES = [name for name in renderer_names() if name not in FETCHES]


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RendererFormat]:
    return {name: RendererFormat(name, write(name, tmp_path_factory.mktemp("family"))) for name in FAMILIES}


def tools_of(format: RendererFormat) -> list[Any]:
    return [] if format.name.removeprefix("renderer ") in NO_TOOLS else [TOOL]


def reply_ids(format: RendererFormat, says: dict[str, Any], after: dict[str, Any]) -> tuple[Tokens, Tokens] | None:
    """The prompt, and the reply as the policy samples it: its text, up to the token that ends the turn. None where the
    template renders this reply in no way that could follow its prompt."""
    tokenizer = format._tokenizer
    prompt = format.rendered([ASKED], tools_of(format))
    before = tokenizer.decode(prompt, keep_special=True)
    spoken = format._renderer.render_ids([ASKED, says], tools=tools_of(format))
    said = tokenizer.decode(np.array(spoken, np.int32), keep_special=True)
    if not said.startswith(before):
        return None
    reply = said[len(before) :]
    stops = [
        tokenizer.decode(np.array([one], np.int32), keep_special=True) for one in format._renderer.get_stop_token_ids()
    ]
    if any(stop in reply for stop in stops):
        reply = min((reply.partition(stop)[0] + stop for stop in stops if stop in reply), key=len)
    else:  # the next turn's first token ends this one
        whole = tokenizer.decode(format.rendered([ASKED, says, after], tools_of(format)), keep_special=True)
        at = whole.rindex(after["content"])
        reply += max(stops, key=lambda stop: whole.rfind(stop, 0, at))
    return prompt, tokenizer.encode(reply)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("name", FAMILIES)
async def test_what_is_sampled_is_read_and_extended(formats: dict[str, RendererFormat], name: str, turn: str):
    format, (says, after) = formats[name], TURNS[turn]
    made = reply_ids(format, says, after)
    if made is None:
        rendered = [what for what, (said, then) in TURNS.items() if reply_ids(format, said, then) is not None]
        assert rendered or name in BY_HAND, "no reply of this family was read"
        return
    prompt, sampled = made
    text = format._tokenizer.decode(sampled, keep_special=True)
    message = await format.parse(prompt, sampled, tools_of(format))
    told = says["content"] if says["content"] in text else ""  # llama-3 has no text next to a call
    assert message["content"].strip() == told
    reasoning = says.get("reasoning_content", "")
    assert message.get("reasoning_content", "").strip() == (reasoning if reasoning in text else "")
    assert [call["function"] for call in message.get("tool_calls", [])] == [
        call["function"] for call in says.get("tool_calls", [])
    ]
    added = await format.extend(prompt, sampled, [after], tools_of(format))
    assert added is not None and len(added)
    tail = format._tokenizer.decode(added, keep_special=True)
    whole = format._tokenizer.decode(format.rendered([ASKED, says, after], tools_of(format)), keep_special=True)
    assert whole.endswith(tail) or (name == "gemma4" and "tool_calls" in says), "it continues as a rendering does"
    assert after["content"] in tail


@pytest.mark.parametrize("name", FAMILIES)
async def test_of_a_long_prompt_only_its_last_turn_matters(formats: dict[str, RendererFormat], name: str):
    format, again = formats[name], {"role": "user", "content": "And tomorrow?"}
    for says, after in TURNS.values():
        made = reply_ids(format, says, after)
        if made is None:
            continue
        added = await format.extend(*made, [after], tools_of(format))
        assert added is not None
        prompt, sampled = np.concatenate([*made, added]), made[1]
        for next_message in (after, again):
            bridged = format._renderer.bridge_to_next_turn(
                prompt.tolist(), sampled.tolist(), [next_message], tools=tools_of(format)
            )
            extended = await format.extend(prompt, sampled, [next_message], tools_of(format))
            assert (bridged is None) == (extended is None)
            if bridged is not None and extended is not None:
                assert bridged.token_ids == [*prompt, *sampled, *extended]
        whole = format._renderer.parse_response(sampled.tolist(), tools=tools_of(format), prompt_ids=prompt.tolist())
        assert (await format.parse(prompt, sampled, tools_of(format)))["content"] == whole.content


@pytest.mark.parametrize("name", BY_HAND)
async def test_reasoning_that_the_prompt_opens_is_read(formats: dict[str, RendererFormat], name: str):
    format = formats[name]
    prompt, sampled = format.rendered([ASKED], []), format._tokenizer.encode(BY_HAND[name])
    message = await format.parse(prompt, sampled, [])
    assert (message["content"].strip(), message["reasoning_content"].strip()) == ("I look it up.", "Oslo, then.")


@pytest.mark.parametrize("name", FAMILIES)
async def test_any_ids_at_all_are_read_and_never_changed(formats: dict[str, RendererFormat], name: str):
    format = formats[name]
    prompt, random = format.rendered([ASKED], tools_of(format)), np.random.default_rng(7)
    special = np.array([format._tokenizer.encode(one)[0] for one in ("<|im_end|>", "a", "{")], np.int32)
    for size in (0, 1, 5, 40):
        for _ in range(10):
            ids = random.integers(0, format._tokenizer.vocabulary, size).astype(np.int32)
            ids = np.where(random.random(size) < 0.3, random.choice(special, size), ids).astype(np.int32)
            message = await format.parse(prompt, ids, tools_of(format))
            assert message["role"] == "assistant" and isinstance(message["content"], str)
            added = await format.extend(prompt, ids, [{"role": "user", "content": "Sure?"}], tools_of(format))
            assert added is None or "Sure?" in format._tokenizer.decode(added, keep_special=True)
    assert format.unparsed == 0


@pytest.mark.parametrize("name", FAMILIES)
async def test_an_opening_begins_a_call_or_there_is_none(formats: dict[str, RendererFormat], name: str):
    format = formats[name]
    opening = await opening_of(format, ["weather"])
    if name in NO_OPENING:
        assert opening is None
        return
    assert opening is not None
    assert "weather" in format._tokenizer.decode(opening, keep_special=True)
    any_tool = await opening_of(format, ["weather", "clock"])
    if any_tool is not None:
        text = format._tokenizer.decode(any_tool, keep_special=True)
        assert "weather" not in text and "clock" not in text


def test_a_format_that_is_not_there_and_one_that_does_not_fit_are_refused_by_name(tmp_path: Path):
    tokenizer = write("llama-3", tmp_path)
    with pytest.raises(ConfigError, match="unknown format 'llama-9'"):
        RendererFormat("llama-9", tokenizer)
    with pytest.raises(ConfigError, match=r"'qwen3' does not fit .*<\|im_start\|>"):
        RendererFormat("qwen3", tokenizer)


DROPPED: dict[str, tuple[str, list[Any], list[Any], str]] = {
    "a misspelt role": ("qwen3", [ASKED, {"role": "usr", "content": "Sure?"}], [], "message 2 of 2, of the role 'usr'"),
    "a later system message": ("minimax-m2", [ASKED, {"role": "system", "content": "No."}, ASKED], [], "of the role 'system'"),
    "tools": ("deepseek-v3", [ASKED], [TOOL], "the definitions of the tools"),
}  # fmt: skip


@pytest.mark.parametrize("what", DROPPED)
async def test_what_a_renderer_leaves_out_is_an_error(formats: dict[str, RendererFormat], what: str):
    name, messages, tools, named = DROPPED[what]
    with pytest.raises(MessageDropped, match=f"the format 'renderer {name}' of .* leaves .*{named}"):
        await formats[name].render(messages, tools)


@pytest.mark.parametrize("name", ["qwen3", "glm-5", "glm-4.5", "minimax-m2", "hy3", "laguna-m.1"])
async def test_a_renderer_extends_by_no_message_that_it_would_leave_out(formats: dict[str, RendererFormat], name: str):
    """Everything is then rendered, which is checked."""
    format, odd = formats[name], {"role": "usr", "content": "Sure?"}
    made = reply_ids(format, *TURNS["text"]) or reply_ids(format, *TURNS["text with reasoning"])
    assert made is not None
    assert await format.extend(*made, [ASKED], [TOOL]) is not None
    assert await format.extend(*made, [odd, ASKED], [TOOL]) is None
