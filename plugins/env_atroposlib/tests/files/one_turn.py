"""Keeps only text, which is encoded again for the trainer: the most common shape."""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.type_definitions import Item
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from datasets import load_dataset


class LettersConfig(BaseEnvConfig):
    letter: str = "a"


class Letters(BaseEnv):
    name = "letters"
    env_config_cls = LettersConfig

    def __init__(self, config, server_configs, slurm=True, testing=False):
        super().__init__(config, server_configs, slurm, testing)
        self.percent_correct_buffer = []

    @classmethod
    def config_init(cls):
        return LettersConfig(group_size=4, max_token_length=16, wandb_name="letters"), APIServerConfig(model_name="x")

    async def setup(self):
        self.train = load_dataset("someone/words", split="train")
        self.iter = 0

    async def get_next_item(self):
        item = self.train[self.iter % len(self.train)]
        self.iter += 1
        return frozenset(item.items())

    async def collect_trajectories(self, item: Item):
        said = dict(item)
        chat = [{"role": "user", "content": said["question"]}]
        done = await self.server.chat_completion(messages=chat, n=self.config.group_size, max_tokens=8, temperature=1.0)
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for choice in done.choices:
            text = choice.message.content
            made = tokenize_for_trainer(
                self.tokenizer, [*chat, {"role": "assistant", "content": text}], finish_reason=choice.finish_reason
            )
            group["tokens"].append(made["tokens"])
            group["masks"].append(made["masks"])
            group["scores"].append(float(text.count(self.config.letter)))
        self.percent_correct_buffer.append(sum(group["scores"]) / len(group["scores"]))
        return group, []

    async def evaluate(self, *args, **kwargs):
        done = await self.server.chat_completion(messages=[{"role": "user", "content": "?"}], n=2, max_tokens=4)
        await self.evaluate_log({"eval/percent_correct": 0.25, "eval/accuracy": 0.5, "eval/asked": len(done.choices)})

    async def wandb_log(self, wandb_metrics=None):
        wandb_metrics = wandb_metrics or {}
        if self.percent_correct_buffer:
            wandb_metrics["train/letters"] = sum(self.percent_correct_buffer) / len(self.percent_correct_buffer)
        self.percent_correct_buffer = []
        await super().wandb_log(wandb_metrics)

    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})


if __name__ == "__main__":
    Letters.cli()
