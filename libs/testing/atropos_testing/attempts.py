"""One rollout with a scripted policy, and the comparison of two."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from atropos_core.guards.exits import line_of_component
from atropos_core.interfaces import Environment
from atropos_core.rollouts.runner import runs_groups
from atropos_core.types import Episode, Failed, Rollout, Task, Tokens
from atropos_testing.eventloop import Blocked
from atropos_testing.report import RAISED, brief, of_error
from atropos_testing.scripted import Script, ScriptedPolicy

CANCELLED_WITHIN_S = 2.0
CAUGHT = ", and catches asyncio.CancelledError, which would end it"
FLOAT32_MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Outcome:
    """One rollout and how it ended: in an episode, or in `error`."""

    task: Task
    script: Script
    seed: int
    policy: ScriptedPolicy
    episode: Episode | None = None
    error: str = ""
    where: str = ""  # the line of the component's code that raised the error
    unended: bool = False  # it had to be ended
    given_up: bool = False  # it was never begun: too many before it did not end

    @property
    def label(self) -> str:
        return f"task {self.task.id!r}, policy {self.script.name!r}"

    @property
    def correct(self) -> bool:
        return self.episode is not None and self.episode.correct is True

    @property
    def score(self) -> float:
        """The score; NaN if there is none, or it is not a number (`wrong_with` names it)."""
        score: object = None if self.episode is None else self.episode.score
        return float(score) if isinstance(score, Real) else float("nan")


class RolloutFailed(Exception):
    """Raised if `rollout_group` returned a Failed instead of its one rollout."""


async def run_rollout(environment: Environment, task: Task, policy: ScriptedPolicy, seed: int) -> Episode:
    """Run `rollout`, or `rollout_group` if the environment overrides it."""
    if not runs_groups(environment):
        return await environment.rollout(task, policy, seed=seed)
    outcome = await environment.rollout_group(task, policy, 1, seeds=[seed])
    if len(outcome) != 1:
        raise RolloutFailed(f"rollout_group() was called for 1 rollout and gave {len(outcome)}")
    one = outcome[0]
    if isinstance(one, BaseException):
        raise one
    if isinstance(one, Failed):
        raise RolloutFailed(one.cause)
    return one


async def attempt(
    environment: Environment,
    task: Task,
    script: Script,
    *,
    seed: int,
    deadline_s: float,
    spread_s: float = 0.0,
    policy: ScriptedPolicy | None = None,
) -> Outcome:
    """Run a rollout and never raise, except for an interrupt."""
    policy = policy or ScriptedPolicy(script, task, spread_s=spread_s)
    rollout = asyncio.ensure_future(run_rollout(environment, task, policy, seed))
    try:
        await asyncio.wait({rollout}, timeout=deadline_s)
        ended = rollout.done()
        caught = await cancel(rollout)
        if not ended:
            error = f"did not end within {deadline_s:g} s{CAUGHT if caught else ''}"
            return Outcome(task, script, seed, policy, None, error, unended=True)
        if rollout.cancelled():
            return Outcome(
                task, script, seed, policy, None, "raised asyncio.CancelledError, though nothing cancelled it"
            )
        episode = rollout.result()
    except Blocked as error:
        return Outcome(task, script, seed, policy, None, str(error), unended=True)
    except RAISED as error:  # the plugin boundary: an environment's code
        where = line_of_component(error.__traceback__)
        return Outcome(task, script, seed, policy, None, of_error(error), where)
    finally:
        rollout.cancel()
    if not isinstance(episode, Episode):
        gave = "returned None" if episode is None else f"returned a {type(episode).__name__}"
        return Outcome(task, script, seed, policy, None, f"rollout() {gave}, not an Episode")
    return Outcome(task, script, seed, policy, episode)


async def cancel(work: asyncio.Future[Any]) -> bool:
    """Cancel `work` a few times, and leave it if it does not end: code that catches every exception also catches its cancellation.
    Return True if it was running and did not end as cancelled."""
    was_running = not work.done()
    for _ in range(3):
        if work.done():
            break
        work.cancel()
        await asyncio.wait({work}, timeout=CANCELLED_WITHIN_S / 4)
    if work.done() and not work.cancelled():
        work.exception()
    return was_running and not work.cancelled()


def wrong_with(outcome: Outcome) -> list[str]:
    """Return what is wrong with the episode: numbers that are not finite, tokens that were not sampled."""
    episode = outcome.episode
    assert episode is not None, "called only for rollouts that ended in an episode"
    wrong = []
    numbers = {"score": episode.score, **{f"parts[{name!r}]": value for name, value in episode.parts.items()}}
    numbers |= {f"metrics[{name!r}]": value for name, value in episode.metrics.items()}
    for name, value in numbers.items():
        try:
            finite = not isinstance(value, str) and bool(np.isfinite(np.float64(value)))
        except (TypeError, ValueError, OverflowError):
            finite = False
        if _is_too_large(value):
            wrong.append(f"{name} is {repr(value)[:80]}, too large for float32 (at most {FLOAT32_MOST:.1e})")
        elif not finite:
            wrong.append(f"{name} is {repr(value)[:80]}, not a finite number")
    if episode.correct not in (True, False, None):
        wrong.append(f"correct is {episode.correct!r}, not True, False or None")
    if not episode.rollouts:
        wrong.append("the episode has no rollout")
    if not any(message.get("role") == "assistant" for message in episode.messages):
        wrong.append("the episode's messages hold no reply: rewards and people see nothing")
    for rollout in episode.rollouts:
        if not was_given(rollout, outcome.policy.given):
            wrong.append("a rollout marks tokens as sampled that are not what the policy sampled")
    return [f"{outcome.label}: {each}" for each in wrong]


def _is_too_large(value: Any) -> bool:  # a score is whatever the environment gave
    """True for a finite number that is infinite as float32, in which scores are kept."""
    return isinstance(value, int | float) and FLOAT32_MOST < abs(value) < float("inf")


def difference(one: Outcome, other: Outcome) -> str:
    """Describe the difference between two rollouts that should be equal; "" if there is none. Metrics may differ: time is one."""
    if one.episode is None or other.episode is None:
        return "" if one.error == other.error else f"{one.error or 'an episode'} against {other.error or 'an episode'}"
    first, second = one.episode, other.episode
    for name in ("score", "correct", "parts", "finish"):
        a, b = getattr(first, name), getattr(second, name)
        a, b = (dict(a), dict(b)) if name == "parts" else (a, b)
        if a != b and not (a != a and b != b):
            return f"{name} {brief(repr(a))} against {brief(repr(b))}"
    if [_digest(rollout) for rollout in first.rollouts] != [_digest(rollout) for rollout in second.rollouts]:
        return "tokens"
    if json.dumps(first.messages, default=repr) != json.dumps(second.messages, default=repr):
        return "messages"
    return ""


def _digest(rollout: Rollout) -> str:
    columns = (rollout.tokens, rollout.sampled, rollout.trained, rollout.logprobs, rollout.advantages)
    return hashlib.blake2b(b"|".join(b"" if c is None else c.tobytes() for c in columns)).hexdigest()


def was_given(rollout: Rollout, given: Sequence[Tokens]) -> bool:
    """True if every run of sampled tokens is one reply of the policy, or several in a row."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rollout.sampled.astype(np.int8), [0]])))
    replies = sorted({ids.tobytes() for ids in given}, key=len, reverse=True)
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        left = np.asarray(rollout.tokens[start:end], np.int32).tobytes()
        while left:
            reply = next((reply for reply in replies if left.startswith(reply)), None)
            if not reply:
                return False
            left = left[len(reply) :]
    return True
