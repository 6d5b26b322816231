"""The fate of each token of an episode: trained, context or dropped, and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from atropos_agent_api.tokens.token_tree import Reply, Turn, by_time, is_orphan, paths
from atropos_core.turn_rewards import turn_ends
from atropos_core.types import Kept, Message, Rollout, RoutedExperts, Tokens

Fate = Literal["trained", "context", "dropped"]


@dataclass(frozen=True)
class Span:
    """Tokens `[start, stop)` of rollout number `rollout`, and the reason why they are there. `turn` names their call."""

    rollout: int
    start: int
    stop: int
    fate: Fate
    why: str  # "sampled", "rendered", "trained in rollout 0", "its call is not trained"
    turn: str


@dataclass(frozen=True)
class Dropped:
    """Sampled tokens that are not in a rollout."""

    turn: str
    why: str  # "orphan", "past a stop", "its call is not trained"
    tokens: Tokens  # [T]


@dataclass(frozen=True)
class Account:
    """The branches of an episode as rollouts, and the fate of every token."""

    rollouts: tuple[Rollout, ...]
    conversations: tuple[tuple[Message, ...], ...]  # of each rollout
    spans: tuple[Span, ...]  # every token of every rollout, in order
    dropped: tuple[Dropped, ...]
    branches: int
    orphans: int
    # of each trained reply, in the order of the calls: its rollout, and the position after its last token there (0: it has none)
    turns: tuple[tuple[int, int], ...] = ()

    def count(self, fate: Fate) -> int:
        if fate == "dropped":
            return sum(len(one.tokens) for one in self.dropped)
        return sum(span.stop - span.start for span in self.spans if span.fate == fate)


def account_of(turns: Sequence[Turn]) -> Account:
    """The account of these turns. A sampled token is trained only in the first branch that contains it."""
    trained_in: dict[Reply, int] = {}
    rollouts: list[Rollout] = []
    conversations: list[tuple[Message, ...]] = []
    spans: list[Span] = []
    branches = list(paths(turns))
    kept: set[Reply] = set()
    ends: dict[Reply, tuple[int, int]] = {}
    for path in branches:
        if not any(is_trained(reply.turn) and reply not in trained_in for reply in path):
            continue
        at = 0
        first = len(spans)
        kept.update(path)
        for reply in path:
            name, size = name_of(reply.turn), len(reply.completion.tokens)
            fate, why = _fate(reply, trained_in, len(rollouts))
            added, end = at + len(reply.turn.added), at + len(reply.turn.added) + size
            spans.append(Span(len(rollouts), at, added, "context", "rendered", name))
            spans.append(Span(len(rollouts), added, end, fate, why, name))
            if fate == "trained":
                ends[reply] = len(rollouts), end if size else 0
            at = end
        rollouts.append(_rollout(path, spans[first:]))
        conversations.append(tuple(said for reply in path for said in (*reply.turn.messages, reply.message)))
    replies = [reply for turn in turns for reply in turn.replies]
    dropped = [
        Dropped(
            name_of(reply.turn), "orphan" if is_orphan(reply) else "its call is not trained", reply.completion.tokens
        )
        for reply in replies
        if reply not in kept
    ]
    dropped += [Dropped(name_of(reply.turn), "past a stop", reply.cut) for reply in replies if len(reply.cut)]
    calls = [ends[reply] for turn in by_time(turns) for reply in turn.replies if reply in ends]
    ordered = _ordered(rollouts, [place for place in calls if place[1]])
    return Account(
        ordered, tuple(conversations), tuple(spans), tuple(dropped), len(branches), sum(map(is_orphan, replies)),
        tuple(ends[reply] for reply in replies if reply in ends),
    )  # fmt: skip


def _ordered(rollouts: Sequence[Rollout], calls: Sequence[tuple[int, int]]) -> tuple[Rollout, ...]:
    """The rollouts with the order of their turns, if they were not sampled one after the other. `calls`: of each call, its rollout and
    its end there, in the order of time."""
    if list(calls) == sorted(calls):
        return tuple(rollouts)
    when = {place: number for number, place in enumerate(calls)}
    return tuple(
        replace(one, turn_order=np.array([when[at, end] for end in turn_ends(one).tolist()], np.int64))
        for at, one in enumerate(rollouts)
    )


def name_of(turn: Turn) -> str:
    """The name of a turn in a session: the id of its answer."""
    return f"{turn.seed:016x}"


def is_trained(turn: Turn) -> bool:
    return turn.is_trained and not turn.is_left_out


def _fate(reply: Reply, trained_in: dict[Reply, int], rollout: int) -> tuple[Fate, str]:
    if not is_trained(reply.turn):
        return "context", "its call is not trained"
    if (other := trained_in.setdefault(reply, rollout)) != rollout:
        return "context", f"trained in rollout {other}"
    return "trained", "sampled"


def _rollout(path: Sequence[Reply], spans: Sequence[Span]) -> Rollout:
    """Make a rollout. Tokens that another rollout trains are context here: not sampled, without logprob and version."""
    tokens = path[-1].history.astype(np.int32)
    trained = np.zeros(len(tokens), np.bool_)
    logprobs = np.zeros(len(tokens), np.float32)
    versions = np.zeros(len(tokens), np.int32)
    kept: list[tuple[int, Kept | None]] = []
    for reply, span in zip(path, spans[1::2], strict=True):
        if span.fate == "trained":
            trained[span.start : span.stop] = True
            logprobs[span.start : span.stop] = reply.completion.logprobs
            versions[span.start : span.stop] = reply.completion.policy_version
            kept.append((span.start, reply.completion.kept))
    return Rollout(
        tokens=tokens,
        sampled=trained,
        trained=trained,
        logprobs=logprobs,
        policy_version=versions,
        temperature=path[-1].completion.temperature,
        truncated=any(reply.completion.truncated for reply in path),
        kept=Kept.joined(len(tokens), kept),
        experts=RoutedExperts.joined(len(tokens), (reply.completion.experts for reply in path)),
    )
