"""The tree of all that was sampled in an episode: which stored ids a request continues.

A turn is one call; its replies are what was sampled for it. A reply's history is the ids of its chain of turns up to the
root: those that were rendered and those that were sampled, as they were. docs/agent-tokens.md has the rules, with pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from atropos_agent_api.calls import Dialect
from atropos_agent_api.tokens.canonical import Unit, call_ids, digest, is_same_reply
from atropos_core.types import Completion, Message, Tokens

Beginning = Literal[
    "new",  # a conversation in which the assistant has said nothing yet
    "extended",  # it continues what was sampled
    "edited",  # the assistant has said in it what was not sampled there: an edit, other tools, a compaction
    "rewritten",  # the format renders what was sampled otherwise, so that there is nothing to extend
]


@dataclass(eq=False)
class Reply:
    """One continuation that was sampled for a turn."""

    turn: Turn
    message: Message  # what the agent was shown, and the reasoning
    position: bytes  # the digest of the conversation up to and with this reply
    completion: Completion  # of what is kept: tokens past a stop are not in it
    cut: Tokens  # what was sampled past a stop, and is not shown
    stop: str = ""  # the stop text that ended it
    text: str | None = None  # all that was said up to here, where the prompt was no conversation
    children: list[Turn] = field(default_factory=list)

    @property
    def history(self) -> Tokens:
        """Every id up to the end of this reply."""
        return np.concatenate([part for reply in self.chain for part in (reply.turn.added, reply.completion.tokens)])

    @property
    def chain(self) -> list[Reply]:
        """From the root to this reply."""
        chain = [self]
        while (parent := chain[-1].turn.parent) is not None:
            chain.append(parent)
        return chain[::-1]

    @property
    def conversation(self) -> tuple[Message, ...]:
        """Every message up to this one."""
        return tuple(said for reply in self.chain for said in (*reply.turn.messages, reply.message))


@dataclass(eq=False)
class Turn:
    """One call. `units` is how many messages its request had, after splits were joined."""

    seed: int  # of its sampling: names it in the session
    dialect: Dialect
    parent: Reply | None  # the reply that it continues
    beginning: Beginning  # why it continues that one, or none
    messages: tuple[Message, ...]  # that are not in the parent's conversation
    units: int
    position: bytes  # the digest of the conversation that was sent
    added: Tokens  # ids that were rendered after the parent's
    is_trained: bool
    is_cut: bool  # it may have fewer tokens than the run's bound
    hints: Mapping[str, str]
    overruled: Mapping[str, Any]
    replies: list[Reply] = field(default_factory=list)
    is_delivered: bool = True  # nothing is known that kept the agent from seeing the answer
    is_superseded: bool = False  # the same call came again, as a retry


@dataclass(frozen=True)
class Match:
    """What a request continues. `remainder` comes after the parent's reply."""

    parent: Reply | None
    beginning: Beginning
    remainder: tuple[Unit, ...]


class TokenTree:
    """Replies by the conversation that they end, and turns in the order in which they were begun."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._replies: dict[bytes, list[Reply]] = {}
        self._turns: dict[bytes, list[Turn]] = {}
        self._texts: list[Reply] = []  # to prompts that were no conversation

    def match(self, units: Sequence[Unit], positions: Sequence[bytes]) -> Match:
        """The longest conversation that ends in a reply and is repeated by a request; `positions` are of its units, with
        that before the first one ahead."""
        for size in range(len(units) - 1, 0, -1):
            echoed = [reply for reply in self._replies.get(positions[size], ()) if _is_echoed(reply, units)]
            if echoed and not any(unit.by_assistant for unit in units[size:]):
                return Match(_likeliest(echoed, units[size - 1].message), "extended", tuple(units[size:]))
        return Match(None, "edited" if any(unit.by_assistant for unit in units) else "new", tuple(units))

    def match_text(self, prompt: str) -> tuple[Reply | None, int]:
        """The reply that ends the longest text that `prompt` begins with, and the length of that text."""
        found = [one for one in self._texts if one.text and prompt != one.text and prompt.startswith(one.text)]
        reply = max(found, key=lambda one: len(one.text or ""), default=None)
        return reply, len(reply.text or "") if reply is not None else 0

    def match_ids(self, prompt: Tokens) -> tuple[Reply | None, int]:
        """The reply with the longest history that `prompt` begins with, and the length of that history."""
        found: tuple[Reply | None, int] = (None, 0)
        for reply in self._texts:
            stored = reply.history
            if found[1] < len(stored) < len(prompt) and np.array_equal(prompt[: len(stored)], stored):
                found = (reply, len(stored))
        return found

    def begin(self, turn: Turn) -> None:
        """Register a turn before it is sampled. One of the same conversation that did not reach its agent is made again by
        it; where there is none, and the client says that this is a retry, the latest one is."""
        earlier = self._turns.setdefault(turn.position, [])
        attempts = [
            one
            for one in earlier
            if not one.is_superseded
            and not any(reply.children for reply in one.replies)
            and all(one.hints.get(name) == turn.hints.get(name) for name in ("session", "agent"))
        ]
        lost = [one for one in attempts if not one.is_delivered]
        says_so = turn.hints.get("retry", "0") not in ("", "0")
        for one in (lost or (attempts if says_so else []))[-1:]:
            one.is_superseded = True
        earlier.append(turn)
        self.turns.append(turn)

    def remove(self, turn: Turn) -> None:
        """A turn of which nothing was sampled. A retry is of it all the same."""
        self.turns.remove(turn)
        turn.is_delivered = False

    def add(self, turn: Turn, replies: Sequence[Reply]) -> None:
        """What was sampled for a turn. From here on it can be continued."""
        turn.replies = list(replies)
        if turn.parent is not None:
            turn.parent.children.append(turn)
        for reply in replies:
            if reply.text is None:
                self._replies.setdefault(reply.position, []).append(reply)
            else:
                self._texts.append(reply)


def positions_of(units: Sequence[Unit], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """A digest of the tools and the units before each of them; the last is of all."""
    positions = [digest("tools", list(tools))]
    for unit in units:
        positions.append(digest(positions[-1], unit.key))
    return positions


def paths(turns: Sequence[Turn]) -> Iterator[list[Reply]]:
    """Every branch from its root to its last reply that is no orphan, in an order that does not depend on which of two calls
    at once came first."""
    waiting = [reply.chain for reply in _standing([turn for turn in turns if turn.parent is None])]
    while waiting:
        path = waiting.pop()
        further = _standing(path[-1].children)
        waiting += [[*path, reply] for reply in further]
        if not further:
            yield path


def is_orphan(reply: Reply) -> bool:
    """An answer that nobody saw: its call was made again, or went away, and nothing continues it."""
    return not reply.children and (reply.turn.is_superseded or not reply.turn.is_delivered)


def _standing(turns: Sequence[Turn]) -> list[Reply]:
    """Their replies, without orphans, last first."""
    return [reply for turn in sorted(turns, key=_order) for reply in turn.replies if not is_orphan(reply)][::-1]


def _order(turn: Turn) -> tuple[int, int]:
    return turn.units, turn.seed


def _is_echoed(reply: Reply, units: Sequence[Unit]) -> bool:
    """Whether what was sent is what was sampled, all along the chain."""
    return all(is_same_reply(units[one.turn.units].message, one.message) for one in reply.chain)


def _likeliest(replies: Sequence[Reply], echoed: Message) -> Reply:
    """Of replies that say the same: the one whose call ids are sent, else one that was seen and nothing continues yet."""
    sent = call_ids(echoed)

    def how_likely(reply: Reply) -> tuple[bool, bool, bool]:
        seen = reply.turn.is_delivered and not reply.turn.is_superseded
        return bool(sent) and call_ids(reply.message) == sent, seen, not reply.children

    return max(replies, key=how_likely)
