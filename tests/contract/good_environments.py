"""Environments of several shapes that keep the contract."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence

from atropos_core.conversation import Conversation, Policy
from atropos_core.interfaces import Environment
from atropos_core.seeds import derive
from atropos_core.types import Episode, Failed, Message, Score, Split, Task


class SingleTurn(Environment):
    """Small sums, where answers stand in questions by chance, and lazily a million of them."""

    class Tasks(Sequence[Task]):
        def __init__(self, split: Split) -> None:
            self.split = split

        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> Task:  # type: ignore[override]
            a, b = derive(0, self.split, index, "a") % 20, derive(0, self.split, index, "b") % 5
            shown = "For example: 2 + 2? Answer: 4"
            return Task(f"{self.split}-{index}", ({"role": "user", "content": f"{shown}\n{a} + {b}?"},), str(a + b))

    def tasks(self, split: Split) -> Sequence[Task]:
        return self.Tasks(split)

    async def score(self, task: Task, reply: Message) -> float | Score:
        numbers = re.findall(r"-?\d+", reply["content"])
        right = bool(numbers) and numbers[-1] == task.answer
        return Score(float(right), right, parts={"answered": float(bool(numbers))})


class ComputesLong(SingleTurn):
    """Once, for most of a second."""

    computed = False

    async def score(self, task: Task, reply: Message) -> float | Score:
        until = time.thread_time() + 0.8
        while not self.computed and time.thread_time() < until:
            pass
        self.computed = True
        return await super().score(task, reply)


class IsStopped(SingleTurn):
    """Once, with its whole process, as on a machine that is busy with others."""

    stopped = False

    async def score(self, task: Task, reply: Message) -> float | Score:
        if not self.stopped:
            self.stopped = True
            subprocess.Popen(["sh", "-c", f"sleep 0.8; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        return await super().score(task, reply)


class MultiTurn(Environment):
    """Guess a number in three turns, with hints."""

    def tasks(self, split: Split) -> Sequence[Task]:
        rng = random.Random(split)
        content = "Guess my number, from 1 to 999."
        return [
            Task(f"{split}-{i}", ({"role": "user", "content": content},), str(rng.randint(1, 999))) for i in range(64)
        ]

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        shown: tuple[Message, ...] = task.messages
        right = False
        turns = 0
        while turns < 3 and not right:
            reply = await talk.reply(*shown)
            turns += 1
            guess = reply["content"].strip()
            right = guess == task.answer
            shown = ({"role": "user", "content": "No." if not guess.isascii() else f"It is not {guess[:10]}."},)
        return talk.episode(Score(right / turns, right, metrics={"turns": turns}))


class OwnGroup(Environment):
    """Runs the members of a group together: all from one call of the policy. A reply beats others by its length."""

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(f"{split}-{i}", ({"role": "user", "content": f"Say {i} words."},)) for i in range(1, 33)]

    async def rollout_group(
        self, task: Task, policy: Policy, n: int, *, seeds: Sequence[int]
    ) -> Sequence[Episode | Failed | BaseException]:
        rollouts = await asyncio.gather(*(self._one(task, policy, seed) for seed in seeds[:n]))
        longest = max(len(reply) for _, reply in rollouts) or 1
        return [talk.episode(Score(len(reply) / longest)) for talk, reply in rollouts]

    async def _one(self, task: Task, policy: Policy, seed: int) -> tuple[Conversation, str]:
        talk = Conversation(policy, seed=seed)
        return talk, (await talk.reply(*task.messages))["content"]


class NoAnswers(Environment):
    """Nothing is right or wrong: the score is a share of vowels."""

    def tasks(self, split: Split) -> Sequence[Task]:
        count = 40 if split == "train" else 0
        return [Task(f"{i}", ({"role": "user", "content": "Sing!"},), data={"key": i}) for i in range(count)]

    async def score(self, task: Task, reply: Message) -> float | Score:
        text = reply["content"]
        return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


class AsyncTools(Environment):
    """The policy may look a value up before it answers. The tool takes a while, the data come from open()."""

    TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}  # noqa: RUF012

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._helper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        rng = random.Random(7)
        self._values = {f"item {i}": str(rng.randint(1000, 9999)) for i in range(50)}
        self._helper = asyncio.create_task(asyncio.sleep(3600))  # as a server would be

    async def close(self) -> None:
        if self._helper is not None:
            self._helper.cancel()
            await asyncio.gather(self._helper, return_exceptions=True)
            self._helper = None

    def tasks(self, split: Split) -> Sequence[Task]:
        items = list(self._values.items())[:40] if split == "train" else list(self._values.items())[40:]
        return [Task(key, ({"role": "user", "content": f"What is {key} worth?"},), value) for key, value in items]

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed, tools=[self.TOOL])
        reply = await talk.reply(*task.messages)
        for call in reply.get("tool_calls", ())[:2]:
            async with asyncio.timeout(5):
                found = await asyncio.to_thread(self._look_up, call["function"]["arguments"])
            reply = await talk.reply({"role": "tool", "content": found})
        right = reply["content"].strip() == task.answer
        return talk.episode(Score(float(right), right))

    def _look_up(self, arguments: object) -> str:
        key = arguments.get("key") if isinstance(arguments, dict) else None
        return self._values.get(str(key), "nothing there")


GOOD = (SingleTurn, MultiTurn, OwnGroup, NoAnswers, AsyncTools)
