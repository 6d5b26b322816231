"""The base of environments that are stepped: they show text, read an action from the reply, and reward each step, which becomes
the turn reward of the reply.

Three plugins use it (gem, textarena, OpenEnv), and plugins may not import one another.
"""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from atropos_core.conversation import Conversation, Policy
from atropos_core.errors import DataError
from atropos_core.interfaces import Environment
from atropos_core.plugins.options import Options
from atropos_core.seeds import derive
from atropos_core.types import Episode, Message, Score, Split, Task
from atropos_env_kit.actions import ActionReader
from atropos_env_kit.numbered_tasks import NumberedTasks

ACTION = "{action}"  # in a template: stands for the action


class SteppingOptions(Options):
    tasks: int = Field(2000, ge=1, description="size of the training split: each task has its own seed")
    held_out: int = Field(200, ge=1, description="size of the test split")
    seed: int = Field(0, ge=0, description="seed of the tasks' seeds")
    action: Literal["reply", "boxed", "pattern"] = Field(
        "reply",
        description="the part of a reply that is the action. reply: all of it; boxed: the content of the last \\boxed{}; pattern: the last "
        "match of `pattern`",
    )
    pattern: str | None = Field(
        None, description="a regular expression; the action is its first group, or the whole match if it has none"
    )
    template: str = Field(
        ACTION, description="how the environment is given the action, which stands in place of {action}"
    )
    system: str = Field("", description="a system message ahead of what the environment shows; empty for none")
    max_turns: int = Field(20, ge=1, description="replies of a side at most; then the episode ends as it stands")
    success: float = Field(1.0, description="the score of an episode from which on it counts as correct")
    step_deadline_s: float = Field(60.0, gt=0, description="seconds for one step; later the rollout fails")

    @model_validator(mode="after")
    def _check_action(self) -> SteppingOptions:
        if (self.action == "pattern") != (self.pattern is not None):
            raise ValueError('action = "pattern" and pattern go together: give both or neither')
        if ACTION not in self.template:
            raise ValueError(f"template has no {ACTION}, so that every action would be the same")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern is not a regular expression: {error}") from error
        return self


@dataclass(frozen=True)
class Turn:
    """The result of a step: which side acts next, and what it is shown since its last action."""

    side: int
    messages: Sequence[Message]
    rewards: Sequence[float] = ()  # of the step, by side; empty at the start
    ended: bool = False
    raised: str = ""  # what the environment raised on the action, for people; empty for nothing


class Stepped(Protocol):
    """One episode of an environment that is stepped."""

    async def reset(self, seed: int) -> Turn: ...
    async def step(self, reply: Message, action: str) -> Turn:
        """Take an action. `action` is from `reply`, which has more than the text."""

    async def close(self) -> None:
        """Release the episode's resources; called once, however it ended."""


class Match:
    """One or several sides, each the policy with its own conversation, until the environment ends the match."""

    def __init__(
        self,
        stepped: Stepped,
        policy: Policy,
        reader: ActionReader,
        *,
        seed: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.ended = False
        self._stepped = stepped
        self._policy = policy
        self._reader = reader
        self._options = reader.options
        self._seed = seed
        self._tools = tools or None
        self._turn: Turn
        self._action: tuple[Message, str]
        self._talks: dict[int, Conversation] = {}
        self._rewards: dict[int, list[float]] = {}
        self._earned_by: dict[int, list[int]] = {}  # for each of these, how many replies the side had sampled
        self._unread: dict[int, int] = {}
        self._raised: dict[int, int] = {}
        self._cut_off = False

    async def begin(self, seed: int) -> None:
        self._turn = await self._stepped.reset(seed)
        if self._turn.ended:
            raise DataError("the episode ended as it began: the policy had nothing to reply to")

    async def reply(self) -> None:
        """Sample a reply of the side that acts next."""
        side, messages = self._turn.side, [*self._turn.messages]
        if side not in self._talks:
            self._talks[side] = Conversation(self._policy, seed=derive(self._seed, side), tools=self._tools)
            self._rewards.setdefault(side, [])
            self._unread[side] = self._raised[side] = 0
            if self._options.system:
                messages.insert(0, {"role": "system", "content": self._options.system})
        answer = await self._talks[side].reply(*messages)
        action = await self._reader.action_of(str(answer.get("content") or ""))
        self._unread[side] += action is None
        self._action = answer, "" if action is None else self._options.template.replace(ACTION, action)

    async def step(self) -> None:
        side = self._turn.side
        self._turn = await self._stepped.step(*self._action)
        self._raised[side] += bool(self._turn.raised)
        for side, reward in enumerate(self._turn.rewards):
            self._rewards.setdefault(side, []).append(reward)
            self._earned_by.setdefault(side, []).append(self._replies(side))
        self._cut_off = not self._turn.ended and self._replies(self._turn.side) >= self._options.max_turns
        self.ended = self._turn.ended or self._cut_off

    async def close(self) -> None:
        await self._stepped.close()

    def episodes(self) -> list[Episode]:
        """Return one episode for each side that has replied, with its own tokens and rewards."""
        return [self._episode(side, talk) for side, talk in sorted(self._talks.items())]

    def _replies(self, side: int) -> int:
        talk = self._talks.get(side)
        return sum(message["role"] == "assistant" for message in talk.messages) if talk else 0

    def _episode(self, side: int, talk: Conversation) -> Episode:
        """The score is the sum of the side's rewards. Each is its last turn's; those before its first turn are of the outcome."""
        total = sum(self._rewards[side])
        replies = self._replies(side)
        turns = [0.0] * replies
        for reward, turn in zip(self._rewards[side], self._earned_by.get(side, ()), strict=True):
            if turn:
                turns[turn - 1] += reward
        metrics = {
            "steps/turns": float(replies),
            "steps/without_action": float(self._unread[side]),
            "steps/raised": float(self._raised[side]),
            "steps/cut_off": float(self._cut_off),
        }
        return talk.episode(Score(total, correct=total >= self._options.success, metrics=metrics, turns=turns))


class SteppedEnvironment(Environment):
    """Tasks are seeds: all rollouts of a task begin alike. One side; with several, override `rollout_group`."""

    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas that the policy is shown

    def __init__(self, name: str, options: SteppingOptions) -> None:
        self.name = name
        self.options = options
        self.reader = ActionReader(options)

    @abstractmethod
    def stepped(self) -> Stepped:
        """Return one more episode."""

    def tasks(self, split: Split) -> Sequence[Task]:
        size = self.options.tasks if split == "train" else self.options.held_out
        return NumberedTasks(size, lambda index: self._task(split, index))

    def source(self) -> str:
        return f"{self.name}, from seeds"

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        match = Match(self.stepped(), policy, self.reader, seed=seed, tools=self.tools)
        [outcome] = await run_matches([match], [task.data["seed"]])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome[0]

    async def close(self) -> None:
        await self.reader.close()

    def _task(self, split: Split, index: int) -> Task:
        seed = derive(self.options.seed, split, index) % 2**31
        said = {"role": "user", "content": f"{self.name}, as it begins from seed {seed}"}
        return Task(f"{split}/{index}", (said,), data={"seed": seed})


def raised_on_action(name: str, raised: str) -> str:
    """Warn that an environment raised on an action."""
    return (
        f"{name} raised on an action: {raised}. The policy is shown the error, and its episode continues. `steps/raised` counts "
        "such replies: if it is close to `steps/turns`, look for a fault in the environment."
    )


async def run_matches(matches: Sequence[Match], seeds: Sequence[int]) -> list[list[Episode] | BaseException]:
    """Run all matches, each to its end or its exception. In rounds: all replies of a round are sampled together, however long the steps
    take, so that a deterministic run has the same batches again."""
    raised: dict[int, BaseException] = {}

    async def each(works: dict[int, Any]) -> None:
        ended = await asyncio.gather(*works.values(), return_exceptions=True)
        raised.update({at: one for at, one in zip(works, ended, strict=True) if isinstance(one, BaseException)})

    def going() -> dict[int, Match]:
        return {at: match for at, match in enumerate(matches) if at not in raised and not match.ended}

    try:
        await each({at: match.begin(seed) for at, (match, seed) in enumerate(zip(matches, seeds, strict=True))})
        while live := going():
            await each({at: match.reply() for at, match in live.items()})
            await each({at: match.step() for at, match in going().items()})
    finally:
        await asyncio.gather(*(match.close() for match in matches), return_exceptions=True)
    return [raised[at] if at in raised else match.episodes() for at, match in enumerate(matches)]
