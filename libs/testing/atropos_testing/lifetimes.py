"""Rollouts that are cancelled, never get an answer, or have a late engine."""

from __future__ import annotations

import asyncio

from atropos_core.interfaces import Environment
from atropos_core.types import Task
from atropos_testing.attempts import CANCELLED_WITHIN_S, cancel, run_rollout
from atropos_testing.eventloop import Blocked
from atropos_testing.replies import EMPTY
from atropos_testing.report import of_error
from atropos_testing.scripted import FailingPolicy, SilentPolicy

SAMPLING_WITHIN_S = 10.0


async def cancel_rollout(environment: Environment, task: Task) -> str | None:
    """Cancel a rollout while it waits for the policy. Return what is wrong, "" for nothing; None if it never sampled."""
    policy = SilentPolicy(EMPTY, task)
    rollout = asyncio.ensure_future(run_rollout(environment, task, policy, 0))
    began = asyncio.ensure_future(policy.sampling_began.wait())
    await asyncio.wait({rollout, began}, timeout=SAMPLING_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
    began.cancel()
    if not policy.sampling_began.is_set():
        await cancel(rollout)
        return None
    rollout.cancel()
    await asyncio.wait({rollout}, timeout=CANCELLED_WITHIN_S)
    if not rollout.done():
        policy.released.set()
        await cancel(rollout)
        return f"task {task.id!r}: a cancelled rollout still ran {CANCELLED_WITHIN_S:g} s later"
    if rollout.cancelled():
        return ""
    error = rollout.exception()
    if error is None:
        return f"task {task.id!r}: a cancelled rollout swallowed asyncio.CancelledError and gave an episode"
    return f"task {task.id!r}: a cancelled rollout raised {of_error(error)} instead of asyncio.CancelledError"


async def fail_rollout(environment: Environment, task: Task) -> str:
    """Run a rollout with a late engine. It may raise or return an episode, but must end."""
    rollout = asyncio.ensure_future(run_rollout(environment, task, FailingPolicy(EMPTY, task), 0))
    await asyncio.wait({rollout}, timeout=CANCELLED_WITHIN_S)
    if rollout.done():
        if not rollout.cancelled() and isinstance(rollout.exception(), Blocked):
            return f"task {task.id!r}: calls a late engine again and again, and blocks the event loop"
        return ""
    await cancel(rollout)
    return f"task {task.id!r}: called a late engine again and again for {CANCELLED_WITHIN_S:g} s"
