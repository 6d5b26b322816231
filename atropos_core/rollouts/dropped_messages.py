"""Find messages and tools that a chat template leaves out of the prompt. Templates ignore roles and contents that they do not know,
and the policy would be trained on prompts that lack what the environment said.

A message was left out if the prompt stays the same when another text takes its place. Each kind of message is tried once per
template: its role, the form of its content, and the roles around it. A try costs one more rendering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from atropos_core import console
from atropos_core.errors import DataError, MessageDropped

Values = Sequence[Mapping[str, Any]]
Kind = tuple[object, ...]
Prompt = str | Sequence[int]  # a list or a tuple, which are compared by their values

STAND_IN = "another text in its place"
TOOL_ROLES = ("tool", "function", "ipython", "observation")
SYSTEM_ROLES = ("system", "developer")
_MOST_KEPT = 4096  # kinds of messages that were found in a prompt
_KEPT_KEYS = ("type", "id")  # templates compare their values, and do not show them
_WITH_TOOLS = "use a model whose chat template shows tools, such as tiny-tools (--model tiny-tools)"


class DroppedMessages:
    """The check of one model's prompts. `source`: what makes them, as errors name it. A system message that begins a conversation may
    be left out: models that were trained without one, such as tiny, have such templates, and environments send one by default. One line
    on stderr then says so."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._ignores_system = False
        self._shown: set[Kind] = set()  # or may be left out

    def check(
        self,
        messages: Values,
        tools: Values,
        rendered: Prompt,
        render: Callable[[Values, Values], Prompt],
        where: Kind = (),
        *,
        before: str = "",
    ) -> None:
        """Raises MessageDropped if a message, or the tools, left no trace in `rendered`, which `render` makes of them. `where`:
        what else decides what the template shows. `before`: the role of the message before the first one."""
        where = (*where, bool(tools))

        def shows(other: Values, other_tools: Values = tools) -> bool:
            try:
                return render(other, other_tools) != rendered
            except DataError:  # the template reads what was changed
                return True

        if len(self._shown) > _MOST_KEPT:  # roles may come from the client of an agent
            self._shown.clear()
        kind: Kind = (*where, "tools")
        if tools and kind not in self._shown and (other := changed(tools)) != tools:
            if not shows(messages, other):
                raise MessageDropped(
                    f"{self._source} leaves the definitions of the tools out of the prompt, so the policy would "
                    "not know them.",
                    remedy=f"{_WITH_TOOLS[0].upper()}{_WITH_TOOLS[1:]}; or describe the tools in a message, and pass none.",
                )
            self._shown.add(kind)
        roles = [before, *(_role(message) for message in messages), ""]
        for at, message in enumerate(messages):
            for part, replaced in _parts(message):
                kind = (*where, at == 0, *roles[at : at + 3], part)
                if kind in self._shown:
                    continue
                others = [replaced, *([_with_other_ids(message)] if part == "calls" else ())]
                if not any(shows([*messages[:at], other, *messages[at + 1 :]]) for other in others):
                    if at == 0 and not before and roles[1] in SYSTEM_ROLES and part == "text":
                        if not self._ignores_system:
                            console.note("prompt", f"{self._source} leaves out the system message", stderr=True)
                        self._ignores_system = True
                        self._shown.add(kind)
                        continue
                    as_text = part != "text" and shows(
                        [*messages[:at], {**message, "content": STAND_IN}, *messages[at + 1 :]]
                    )
                    raise self._dropped(at, len(messages), roles[at + 1], part, as_text=as_text)
                self._shown.add(kind)

    def _dropped(self, at: int, count: int, role: str, part: str, *, as_text: bool) -> MessageDropped:
        what = f"message {at + 1} of {count}, of the role {role!r}"
        if part == "calls":
            what, remedy = f"the tool calls of {what}", f"Write the calls into its content; or {_WITH_TOOLS}."
        elif as_text:
            what, remedy = f"the content of {what}, which is not a text", "Send the content as one text."
        elif role in TOOL_ROLES:
            remedy = f"Send a tool's result in a message of the role 'user'; or {_WITH_TOOLS}."
        elif role in SYSTEM_ROLES:
            remedy = "Put its text into the first message, of the role 'system', or into a message of the user."
        else:
            remedy = "Give it a role that this template shows, such as 'user'."
        return MessageDropped(
            f"{self._source} leaves {what}, out of the prompt, so the policy would not see it.",
            remedy=remedy,
        )


def _with_other_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with other ids of its calls: some families show a call's name only as a part of its id."""
    return {
        **message,
        "tool_calls": [{**call, "id": STAND_IN} if "id" in call else call for call in message["tool_calls"]],
    }


def changed(value: Any) -> Any:
    """Return a JSON value with other texts and numbers in the same places."""
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return STAND_IN
    if isinstance(value, Mapping):
        return {key: one if key in _KEPT_KEYS else changed(one) for key, one in value.items()}
    return [changed(one) for one in value] if isinstance(value, list | tuple) else value


def _parts(message: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name of each part of a message that a prompt must show, and the message with another text in its place. The content next
    to tool calls is not one: the templates of some families show only the calls. Nor is reasoning, which they drop from earlier turns."""
    if calls := message.get("tool_calls"):
        if (other := changed(calls)) != calls:
            yield "calls", {**message, "tool_calls": other}
        return
    content = message.get("content")
    if isinstance(content, str):
        if content and not content.isspace():
            yield "text", {**message, "content": STAND_IN}
    elif isinstance(content, list | tuple) and all(isinstance(part, Mapping) and "type" in part for part in content):
        for at, part in enumerate(content):
            if isinstance(text := part.get("text"), str) and text.strip():
                other = [*content[:at], {**part, "text": STAND_IN}, *content[at + 1 :]]
                yield f"part {at + 1} of {len(content)}", {**message, "content": other}
    elif (other := changed(content)) != content:
        yield type(content).__name__, {**message, "content": other}


def _role(message: Mapping[str, Any]) -> str:
    return str(message.get("role"))
