"""Several turns: the environment talks to the agent, which guesses; another of the same policy watches, untrained."""

import itertools
import re

import verifiers.v1 as vf
from verifiers.v1.configs.agent import AgentConfig

HARNESS = {"id": "chatting"}


class GuessData(vf.TaskData):
    target: int


class GuessTask(vf.Task[GuessData]):
    async def setup(self, trace, runtime) -> None:
        if self.data.target == 99:
            raise OSError("the dice are gone")

    @vf.reward(weight=1.0)
    async def closeness(self, task, trace) -> float:
        said = [message.content or "" for message in trace.messages if message.role == "assistant"]
        guesses = [int(found[-1][-1]) for text in said if (found := re.findall(r"\d+", text))]
        return max((1 - abs(guess - task.target) / 10 for guess in guesses), default=0.0)


class GuessConfig(vf.EnvConfig):
    agent: AgentConfig = AgentConfig(harness=HARNESS)
    watcher: AgentConfig = AgentConfig(harness=HARNESS)
    turns: int = 3
    watched: bool = False
    both: bool = False


class GuessTaskset(vf.Taskset[GuessTask]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            a, b = 2 + number // 7, 2 + number % 7
            yield GuessTask(GuessData(prompt=f"What is {a} plus {b}?", target=(a + b) % 10))


class GuessEnv(vf.Env[GuessConfig]):
    async def setup(self, agents) -> None:
        agents.watcher.trainable = self.config.both

    async def run(self, task, agents) -> None:
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(self.config.turns - 1):
                found = re.findall(r"\d+", segment.last_reply)
                guess = int(found[-1][-1]) if found else -1
                if segment.terminated or guess == task.data.target:
                    break
                segment = await talk.turn("higher" if guess < task.data.target else "lower")
        if self.config.watched:
            await agents.watcher.run(task.with_data(prompt="Was that right?"))


__all__ = ["GuessTaskset", "GuessEnv"]
