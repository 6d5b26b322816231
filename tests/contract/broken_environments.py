"""Environments with one planted bug each. `BUGS` says which check must name it."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atropos_core.conversation import Conversation, Policy
from atropos_core.interfaces import Environment
from atropos_core.types import Episode, Message, Rollout, Score, Split, Task


def task(id: str, question: str, answer: str | None) -> Task:
    return Task(id, ({"role": "user", "content": question},), answer)


class Sums(Environment):
    """Two-digit sums, and no bug: what the broken ones derive from."""

    def tasks(self, split: Split) -> Sequence[Task]:
        rng = random.Random(split)
        pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(200)]
        return [task(f"{split}-{i}", f"What is {a} + {b}?", str(a + b)) for i, (a, b) in enumerate(pairs)]

    async def score(self, task: Task, reply: Message) -> float | Score:
        right = reply["content"].strip() == task.answer
        return Score(float(right), right)


class DuplicateIds(Sums):
    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(each, id=f"{split}-{i % 150}") for i, each in enumerate(super().tasks(split))]


class SharedSplits(Sums):
    def tasks(self, split: Split) -> Sequence[Task]:
        return super().tasks("train")


class SamePromptsInTest(Sums):
    """Other ids, the same questions."""

    def tasks(self, split: Split) -> Sequence[Task]:
        return [task(f"{split}-{i}", f"What is {i} + {i * i}?", str(i + i * i)) for i in range(100)]


class LazyTasksFromASharedGenerator(Sums):
    class Tasks(Sequence[Task]):
        def __init__(self, split: Split) -> None:
            self.split = split

        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> Task:  # type: ignore[override]
            a = random.randrange(1000)
            return task(f"{self.split}-{index}", f"What is {a} + {a}?", str(2 * a))

    def tasks(self, split: Split) -> Sequence[Task]:
        return self.Tasks(split)


class UnseededShuffle(Sums):
    """The order is another in every process, so that a resumed run trains other tasks."""

    def __init__(self) -> None:
        self._tasks = {split: list(super(UnseededShuffle, self).tasks(split)) for split in ("train", "test")}
        for tasks in self._tasks.values():
            random.shuffle(tasks)

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]


class AnswerInPrompt(Sums):
    def tasks(self, split: Split) -> Sequence[Task]:
        return [task(t.id, f"{t.messages[0]['content']} (answer: {t.answer})", t.answer) for t in super().tasks(split)]


class AnswerInSystemMessage(Sums):
    def tasks(self, split: Split) -> Sequence[Task]:
        return [
            Task(t.id, ({"role": "system", "content": f"The grader wants {t.answer}."}, *t.messages), t.answer)
            for t in super().tasks(split)
        ]


class EquationInPrompt(Sums):
    def tasks(self, split: Split) -> Sequence[Task]:
        return [task(t.id, f"{t.messages[0]['content']} {t.answer}, right?", t.answer) for t in super().tasks(split)]


class RandomScore(Sums):
    async def score(self, task: Task, reply: Message) -> float | Score:
        right = reply["content"].strip() == task.answer
        return Score(right - 0.1 * random.random(), right)


class SeedOfItsOwn(Sums):
    """Samples by a seed that is not the rollout's."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        return await super().rollout(task, policy, seed=random.getrandbits(40))


class NanScore(Sums):
    async def score(self, task: Task, reply: Message) -> float | Score:
        words = reply["content"].split()
        return Score(float("nan") if not words else float(words[0] == task.answer), words[:1] == [task.answer])


class SharedState(Sums):
    """Keeps the task of the current go on self."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        self.current = task
        talk = Conversation(policy, seed=seed)
        reply = await talk.reply(*task.messages)
        return talk.episode(Score(float(reply["content"].strip() == self.current.answer)))


class HistoryInScore(Sums):
    """Pays less for what it has seen before."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    async def score(self, task: Task, reply: Message) -> float | Score:
        new = reply["content"] not in self.seen
        self.seen.add(reply["content"])
        right = reply["content"].strip() == task.answer
        return Score(right + 0.1 * new, right)


class SwallowsCancellation(Sums):
    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        try:
            reply = await talk.reply(*task.messages)
        except BaseException:
            return Episode((), 0.0)
        return talk.episode(Score(float(reply["content"].strip() == task.answer)))


class RetriesForEver(Sums):
    """Neither cancellation nor a late engine ends its rollouts."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        while True:
            try:
                return await super().rollout(task, policy, seed=seed)
            except (Exception, asyncio.CancelledError):
                await asyncio.sleep(0.01)


class Sleeps(Sums):
    async def score(self, task: Task, reply: Message) -> float | Score:
        time.sleep(600)  # noqa: ASYNC251 - the bug
        return 0.0


class BusyLoop(Sums):
    async def score(self, task: Task, reply: Message) -> float | Score:
        while reply:
            try:
                pass
            except Exception:
                break
        return 0.0


class BacktrackingRegex(Sums):
    """Holds the loop, and Python's lock, on one hostile reply alone."""

    async def score(self, task: Task, reply: Message) -> float | Score:
        found = re.search(r"^(a+)+$", reply["content"].rpartition(")")[2])
        right = found is None and reply["content"].strip() == task.answer
        return Score(float(right), right)


class RaisesOnEmptyReply(Sums):
    async def score(self, task: Task, reply: Message) -> float | Score:
        right = reply["content"].split()[-1] == task.answer
        return Score(float(right), right)


class RaisesOnHugeNumber(Sums):
    async def score(self, task: Task, reply: Message) -> float | Score:
        numbers = re.findall(r"\d+", reply["content"])
        right = bool(numbers) and int(numbers[-1]) == int(task.answer or 0)
        return Score(float(right), right)


class OracleIsWrong(Sums):
    """Wants a form that its own answers do not have."""

    async def score(self, task: Task, reply: Message) -> float | Score:
        right = f"\\boxed{{{task.answer}}}" in reply["content"]
        return Score(float(right), right)


class PaysEveryReply(Sums):
    async def score(self, task: Task, reply: Message) -> float | Score:
        return 1.0


class AnyNumberWillDo(Sums):
    async def score(self, task: Task, reply: Message) -> float | Score:
        right = task.answer in re.findall(r"\d+", reply["content"])
        return Score(float(right), right)


class NanIsCorrect(Sums):
    """`not (x != x)` and friends: a comparison that nan slips through."""

    async def score(self, task: Task, reply: Message) -> float | Score:
        try:
            value = float(reply["content"])
        except ValueError:
            return Score(0.0, False)
        wrong = abs(value - float(task.answer or 0)) > 0.5
        return Score(float(not wrong), not wrong)


class LeavesTasksRunning(Sums):
    async def open(self) -> None:
        self.refresh = asyncio.create_task(asyncio.sleep(3600))


class ReencodesTokens(Sums):
    """Says that the policy sampled what it never sampled."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        episode = await super().rollout(task, policy, seed=seed)
        rollout = episode.rollouts[0]
        rollout.tokens[rollout.sampled] += 1
        return episode


class TokenisesAgain(Sums):
    """Keeps the reply's text, and encodes it for the trainer: the ids are those of the text, not the ones that were sampled."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        prompt = await policy.render(task.messages)
        [completion] = await policy.sample(prompt, seed=seed)
        reply = await policy.parse(completion.tokens)
        whole = await policy.render([*task.messages, reply])
        tokens = whole[: len(prompt) + len(completion.tokens)]
        sampled = np.arange(len(tokens)) >= len(prompt)
        scores = np.where(sampled, -0.5, 0).astype(np.float32)
        made = Rollout(tokens, sampled, sampled, scores, np.zeros(len(tokens), np.int32), completion.temperature)
        score = float(str(reply["content"]).strip() == task.answer)
        return Episode((made,), score, bool(score), messages=(*task.messages, reply))


class EncodesEarlierRepliesAgain(Sums):
    """Two turns, of which the second prompt is all messages anew."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        first = await super().rollout(task, policy, seed=seed)
        again = Conversation(policy, seed=seed + 1)
        reply = await again.reply(*first.messages, {"role": "user", "content": "Are you sure?"})
        score = await self.score(task, reply)
        assert isinstance(score, Score)
        return again.episode(score)


class UnpicklableItems(Sums):
    """What a loader of data gives, as it is."""

    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(each, data={"item": frozenset({each.id})}) for each in super().tasks(split)]


class TasksFromAGenerator(Sums):
    def tasks(self, split: Split) -> Sequence[Task]:
        yield from super().tasks(split)  # type: ignore[misc]


class TasksOfACoroutine(Sums):
    async def tasks(self, split: Split) -> Sequence[Task]:  # type: ignore[override]
        return super().tasks(split)


class YieldsItsScore(Sums):
    async def score(self, task: Task, reply: Message) -> float | Score:  # type: ignore[misc,override]
        yield float(reply["content"].strip() == task.answer)


class BlocksForAMoment(Sums):
    """As a client of HTTP does that is not awaited, with each reply."""

    async def score(self, task: Task, reply: Message) -> float | Score:
        time.sleep(0.04)  # noqa: ASYNC251 - the bug
        return await super().score(task, reply)


class MissingAnswersAsText(Sums):
    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(each, answer="None") if at % 4 == 0 else each for at, each in enumerate(super().tasks(split))]


class MalformedMessages(Sums):
    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(f"{split}-{i}", ({"role": "usr", "text": "hello"},), "1") for i in range(5)]


class NoTasks(Sums):
    def tasks(self, split: Split) -> Sequence[Task]:
        return []


class GroupOfTheWrongSize(Sums):
    async def rollout_group(self, task, policy, n, *, seeds):  # type: ignore[no-untyped-def]
        episodes = await super().rollout_group(task, policy, n, seeds=seeds)
        return episodes[: max(n - 1, 1)]


class MisspeltRole(Sums):
    """Its second message has a role that no chat template knows."""

    async def rollout(self, task, policy, *, seed):  # type: ignore[no-untyped-def]
        talk = Conversation(policy, seed=seed)
        await talk.reply(*task.messages)
        reply = await talk.reply({"role": "usr", "content": "Are you sure?"})
        return talk.episode(await self.score(task, reply))


BUGS: dict[type[Environment], set[str]] = {
    DuplicateIds: {"unique ids"},
    SharedSplits: {"splits"},
    SamePromptsInTest: {"splits"},
    LazyTasksFromASharedGenerator: {"stable tasks"},
    UnseededShuffle: {"made anew"},
    AnswerInPrompt: {"no leaks"},
    AnswerInSystemMessage: {"no leaks"},
    EquationInPrompt: {"no leaks"},
    RandomScore: {"same again"},
    SeedOfItsOwn: {"same again"},
    NanScore: {"episodes"},
    SharedState: {"rollouts at once"},
    HistoryInScore: {"same again"},
    SwallowsCancellation: {"cancellation"},
    RetriesForEver: {"cancellation", "late engine"},
    Sleeps: {"event loop", "rollouts"},
    BusyLoop: {"event loop", "rollouts"},
    BacktrackingRegex: {"event loop", "rollouts"},
    RaisesOnEmptyReply: {"rollouts"},
    RaisesOnHugeNumber: {"rollouts"},
    OracleIsWrong: {"oracle"},
    PaysEveryReply: {"oracle"},
    AnyNumberWillDo: {"no hedging"},
    NanIsCorrect: {"adversarial replies"},
    LeavesTasksRunning: {"closes"},
    ReencodesTokens: {"episodes"},
    TokenisesAgain: {"re-tokenisation"},
    UnpicklableItems: {"tasks"},
    TasksFromAGenerator: {"tasks"},
    TasksOfACoroutine: {"tasks"},
    YieldsItsScore: {"rollouts"},
    BlocksForAMoment: {"event loop"},
    MalformedMessages: {"tasks"},
    MisspeltRole: {"messages"},
    NoTasks: {"tasks"},
    GroupOfTheWrongSize: {"groups"},
}
