"""Writes each group, as it is given, to a file that only this environment writes."""

import asyncio
import json

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


class WrittenConfig(BaseEnvConfig):
    ledger: str = ""
    seconds: float = 0.2


class Written(BaseEnv):
    env_config_cls = WrittenConfig

    @classmethod
    def config_init(cls):
        return WrittenConfig(), [APIServerConfig()]

    async def setup(self):
        self.at = 0

    async def get_next_item(self):
        self.at += 1
        return self.at

    async def collect_trajectories(self, item):
        await asyncio.sleep(self.config.seconds)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=f"item {item}:", n=self.config.group_size, max_tokens=4)
            nodes = managed.get_state()["nodes"]
        self.write_down({"item": item, "rows": [node.tokens for node in nodes]})
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "scores": [float(at) for at in range(len(nodes))],
        }, []

    def write_down(self, group):
        with open(self.config.ledger, "a") as file:
            file.write(json.dumps(group) + "\n")

    async def evaluate(self, *args, **kwargs): ...

    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {**(data or {}), "at": self.at})
