"""Episodes and groups to try rewards and transforms on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atropos_core.interfaces import Environment
from atropos_core.types import Draw, Episode, Failed, Message, Rollout, ScoredGroup, Split, Task
from atropos_testing.scripted import END, to_ids


def make_task(answer: str | None = "42", number: int = 0, **data: object) -> Task:
    question = {"role": "user", "content": f"Question {number}: what is six times seven?"}
    return Task(f"task-{number}", (question,), answer, data)


def make_episode(task: Task, reply: str, score: float = 0.0, *, correct: bool | None = None) -> Episode:
    """Make an episode of one turn: the prompt's ids, then the reply's."""
    prompt, reply_ids = to_ids(str(task.messages[0]["content"])), np.append(to_ids(reply), END)
    sampled = np.arange(len(prompt) + len(reply_ids)) >= len(prompt)
    rollout = Rollout(
        tokens=np.concatenate([prompt, reply_ids]).astype(np.int32),
        sampled=sampled,
        trained=sampled,
        logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32),
        policy_version=np.zeros(len(sampled), np.int32),
        temperature=1.0,
    )
    messages = (*task.messages, {"role": "assistant", "content": reply})
    return Episode((rollout,), score, correct, messages=messages)


def make_group(number: int, rewards: Sequence[float], *, failed: int = 0) -> ScoredGroup:
    """Make a group with replies of different lengths, drawn as number `number`."""
    task = make_task(number=number)
    episodes = tuple(
        make_episode(task, "x" * (3 + 5 * member) + str(reward), reward, correct=reward > 0)
        for member, reward in enumerate(rewards)
    )
    return ScoredGroup(
        draw=Draw(number, "sample", "train", number, 1000 + number),
        task=task,
        episodes=episodes,
        rewards=np.array(rewards, np.float32),
        parts={"environment": np.array(rewards, np.float32)},
        failed=(Failed("a rollout that failed", "rollout"),) * failed,
    )


MIXED: Sequence[Sequence[float]] = (
    (0, 1, 0, 1),
    (0.25, 0.5, 0.125, 1),
    (1, 1, 1, 1),  # flat
    (-3, 2, 0, 7),
    (0, 0, 0, 1e-9),  # flat but for noise
    (1e6, -1e6, 5, 0),
)


def make_groups(start: int = 0) -> list[ScoredGroup]:
    """Make six groups, drawn from number `start` on: ordinary and flat ones, some with failed rollouts, one with a wide range. Other
    numbers give other rewards, so that a running statistic moves."""
    scale = 1 + start / 32
    return [
        make_group(start + at, [scale * reward for reward in rewards], failed=at % 3)
        for at, rewards in enumerate(MIXED)
    ]


class TwoSums(Environment):
    """A small environment for components that need one."""

    def tasks(self, split: Split) -> Sequence[Task]:
        first = 0 if split == "train" else 50
        return [
            Task(f"{split}-{n}", ({"role": "user", "content": f"{n} + {n}?"},), str(2 * n))
            for n in range(first, first + 8)
        ]

    async def score(self, task: Task, reply: Message) -> float:
        return float(reply["content"].strip() == task.answer)
