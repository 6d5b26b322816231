"""Word problems of local files, in the shape of atroposlib's gsm8k_server: text is kept, and encoded again for the trainer."""

import re

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from datasets import load_dataset

REPLY_TOKENS = 64


class Problems(BaseEnv):
    name = "problems"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=8, max_token_length=REPLY_TOKENS), APIServerConfig(model_name="x")

    async def setup(self):
        self.train = load_dataset("example/problems", split="train")
        self.test = load_dataset("example/problems", split="test")
        self.iter = 0

    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    async def get_next_item(self):
        row = self.train[self.iter % len(self.train)]
        self.iter += 1
        return row["question"], row["answer"]

    async def said(self, question, n):
        chat = [{"role": "user", "content": question}]
        done = await self.server.chat_completion(messages=chat, n=n, max_tokens=REPLY_TOKENS, temperature=1.0)
        return chat, done.choices

    async def collect_trajectories(self, item):
        question, answer = item
        chat, choices = await self.said(question, self.config.group_size)
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for choice in choices:
            reply = [*chat, {"role": "assistant", "content": choice.message.content}]
            made = tokenize_for_trainer(self.tokenizer, reply, finish_reason=choice.finish_reason)
            group["tokens"].append(made["tokens"])
            group["masks"].append(made["masks"])
            group["scores"].append(float(is_right(choice.message.content, answer)))
        return group, []

    async def evaluate(self, *args, **kwargs):
        right = 0
        for row in self.test:
            _, [choice] = await self.said(row["question"], 1)
            right += is_right(choice.message.content, row["answer"])
        await self.evaluate_log({"eval/accuracy": right / len(self.test)})


def is_right(text, answer):
    found = re.findall(r"####\s*(-?\d{1,12})", text)
    return bool(found) and found[-1] == answer


if __name__ == "__main__":
    Problems.cli()
