"""Rewards for `benchmarks.soak_ensemble`: graders that err, and one that can be talked into anything.

`grader` has the environment's verdict and gets it wrong now and then, by itself. `gameable` has the right verdict, but
takes a bare answer, one that shows no working, at its word: what a policy does that learns to please a reward model. They
are planted as a plugin of the runs that the soak starts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from atropos_core import hookimpl
from atropos_core.builtin.rewards import last_reply
from atropos_core.interfaces import Reward
from atropos_core.plugins.options import NoOptions, Options
from atropos_core.plugins.provider import Provider, RunContext
from atropos_core.types import Episode, Floats, Task


class GraderOptions(Options):
    number: int = 0  # graders of different numbers err independently
    error: float = Field(0.1, ge=0, le=1)  # how often the verdict is the wrong one


class Grader(Reward):
    """The same verdict for the same reply to the same task."""

    def __init__(self, options: GraderOptions, seed: int) -> None:
        self._options = options
        self._seed = seed

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        return np.array([self._verdict(task, episode) for episode in episodes], np.float32)

    def _verdict(self, task: Task, episode: Episode) -> float:
        chance = random.Random(f"{self._seed} {self._options.number} {task.id} {last_reply(episode)}")
        return 1.0 - episode.score if chance.random() < self._options.error else episode.score


class Gameable(Reward):
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        bare = [last_reply(episode).strip().startswith("####") for episode in episodes]
        return np.array(
            [max(episode.score, float(is_bare)) for episode, is_bare in zip(episodes, bare, strict=True)], np.float32
        )


def build_grader(options: GraderOptions, context: RunContext) -> Reward:
    return Grader(options, context.seed)


def build_gameable(options: NoOptions, context: RunContext) -> Reward:
    return Gameable()


@hookimpl
def atropos_rewards() -> Iterable[Provider[Reward]]:
    return [
        Provider("grader", "the environment's verdict, wrong now and then", GraderOptions, build_grader),
        Provider("gameable", "the environment's verdict; a bare answer counts as right", NoOptions, build_gameable),
    ]


def plant(folder: Path, module: str = __name__) -> str:
    """Write the metadata of an installed plugin, this module or another one. Return what PYTHONPATH must have in front."""
    metadata = folder / "gameable-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gameable\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[atropos]\ngameable = {module}\n")
    return f"{folder}:{Path(__file__).parents[1]}"
