"""Choose a model's format: a renderer's if it renders as the model's own chat template does, else the template's.

Names do not show it: a fine-tune keeps its model's name and brings another template. So each renderer is tried on conversations, and
one is used if it gives the same ids for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atropos_agent_api.tokens.formats import ChatFormat, TemplateFormat
from atropos_agent_api.tokens.renderer_format import FETCHES, RendererFormat, renderer_names
from atropos_core.conversation import Policy
from atropos_core.errors import ConfigError, DataError
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Message, Tokens

_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}, "pages": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_USER: Message = {"role": "user", "content": "What is a cat?\n"}
_CALL: Message = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "A word.",
    "tool_calls": [
        {
            "id": "functions.look_up:0",
            "type": "function",
            "function": {"name": "look_up", "arguments": {"word": 'ca"t', "pages": 2}},
        }
    ],
}
_RESULT: Message = {"role": "tool", "tool_call_id": "functions.look_up:0", "name": "look_up", "content": "A pet."}
PROBES: tuple[tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]], ...] = (
    ((_USER,), ()),
    ((_SYSTEM, _USER), ()),
    ((_SYSTEM, _USER), (_TOOL,)),
    ((_USER, {"role": "assistant", "content": "A pet."}, {"role": "user", "content": "Sure?"}), ()),
    ((_SYSTEM, _USER, _CALL, _RESULT), (_TOOL,)),
    (
        (_USER, _CALL, _RESULT, {"role": "assistant", "content": "A pet."}, {"role": "user", "content": "Sure?"}),
        (_TOOL,),
    ),
)
_SETTINGS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})


class ModelFormats:
    """The format of one model directory. `choice`: "auto", "template", or the name of a renderer. `today`: as in
    ChatTokenizer. Raises ConfigError."""

    def __init__(self, model: Path, choice: str = "auto", today: str = "") -> None:
        self.tokenizer = ChatTokenizer(model, today)
        self._renderer: RendererFormat | None = None
        if choice == "auto":
            self._renderer = renderer_like_template(self.tokenizer)
        elif choice != "template":
            self._renderer = RendererFormat(choice, self.tokenizer)

    async def of(self, policy: Policy) -> ChatFormat:
        """The format for one rollout's policy. A policy that renders differently from this model's tokenizer (a scripted one) uses
        its own rendering."""
        probe = [{"role": "user", "content": "."}]
        try:
            same = np.array_equal(await policy.render(probe), self.tokenizer.render(probe))
        except (ConfigError, DataError):
            same = self._renderer is not None  # a model without a template, for which a renderer was chosen
        if not same:
            return TemplateFormat(policy, None)
        return self._renderer or TemplateFormat(policy, self.tokenizer)


def renderer_like_template(tokenizer: ChatTokenizer) -> RendererFormat | None:
    """The first renderer that renders PROBES as the model's chat template does, token for token."""
    try:
        expected = [tokenizer.render(messages, tools) for messages, tools in PROBES]
    except (ConfigError, DataError):
        return None  # the template does not support tools, or there is none
    for name in (name for name in renderer_names() if name not in FETCHES):
        for settings in _SETTINGS:
            try:
                format = RendererFormat(name, tokenizer, **settings)
            except ConfigError:
                continue
            if _renders(format, expected):
                return format
    return None


def _renders(format: RendererFormat, expected: list[Tokens]) -> bool:
    try:
        return all(
            np.array_equal(format.rendered(messages, tools), ids)
            for (messages, tools), ids in zip(PROBES, expected, strict=True)
        )
    except DataError:
        return False
