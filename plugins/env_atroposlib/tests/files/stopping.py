"""A reply that ends at a stop text."""

from atroposlib.envs.base import BaseEnv


class Stopping(BaseEnv):
    async def setup(self): ...

    async def get_next_item(self):
        return 1

    async def evaluate(self, *args, **kwargs): ...

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            done = await managed.completion(prompt="p:", n=self.config.group_size, max_tokens=40, stop=["six", "four"])
            nodes = managed.get_state()["nodes"]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "scores": [float(choice.text == "one two ") for choice in done.choices],
        }, []
