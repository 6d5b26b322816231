"""From the tokens of an episode to its turns, and from advantages of turns to tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from atropos_core.turn_rewards import outcome_rewards, turn_ends, turns_in_order
from atropos_core.types import Episode, Rollout, ScoredGroup, Tokens
from atropos_credit.config import State
from atropos_credit.turns import Turns, Values


class Span(NamedTuple):
    """The tokens of one turn, from `begin` to before `end`, all of them sampled."""

    rollout: int
    shown: int  # the position after the last sampled token before the turn, or 0
    begin: int
    end: int
    value: float
    length: int  # sampled tokens


def spans_of(episode: Episode) -> list[Span]:
    """The turns of an episode in the order of time (`turns_in_order`).

    A turn ends with each unbroken run of sampled tokens, whether it earned something or not, and in addition at each turn reward inside
    such a run. So the number of a turn does not depend on what was earned later."""
    spans = [span for number, rollout in enumerate(episode.rollouts) for span in _spans_of_rollout(number, rollout)]
    if all(rollout.turn_order is None for rollout in episode.rollouts):
        return spans
    when = {place: at for at, place in enumerate(turns_in_order(episode.rollouts))}
    ends = [turn_ends(rollout) for rollout in episode.rollouts]

    def turn_of(span: Span) -> tuple[int, int]:
        own = ends[span.rollout]
        return span.rollout, int(own[np.searchsorted(own, span.end)])

    return sorted(spans, key=lambda span: when[turn_of(span)])  # stable: parts of one turn stay in their order


def _spans_of_rollout(number: int, rollout: Rollout) -> Iterator[Span]:
    placed = (
        {}
        if rollout.turns is None
        else dict(zip(rollout.turns.ends.tolist(), rollout.turns.values.tolist(), strict=True))
    )
    sampled, done = np.flatnonzero(rollout.sampled), 0
    for end in sorted({*turn_ends(rollout).tolist(), *placed}):
        until = int(np.searchsorted(sampled, end))
        shown = int(sampled[done - 1]) + 1 if done else 0
        yield Span(number, shown, int(sampled[done]), end, placed.get(end, 0.0), until - done)
        done = until


def turns_of(group: ScoredGroup, state: State = "observation") -> list[Turns]:
    """The rewards of each episode by turn. The outcome is what its total, as it is trained, has beyond the turn rewards."""
    return [
        _turns(episode, float(outcome), state)
        for episode, outcome in zip(group.episodes, outcome_rewards(group), strict=True)
    ]


def _turns(episode: Episode, outcome: float, state: State) -> Turns:
    spans = spans_of(episode)
    return Turns(
        rewards=np.array([span.value for span in spans], np.float64),
        outcome=outcome,
        states=tuple(_state(episode.rollouts[span.rollout], span, state) for span in spans),
        lengths=tuple(span.length for span in spans),
    )


def _state(rollout: Rollout, span: Span, state: State) -> bytes:
    """A digest of the tokens that a turn was shown. If there are none, as between two parts of one reply, of all tokens before it."""
    since = 0 if state == "history" or span.shown == span.begin else span.shown
    return digest(rollout.tokens[since : span.begin])


def digest(tokens: Tokens) -> bytes:
    """16 bytes that stand for these tokens."""
    return hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=16).digest()


def with_advantages(episode: Episode, advantages: Values) -> Episode:
    """The episode with the advantage of each turn at its sampled tokens. A rollout that has advantages keeps them."""
    columns = [np.zeros(len(rollout.tokens), np.float32) for rollout in episode.rollouts]
    for span, value in zip(spans_of(episode), advantages, strict=True):
        columns[span.rollout][span.begin : span.end] = value
    return replace(
        episode,
        rollouts=tuple(
            replace(rollout, advantages=column) if rollout.advantages is None else rollout
            for rollout, column in zip(episode.rollouts, columns, strict=True)
        ),
    )
