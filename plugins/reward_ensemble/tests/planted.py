"""Rewards that fail in every way, as an installed plugin of this test run."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Sequence

import numpy as np

from atropos_core import hookimpl
from atropos_core.errors import ConfigError
from atropos_core.interfaces import Reward
from atropos_core.plugins.options import NoOptions, Options
from atropos_core.plugins.provider import Provider
from atropos_core.types import Episode, Floats, Task


class PlantedOptions(Options):
    does: str = "says"  # says, raises, is_misconfigured, waits, takes_a_second, computes, nan, shape, dies, cancelled
    values: tuple[float, ...] = ()  # by episode, and from the first again; empty: the environment's score
    flip: float = 0.0  # share of episodes whose rating is 1 - rating
    seed: int = 0


class Forgetful(Reward):
    """A reward without state, so it may run in a separate process."""

    def __init__(self, options: PlantedOptions) -> None:
        self._options = options
        self.calls = 0
        self.closed = False

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        self.calls += 1
        does = self._options.does
        if does == "raises":
            raise KeyError("the rubric")
        if does == "is_misconfigured":
            raise ConfigError("the rubric is not there.", remedy="Name one.")
        if does == "takes_a_second":
            await asyncio.sleep(1)
        if does == "waits":
            await asyncio.sleep(60)
        if does == "computes":
            time.sleep(60)  # noqa: ASYNC251 - as heavy grading does
        if does == "dies":
            os._exit(7)
        if does == "cancelled":
            raise asyncio.CancelledError
        values = self._options.values or tuple(episode.score for episode in episodes)
        given = np.array([values[at % len(values)] for at in range(len(episodes))], np.float32)
        if self._options.flip:
            chance = np.random.default_rng([self._options.seed, int(task.id.split("-")[-1])])
            given = np.where(chance.random(len(given)) < self._options.flip, 1 - given, given)
        if does == "nan":
            given[0] = np.nan
        return given[:-1] if does == "shape" else given

    async def close(self) -> None:
        self.closed = True


class Planted(Forgetful):
    def state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def metrics(self) -> dict[str, float]:
        return {"calls": float(self.calls)}


class WherePid(Reward):
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        return np.full(len(episodes), os.getpid(), np.float32)


@hookimpl
def atropos_rewards() -> Iterable[Provider[Reward]]:
    return [
        Provider("planted", "fails as requested", PlantedOptions, lambda options, context: Planted(options)),
        Provider("forgetful", "fails as requested", PlantedOptions, lambda options, context: Forgetful(options)),
        Provider("pid", "where it runs", NoOptions, lambda options, context: WherePid()),
    ]
