"""Run an episode of the trial environment through ROLL's own env managers, with stand-ins for model, router and tokenizer."""

from __future__ import annotations

import contextlib
import importlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from atropos_adapter_roll import managers
from atropos_adapter_roll.recipe import ESTIMATORS
from atropos_adapter_roll.trial import TRIAL, Stock, right_replies
from atropos_core.seeds import derive

Say = Callable[[Sequence[Any]], str | list[int]]  # from the messages to a reply: its text, or ids of its own tokenizer
SEED = 17  # of the one group
PROXY = "atropos_trial"  # in ROLL's registry of llm proxies: its own one is a client of a running router
SPECIAL = {"<s>": 0x110010, "<|im_end|>": 0x110011, "<|endoftext|>": 0x110012}


class LetterTokenizer:
    """The part of a tokenizer that ROLL uses: one id a character; a turn is `<s>role\\ncontent<|im_end|>`."""

    pad_token_id = SPECIAL["<|endoftext|>"]
    eos_token_id = SPECIAL["<|im_end|>"]
    all_special_ids = tuple(SPECIAL.values())

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        tools: Any = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **_: Any,
    ) -> list[int] | str:
        ids = [ord(letter) for letter in json.dumps(tools)] if tools else []
        for message in messages:
            ids += [SPECIAL["<s>"], *map(ord, f"{message['role']}\n{message['content']}"), SPECIAL["<|im_end|>"]]
        ids += [SPECIAL["<s>"], *map(ord, "assistant\n")] if add_generation_prompt else []
        return ids if tokenize else self.decode(ids)

    def decode(self, ids: Sequence[Any], skip_special_tokens: bool = False) -> str:
        names = {number: "" if skip_special_tokens else name for name, number in SPECIAL.items()}
        return "".join(names[int(one)] if int(one) in names else chr(int(one)) for one in ids)

    def batch_decode(self, rows: Sequence[Any], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]


class SayingProxy:
    """The part of an llm proxy that ROLL uses. The logprob of an id is -1 / its position."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def generate(self, messages: Sequence[Any], lm_input: Any, generation_config: Any) -> Any:
        import torch
        from tensordict import TensorDict

        reply = self._say(messages)
        ids = reply if isinstance(reply, list) else [*map(ord, reply), SPECIAL["<|im_end|>"], SPECIAL["<|endoftext|>"]]
        logprobs = [-1 / place for place in range(1, len(ids) + 1)]
        made = {"responses": torch.tensor([ids]), "infer_logprobs": torch.tensor([logprobs])}
        proto = importlib.import_module("roll.distributed.scheduler.protocol").DataProto
        return proto(batch=TensorDict(made, batch_size=1))


def make_manager(
    name: str,
    say: Say,
    queue: Any,
    *,
    group_size: int = 1,
    env_id: int = 0,
    max_steps: int = 3,
    sequence_length: int = 4096,
    tokenizer: Any = None,
    **env_config: Any,
) -> Any:
    """ROLL's manager `name` as a worker of ROLL makes it, which samples by `say`."""
    from omegaconf import OmegaConf

    proxies = importlib.import_module("roll.pipeline.agentic.llm_proxy")
    proxies.register_llm_proxy(PROXY)(lambda *_, **__: SayingProxy(say))

    custom = {
        "env_type": "atropos", "max_steps": max_steps, "max_tokens_per_step": 256, "agent_system_template": "Be brief.",
        "agent_template": "{observation}",
    }  # fmt: skip
    config = {"observation": managers.BASES[name][1], "max_steps": max_steps, **env_config}
    entry = {**custom, "tag": "Tag", "group_id": 0, "env_id": env_id, "group_seed": SEED, "config": config}
    worker = SimpleNamespace(
        llm_proxy=SimpleNamespace(proxy_type=PROXY, proxy_config={}), group_filter_cls=managers.FILTER,
        generating_args=SimpleNamespace(max_new_tokens=256, to_dict=dict), group_size=group_size,
    )  # fmt: skip
    pipeline = SimpleNamespace(
        custom_envs={"Tag": custom}, sequence_length=sequence_length, skip_mock_system_prompt=True, exp_name="trial",
        parse_tool_call_parameter_to_dict=False, **ESTIMATORS[managers.BASES[name][1]],
    )  # fmt: skip
    made = getattr(managers, name)(
        worker, pipeline, OmegaConf.create(entry), tokenizer or LetterTokenizer(), None, queue, threading.Lock()
    )
    made.current_step = 0
    return made


class OneEpisode:
    """The part of a queue that ROLL uses, for one episode: its id, and a place for the rollout."""

    def __init__(self) -> None:
        self.get_episode_id = SimpleNamespace(remote=self._next)
        self.put = SimpleNamespace(remote=self._keep)
        self.manager: Any = None
        self.rollout: Any = None

    def _next(self, *_: Any) -> Any:
        import ray

        return ray.put(None if self.rollout is not None else 0)

    def _keep(self, group_id: Any, episode_id: Any, step: Any, rollout: Any, *_: Any) -> Any:
        import ray

        self.manager.running = False  # the loop then ends, as when ROLL has enough
        self.rollout = self.rollout or rollout
        return ray.put(None)


def run_one_rollout(name: str, say: Say, *, seed: int = 0, **given: Any) -> Any:
    """The rollout, a DataProto, of one episode in ROLL's own loop; None if ROLL makes none. `given`: see `make_manager`.
    Rollouts of one `seed` and several `env_id`s are a group. Ray must run."""
    queue = OneEpisode()
    queue.manager = make_manager(name, say, queue, **given)
    try:
        queue.manager.run_rollout_loop(SimpleNamespace(meta_info={"seed": seed}))
        return queue.rollout
    finally:
        queue.manager.env.close()


def run_through(name: str) -> tuple[int, float]:
    """Replies and score of one episode of the trial environment. Ray has to run."""
    tasks = Stock().tasks("train")
    replies = iter(right_replies(tasks[derive(SEED, "task") % len(tasks)]))
    rollout = run_one_rollout(name, lambda messages: next(replies), environment=TRIAL)
    return rollout.meta_info["atropos"]["steps"], float(rollout.non_tensor_batch["episode_scores"][-1])


@contextlib.contextmanager
def a_ray() -> Iterator[None]:
    """A Ray on this machine if none runs, ended afterwards."""
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        if started:
            ray.shutdown()
