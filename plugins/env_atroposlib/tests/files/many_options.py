"""Options of every kind, which `atropos import` reads. The file is never run."""

from typing import Literal

import not_installed_anywhere
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from pydantic import Field

DIGITS = 3


class SumsConfig(BaseEnvConfig):
    digits: int = 2
    style: Literal["plain", "long"] = Field(default="plain", description="How it asks.")
    limit: int | None = Field(None, description="Of tasks.")
    made: float = not_installed_anywhere.number()


class SumsEnv(BaseEnv):
    name = "sums"

    @classmethod
    def config_init(cls):
        return SumsConfig(group_size=16, digits=4, style="long"), [APIServerConfig(model_name="x")]

    async def setup(self):
        self.at = 0

    async def get_next_item(self):
        self.at += 1
        return self.at

    async def collect_trajectories(self, item):
        return await self.ask(item), []

    async def ask(self, item): ...

    async def evaluate(self, *args, **kwargs): ...


def format_sum(a, b):
    return f"{a} + {b}"
