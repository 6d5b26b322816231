"""One rollout with a scripted policy, and the comparison of two."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from atropos_core.interfaces import Environment
from atropos_core.rollouts.runner import runs_groups
from atropos_core.types import Episode, Failed, Rollout, Task, Tokens
from atropos_testing.eventloop import Blocked
from atropos_testing.report import RAISED, brief, of_error
from atropos_testing.scripted import Script, ScriptedPolicy


@dataclass(frozen=True)
class Outcome:
    """One rollout and how it ended: in an episode, or in `error`."""

    task: Task
    script: Script
    seed: int
    policy: ScriptedPolicy
    episode: Episode | None = None
    error: str = ""
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
    try:
        async with asyncio.timeout(deadline_s):
            episode = await run_rollout(environment, task, policy, seed)
    except TimeoutError:
        return Outcome(task, script, seed, policy, None, f"did not end within {deadline_s:g} s", unended=True)
    except Blocked as error:
        return Outcome(task, script, seed, policy, None, str(error), unended=True)
    except RAISED as error:  # the plugin boundary: an environment's code
        return Outcome(task, script, seed, policy, None, of_error(error))
    if not isinstance(episode, Episode):
        return Outcome(task, script, seed, policy, None, f"gave a {type(episode).__name__}, not an Episode")
    return Outcome(task, script, seed, policy, episode)


def wrong_with(outcome: Outcome) -> list[str]:
    """Return what is wrong with the episode: numbers that are not finite, tokens that were not sampled."""
    episode = outcome.episode
    assert episode is not None, "called only for rollouts that ended in an episode"
    wrong = []
    numbers = {"score": episode.score, **{f"parts[{name!r}]": value for name, value in episode.parts.items()}}
    numbers |= {f"metrics[{name!r}]": value for name, value in episode.metrics.items()}
    for name, value in numbers.items():
        try:
            finite = not isinstance(value, str) and bool(np.isfinite(np.float32(value)))
        except (TypeError, ValueError):
            finite = False
        if not finite:
            wrong.append(f"{name} is {value!r}, not a finite number")
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
