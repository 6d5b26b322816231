"""Files that open clients of OpenAI's API: for the policy, and for judges."""

import asyncio

import openai
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer


class ClientConfig(BaseEnvConfig):
    judge_url: str = ""


class Clients(BaseEnv):
    env_config_cls = ClientConfig

    @classmethod
    def config_init(cls):
        return ClientConfig(max_token_length=64), [APIServerConfig(model_name="p", base_url="http://localhost:9001/v1")]

    def __init__(self, config, server_configs, slurm=False, testing=False):
        super().__init__(config, server_configs, slurm, testing)
        self.policy = openai.AsyncOpenAI(api_key="x", base_url=server_configs[0].base_url)
        self.judge = openai.AsyncOpenAI(api_key="x", base_url=config.judge_url)
        self.blocking = openai.OpenAI()

    async def setup(self):
        self.count = 0

    async def get_next_item(self):
        self.count += 1
        return self.count

    async def evaluate(self, *args, **kwargs): ...

    async def collect_trajectories(self, item):
        chat = [{"role": "user", "content": f"say {item}"}]
        done = await self.policy.chat.completions.create(
            model="p", messages=chat, n=self.config.group_size, max_tokens=6, temperature=1.0
        )
        own = await asyncio.to_thread(
            self.blocking.completions.create, model="j", prompt=f"judge {item}:", max_tokens=3
        )
        score = await self.judge.chat.completions.create(
            model="j", messages=[{"role": "user", "content": own.choices[0].text}]
        )
        rows = [
            tokenize_for_trainer(self.tokenizer, [*chat, {"role": "assistant", "content": choice.message.content}])
            for choice in done.choices
        ]
        return {
            "tokens": [row["tokens"] for row in rows],
            "masks": [row["masks"] for row in rows],
            "scores": [float(score.choices[0].message.content)] * len(rows),
        }, []


class Blocking(Clients):
    async def collect_trajectories(self, item):
        self.blocking.completions.create(model="p", prompt="x", max_tokens=3)


class Streaming(Clients):
    async def collect_trajectories(self, item):
        await self.policy.chat.completions.create(model="p", messages=[{"role": "user", "content": "x"}], stream=True)
