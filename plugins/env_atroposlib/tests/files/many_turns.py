"""Several shapes in one file: each class is named by its own."""

import asyncio
import importlib
import os
from pathlib import Path

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem


class Counting(BaseEnv):
    async def setup(self):
        self.count = 0

    async def get_next_item(self):
        self.count += 1
        return self.count

    async def evaluate(self, *args, **kwargs): ...


class Managed(Counting):
    """Two turns of one managed server for each member, and one dictionary for each."""

    async def collect_trajectory(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            chat = [{"role": "user", "content": f"say {item}"}]
            for turn in range(2):
                done = await managed.chat_completion(messages=chat, n=1, max_tokens=6, temperature=1.0)
                chat.append({"role": "assistant", "content": done.choices[0].message.content})
                chat.append({"role": "user", "content": f"and {turn}"})
            [node] = managed.get_state()["nodes"]
        return ScoredDataItem(
            tokens=node.tokens, masks=node.masked_tokens, scores=float(len(node.tokens)), messages=chat[:-1]
        ), []


class Completing(Counting):
    """Plain text, branches of one prompt, two groups for one item, and a judge that is never trained."""

    async def collect_trajectories(self, item):
        groups = []
        for prompt in ("one:", "two:"):
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                done = await managed.completion(prompt=prompt, n=self.config.group_size, max_tokens=5)
                nodes = managed.get_state()["nodes"]
            async with self.server.dedicated_server() as judge:
                told = await judge.completion(prompt=f"judge {done.choices[0].text}", max_tokens=3, temperature=0.5)
            groups.append(
                {
                    "tokens": [node.tokens for node in nodes],
                    "masks": [node.masked_tokens for node in nodes],
                    "scores": [float(at) for at in range(len(nodes))],
                    "advantages": [[0.5] * len(node.tokens) for node in nodes],
                    "overrides": [{"set_advantage_to_zero": at == 0} for at in range(len(nodes))],
                    "judged": told.choices[0].text,
                }
            )
        return groups, []


class Invented(Counting):
    """One sequence that was sampled and one that was not; every other item has no group."""

    async def collect_trajectories(self, item):
        if item % 2:
            return None, [item * 2]
        tokens, sampled, *_ = await self.server.tokens_and_logprobs_completion(prompt="x", max_tokens=4)
        known = [*tokens, *sampled[0]]
        masks = [-100] * len(tokens)
        other = self.tokenizer.encode("nobody said that")
        return {"tokens": [known, other], "masks": [[*masks, *sampled[0]], other], "scores": [1, 0]}, []


class Slow(Counting):
    def __init__(self, config, server_configs, slurm=None):
        super().__init__(config, server_configs, slurm)

    async def setup(self):
        await asyncio.sleep(3600)


class Dying(Counting):
    """Its process ends in the middle of the second group."""

    async def collect_trajectories(self, item):
        done = await self.server.chat_completion(messages=[{"role": "user", "content": "x"}], n=self.config.group_size)
        if item == 2 and not Path(self.config.wandb_name).exists():
            Path(self.config.wandb_name).touch()
            os._exit(9)
        await asyncio.sleep(0)
        rows = [self.tokenizer.encode(choice.message.content or "a") for choice in done.choices]
        return {"tokens": rows, "masks": rows, "scores": [float(len(row)) for row in rows]}, []

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(max_token_length=8), [APIServerConfig(), APIServerConfig()]


class LateConfig(BaseEnvConfig):
    module: str = "surely_not_there"


class Late(Counting):
    """Names its configuration only in __init__, and imports what it needs during setup."""

    def __init__(self, config: LateConfig, server_configs, slurm=False, testing=False):
        super().__init__(config, server_configs, slurm, testing)

    async def setup(self):
        await super().setup()
        if self.config.module:
            importlib.import_module(self.config.module)

    async def collect_trajectories(self, item):
        said = [{"role": "user", "content": "x"}]
        done = await self.server.chat_completion(
            messages=said, n=self.config.group_size, stop=[self.tokenizer.eos_token_id]
        )
        rows = [self.tokenizer.encode(choice.message.content or "a") for choice in done.choices]
        return {"tokens": rows, "masks": rows, "scores": [float(item)] * len(rows)}, []

    async def add_rollouts_for_wandb(self, scored_data, item=None):
        assert item == scored_data["scores"][0], "the item that the group is of"
