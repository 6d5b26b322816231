"""Groups of many shapes, one after another, for a file that is run as it is by atroposlib (`python FILE serve ...`) and by import.

The scripted model answers to the text between << and >>.
"""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup, ScoredDataItem

SHAPES = ("managed_chat", "managed_turns", "ended_turns", "managed_text", "overridden", "chat_text", "plain_text")


class Shapes(BaseEnv):
    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            group_size=4,
            max_num_workers=1,
            max_token_length=2048,
            use_wandb=False,
            total_steps=1000,
            steps_per_eval=100000,
            ensure_scores_are_not_same=False,
            wandb_name="shapes",
        )
        return config, [APIServerConfig(model_name="scripted", server_type="vllm", api_key="x")]

    async def setup(self):
        self.at = 0

    async def get_next_item(self):
        self.at += 1
        return f"{SHAPES[self.at % len(SHAPES)]} {self.at}"

    async def evaluate(self, *args, **kwargs): ...

    async def collect_trajectories(self, item):
        shape = getattr(self, item.split()[0], None)
        return await super().collect_trajectories(item) if shape is None else (await shape(item), [])

    async def collect_trajectory(self, item):
        """Three turns of one history: for `managed_turns`, replies without an end of turn, which keys that end with "-" have."""
        dash, messages = "-" if item.startswith("managed") else "", []
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for turn in range(3):
                messages += self.chat(f"{item}.{turn}{dash}")
                done = await managed.chat_completion(messages=messages, n=1, max_tokens=40)
                messages.append({"role": "assistant", "content": done.choices[0].message.content})
            [node] = managed.get_state()["nodes"]
        return ScoredDataItem(
            tokens=node.tokens,
            masks=node.masked_tokens,
            inference_logprobs=node.logprobs,
            scores=1.5,
            messages=messages,
        ), []

    async def managed_chat(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=self.chat(item), n=self.config.group_size, max_tokens=40)
            return self.group(managed.get_state()["nodes"])

    async def managed_text(self, item):
        """Two groups for one item."""
        groups = []
        for part in "ab":
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                await managed.completion(prompt=f"plain <<{item}{part}>>", n=self.config.group_size, max_tokens=40)
                groups.append(self.group(managed.get_state()["nodes"]))
        return groups

    async def overridden(self, item):
        """The file's own advantages, and overrides for one sequence and for all."""
        group = await self.managed_chat(item)
        group["advantages"] = [[0.25 * (at + 1)] * len(row) for at, row in enumerate(group["tokens"])]
        group["overrides"] = [{"set_advantage_to_zero": at == 2} for at in range(len(group["tokens"]))]
        group["group_overrides"] = {"sft": self.at > len(SHAPES)}
        return group

    async def chat_text(self, item):
        """Keeps only text and messages, encoded again. (atroposlib's `tokenize_for_trainer` needs transformers 4.)"""
        done = await self.server.chat_completion(messages=self.chat(item), n=self.config.group_size, max_tokens=40)
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], messages=[])
        for at, choice in enumerate(done.choices):
            messages = [*self.chat(item), {"role": "assistant", "content": choice.message.content}]
            tokens = self.ids(messages)
            begin = len(self.ids(messages[:1], add_generation_prompt=True))
            group["tokens"].append(tokens)
            group["masks"].append([-100] * begin + tokens[begin:])
            group["scores"].append(at / 4)
            group["messages"].append(messages)
        return group

    async def plain_text(self, item):
        """`completion` of text, whose ids the file makes itself."""
        prompt = f"plain <<{item}>>"
        done = await self.server.completion(prompt=prompt, n=self.config.group_size, max_tokens=40)
        begin = self.tokenizer.encode(prompt)
        replies = [self.tokenizer.encode(choice.text, add_special_tokens=False) for choice in done.choices]
        return ScoredDataGroup(
            tokens=[begin + reply for reply in replies],
            masks=[[-100] * len(begin) + reply for reply in replies],
            scores=[float(at) for at in range(len(replies))],
        )

    def ids(self, messages, **more):
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **more)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def chat(self, key):
        return [{"role": "user", "content": f"say <<{key}>>"}]

    def group(self, nodes):
        return ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[float(len(node.tokens)) for node in nodes],
        )


if __name__ == "__main__":
    Shapes.cli()
