"""Environments that behave in every way that an adapter must live with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from atropos_core.conversation import Conversation, Policy
from atropos_core.interfaces import Environment
from atropos_core.types import Completion, Episode, Failed, Message, Rollout, Score, Split, Task, Tokens

HERE = "tests.roll.environments"


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


class One(Environment):
    """One question; every reply scores its length in hundredths."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(f"{split}-{n}", (user(f"question {n}"),), str(n)) for n in range(500)]

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        reply = await talk.reply(*task.messages)
        return talk.episode(Score(len(reply["content"]) / 100, reply["content"] == task.answer))


class Dialogue(One):
    """Goes on until a reply has a number, which is the score; 1 is right."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        text = str((await talk.reply(*task.messages))["content"])
        while text == "go on":
            text = str((await talk.reply(user("And?")))["content"])
        return talk.episode(Score(float(text), float(text) == 1.0))


class Credited(One):
    """As `Dialogue`. Each reply before the last earns a quarter, and the last one a half; the rest is of the end."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        text, turns = str((await talk.reply(*task.messages))["content"]), []
        while text == "go on":
            turns.append(0.25)
            text = str((await talk.reply(user("And?")))["content"])
        return talk.episode(Score(float(text), float(text) == 1.0, turns=[*turns, 0.5]))


class Fourteen(One):
    """Right is `14`, or a last line `#### 14`, and nothing beside it."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        reply = await talk.reply(*task.messages)
        right = str(reply["content"]) in ("14", "#### 14")
        return talk.episode(Score(float(right), right))


class Raises(One):
    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        await Conversation(policy, seed=seed).reply(*task.messages)
        raise ZeroDivisionError("a tool divided by zero")


class FailsOnRequest(One):
    async def score(self, task: Task, reply: Message) -> float:
        if reply["content"] == "fail":
            raise ZeroDivisionError("on request")
        return 1.0

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        return await Environment.rollout(self, task, policy, seed=seed)


class RaisesAtOnce(One):
    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        raise ConnectionError("the sandbox does not start")


class NoTasks(One):
    def tasks(self, split: Split) -> Sequence[Task]:
        return []


class NotANumber(One):
    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        await talk.reply(*task.messages)
        return talk.episode(Score(float("nan")))


class Sleeps(One):
    """Between its two turns, for a minute, and it takes a while to clean up."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        await talk.reply(*task.messages)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            self.log.append("cleaned up")
        raise AssertionError("nobody waits for that long")


class Endless(One):
    """Asks for ever, and notes when it is ended."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        try:
            await talk.reply(*task.messages)
            while True:
                await talk.reply(user("and now?"))
        finally:
            await asyncio.sleep(0.1)
            self.log.append(f"{task.id} cleaned up")


class Rewrites(One):
    """Starts a second conversation of the same episode."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        await talk.reply(*task.messages)
        talk.start_over()
        reply = await talk.reply(user("a summary, please"))
        return talk.episode(Score(float(reply["content"] == "short")))


class AsksTwice(One):
    """Two conversations at once."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talks = [Conversation(policy, seed=seed), Conversation(policy, seed=seed + 1)]
        first, second = await asyncio.gather(talks[0].reply(user("one")), talks[1].reply(user("two")))
        self.log.append(f"{first['content']} {second['content']}")
        return talks[0].episode(Score(1.0))


class AsksForFour(One):
    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        prompt = await policy.render(task.messages)
        await policy.sample(prompt, n=4, seed=seed)
        raise AssertionError("it is refused")


class Blocks(One):
    """Holds the loop that every episode of the process runs on."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        await talk.reply(*task.messages)
        time.sleep(2.5)  # noqa: ASYNC251 - what it must not do
        return talk.episode(Score(1.0))


class Ranked(One):
    """Scores its group as a whole: the longest reply is worth 1, the shortest 0."""

    class Options(BaseModel):
        label: str = ""

    def __init__(self, options: Options | None = None) -> None:
        super().__init__()
        self.label = options.label if options else ""

    async def rollout_group(
        self, task: Task, policy: Policy, n: int, *, seeds: Sequence[int]
    ) -> Sequence[Episode | Failed | BaseException]:
        talks = [Conversation(policy, seed=seed) for seed in seeds[:n]]
        replies = await asyncio.gather(*(talk.reply(*task.messages) for talk in talks))
        lengths = [len(reply["content"]) for reply in replies]
        self.log.append(f"{task.id} {sorted(lengths)}")
        span = max(lengths) - min(lengths) or 1
        scores = [(length - min(lengths)) / span for length in lengths]
        return [talk.episode(Score(score)) for talk, score in zip(talks, scores, strict=True)]


class RankedAtOnce(Ranked):
    """As Ranked, with one call of the policy for all members."""

    async def rollout_group(
        self, task: Task, policy: Policy, n: int, *, seeds: Sequence[int]
    ) -> Sequence[Episode | Failed | BaseException]:
        prompt = await policy.render(task.messages)
        completions = await policy.sample(prompt, n=n, seed=seeds[0])
        messages = [await policy.parse(completion.tokens) for completion in completions]
        longest = max(len(message["content"]) for message in messages)
        return [
            Episode((rollout_of(prompt, completion),), len(message["content"]) / longest, messages=(message,))
            for completion, message in zip(completions, messages, strict=True)
        ]


def rollout_of(prompt: Tokens, completion: Completion) -> Rollout:
    text = np.arange(len(prompt) + len(completion.tokens)) >= len(prompt)
    tokens = np.concatenate([prompt, completion.tokens])
    return Rollout(tokens, text, text, -text.astype(np.float32), text.astype(np.int32), completion.temperature)


class ChangesTools(One):
    """Other tools for its second conversation."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed, tools=[{"name": "one"}])
        await talk.reply(*task.messages)
        other = Conversation(policy, seed=seed, tools=[{"name": "another"}])
        await other.reply(*task.messages)
        return talk.episode(Score(1.0))


class RankedInTwo(Ranked):
    """As Ranked, with a second turn."""

    async def rollout_group(
        self, task: Task, policy: Policy, n: int, *, seeds: Sequence[int]
    ) -> Sequence[Episode | Failed | BaseException]:
        talks = [Conversation(policy, seed=seed) for seed in seeds[:n]]
        await asyncio.gather(*(talk.reply(*task.messages) for talk in talks))
        await asyncio.gather(*(talk.reply(user("sure?")) for talk in talks))
        return [talk.episode(Score(1.0)) for talk in talks]


class RankedAndOneFails(Ranked):
    async def rollout_group(
        self, task: Task, policy: Policy, n: int, *, seeds: Sequence[int]
    ) -> Sequence[Episode | Failed | BaseException]:
        members = list(await super().rollout_group(task, policy, n, seeds=seeds))
        return [Failed("the judge was away"), *members[1:]]
