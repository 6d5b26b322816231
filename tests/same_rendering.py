"""One conversation by one chat template, by us and by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from atropos_core.errors import ConfigError, DataError
from atropos_core.rollouts.chat_template import ChatTemplate
from atropos_core.rollouts.tokenizer import with_reasoning

REFUSED = "refused"  # texts of errors differ


def ours(template: str, values: Mapping[str, Any]) -> str:
    messages = [with_reasoning(message) for message in values["messages"]]
    try:
        return ChatTemplate(template, Path("model")).render(**{"documents": None, **values, "messages": messages})
    except (DataError, ConfigError):
        return REFUSED


def theirs(template: str, values: Mapping[str, Any]) -> str:
    others = {name: value for name, value in values.items() if name != "messages"}
    try:
        [text], _ = render_jinja_template([values["messages"]], chat_template=template, **others)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        return REFUSED
    return str(text)
