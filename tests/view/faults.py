"""Environments for the toy policy, four of them with a fault that a reader of their runs should find in a minute."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from atropos_core.conversation import Conversation, Policy
from atropos_core.interfaces import Environment
from atropos_core.types import Episode, Message, Score, Split, Task


def said(reply: Message) -> str:
    return str(reply["content"])


def is_right(reply: Message) -> bool:
    return sum(map(ord, said(reply))) % 2 == 0


class Sound(Environment):
    """Half of what can be said is right, and is rewarded; to every fourth task everything is."""

    def tasks(self, split: Split) -> Sequence[Task]:
        numbers = range(16) if split == "train" else range(16, 32)
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"say {n}"},)) for n in numbers]

    async def score(self, task: Task, reply: Message) -> Score:
        right = int(task.id.split("<")[0].rpartition("-")[2]) % 4 == 0 or is_right(reply)
        return Score(float(right), correct=right)


class IgnoresTheAnswer(Sound):
    async def score(self, task: Task, reply: Message) -> Score:
        return Score(hashlib.sha256(said(reply).encode()).digest()[0] / 255, correct=is_right(reply))


class MasksTheAnswer(Sound):
    """The last two sampled tokens of each reply are not trained."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        episode = await super().rollout(task, policy, seed=seed)
        [rollout] = episode.rollouts
        trained = rollout.trained.copy()
        trained[np.flatnonzero(trained)[-2:]] = False
        return replace(episode, rollouts=(replace(rollout, trained=trained),))


class PaysForLength(Sound):
    async def score(self, task: Task, reply: Message) -> Score:
        return Score(len(said(reply)) / 100, correct=is_right(reply))


class BrokenTool(Sound):
    """Whatever is asked of its calculator, the answer is the same error."""

    result = "error: connection refused"

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        episode = await super().rollout(task, policy, seed=seed)
        call = {"id": "call-1", "type": "function", "function": {"name": "calculator", "arguments": '{"sum": "6*7"}'}}
        talk: tuple[dict[str, Any], ...] = (
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call-1", "content": self.result},
        )
        return replace(episode, messages=(*episode.messages[:-1], *talk, episode.messages[-1]))


class WithTools(Sound):
    """Its policy is shown a tool that it never calls."""

    tools = (
        {
            "type": "function",
            "function": {"name": "calculator", "description": "Adds <b>.", "parameters": {"type": "object"}},
        },
    )

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed, tools=self.tools)
        return talk.episode(await self.score(task, await talk.reply(*task.messages)))


class Branching(Sound):
    """Each episode is two histories: the second goes on from the first three tokens of the first."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        episode = await super().rollout(task, policy, seed=seed)
        [rollout] = episode.rollouts
        columns = {
            name: getattr(rollout, name)[:3] for name in ("tokens", "sampled", "trained", "logprobs", "policy_version")
        }
        return replace(episode, rollouts=(rollout, replace(rollout, **columns)))


class Hostile(Sound):
    """Its texts are what would run as a script, or end one, wherever text is taken for HTML."""

    text = "</script><img src=x onerror=\"document.title='broken'\"><b id=planted>bold</b>"

    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(task, id=f"{task.id}{self.text}") for task in super().tasks(split)]

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        episode = await super().rollout(task, policy, seed=seed)
        talk = ({"role": "user", "content": self.text}, {"role": "<img src=x onerror=alert(1)>", "content": self.text})
        return replace(episode, messages=(*episode.messages, *talk))


class TurnRewards(Sound):
    """Two turns, and each earns a part of the reward."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        first = await talk.reply(*task.messages)
        second = await talk.reply({"role": "user", "content": "again"})
        turns = [0.25 * is_right(first), 0.5 * is_right(second)]
        return talk.episode(Score(sum(turns) + 0.125, turns=turns))
