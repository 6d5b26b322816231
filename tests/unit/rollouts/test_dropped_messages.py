"""A message that a chat template leaves out of the prompt is an error, and what templates may leave out is not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atropos_core.builtin
import atropos_env_gsm8k
from atropos_core.errors import MessageDropped
from atropos_core.rollouts.tokenizer import ChatTokenizer
from tests.families import FAMILIES, write

PACKAGED = Path(atropos_env_gsm8k.__file__).parent
USER = {"role": "user", "content": "How many?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
REPLY = {"role": "assistant", "content": "<think>hm</think>3"}
RESULT = {"role": "tool", "content": "3"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
PARTS = {"role": "user", "content": [{"type": "text", "text": "How"}, {"type": "text", "text": "many?"}]}


@pytest.fixture(scope="module")
def tiny() -> ChatTokenizer:
    return ChatTokenizer(PACKAGED / "tiny")


@pytest.fixture(scope="module")
def tiny_tools() -> ChatTokenizer:
    return ChatTokenizer(PACKAGED / "tiny_tools")


def with_template(directory: Path, template: str) -> ChatTokenizer:
    write("qwen", directory)
    (directory / "chat_template.jinja").write_text(template)
    return ChatTokenizer(directory)


DROPPED_BY_TINY: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = {
    "a tool's result": ([USER, REPLY, RESULT], [], "message 3 of 3, of the role 'tool'"),
    "a dict as a tool's result": ([USER, REPLY, {"role": "tool", "content": {"sum": 3}}], [], "of the role 'tool'"),
    "a number as a tool's result": ([USER, REPLY, {"role": "tool", "content": 3}], [], "of the role 'tool'"),
    "tools": ([USER], TOOLS, "the definitions of the tools"),
    "a misspelt role": ([USER, REPLY, {"role": "usr", "content": "Sure?"}], [], "of the role 'usr'"),
    "a first message with a misspelt role": ([{"role": "usr", "content": "Sure?"}, USER], [], "message 1 of 2"),
    "a later system message": ([USER, SYSTEM, USER], [], "message 2 of 3, of the role 'system'"),
    "the developer's later message": (
        [USER, {"role": "developer", "content": "Be brief."}],
        [],
        "of the role 'developer'",
    ),
    "a system message that is not a text": ([{**SYSTEM, "content": {"be": "brief"}}, USER], [], "of the role 'system'"),
    "tool calls": ([USER, CALLS, USER], [], "the tool calls of message 2 of 3"),
}


@pytest.mark.parametrize("what", DROPPED_BY_TINY)
def test_what_the_template_of_tiny_leaves_out_is_named_with_a_remedy(what: str, tiny: ChatTokenizer) -> None:
    messages, tools, named = DROPPED_BY_TINY[what]
    for _ in range(2):
        with pytest.raises(MessageDropped, match="the chat template of tiny leaves") as refused:
            tiny.render(messages, tools)
        assert named in str(refused.value) and refused.value.remedy
    if "tool" in what:
        assert "--model tiny-tools" in str(refused.value.remedy)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_first_system_message_may_be_left_out_and_a_line_says_so(
    role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, ignores in ((PACKAGED / "tiny", True), (PACKAGED / "tiny_tools", role == "developer")):
        tokenizer = ChatTokenizer(model)
        tokenizer.render([USER])
        assert not capsys.readouterr().err
        tokenizer.render([{"role": role, "content": "Be brief."}, USER])
        assert ("leaves out the system message" in capsys.readouterr().err) is ignores


def test_a_system_message_that_is_left_out_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever way the prompt was made: also an environment's own rollout renders with this tokenizer."""
    tokenizer = ChatTokenizer(PACKAGED / "tiny")
    for _ in range(2):
        tokenizer.render([SYSTEM, USER])
        tokenizer.render([SYSTEM, USER, REPLY, USER])
    assert capsys.readouterr().err.count("the chat template of tiny leaves out the system message") == 1


def test_a_call_without_arguments_that_is_shown_by_its_id_is_no_error(tmp_path: Path) -> None:
    by_id = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}{% endfor %}"
    call = {"id": "functions.now:0", "type": "function", "function": {"name": "now", "arguments": {}}}
    assert len(with_template(tmp_path / "shown", by_id).render([USER, {**CALLS, "tool_calls": [call]}, USER]))
    with pytest.raises(MessageDropped, match="the tool calls"):
        with_template(tmp_path / "hidden", by_id.replace("{{ c.id }}", "")).render(
            [USER, {**CALLS, "tool_calls": [call]}, USER]
        )


@pytest.mark.parametrize("message", [RESULT, {"role": "usr", "content": "Sure?"}, SYSTEM])
def test_a_message_of_a_later_turn_is_checked_too(message: dict[str, Any], tiny: ChatTokenizer) -> None:
    history = np.concatenate([tiny.render([USER]), tiny.encode("3<|end|>")])
    assert len(tiny.extend([USER], history))
    with pytest.raises(MessageDropped, match=f"of the role '{message['role']}'"):
        tiny.extend([message], history)
    with pytest.raises(MessageDropped, match="message 2 of 2"):
        tiny.extend([USER, message], history)


def test_the_template_with_tools_shows_them_and_drops_a_later_system_message(tiny_tools: ChatTokenizer) -> None:
    whole = [SYSTEM, USER, CALLS, RESULT, RESULT, REPLY, USER]
    assert len(tiny_tools.render(whole, TOOLS)) and len(tiny_tools.render(whole))
    history = np.concatenate([tiny_tools.render([USER], TOOLS), tiny_tools.encode("3<|im_end|>")])
    assert len(tiny_tools.extend([RESULT, RESULT], history, TOOLS))
    with pytest.raises(MessageDropped, match="of the role 'usr'"):
        tiny_tools.extend([{"role": "usr", "content": "Sure?"}], history, TOOLS)
    with pytest.raises(MessageDropped, match="message 2 of 3, of the role 'system'") as refused:
        tiny_tools.render([USER, SYSTEM, USER])
    assert "first message" in str(refused.value.remedy)


EMPTY = ("", None, " \n", [], [{"type": "text", "text": ""}], {})


@pytest.mark.parametrize("content", EMPTY, ids=repr)
def test_an_empty_message_may_be_left_out(content: Any, tmp_path: Path) -> None:
    template = "{% for m in messages if m.content and m.role != 'system' %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    tokenizer = with_template(tmp_path, template)
    for role in ("system", "user", "tool", "usr"):
        assert len(tokenizer.render([{"role": role, "content": content}, USER]))


LEGITIMATE = {
    "an earlier turn's reasoning is dropped": "{% for m in messages %}{{ m.role }}:"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}{{ m.tool_calls or '' }}\n{% endfor %}",
    "only the calls are shown": "{% for m in messages %}{{ m.role }}:{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}"
    "{{ m.content }}{% endif %}\n{% endfor %}",
    "the system message is a part of the user's": "{% for m in messages if m.role != 'system' %}{{ m.role }}:"
    "{% if loop.first and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls }}{% endif %}{{ m.content }}\n{% endfor %}",
    "results of a turn are one message": "{% for m in messages %}{% if m.role != 'tool' or loop.previtem.role != 'tool' %}\n"
    "{{ m.role }}:{% endif %}{{ (m.tool_calls or '') | string ~ m.content }}{% endfor %}",
    "texts are trimmed and escaped": "{% for m in messages %}{{ (m.content | trim | upper) | tojson }}"
    "{{ (m.tool_calls or '') | tojson }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("what", LEGITIMATE)
def test_what_templates_may_leave_out_or_move_is_no_error(what: str, tmp_path: Path) -> None:
    tools = "{% if tools %}{{ tools[0].function.name }}\n{% endif %}"
    tokenizer = with_template(tmp_path, tools + LEGITIMATE[what])
    talk = [SYSTEM, USER, {**CALLS, "content": "Wait."}, RESULT, {**RESULT, "content": "4"}, REPLY, USER]
    assert len(tokenizer.render(talk, TOOLS))
    assert len(tokenizer.render(talk[1:]))
    assert len(tokenizer.render([USER, {"role": "assistant", "content": "<think>hm</think>"}, USER]))


def test_parts_that_are_left_out_are_found_and_the_remedy_is_a_text(tmp_path: Path) -> None:
    first = (
        "{% for m in messages %}{{ m.role }}:{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    )
    with pytest.raises(MessageDropped, match="which is not a text") as refused:
        with_template(tmp_path / "first", first).render([PARTS])
    assert refused.value.remedy == "Send the content as one text."
    each = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert len(with_template(tmp_path / "each", each).render([PARTS]))
    only_texts = "{% for m in messages %}{{ m.role }}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(MessageDropped, match="of the role 'tool', which is not a text"):
        with_template(tmp_path / "texts", only_texts).render([USER, {"role": "tool", "content": {"sum": 3}}])


def test_a_message_that_moves_out_of_the_next_turn_is_an_error(tmp_path: Path) -> None:
    to_the_front = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    )
    tokenizer = with_template(tmp_path, to_the_front)
    assert len(tokenizer.render([USER, SYSTEM]))
    with pytest.raises(MessageDropped, match="of the role 'system'"):
        tokenizer.extend([SYSTEM, USER], tokenizer.render([USER]))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_drops_the_turns_of_a_conversation(family: str, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write(family, tmp_path))
    ids = tokenizer.render([USER, REPLY, USER])
    assert len(ids) and len(tokenizer.extend([USER], ids))


def test_each_kind_of_message_costs_one_more_rendering_once(tmp_path: Path) -> None:
    model = Path(shutil.copytree(Path(atropos_core.builtin.__file__).parent / "toy_model", tmp_path / "model"))
    tokenizer = ChatTokenizer(model)
    inner, renderings = tokenizer._render, []

    def counted(*given: Any, **more: Any) -> str:
        renderings.append(given)
        return inner(*given, **more)

    tokenizer._render = counted  # type: ignore[method-assign]
    tokenizer.render([USER])  # the first rendering also finds the control tokens
    renderings.clear()
    talk = [USER, {"role": "assistant", "content": "3"}] * 50 + [USER]
    tokenizer.render(talk)
    assert len(renderings) == 5, "the conversation; and the first, a reply, an inner question, and the last"
    renderings.clear()
    tokenizer.render(talk)
    assert len(renderings) == 1
