"""Sinks, teachers, engines, trainers and adapters with one planted bug each, beside the checks that must name it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.builtin.config import ToyEngineOptions, ToyTrainerOptions
from atropos_core.builtin.toy import ToyEngine, ToyTrainer
from atropos_core.interfaces import Finding, ModelInfo, Sink, Teacher, Writing
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.local import LocalLauncher, LocalProcess
from atropos_core.types import Batch, Completion, Floats, Metrics, Sampling, ScoredGroup, Tokens, TopK

# -- sinks


class Counting(Sink):
    """No bug: counts its steps in a file."""

    def __init__(self, context: RunContext) -> None:
        self._path, self._steps = context.directory / "steps", 0

    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        self._steps += 1
        self._path.write_text(str(self._steps))

    def state(self) -> Mapping[str, Any]:
        return {"steps": self._steps}

    def load(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]


class WantsAReward(Counting):
    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        self._path.write_text(f"{metrics['reward/mean']}")


class RefusesNaN(Counting):
    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        json.dumps(metrics, allow_nan=False)


class EncodesReplies(Counting):
    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            for episode in group.episodes:
                str(episode.messages[-1]["content"]).encode()


class RoundsRewards(Counting):
    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            np.round(group.rewards / 3, out=group.rewards)


class ForgetsOnResume(Counting):
    def load(self, state: Mapping[str, Any]) -> None:
        pass


class StateOfSet(Counting):
    def state(self) -> Mapping[str, Any]:
        return {"steps": {self._steps}}


class Sleeps(Counting):
    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        time.sleep(10)  # noqa: ASYNC251 - the bug


class ClosesOnce(Counting):
    async def close(self) -> None:
        del self._path


SINKS: dict[Callable[..., Any], set[str]] = {
    Counting: set(),
    WantsAReward: {"steps"},
    RefusesNaN: {"odd metrics"},
    EncodesReplies: {"hostile replies"},
    RoundsRewards: {"groups unchanged"},
    ForgetsOnResume: {"resumes"},
    StateOfSet: {"resumes"},
    ClosesOnce: {"closes"},
}
BLOCKING = Sleeps

# -- teachers


class LikesEveryToken(Teacher):
    """No bug: every token that was sampled is as likely as can be."""

    async def annotate(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return [self._with(group) for group in groups]

    def _with(self, group: ScoredGroup) -> ScoredGroup:
        return replace(
            group,
            episodes=tuple(
                replace(one, rollouts=tuple(replace(each, teacher=self.says(each.tokens)) for each in one.rollouts))
                for one in group.episodes
            ),
        )

    def says(self, tokens: Tokens) -> TopK:
        offsets = np.maximum(np.arange(len(tokens) + 1) - 1, 0)
        return TopK(offsets, tokens[1:], np.zeros(len(tokens) - 1, np.float32))


class DropsShortGroups(LikesEveryToken):
    async def annotate(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return [self._with(group) for group in groups if len(group.episodes) > 1]


class Sorts(LikesEveryToken):
    async def annotate(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return sorted(map(self._with, groups), key=lambda group: -group.draw.id)


class ScoresToo(LikesEveryToken):
    def _with(self, group: ScoredGroup) -> ScoredGroup:
        return replace(super()._with(group), rewards=group.rewards * 2)


class LikelierThanCertain(LikesEveryToken):
    def says(self, tokens: Tokens) -> TopK:
        found = super().says(tokens)
        return replace(found, logprobs=found.logprobs + 1)


class OneTokenEarly(LikesEveryToken):
    def says(self, tokens: Tokens) -> TopK:
        return TopK(np.arange(len(tokens) + 1), tokens, np.zeros(len(tokens), np.float32))


class WritesInPlace(LikesEveryToken):
    def _with(self, group: ScoredGroup) -> ScoredGroup:
        group.episodes[0].rollouts[0].trained[:] = False
        return super()._with(group)


class ByChance(LikesEveryToken):
    def says(self, tokens: Tokens) -> TopK:
        found = super().says(tokens)
        return replace(found, logprobs=found.logprobs - np.float32(random.random()))


TEACHERS: dict[Callable[..., Any], set[str]] = {
    LikesEveryToken: set(),
    DropsShortGroups: {"odd steps"},
    Sorts: {"same groups"},
    ScoresToo: {"same groups"},
    LikelierThanCertain: {"annotations"},
    OneTokenEarly: {"annotations"},
    WritesInPlace: {"groups unchanged"},
    ByChance: {"same again"},
}

# -- engines


class Engine(ToyEngine):
    """No bug; with a table that is not flat, so that the temperature shows."""

    Options = ToyEngineOptions

    def __init__(self, options: ToyEngineOptions, context: RunContext) -> None:
        super().__init__(options, context)
        self.weights["table"][:] = np.random.default_rng(0).normal(size=self.weights["table"].shape)

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        return [self.change(one) for one in await super().sample(prompt, n, sampling, seeds, deadline_s)]

    def change(self, one: Completion) -> Completion:
        return one


class AnotherTokenizer(Engine):
    async def open(self) -> ModelInfo:
        return replace(await super().open(), tokenizer="of another model")


class OneSeedForAll(Engine):
    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        return await super().sample(prompt, n, sampling, [seeds[0]] * n, deadline_s)


class NoSeeds(Engine):
    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        return await super().sample(prompt, n, sampling, [random.getrandbits(40) for _ in seeds], deadline_s)


class OneTooFew(Engine):
    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        return await super().sample(prompt, n, sampling, seeds[: max(n - 1, 1)], deadline_s)


class TooLong(Engine):
    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        return await super().sample(prompt, n, replace(sampling, max_tokens=30), seeds, deadline_s)


class GreedyIsHot(Engine):
    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        return await super().sample(prompt, n, replace(sampling, temperature=1.0), seeds, deadline_s)


class SamplesPastStopIds(Engine):
    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        return await super().sample(prompt, n, replace(sampling, stop_ids=()), seeds, deadline_s)


class LogprobsOfAnotherTemperature(Engine):
    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        return await super().logprobs(sequences, 2 * temperature)


class OneStepOff(Engine):
    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        return [np.roll(one, -1) for one in await super().logprobs(sequences, temperature)]


class OneCallAtATime(Engine):
    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        self.seeds = seeds
        await asyncio.sleep(0.01)
        return await super().sample(prompt, n, sampling, self.seeds, deadline_s)


class NeverPauses(Engine):
    async def pause(self) -> None:
        pass


class ForgetsItsVersion(Engine):
    async def resume(self, version: int) -> None:
        await super().resume(0)


ENGINES: dict[Callable[..., Any], set[str]] = {
    Engine: set(),
    AnotherTokenizer: {"model"},
    OneSeedForAll: {"seeds"},
    NoSeeds: {"seeds", "calls at once", "stop ids"},
    OneTooFew: {"samples", "seeds"},
    TooLong: {"samples", "versions"},
    GreedyIsHot: {"greedy"},
    SamplesPastStopIds: {"stop ids"},
    LogprobsOfAnotherTemperature: {"logprobs"},
    OneStepOff: {"logprobs"},
    OneCallAtATime: {"calls at once"},
    NeverPauses: {"pauses"},
    ForgetsItsVersion: {"versions"},
}

# -- trainers


class Trainer(ToyTrainer):
    """No bug; with momentum, which is the optimiser's state."""

    Options = ToyTrainerOptions

    def __init__(self, options: ToyTrainerOptions, context: RunContext) -> None:
        super().__init__(options, context)
        self.momentum = np.zeros_like(self.weights["table"])

    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        self._from = self.weights["table"].copy()
        return await super().step(batch, lambda: self.inside(writing))

    def inside(self, writing: Writing) -> Any:
        from contextlib import asynccontextmanager

        @asynccontextmanager
        async def momentum() -> Any:
            async with writing():
                yield
                self.momentum = 0.9 * self.momentum + self.weights["table"] - self._from
                self.weights["table"][:] = self._from + self.momentum

        return momentum()

    async def save(self, directory: Path) -> None:
        await super().save(directory)
        np.save(directory / "momentum.npy", self.momentum)

    async def restore(self, directory: Path) -> None:
        await super().restore(directory)
        self.momentum = np.load(directory / "momentum.npy")


class WritesTooEarly(Trainer):
    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        self.weights["table"][:, 3] += 0.1
        return await super().step(batch, writing)


class WritesTooLate(Trainer):
    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        metrics = await super().step(batch, writing)
        self.weights["table"][:, 3] += 0.1
        return metrics


class NeverWrites(Trainer):
    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        return {"loss": 0.0}


class WrongWay(Trainer):
    def __init__(self, options: ToyTrainerOptions, context: RunContext) -> None:
        super().__init__(options, context)
        self._rate = -self._rate


class LosesMomentum(Trainer):
    async def restore(self, directory: Path) -> None:
        await super().restore(directory)
        self.momentum = np.zeros_like(self.momentum)


class SavesNothing(Trainer):
    async def save(self, directory: Path) -> None:
        pass


class FirstTokenScored(Trainer):
    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        return [one - 1 for one in await super().logprobs(sequences, temperature)]


class LossIsNaN(Trainer):
    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        return {**await super().step(batch, writing), "loss": float("nan")}


TRAINERS: dict[Callable[..., Any], set[str]] = {
    Trainer: set(),
    WritesTooEarly: {"writing"},
    WritesTooLate: {"writing"},
    NeverWrites: {"writing", "learns"},
    WrongWay: {"learns"},
    LosesMomentum: {"restores"},
    SavesNothing: {"restores"},
    FirstTokenScored: {"logprobs"},
    LossIsNaN: {"metrics"},
}

# -- adapters


class Names:
    """No bug: a file of the names of the environments."""

    def __init__(self, context: RunContext) -> None:
        self.elsewhere = context.directory

    def export(self, run: Any, out: Path) -> list[Path]:
        (out / "names").write_text("\n".join(run.environment))
        return [out / "names"]

    def versions(self) -> Mapping[str, str]:
        return {"core": "1"}

    def doctor(self) -> Sequence[Finding]:
        return [Finding("core", True, "there")]


class TakesItsTime(Names):
    """No bug: nothing else proceeds beside a command of its own."""

    def doctor(self) -> Sequence[Finding]:
        time.sleep(2.5)
        return super().doctor()


class VersionOfNumbers(Names):
    def versions(self) -> Any:
        return {"core": 1}


class SaysText(Names):
    def doctor(self) -> Any:
        return ["core is there"]


class NoRemedy(Names):
    def doctor(self) -> Sequence[Finding]:
        return [Finding("core", False, "not there")]


class WritesBeside(Names):
    def export(self, run: Any, out: Path) -> list[Path]:
        (self.elsewhere / "more").write_text("more")
        return super().export(run, out)


class NamesAFileThatIsNotThere(Names):
    def export(self, run: Any, out: Path) -> list[Path]:
        return [*super().export(run, out)[:0], out / "other"]


class Stamps(Names):
    def export(self, run: Any, out: Path) -> list[Path]:
        [path] = super().export(run, out)
        path.write_text(str(time.time_ns()))
        return [path]


ADAPTERS: dict[Callable[..., Any], set[str]] = {
    Names: set(),
    TakesItsTime: set(),
    VersionOfNumbers: {"versions"},
    SaysText: {"doctor"},
    NoRemedy: {"doctor"},
    WritesBeside: {"exports"},
    NamesAFileThatIsNotThere: {"exports", "same again"},
    Stamps: {"same again"},
}


# -- launchers


class Nowhere(LocalLauncher):
    async def machines(self) -> Any:
        return []


class LosesVariables(LocalLauncher):
    async def start(self, role: str, program: str, environment: Mapping[str, str], log: Path) -> LocalProcess:
        return await super().start(role, program, {"PYTHONUNBUFFERED": "1"}, log)


class PrintsNowhere(LocalLauncher):
    async def start(self, role: str, program: str, environment: Mapping[str, str], log: Path) -> LocalProcess:
        return await super().start(role, program, environment, Path("/dev/null"))


class _SaysLittle(LocalProcess):
    def ended(self) -> str | None:
        return super().ended() and "ended"


class SaysLittle(LocalLauncher):
    async def start(self, role: str, program: str, environment: Mapping[str, str], log: Path) -> LocalProcess:
        made = await super().start(role, program, environment, log)
        return _SaysLittle(made.popen, made.connection)


class _KillsOne(LocalProcess):
    """And not what that one has started."""

    def ended(self) -> str | None:
        return None if self.popen.poll() is None else "ended with exit code 0"

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)


class KillsOne(LocalLauncher):
    async def start(self, role: str, program: str, environment: Mapping[str, str], log: Path) -> LocalProcess:
        made = await super().start(role, program, environment, log)
        return _KillsOne(made.popen, made.connection)

    async def close(self) -> None:
        """What its bug has left is ended here."""
        for one in self._started:
            try:
                os.killpg(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


class LeavesRunning(LocalLauncher):
    async def close(self) -> None:
        pass


LAUNCHERS: dict[Callable[..., Any], str] = {
    Nowhere: "machines",
    LosesVariables: "starts",
    PrintsNowhere: "logs",
    SaysLittle: "ends",
    KillsOne: "kills",
    LeavesRunning: "closes what runs",
}
