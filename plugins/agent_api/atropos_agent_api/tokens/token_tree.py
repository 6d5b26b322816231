"""The tree of everything that was sampled in an episode: it finds the stored ids that a request continues.

A turn is one call; its replies are what was sampled for it. A reply's history is the ids of its chain of turns up to the root:
rendered and sampled, unchanged. docs/agent-tokens.md has the rules, with pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from atropos_agent_api.calls import Dialect
from atropos_agent_api.tokens.canonical import Unit, call_ids, digest, is_same_reply
from atropos_core.types import Completion, Message, Tokens

Beginning = Literal[
    "new",  # a conversation in which the assistant has said nothing yet
    "extended",  # it continues what was sampled
    "edited",  # it has assistant messages that were not sampled there: an edit, other tools, a compaction
    "rewritten",  # the format renders what was sampled differently, so there is nothing to extend
]


@dataclass(eq=False)
class Reply:
    """One continuation that was sampled for a turn."""

    turn: Turn
    message: Message  # what the agent saw, and the reasoning
    position: bytes  # the digest of the conversation up to and including this reply
    completion: Completion  # the kept part, without tokens past a stop
    cut: Tokens  # sampled past a stop; not shown
    stop: str = ""  # the stop text that ended it
    text: str | None = None  # its text, if the prompt was not a conversation
    children: list[Turn] = field(default_factory=list)

    @property
    def history(self) -> Tokens:
        """Every id up to the end of this reply."""
        return np.concatenate([part for reply in self.chain for part in (reply.turn.added, reply.completion.tokens)])

    @property
    def chain(self) -> list[Reply]:
        """The replies from the root to this one."""
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
    """One call. `units` is the number of messages in its request, after split ones were joined."""

    seed: int  # of its sampling; it names the turn in the session
    dialect: Dialect
    parent: Reply | None  # the reply that it continues
    beginning: Beginning  # the reason why it continues that one, or none
    messages: tuple[Message, ...]  # not in the parent's conversation
    units: int
    position: bytes  # the digest of the conversation that was sent
    added: Tokens  # ids that were rendered after the parent's
    tools: tuple[str, ...]  # sorted names of the tools that it offers
    is_trained: bool
    is_cut: bool  # it may have fewer tokens than the run's bound
    hints: Mapping[str, str]
    overruled: Mapping[str, Any]
    replies: list[Reply] = field(default_factory=list)
    is_delivered: bool = True  # some of its answer was sent, or will be
    is_side: bool = False  # its conversation is outside the task
    is_left_out: bool = False  # not trained because of that
    answered_before: int = 0  # calls of the session that had their answer when this one began


@dataclass(frozen=True)
class Match:
    """The reply that a request continues. `remainder` comes after the parent's reply."""

    parent: Reply | None
    beginning: Beginning
    remainder: tuple[Unit, ...]


class TokenTree:
    """Replies by the conversation that they end, and turns in the order in which they began."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._replies: dict[bytes, list[Reply]] = {}
        self._texts: list[Turn] = []  # with plain text as prompts, continuing no reply
        self._answered = 0  # turns

    def match(self, units: Sequence[Unit], positions: Sequence[bytes]) -> Match:
        """The longest conversation that ends in a reply and is repeated by a request. `positions` are those of its units, preceded
        by the position before the first one."""
        size = max(
            (at for at, unit in enumerate(units, 1) if unit.by_assistant), default=0
        )  # a reply is the last unit of the assistant
        if 0 < size < len(units):
            seen: dict[Reply, bool] = {}
            echoed = [reply for reply in self._replies.get(positions[size], ()) if _is_echoed(reply, units, seen)]
            if echoed:
                return Match(_likeliest(echoed, units[size - 1].message), "extended", tuple(units[size:]))
        return Match(None, "edited" if size else "new", tuple(units))

    def match_text(self, prompt: str) -> tuple[Reply | None, int]:
        """The reply that ends the longest text that `prompt` begins with, and the length of that text."""

        def end(reply: Reply, start: int) -> int:
            said = f"{reply.turn.messages[0]['content']}{reply.text}"
            return start + len(said) if prompt.startswith(said, start) else 0

        return self._longest(end, len(prompt))

    def match_ids(self, prompt: Tokens) -> tuple[Reply | None, int]:
        """The reply with the longest history that `prompt` begins with, and the length of that history."""

        def end(reply: Reply, start: int) -> int:
            for part in (reply.turn.added, reply.completion.tokens):
                if not np.array_equal(prompt[start : start + len(part)], part):
                    return 0
                start += len(part)
            return start

        return self._longest(end, len(prompt))

    def _longest(self, end: Callable[[Reply, int], int], size: int) -> tuple[Reply | None, int]:
        """The last reply of the longest chain that a prompt of `size` repeats, and the place of its end; the prompt must continue
        after it. `end(reply, start)`: the place at which a reply that begins at `start` ends in the prompt, or 0 if it does not match."""
        found: tuple[Reply | None, int] = (None, 0)
        waiting = [(turn, 0) for turn in self._texts]
        while waiting:
            turn, start = waiting.pop()
            for reply in turn.replies:
                if not 0 < (stop := end(reply, start)) < size:
                    continue
                if stop > found[1]:
                    found = (reply, stop)
                waiting += [(child, stop) for child in reply.children]
        return found

    def begin(self, turn: Turn) -> None:
        """Register a turn before it is sampled."""
        turn.answered_before = self._answered
        self.turns.append(turn)

    def remove(self, turn: Turn) -> None:
        """Remove a turn of which nothing was sampled."""
        self.turns.remove(turn)

    def add(self, turn: Turn, replies: Sequence[Reply]) -> None:
        """Add what was sampled for a turn. From now on it can be continued."""
        turn.replies = list(replies)
        self._answered += 1
        if turn.parent is not None:
            turn.parent.children.append(turn)
        for reply in replies:
            if reply.text is None:
                self._replies.setdefault(reply.position, []).append(reply)
        if turn.parent is None and replies and replies[0].text is not None:
            self._texts.append(turn)


def positions_of(units: Sequence[Unit], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """A digest of the tools and the units before each of them; the last is of all."""
    positions = [digest("tools", list(tools))]
    for unit in units:
        positions.append(digest(positions[-1], unit.key))
    return positions


def paths(turns: Sequence[Turn]) -> Iterator[list[Reply]]:
    """Every branch from its root to its last reply that is not an orphan. The order does not depend on which of two simultaneous
    calls came first."""
    waiting = [reply.chain for reply in _standing([turn for turn in turns if turn.parent is None])]
    while waiting:
        path = waiting.pop()
        further = _standing(path[-1].children)
        waiting += [[*path, reply] for reply in further]
        if not further:
            yield path


def by_time(turns: Sequence[Turn]) -> list[Turn]:
    """The turns in an order in which each comes after those that were answered before it began. The order does not depend on
    which of two calls that began together came first."""
    return sorted(turns, key=lambda turn: (turn.answered_before, *_order(turn)))


def is_orphan(reply: Reply) -> bool:
    """Return True for a reply that its client did not see, because it had gone before any of it was sent, and that nothing continues."""
    return not reply.children and not reply.turn.is_delivered


def _standing(turns: Sequence[Turn]) -> list[Reply]:
    """The turns' replies without orphans, last first."""
    return [reply for turn in sorted(turns, key=_order) for reply in turn.replies if not is_orphan(reply)][::-1]


def _order(turn: Turn) -> tuple[int, int]:
    return turn.units, turn.seed


def _is_echoed(reply: Reply, units: Sequence[Unit], seen: dict[Reply, bool]) -> bool:
    """Return True if the client sent back what was sampled, for every reply of the chain. `seen`: results for earlier replies."""
    for one in reply.chain:
        if one not in seen:
            seen[one] = is_same_reply(units[one.turn.units].message, one.message)
        if not seen[one]:
            return False
    return True


def _likeliest(replies: Sequence[Reply], echoed: Message) -> Reply:
    """The best of replies with the same content: the one whose call ids were sent, else one that was seen and not continued yet."""
    sent = call_ids(echoed)

    def how_likely(reply: Reply) -> tuple[bool, bool, bool]:
        return bool(sent) and call_ids(reply.message) == sent, reply.turn.is_delivered, not reply.children

    return max(replies, key=how_likely)
