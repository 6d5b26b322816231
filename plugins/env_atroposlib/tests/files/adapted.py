"""Gives a managed server, in the shape of OpenAI's client, to a library that looks at the class of what comes back."""

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.server_handling.managed_server import ManagedServerAdapter
from openai.types import Completion
from openai.types.chat import ChatCompletion


class Adapted(BaseEnv):
    async def setup(self): ...

    async def get_next_item(self):
        return "say it"

    async def evaluate(self, *args, **kwargs): ...

    async def collect_trajectories(self, item):
        n = self.config.group_size // 2
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            client = ManagedServerAdapter(managed_server=managed, base_url="http://localhost:9001/v1")
            chat = await client.chat.completions.create(
                model="p", messages=[{"role": "user", "content": item}], n=n, max_completion_tokens=4
            )
            text = await client.completions.create(model="p", prompt=item, n=n, max_tokens=4)
            nodes = managed.get_state()["nodes"]
        if type(chat) is not ChatCompletion or type(text) is not Completion:
            raise TypeError(f"{type(chat)} and {type(text)} are not answers of OpenAI's client")
        said = [*(one.message.content for one in chat.choices), *(one.text for one in text.choices)]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "scores": [float(len(one)) for one in said],
        }, []
