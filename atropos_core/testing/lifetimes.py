"""Plays that are cancelled, that never get an answer, or whose engine is late."""

from __future__ import annotations

import asyncio

from atropos_core.interfaces import Environment
from atropos_core.testing.eventloop import Blocked
from atropos_core.testing.plays import play_as_a_run_does
from atropos_core.testing.replies import EMPTY
from atropos_core.testing.report import of_error
from atropos_core.testing.scripted import FailingPolicy, SilentPolicy
from atropos_core.types import Episode, Task

CANCELLED_WITHIN_S = 2.0
SAMPLING_WITHIN_S = 10.0


async def cancel_a_play(environment: Environment, task: Task) -> str | None:
    """Cancel a play while it waits for the policy. What is wrong, empty where nothing is; None where it never asked."""
    policy = SilentPolicy(EMPTY, task)
    play = asyncio.ensure_future(play_as_a_run_does(environment, task, policy, 0))
    began = asyncio.ensure_future(policy.sampling_began.wait())
    await asyncio.wait({play, began}, timeout=SAMPLING_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
    began.cancel()
    if not policy.sampling_began.is_set():
        await _end(play)
        return None
    play.cancel()
    await asyncio.wait({play}, timeout=CANCELLED_WITHIN_S)
    if not play.done():
        policy.released.set()
        await _end(play)
        return f"task {task.id!r}: a cancelled play still ran {CANCELLED_WITHIN_S:g} s later"
    if play.cancelled():
        return ""
    error = play.exception()
    if error is None:
        return f"task {task.id!r}: a cancelled play swallowed asyncio.CancelledError and gave an episode"
    return f"task {task.id!r}: a cancelled play raised {of_error(error)} instead of asyncio.CancelledError"


async def fail_a_play(environment: Environment, task: Task) -> str:
    """Play while the engine is late. The play may raise or give an episode, but must end."""
    play = asyncio.ensure_future(play_as_a_run_does(environment, task, FailingPolicy(EMPTY, task), 0))
    await asyncio.wait({play}, timeout=CANCELLED_WITHIN_S)
    if play.done():
        if not play.cancelled() and isinstance(play.exception(), Blocked):
            return f"task {task.id!r}: asks a late engine again and again, and holds the event loop"
        return ""
    await _end(play)
    return f"task {task.id!r}: asked a late engine again and again for {CANCELLED_WITHIN_S:g} s"


async def _end(play: asyncio.Future[Episode]) -> None:
    for _ in range(3):
        if play.done():
            break
        play.cancel()
        await asyncio.wait({play}, timeout=CANCELLED_WITHIN_S / 4)
    if play.done() and not play.cancelled():
        play.exception()
