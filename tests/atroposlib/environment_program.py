"""An environment as its users write them: a subclass of atroposlib's BaseEnv, unmodified. Run by atroposlib's Python.

Every group has a number of its own in `generation_params`, and is printed on a line of output just before it is sent. So is
each step that the environment sees.
"""

import asyncio
import itertools
import json
import sys

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

SIZES = {"right": [4], "mixed": [1, 3, 2, 2], "above": [6, 4], "taught": [4]}


class ScriptedEnv(BaseEnv):
    name = "scripted"

    async def setup(self):
        self.kind = KIND
        self.numbers = itertools.count()

    async def get_next_item(self):
        return next(self.numbers)

    async def collect_trajectories(self, item):
        size = SIZES[self.kind][item % len(SIZES[self.kind])]
        messages = [{"role": "user", "content": f"problem {item}"}]
        answers = await self.server.chat_completion(messages=messages, n=size, max_tokens=16)
        group = ScoredDataGroup(
            tokens=[], masks=[], scores=[], inference_logprobs=[], messages=[],
            generation_params={"temperature": 1.0, "tag": f"{self.kind}-{item}"},
            group_overrides={"group_size": size},
        )  # fmt: skip
        for number, choice in enumerate(answers.choices):
            prompt = self.tokenizer.encode(messages[0]["content"])
            reply = self.tokenizer.encode(choice.message.content)
            if self.kind == "above" and item == 3:
                reply = reply * 40  # longer than the trainer takes: the environment itself drops such a group
            group["tokens"].append(prompt + reply)
            group["masks"].append([-100] * len(prompt) + reply)
            group["inference_logprobs"].append([1.0] * len(prompt) + [-0.5] * len(reply))
            group["scores"].append(1.0 if self.kind == "taught" else float(number))
            group["messages"].append([*messages, {"role": "assistant", "content": choice.message.content}])
        if self.kind == "taught":  # a teacher that is nearly sure of the tokens
            masks = group["masks"]
            group["distill_token_ids"] = [[[t] if t >= 0 else [] for t in mask] for mask in masks]
            group["distill_logprobs"] = [[[-0.01] if t >= 0 else [] for t in mask] for mask in masks]
        return group, []

    async def add_rollouts_for_wandb(self, group, item=None):
        print("SENDING", json.dumps([group["generation_params"]["tag"], len(group["tokens"])]), flush=True)

    async def evaluate(self, *args, **kwargs):
        answers = await self.server.chat_completion(messages=[{"role": "user", "content": "test"}], n=2, max_tokens=4)
        await self.evaluate_log({"right": float(len(answers.choices))}, task_name="scripted", verbose=False)
        print("EVALUATED", self.status_dict["current_step"], flush=True)

    async def get_status(self):
        await super().get_status()
        print("SAW", self.status_dict["current_step"], flush=True)

    async def wandb_log(self, wandb_metrics=None):
        print("LOGGED", self.curr_step, flush=True)


KIND, SERVER, MODEL, TOKENIZER, STEPS, EVALS = sys.argv[1:7]

environment = ScriptedEnv(
    BaseEnvConfig(
        group_size=4, max_num_workers=2, steps_per_eval=2, max_token_length=200, use_wandb=False, wandb_name=f"scripted-{KIND}",
        tokenizer_name=TOKENIZER, rollout_server_url=SERVER, total_steps=int(STEPS), data_dir_to_save_evals=EVALS,
        ensure_scores_are_not_same=False, min_items_sent_before_logging=1,
    ),
    [APIServerConfig(model_name="scripted", base_url=MODEL, api_key="x", num_requests_for_eval=4)],
)  # fmt: skip
asyncio.run(environment.env_manager())
print("ENDED", environment.env_id, flush=True)
