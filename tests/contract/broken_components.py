"""Rewards, transforms, curricula and bridges with one planted bug each, beside the checks that must name it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from atropos_core.builtin.curricula import OrderedCurriculum
from atropos_core.builtin.local import LocalBridge
from atropos_core.interfaces import Outcome, Publication
from atropos_core.plugins.model_provider import BridgeProvider
from atropos_core.plugins.options import NoOptions
from atropos_core.types import Completion, Draw, Episode, Floats, ScoredGroup, Task

# -- rewards


def words(episode: Episode) -> list[str]:
    return str(episode.messages[-1]["content"]).split()


class WrongShape:
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        return np.zeros((len(episodes), 1), np.float32)


class NotFinite:
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        return np.array([1 / len(words(e)) if words(e) else np.nan for e in episodes], np.float32)


class RaisesOnHostileReplies:
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        return np.array([len(str(e.messages[-1]["content"]).encode()) for e in episodes], np.float32)  # a surrogate


class ByPlace:
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        return np.arange(len(episodes), dtype=np.float32)


class ByChance:
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        return np.array([random.random() for _ in episodes], np.float32)


class OneCallAtATime:
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        self.current = episodes
        await asyncio.sleep(0.01)
        found = [float(len(words(episode))) for episode in self.current]
        return np.array((found + [0.0] * len(episodes))[: len(episodes)], np.float32)


class ChangesEpisodes:
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        for episode in episodes:
            episode.rollouts[0].trained[:] = False
        return np.zeros(len(episodes), np.float32)


class Computes:
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        while True:
            pass


class DoesNotOpen:
    async def open(self) -> None:
        raise ConnectionRefusedError("no model there")

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        return np.zeros(len(episodes), np.float32)


class NeedsOpening:
    """No bug: as a run does, its contract awaits `open()` before the first call."""

    async def open(self) -> None:
        self.bonus = 1.0

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        return np.array([self.bonus * len(words(episode)) for episode in episodes], np.float32)

    async def close(self) -> None:
        del self.bonus
        self.bonus = 0.0


REWARDS: dict[Callable[..., Any], set[str]] = {
    DoesNotOpen: {"opens"},
    WrongShape: {"shape"},
    NotFinite: {"shape"},
    RaisesOnHostileReplies: {"hostile replies"},
    ByPlace: {"order"},
    ByChance: {"same again"},
    OneCallAtATime: {"calls at once"},
    ChangesEpisodes: {"episodes unchanged"},
    Computes: {"event loop", "shape"},
}

# -- transforms


def centred(group: ScoredGroup) -> ScoredGroup:
    return group.with_advantages(group.rewards - group.rewards.mean())


class DividesByZero:
    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        with np.errstate(all="ignore"):
            return [g.with_advantages((g.rewards - g.rewards.mean()) / g.rewards.std()) for g in groups]


class OneAdvantageForAll:
    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return [g.with_advantages(g.rewards.mean(keepdims=True)) for g in groups]


class EmptyRaises:
    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        mean = max(g.rewards.mean() for g in groups)
        return [g.with_advantages(g.rewards - mean) for g in groups]


class Reorders:
    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return sorted(map(centred, groups), key=lambda group: -float(group.rewards.mean()))


class Repeats:
    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return [centred(group) for group in groups for _ in range(2)]


class ChangesGroups:
    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        for group in groups:
            group.rewards[:] -= group.rewards.mean()
        return [group.with_advantages(group.rewards) for group in groups]


class ForgetsItsState:
    """Normalises by a running mean, and saves none of it."""

    def __init__(self) -> None:
        self.mean, self.count = 0.0, 0

    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        for group in groups:
            self.count += 1
            self.mean += (float(group.rewards.mean()) - self.mean) / self.count
        return [group.with_advantages(group.rewards - self.mean) for group in groups]

    def state(self) -> Mapping[str, Any]:
        return {"mean": self.mean}

    def load(self, state: Mapping[str, Any]) -> None:
        pass


class StateIsNoJson(ForgetsItsState):
    def state(self) -> Mapping[str, Any]:
        return {"mean": np.float32(self.mean)}


TRANSFORMS: dict[Callable[..., Any], set[str]] = {
    DividesByZero: {"advantages"},
    OneAdvantageForAll: {"advantages"},
    EmptyRaises: {"odd steps"},
    Reorders: {"order"},
    Repeats: {"order"},
    ChangesGroups: {"groups unchanged"},
    ForgetsItsState: {"state"},
    StateIsNoJson: {"state"},
}

# -- curricula


class Ordered(OrderedCurriculum):
    def __init__(self) -> None:
        super().__init__(0, shuffled=True)


class SameIdTwice(Ordered):
    def draw(self, n: int) -> list[Draw]:
        return [replace(draw, id=draw.id // 2) for draw in super().draw(n)]

    def settle(self, draw: Draw, outcome: Outcome, group: ScoredGroup | None) -> None:
        pass


class OneIndexTooFar(Ordered):
    def draw(self, n: int) -> list[Draw]:
        return [replace(draw, index=draw.index + 1) for draw in super().draw(n)]


class Unseeded(OrderedCurriculum):
    def __init__(self) -> None:
        super().__init__(random.getrandbits(40), shuffled=True)


class LosesWhatIsOpen(Ordered):
    def load(self, state: Mapping[str, Any]) -> None:
        super().load({**state, "unsettled": []})


class TakesOnlyTrained(Ordered):
    def settle(self, draw: Draw, outcome: Outcome, group: ScoredGroup | None) -> None:
        assert group is not None
        super().settle(draw, outcome, group)


class StartsAgain(Ordered):
    def load(self, state: Mapping[str, Any]) -> None:
        pass


CURRICULA: dict[Callable[..., Any], set[str]] = {
    SameIdTwice: {"unique ids"},
    OneIndexTooFar: {"draws"},
    Unseeded: {"seeds"},
    LosesWhatIsOpen: {"unsettled draws"},
    TakesOnlyTrained: {"settling"},
    StartsAgain: {"state"},
}

# -- bridges


class DoesNotPause(LocalBridge):
    @asynccontextmanager
    async def _write(self, version: int) -> AsyncIterator[None]:
        yield
        for engine in self._engines:
            await engine.resume(version)
        self.published = Publication(version, 0.0, 0)


class StaysAtItsVersion(LocalBridge):
    @asynccontextmanager
    async def _write(self, version: int) -> AsyncIterator[None]:
        for engine in self._engines:
            await engine.pause()
        yield
        for engine in self._engines:
            await engine.resume(0)
        self.published = Publication(version, 0.0, 0)


class ResumesAfterAnError(LocalBridge):
    @asynccontextmanager
    async def _write(self, version: int) -> AsyncIterator[None]:
        for engine in self._engines:
            await engine.pause()
        try:
            yield
        finally:
            for engine in self._engines:
                await engine.resume(version)
            self.published = Publication(version, 0.0, 0)


class SwallowsErrors(LocalBridge):
    @asynccontextmanager
    async def _write(self, version: int) -> AsyncIterator[None]:
        for engine in self._engines:
            await engine.pause()
        try:
            yield
        except Exception:
            return
        for engine in self._engines:
            await engine.resume(version)
        self.published = Publication(version, 0.0, 0)


class SaysWhatACallReturns(LocalBridge):
    """A call through an endpoint returns a pair."""

    @asynccontextmanager
    async def _write(self, version: int) -> AsyncIterator[None]:
        async with super()._write(version):
            yield
        pair: Any = (0, [])
        self.published = Publication(version, 0.0, pair)


class NeverCopies(LocalBridge):
    """The engine goes on sampling from the weights that it began with."""

    async def connect(self, trainer: Any, engines: Any) -> None:
        await super().connect(trainer, engines)
        for engine in (timed.behind for timed in engines):
            engine.weights = {name: values.copy() for name, values in engine.weights.items()}


class EndsInNoNumbers(LocalBridge):
    """After its second publish, what the engine says of its samples is not a number."""

    @asynccontextmanager
    async def _write(self, version: int) -> AsyncIterator[None]:
        async with super()._write(version):
            yield
        for engine in self._engines if version == 2 else ():
            engine._one = partial(_without_numbers, engine._one)  # type: ignore[attr-defined]


def _without_numbers(one: Callable[..., Completion], *arguments: Any) -> Completion:
    completion = one(*arguments)
    return replace(completion, logprobs=np.full_like(completion.logprobs, np.nan))


class SaysNothing(LocalBridge):
    @asynccontextmanager
    async def _write(self, version: int) -> AsyncIterator[None]:
        async with super()._write(version):
            yield
        self.published = None


class ClosesOnce(LocalBridge):
    async def close(self) -> None:
        del self._engines


class ExtensionFromNowhere(LocalBridge):
    def extensions(self) -> Any:
        return {"engine": "atropos_no_such_plugin.extension:Extension"}


class LeavesDescriptorsOpen(LocalBridge):
    async def connect(self, trainer: Any, engines: Any) -> None:
        import os

        await super().connect(trainer, engines)
        self.handle = os.memfd_create("leak")


BRIDGES: dict[Callable[..., Any], set[str]] = {
    DoesNotPause: {"pauses", "failure"},
    StaysAtItsVersion: {"versions"},
    ResumesAfterAnError: {"failure"},
    SwallowsErrors: {"failure"},
    NeverCopies: {"weights"},
    EndsInNoNumbers: {"weights"},
    SaysNothing: {"publication"},
    SaysWhatACallReturns: {"publication"},
    ClosesOnce: {"closes"},
    ExtensionFromNowhere: {"extensions"},
    LeavesDescriptorsOpen: {"handles"},
}


def in_process(bridge: Callable[[], Any]) -> BridgeProvider:
    name = getattr(bridge, "__name__", "?")
    return BridgeProvider(name, "", NoOptions, lambda o, c: bridge(), transports=lambda o: frozenset({"in_process"}))
