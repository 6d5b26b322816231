"""The prompt of a call: the stored ids that it continues, and the ids that are rendered after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from atropos_agent_api.calls import Call, CallRefused
from atropos_agent_api.tokens.canonical import Unit, call_ids, digest, units_of
from atropos_agent_api.tokens.formats import ChatFormat
from atropos_agent_api.tokens.openings import opening_of
from atropos_agent_api.tokens.token_tree import Beginning, Match, Reply, TokenTree, positions_of
from atropos_core.errors import DataError
from atropos_core.guards.worker_threads import apart_if_long
from atropos_core.types import Message, Tokens

NOTHING: Tokens = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Prompt:
    """`opening` are the last ids of `added`, with which the reply must begin if it has to call a tool."""

    parent: Reply | None  # the reply whose history is extended
    beginning: Beginning
    messages: tuple[Message, ...]  # after the parent's
    units: int  # number of all messages
    position: bytes
    history: Tokens  # stored ids
    added: Tokens  # ids after those
    opening: Tokens

    @property
    def ids(self) -> Tokens:
        return np.concatenate([self.history, self.added])


class PromptBuilder:
    """Finds what a call continues in the tree, and lets the format render the rest. Changes nothing."""

    def __init__(self, format: ChatFormat, tree: TokenTree, history: Literal["as_sampled", "as_sent"]) -> None:
        self._format = format
        self._tree = tree
        self._history = history

    async def prompt(self, call: Call) -> Prompt:
        """The prompt of a call. Raises CallRefused if it cannot be rendered."""
        field = "messages" if call.prompt is None else "prompt"
        try:
            return await (self._of_messages(call) if call.prompt is None else self._of_text(call.prompt))
        except UnicodeEncodeError as error:
            raise CallRefused(
                f"{field} contains {error.object[error.start]!a}, half of a surrogate pair, which cannot be encoded. Remove it.",
                field=field,
            ) from None
        except DataError as error:
            raise CallRefused(str(error), field=field) from error

    async def _of_messages(self, call: Call) -> Prompt:
        units, positions = await apart_if_long((call.messages, call.tools), _units, call)
        match = self._tree.match(units, positions)
        history, added, match = await self._continued(match, units, call)
        opening = await self._opening(call)
        return Prompt(
            parent=match.parent,
            beginning=match.beginning,
            messages=tuple(unit.message for unit in match.remainder),
            units=len(units),
            position=positions[-1],
            history=history,
            added=np.concatenate([added, opening]),
            opening=opening,
        )

    async def _continued(self, match: Match, units: tuple[Unit, ...], call: Call) -> tuple[Tokens, Tokens, Match]:
        """The stored ids that are extended, the ids after them, and the match they belong to."""
        parent = match.parent
        if parent is not None and self._history == "as_sampled":
            before, remainder = parent.history, _with_stored_ids(match, units)
            size = len(before) - len(parent.completion.tokens)
            added = await self._format.extend(before[:size], before[size:], remainder, call.tools)
            if added is not None:
                return before, added, match
        rendered = await self._format.render([unit.message for unit in units], call.tools)
        for reply in parent.chain[::-1] if parent is not None else ():
            stored = reply.history
            if len(stored) < len(rendered) and np.array_equal(rendered[: len(stored)], stored):
                beginning: Beginning = "extended" if reply is parent else "rewritten"
                return stored, rendered[len(stored) :], Match(reply, beginning, units[reply.turn.units + 1 :])
        return NOTHING, rendered, Match(None, match.beginning if parent is None else "rewritten", units)

    async def _of_text(self, prompt: str | Tokens) -> Prompt:
        """A text continues the longest stored text that it begins with; ids continue the longest stored ids."""
        if isinstance(prompt, str):
            parent, before = self._tree.match_text(prompt)
            added = await self._format.encode(prompt[before:])
            text = prompt[before:]
        else:
            parent, before = self._tree.match_ids(prompt)
            added = np.asarray(prompt[before:], np.int32)
            text = await self._format.text(added)
        start = digest("prompt") if parent is None else parent.position
        return Prompt(
            parent=parent,
            beginning="new" if parent is None else "extended",
            messages=({"role": "user", "content": text},),
            units=1 if parent is None else parent.turn.units + 2,
            position=digest(start, text, added.tobytes()),
            history=NOTHING if parent is None else parent.history,
            added=added,
            opening=NOTHING,
        )

    async def _opening(self, call: Call) -> Tokens:
        if call.tool_choice in ("auto", "none"):
            return NOTHING
        name = call.tool_choice.removeprefix("tool:") if call.tool_choice != "required" else None
        names = {tool["function"]["name"] for tool in call.tools}
        if not names or (name is not None and name not in names):
            raise CallRefused(
                f"tool_choice is {call.tool_choice!r}, but that tool is not given. Send it in tools, or choose another.",
                field="tool_choice",
            )
        # the first and the last name in order share the beginning that all of them share
        opening = await opening_of(self._format, [name] if name is not None else sorted({min(names), max(names)}))
        if opening is None:
            raise CallRefused(
                f"tool_choice {call.tool_choice!r} cannot be kept: the format {self._format.name!r} of this model has no "
                'fixed beginning of a call to start the reply with. Use "auto".',
                field="tool_choice",
                code="unsupported_parameter",
            )
        return opening


def _units(call: Call) -> tuple[tuple[Unit, ...], list[bytes]]:
    units = tuple(units_of(call.messages))
    return units, positions_of(units, call.tools)


def _with_stored_ids(match: Match, units: tuple[Unit, ...]) -> list[Message]:
    """The messages after the parent's, with the call ids that were sampled instead of the client's: some formats write them
    out."""
    stored: dict[str, str] = {}
    for reply in match.parent.chain if match.parent is not None else ():
        stored |= zip(call_ids(units[reply.turn.units].message), call_ids(reply.message), strict=False)
    after = [unit.message for unit in match.remainder]
    return [
        {**message, "tool_call_id": stored.get(message["tool_call_id"], message["tool_call_id"])}
        if message.get("tool_call_id")
        else message
        for message in after
    ]
