"""Other processes for the tests: an engine of one table that loads weights, as an installed plugin, and the environment."""

from __future__ import annotations

import os
from pathlib import Path

from tests.conftest import plant

ENGINE = """
import numpy as np

from atropos_core import hookimpl
from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.toy import ToyEngine
from atropos_core.plugins.model_provider import EngineProvider


class TableEngine(ToyEngine):
    async def load_weights(self, directory):
        self.weights["table"][:] = np.load(directory / "table.npy")


@hookimpl
def atropos_engines():
    yield EngineProvider(
        "table", "a table that loads", ToyEngineOptions, TableEngine, transports=lambda options: frozenset({"checkpoint"})
    )
"""

SEVENS = """
import os

from atropos_core import Environment, Score, Task


class Sevens(Environment):
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"say 7 to {n}"},)) for n in range(64)]

    async def rollout(self, task, policy, *, seed):
        if os.path.exists("broken"):
            raise ValueError("the tool is away")
        if os.path.exists("flaky") and seed % 16 == 0:
            raise ValueError("the tool is away")
        episode = await super().rollout(task, policy, seed=seed)
        return episode

    async def score(self, task, reply):
        return Score(reply["content"].count("7") / 2, metrics={"letters": float(len(reply["content"]))})
"""


def python_path(first: Path) -> str:
    """For another process: `first`, and after it what this one was given, a checkout of SkyRL's perhaps."""
    return os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])


def prepare(folder: Path) -> None:
    """The environment as `sevens.py`, and the engine "table" on PYTHONPATH as `site`."""
    (folder / "sevens.py").write_text(SEVENS)
    (folder / "site").mkdir()
    plant(folder / "site", "engine_table", ENGINE)
