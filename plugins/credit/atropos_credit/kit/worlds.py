"""Tasks of a few turns whose episodes can all be listed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

Reply = tuple[int, ...]  # its tokens


class Step(NamedTuple):
    """The answer of a world to a reply."""

    reward: float
    state: Hashable | None = None  # what the policy sees next; None: the episode is over
    outcome: float = 0.0  # if the episode ends here, by the world or by its last turn


class World(NamedTuple):
    """A task. The policy sees only the state, and has a separate distribution for each."""

    name: str
    summary: str
    replies: tuple[Reply, ...]  # no reply begins another
    turns: int  # at most
    start: Hashable
    step: Callable[[Hashable, Reply], Step]


SHORT: tuple[Reply, ...] = ((0,), (1, 0), (1, 1))


def _fixed(state: Hashable, reply: Reply) -> Step:
    history = (*_history(state), reply)
    reward = {(0,): 0.25, (1, 0): 1.0, (1, 1): -0.5}[reply] * len(history)
    outcome = 2.0 if history == ((1, 1), (0,)) else 0.5 * (len(set(history)) == 1)
    return Step(reward, history if len(history) < 2 else None, outcome)


def _stopping(state: Hashable, reply: Reply) -> Step:
    """To reply 0 is to stop. Every other turn earns something, and a good end needs the right turns before it."""
    history = (*_history(state), reply)
    if reply == (0,):
        return Step(0.0, None, 2.0 if (1, 1) in history else 0.0)
    return Step(1.0 if reply == (1, 0) else 0.25, history, -1.0)


def _rooms(state: Hashable, reply: Reply) -> Step:
    """Three rooms in a row. From the middle one the policy goes left, goes right, or opens the box and is done. What it sees is the
    room, so it comes back to states that it was in."""
    assert isinstance(state, int)
    if reply == (0,):
        return Step((-1.0, 0.5, 3.0)[state])
    room = max(0, min(2, state + (1 if reply == (1, 1) else -1)))
    return Step(-0.25, room, -0.5)


def _answer(state: Hashable, reply: Reply) -> Step:
    return Step(0.0, None, float(reply == (1, 1)))


def _history(state: Hashable) -> tuple[Reply, ...]:
    assert isinstance(state, tuple)
    return state


WORLDS = {
    world.name: world
    for world in (
        World("fixed", "two turns, always", SHORT, 2, (), _fixed),
        World("stopping", "the policy decides after how many of three turns it stops", SHORT, 3, (), _stopping),
        World("rooms", "three turns in rooms that it comes back to", SHORT, 3, 1, _rooms),
        World("answer", "one turn, right or wrong", SHORT, 1, (), _answer),
    )
}
