"""An episode of the trial environment through ROLL's own env managers, with its model, router and tokenizer stood in for."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from atropos_adapter_roll import managers
from atropos_adapter_roll.trial import TRIAL, Stock, right_replies
from atropos_core.seeds import derive

Say = Callable[[Sequence[Any]], str]  # from the messages to a reply
SPECIAL = {"<s>": 0x110010, "<|im_end|>": 0x110011, "<|endoftext|>": 0x110012}


class LetterTokenizer:
    """What ROLL asks of a tokenizer: one id a character; a turn is `<s>role\\ncontent<|im_end|>`."""

    pad_token_id = SPECIAL["<|endoftext|>"]
    eos_token_id = SPECIAL["<|im_end|>"]
    all_special_ids = tuple(SPECIAL.values())

    def apply_chat_template(
        self, messages: Sequence[Any], tools: Any = None, add_generation_prompt: bool = False, **_: Any
    ) -> list[int]:
        ids = [ord(letter) for letter in json.dumps(tools)] if tools else []
        for message in messages:
            ids += [SPECIAL["<s>"], *map(ord, f"{message['role']}\n{message['content']}"), SPECIAL["<|im_end|>"]]
        return [*ids, SPECIAL["<s>"], *map(ord, "assistant\n")] if add_generation_prompt else ids

    def decode(self, ids: Sequence[Any], skip_special_tokens: bool = False) -> str:
        names = {} if skip_special_tokens else {number: name for name, number in SPECIAL.items()}
        return "".join(names.get(int(one), "" if int(one) in self.all_special_ids else chr(int(one))) for one in ids)

    def batch_decode(self, rows: Sequence[Any], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]


class SayingProxy:
    """What ROLL asks of an llm proxy."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def generate(self, messages: Sequence[Any], lm_input: Any, generation_config: Any) -> Any:
        import torch
        from tensordict import TensorDict

        ids = [*map(ord, self._say(messages)), SPECIAL["<|im_end|>"], SPECIAL["<|endoftext|>"]]
        proto = importlib.import_module("roll.distributed.scheduler.protocol").DataProto
        return proto(batch=TensorDict({"responses": torch.tensor([ids])}, batch_size=1))


def make_manager(
    name: str, say: Say, queue: Any, *, group_size: int = 1, env_id: int = 0, max_steps: int = 3, **env_config: Any
) -> Any:
    """ROLL's manager `name` as a worker of ROLL makes it, which samples by `say`."""
    from omegaconf import OmegaConf

    custom = {
        "env_type": "atropos", "max_steps": max_steps, "max_tokens_per_step": 256, "agent_system_template": "Be brief.",
        "agent_template": "{observation}",
    }  # fmt: skip
    config = {"observation": managers.BASES[name][1], "max_steps": max_steps, **env_config}
    entry = {**custom, "tag": "Tag", "group_id": 0, "env_id": env_id, "group_seed": 17, "config": config}
    worker = SimpleNamespace(
        llm_proxy=SimpleNamespace(proxy_type="policy", proxy_config={}), group_filter_cls=managers.FILTER,
        generating_args=SimpleNamespace(max_new_tokens=256, to_dict=dict), group_size=group_size,
    )  # fmt: skip
    pipeline = SimpleNamespace(
        custom_envs={"Tag": custom}, sequence_length=4096, skip_mock_system_prompt=True, exp_name="trial",
        parse_tool_call_parameter_to_dict=False,
    )  # fmt: skip
    made = getattr(managers, name)(
        worker, pipeline, OmegaConf.create(entry), LetterTokenizer(), None, queue, threading.Lock()
    )
    made.llm_proxy, made.current_step = SayingProxy(say), 0
    return made


def play_through(name: str) -> tuple[int, float]:
    """Replies and score of one episode. Starts a Ray of its own where none runs, and ends it."""
    import ray

    tasks = Stock().tasks("train")
    replies = iter(right_replies(tasks[derive(0, "task") % len(tasks)]))
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        queue = SimpleNamespace(get_episode_id=SimpleNamespace(remote=lambda *_: ray.put(0)))
        manager = make_manager(name, lambda messages: next(replies), queue, environment=TRIAL)
        manager.running, manager.group_seed = True, 0
        cache = manager.reset()
        while not cache.terminated:
            output = manager.make_decision(cache)
            output.meta_info.pop("stop_reason")
            cache = manager.step(output)
        rollout = manager.formulate_rollouts(cache)
        manager.env.close()
        return cache.step, float(rollout.non_tensor_batch["episode_scores"][-1])
    finally:
        if started:
            ray.shutdown()
