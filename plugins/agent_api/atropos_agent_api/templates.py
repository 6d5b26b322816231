"""Placeholders in a program's arguments, variables and files: `{base_url}`, `{task.prompt}` and so on.

Only lower-case names in braces are placeholders, so JSON, TOML and shell text can be used in a template unchanged. `{{name}}`
stands for `{name}` itself.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from atropos_core.errors import DataError

if TYPE_CHECKING:
    from atropos_core.types import Task

NAMES = {
    "base_url": "URL of OpenAI's APIs, ends in /v1",
    "root_url": "URL of Anthropic's API, the same without /v1",
    "api_key": "the session's key",
    "model": "the model's name",
    "work": "the program's work directory",
    "home": "its HOME",
    "here": "folder in which the run was started",
    "python": "the interpreter that runs Atropos",
    "seed": "a number of the episode",
    "task_file": "a JSON file with the task's id, prompt and messages",
    "task.id": "",
    "task.prompt": "the text of the task's last message",
    "task.messages": "its messages, as JSON",
}
GRADER_NAMES = ("work", "home", "here", "python")  # for a reward by command
_PLACEHOLDER = re.compile(r"\{\{([a-z_]+(?:\.\w+)*)\}\}|\{([a-z_]+(?:\.\w+)*)\}")


def check(text: str, where: str, names: Collection[str] = NAMES) -> None:
    """Raises ValueError for an unknown placeholder. If `names` has those of a task, `{task.NAME}` may be any field of the tasks
    except the answer."""
    for escaped, name in _PLACEHOLDER.findall(text):
        if escaped or name in names:
            continue
        if name == "task.answer":
            raise ValueError(f"{where}: {{task.answer}} would give the program the answer: remove it")
        if not name.startswith("task.") or "task.id" not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"Did you mean {{{near[0]}}}?" if near else f"Choose one of: {', '.join(names)}."
            raise ValueError(
                f"{where}: unknown placeholder {{{name}}}. {hint} For the text itself write {{{{{name}}}}}"
            )


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with the values of its placeholders. Raises DataError for a field that the task does not have."""

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return f"{{{found[1]}}}"
        try:
            return values[found[2]]
        except KeyError:
            raise DataError(
                f"the program's options name {{{found[2]}}}, but task {values.get('task.id', '')!r} has no such field.",
                remedy="Give every task that field, or remove the placeholder.",
            ) from None

    return _PLACEHOLDER.sub(value, text)


def fixed(text: str, values: Mapping[str, str]) -> str:
    """The text, filled, if `values` has all of its placeholders. Else empty: it depends on the episode."""
    names = {name for _, name in _PLACEHOLDER.findall(text) if name}
    return fill(text, values) if names <= set(values) else ""


def plain(text: str) -> str:
    """A template that stands for exactly this text."""
    return _PLACEHOLDER.sub(lambda found: f"{{{found[0]}}}", text)


def of_task(task: Task) -> dict[str, str]:
    """The values of a task's placeholders: its id, prompt and messages, and each field of its data. Never its answer."""
    fields = {f"task.{name}": _text(value) for name, value in task.data.items() if name != "answer"}
    return fields | {
        "task.id": _text(task.id),
        "task.prompt": prompt_of(task),
        "task.messages": _text(list(task.messages)),
    }


def prompt_of(task: Task) -> str:
    """The text of a task's last message, for programs that do not use the others."""
    return _text(task.messages[-1].get("content", "")) if task.messages else ""


def _text(value: Any) -> str:
    from atropos_agent_api.dialects.values import writable  # with numpy, which reading options needs not

    return writable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
