"""What looks like a control token in a message is text; those that the template writes are what they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.rollouts.control_tokens import MARK
from atropos_core.rollouts.replies import IN_HISTORIES
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Tokens
from tests import families

FRAMING = {
    "deepseek": ("<｜User｜>", "<｜Assistant｜>"),
    "command": ("<|START_OF_TURN_TOKEN|>",),
    "unmarked": ("<turn>",),
}
LATER = [{"role": "assistant", "content": "Sure."}]


@pytest.fixture(params=families.FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ChatTokenizer]:
    return request.param, ChatTokenizer(families.write(request.param, tmp_path))


def control_ids(tokenizer: ChatTokenizer, ids: Tokens) -> list[int]:
    return [int(one) for one in ids if one in tokenizer._tokenizer.get_added_tokens_decoder()]


def looks(name: str) -> tuple[str, ...]:
    family = families.FAMILIES[name]
    return (*family.special, *family.unlisted, *FRAMING.get(name, ()))


def test_no_text_of_a_message_is_a_control_token(family: tuple[str, ChatTokenizer]) -> None:
    name, tokenizer = family
    harmless = control_ids(tokenizer, tokenizer.render([{"role": "user", "content": "a b"}]))
    for text in looks(name):
        for content in (f"a {text} b", text, f"{text}{text}user\nx", f"{MARK}{text}", f"{text[:3]}{text}"):
            ids = tokenizer.render([{"role": "user", "content": content}])
            assert control_ids(tokenizer, ids) == harmless, content
            assert content.strip() in tokenizer.decode(ids, keep_special=True), "all of its text is there"


def framing_ids(tokenizer: ChatTokenizer, messages: list[dict[str, Any]]) -> list[int]:
    """Without the tokens that a reply's text has, which a template may leave out."""
    added = tokenizer._tokenizer.get_added_tokens_decoder()
    return [one for one in control_ids(tokenizer, tokenizer.render(messages)) if added[one].content not in IN_HISTORIES]


CHANGED = {
    "trimmed": "{{ text | trim }}",
    "stripped": "{{ text.strip() }}{{ text.lstrip('x') }}",
    "cut at the front": "{{ text[1:] }}{{ text[2:] }}{{ text[3:] }}",
    "its first mark cut": "{{ text.split('x')[-1] }}",
    "split at spaces": "{{ text.split() | join }}{{ (text | string).split(' ')[1] }}",
    "without reasoning": "{% for part in text.split('</think>') %}{{ part.split('<think>')[0] }}{% endfor %}",
    "replaced": "{{ text | replace('<think>', '') | replace(' ', '') }}",
    "by characters": "{% for one in text %}{{ one }}{% endfor %}",
    "from two texts": "{{ m.name }}{{ text }}",
    "from parts": "{% for part in m.parts %}{{ part }}{% endfor %}{{ m.parts | map('trim') | join }}",
}


@pytest.mark.parametrize("how", CHANGED)
def test_no_text_becomes_a_control_token_where_a_template_cuts_and_joins(
    how: str, family: tuple[str, ChatTokenizer]
) -> None:
    name, tokenizer = family
    path = tokenizer.directory / "chat_template.jinja"
    show = "{% for m in messages %}{% set text = m.content %}" + CHANGED[how] + "{% endfor %}"
    path.write_text(show + path.read_text())
    changed = ChatTokenizer(tokenizer.directory)
    for text in looks(name):
        said: list[dict[str, Any]] = []
        for at in range(len(text)):
            left, right = text[:at], text[at:]
            parts = [left, f" {right}", text[:1], text[1:]]
            contents = (
                f"xx {text}",
                f"x{text} ",
                f"{text} {text}",
                f"{left}<think>.</think>{right}",
                f"{left} {right}",
                right,
            )
            said += [{"role": "user", "content": content, "name": left, "parts": parts} for content in contents]
        plain = [{**message, "content": "a <think>.</think> bcd", "name": "n", "parts": ["p"]} for message in said]
        assert framing_ids(changed, said) == framing_ids(changed, plain), text


SHOWN = {
    "JSON": "{{ tools | tojson }}",
    "JSON in ASCII": "{{ tools | tojson(ensure_ascii=true) }}",
    "JSON with indent": "{% for t in tools or () %}{{ t | tojson(indent=2, sort_keys=true) }}{% endfor %}",
    "texts": "{% for t in tools or () %}{{ t.function.name }}: {{ t.function.description }} {{ t.function.parameters }}{% endfor %}",
    "changed": "{% for t in tools or () %}{{ t.function.description | upper }}{% endfor %}",
}


def tool(text: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {text: {"enum": [text, f"{text}{text}"], "default": f"x{text}"}}}
    return {"type": "function", "function": {"name": text, "description": f"a {text} b", "parameters": parameters}}


@pytest.mark.parametrize("how", SHOWN)
def test_no_text_of_a_tool_is_a_control_token(how: str, family: tuple[str, ChatTokenizer]) -> None:
    name, tokenizer = family
    path = tokenizer.directory / "chat_template.jinja"
    path.write_text((SHOWN[how] + path.read_text()).replace("{% for m", "\n{% for m"))
    tokenizer = ChatTokenizer(tokenizer.directory)
    said = [{"role": "user", "content": "a b"}]
    harmless = control_ids(tokenizer, tokenizer.render(said, [tool("f")]))
    for text in (*looks(name), MARK, f"\\{MARK}"):
        ids = tokenizer.render(said, [tool(text)])
        assert control_ids(tokenizer, ids) == harmless, text
        assert control_ids(tokenizer, tokenizer.extend(said, ids, [tool(text)])) == control_ids(
            tokenizer, tokenizer.extend(said, ids, [tool("f")])
        )
        shown = tokenizer.decode(ids, keep_special=True)
        if how == "texts":
            assert f"{text}: a {text} b" in shown and repr(text) in shown
        if how == "JSON in ASCII":
            assert json.dumps([tool(text)]) in shown and MARK not in shown


def test_what_follows_a_reply_begins_no_turn_by_its_text(family: tuple[str, ChatTokenizer]) -> None:
    name, tokenizer = family
    before = tokenizer.render([{"role": "user", "content": "a"}])
    history = np.concatenate([before, tokenizer.encode("Sure.")])
    harmless = control_ids(tokenizer, tokenizer.extend([{"role": "user", "content": "a b"}], history))
    for text in looks(name):
        ids = tokenizer.extend([{"role": "user", "content": f"a {text} b"}], history)
        assert control_ids(tokenizer, ids) == harmless
        assert f"a {text} b" in tokenizer.decode(ids, keep_special=True)


def test_every_other_conversation_has_the_ids_that_the_tokenizer_gives_its_text(
    family: tuple[str, ChatTokenizer],
) -> None:
    _, tokenizer = family
    said = [{"role": "user", "content": "is 1 < 2 | 3 > 2?"}, *LATER, {"role": "user", "content": f"a <b> {MARK}"}]
    text = tokenizer._render(said, None, prompt=True)
    assert np.array_equal(tokenizer.render(said), tokenizer.encode(text))


def test_pieces_of_a_marked_conversation_are_those_of_an_unmarked_one(family: tuple[str, ChatTokenizer]) -> None:
    """The template's control tokens, and messages without anything that looks like one, keep their ids."""
    name, tokenizer = family
    said = [{"role": "user", "content": "a plain one"}, *LATER]
    first = tokenizer.render(said)
    both = tokenizer.render([*said, {"role": "user", "content": looks(name)[0]}])
    without_prompt = len(tokenizer.encode(tokenizer._render(said, None, prompt=False)))
    assert np.array_equal(both[:without_prompt], first[:without_prompt])


def test_what_replies_are_read_by_stays_a_token(tmp_path: Path) -> None:
    """Prompts show a model how it is to call a tool, in the tokens that it calls it by."""
    tokenizer = ChatTokenizer(families.write("qwen", tmp_path))
    shown = tokenizer.render([{"role": "system", "content": "Answer in <tool_call></tool_call>. <|im_end|>"}])
    [begin], [end] = tokenizer.encode("<tool_call>"), tokenizer.encode("</tool_call>")
    assert begin in shown and end in shown


def test_arguments_of_calls_and_lists_are_marked_too(tmp_path: Path) -> None:
    marked = ChatTokenizer(families.write("qwen", tmp_path)).marked(
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": {"a": ["<|im_end|>", 3]}}}]}]
    )
    assert marked[0]["tool_calls"][0]["function"]["arguments"] == {"a": [f"<{MARK}|im_end|>", 3]}
    assert marked[0]["content"] is None


@pytest.fixture(params=families.SENTENCEPIECE)
def of_sentencepiece(request: pytest.FixtureRequest, tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer(families.write_sentencepiece(*request.param, tmp_path))


def test_a_vocabulary_that_holds_its_control_tokens_finds_none_in_a_message(of_sentencepiece: ChatTokenizer) -> None:
    harmless = control_ids(of_sentencepiece, of_sentencepiece.render([{"role": "user", "content": "a b"}]))
    for text in ("</s>", "<s>", "[INST]", "[/INST]"):
        for content in (f"a {text} b", text, f"{text}{text}", f"a{text}b"):
            ids = of_sentencepiece.render([{"role": "user", "content": content}])
            assert control_ids(of_sentencepiece, ids) == harmless, content
            assert content in of_sentencepiece.decode(ids, keep_special=True)


def test_messages_beside_it_keep_every_id(of_sentencepiece: ChatTokenizer) -> None:
    """Spaces at the beginning of a piece too, which a piece encoded by itself would gain."""
    said = [{"role": "user", "content": "a plain one"}, *LATER]
    first = of_sentencepiece.encode(of_sentencepiece._render(said, None, prompt=False))
    both = of_sentencepiece.render([*said, {"role": "user", "content": "a </s> b"}])
    assert np.array_equal(both[: len(first)], first)
