"""Files that give their groups otherwise than by returning them whole."""

from atroposlib.envs.base import BaseEnv


class Sending(BaseEnv):
    """Collects nothing: as a step begins, it sends what is to be imitated, a sequence in each group."""

    async def setup(self):
        self.at = 0

    async def get_next_item(self):
        raise RuntimeError("its items are never drawn")

    async def evaluate(self, *args, **kwargs): ...

    async def env_step_checks(self):
        if self.curr_step != self.status_dict["current_step"]:
            for _ in range(3):
                self.at += 1
                tokens = self.tokenizer.encode(f"text {self.at}")
                group = {"tokens": [tokens], "masks": [[-100, *tokens[1:]]], "scores": [1], "advantages": [1]}
                await self.handle_send_to_api(
                    group | {"overrides": [{"sft": True}], "group_overrides": {"sft": True}}, None
                )
        await super().env_step_checks()


class Pairing(BaseEnv):
    """Trajectories first, which are scored; then a pair of the group and what is left for later. It sends another group besides."""

    async def setup(self):
        self.at = 0

    async def get_next_item(self):
        self.at += 1
        return self.at

    async def evaluate(self, *args, **kwargs): ...

    async def collect_trajectories(self, item):
        done = await self.server.completion(prompt=f"item {item}:", n=self.config.group_size, max_tokens=4)
        return [[f"item {item}:", one.text] for one in done.choices], []

    async def score(self, trajectories):
        rows = [self.tokenizer.encode("".join(one)) for one in trajectories]
        masks = [
            [-100] * len(self.tokenizer.encode(prompt)) + row[len(self.tokenizer.encode(prompt)) :]
            for (prompt, _), row in zip(trajectories, rows, strict=True)
        ]
        return {"tokens": rows, "masks": masks, "scores": [float(at) for at in range(len(rows))]}

    async def postprocess_histories(self, trajectories):
        await self.handle_send_to_api({**trajectories, "scores": [7.0] * len(trajectories["scores"])})
        return trajectories, [10 * self.at]


class Unanswered(BaseEnv):
    """The first of a group has no reply in it, so that the question itself is the last message."""

    async def setup(self): ...

    async def get_next_item(self):
        return "what is it?"

    async def evaluate(self, *args, **kwargs): ...

    async def collect_trajectories(self, item):
        chat = [{"role": "user", "content": item}]
        done = await self.server.chat_completion(messages=chat, n=self.config.group_size, max_tokens=4)
        group = {"tokens": [], "masks": [], "scores": []}
        for at, one in enumerate(done.choices):
            said = [*chat, {"role": "assistant", "content": one.message.content}] if at else chat
            tokens = self.tokenizer.apply_chat_template(said)
            begin = len(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True)) if at else len(tokens) - 4
            group["tokens"].append(tokens)
            group["masks"].append([-100] * begin + tokens[begin:])
            group["scores"].append(float(at))
        return group, []
