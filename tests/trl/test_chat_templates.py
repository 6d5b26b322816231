"""Chat templates of others, rendered by us and by transformers: those that the installed TRL ships, and every `.jinja` file in the folder
that THEIR_TEMPLATES names."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from atropos_core.rollouts.tokenizer import with_reasoning
from tests.same_rendering import REFUSED, ours, theirs
from tests.trl.installed import folder

USER = {"role": "user", "content": " What is 2 < 3 & é?\n"}
SYSTEM = {"role": "system", "content": "Be <brief>."}
REPLY = {"role": "assistant", "content": "Yes.\n"}
ARGUMENTS = {"b": 1.0, "a": [1, "é"], "o": {"z": None, "t": True}}
CALL = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"sum": 7}', "name": "add", "tool_call_id": "call12345"}
PROPERTIES = {"b": {"type": "integer", "description": 'é <x> "q"'}, "a": {"type": ["integer", "null"], "enum": [1, 2]}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "several turns": [SYSTEM, USER, REPLY, USER, REPLY, USER],
    "a call": [USER, CALLS, RESULT],
    "two calls at once": [USER, {**CALLS, "tool_calls": [CALL, CALL]}, RESULT, RESULT],
    "a call with a text": [SYSTEM, USER, {**CALLS, "content": "Let me."}, RESULT, REPLY, USER],
    "reasoning": [USER, {**REPLY, "reasoning_content": "hm\n"}, USER],
    "reasoning before a call": [USER, {**CALLS, "reasoning_content": "so"}, RESULT],
    "reasoning within the content": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}],
    "a reply at the end": [USER, REPLY],
    "two users": [USER, USER],
    "nothing": [],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def templates() -> list[Path]:
    folders = [Path(os.environ["THEIR_TEMPLATES"])] if "THEIR_TEMPLATES" in os.environ else []
    if (installed := folder()) is not None:
        folders.append(installed)
    return sorted(path for root in folders for path in root.rglob("*.jinja"))


FOUND = templates()


@pytest.mark.skipif(
    not FOUND, reason="no template of others: TRL_PYTHON names no Python with TRL, and THEIR_TEMPLATES no folder"
)
@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_a_template_of_others_renders_as_transformers_renders_it(path: Path) -> None:
    template, rendered = path.read_text(), 0
    for (name, messages), tools, prompt in product(CONVERSATIONS.items(), (None, TOOLS), (True, False)):
        for more in ({}, {"enable_thinking": False}):
            given = [with_reasoning(message) for message in messages]
            values = {"messages": given, "tools": tools, "add_generation_prompt": prompt, **TOKENS, **more}
            said = theirs(template, values)
            rendered += said != REFUSED
            assert ours(template, values) == said, (name, bool(tools), prompt, more)
    assert rendered, "transformers renders at least one of these conversations"
