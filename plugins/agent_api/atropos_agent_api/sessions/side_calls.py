"""Find the calls of an episode that are outside its task: a greeting that probes the server, a title, a memory, a sub-agent's.

A title often quotes the task's prompt, so the tools and the start of the system prompt count as well. A doubtful conversation
belongs to the task.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from itertools import dropwhile

from atropos_agent_api.tokens.token_tree import Turn
from atropos_core.types import Message

START = 200  # characters of a system prompt: further on it has dates, folders and what was remembered
SHOWN = 60  # characters, in a description


def side_turns(turns: Sequence[Turn], prompt: str) -> frozenset[Turn] | None:
    """The turns of conversations that are outside the task with this prompt, of those that may be trained. None if none of
    these shows the prompt, so that nothing can be told.

    The task's conversations are those that show the prompt. If any of these has tools, those without tools are not. A conversation
    that begins with the same system prompt as one of the task's belongs to the task as well if it has the same tools and begins
    later (a history that was compacted) or shows the prompt (a last answer without tools)."""
    roots: dict[Turn, Turn] = {}
    said: dict[Turn, list[str]] = {}
    for turn in turns:  # a parent is before its children
        roots[turn] = turn if turn.parent is None else roots[turn.parent.turn]
        said.setdefault(roots[turn], []).extend(_texts(turn.messages))
    may_be = {roots[turn] for turn in turns if turn.is_trained}
    shown = {root for root in may_be if _shows(_plain("".join(said[root])), prompt)}
    main = {root for root in shown if root.tools} or shown
    if not main:
        return None
    systems = {_system(root) for root in main} - {""}
    openings = {(_system(root), root.tools) for root in main}
    later = dropwhile(lambda turn: turn not in main, turns)
    main |= {root for root in may_be.intersection(later) if (_system(root), root.tools) in openings}
    main |= {root for root in shown if _system(root) in systems}
    return frozenset(turn for turn in turns if turn.is_trained and roots[turn] not in main)


def description(turn: Turn) -> str:
    """A short description of a conversation, for a message."""
    while turn.parent is not None:
        turn = turn.parent.turn
    system = "".join(_texts(turn.messages, of_system=True))
    begins = " ".join((system or "".join(_texts(turn.messages))).split())
    more = "..." if len(begins) > SHOWN else ""
    which = "the system prompt" if system else "the message"
    return f"{which} {begins[:SHOWN] + more!r} and {', '.join(turn.tools[:5]) if turn.tools else 'no tools'}"


def _system(root: Turn) -> str:
    return _plain("".join(_texts(root.messages, of_system=True)))[:START]


def _texts(messages: Sequence[Message], *, of_system: bool = False) -> list[str]:
    return [str(one["content"]) for one in messages if not of_system or one["role"] in ("system", "developer")]


def _shows(text: str, prompt: str) -> bool:
    """Look for the prompt in a text: as it is, or as programs escape it in JSON or XML."""
    in_json = [json.dumps(prompt, ensure_ascii=ascii)[1:-1] for ascii in (True, False)]
    wanted = {_plain(one) for one in (prompt, *in_json, html.escape(prompt), html.escape(prompt, quote=False))}
    return "" not in wanted and any(one in text for one in wanted)


def _plain(text: str) -> str:
    """The text without white space, which programs add and trim."""
    return "".join(text.split())
