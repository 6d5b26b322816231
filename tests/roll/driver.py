"""Drives a gem.Env as ROLL's two env managers do (facts of ROLL 8eb27cc2), without ROLL: an own, small implementation of
their contract, with real tensors and real DictConfigs. A policy is a function from the messages to a reply.
"""

from __future__ import annotations

import copy
import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import gem
import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from atropos_adapter_roll import managers
from atropos_adapter_roll.through_roll import LetterTokenizer

LENGTH = 4096
Reply = Callable[[list[dict[str, Any]]], "str | None"]  # None: ROLL's generation ended at the sequence length


class EpisodeStopReason(enum.Enum):
    FINISH = "finish"
    MAX_LENGTH = "max_length"
    ABORT = "abort"


@dataclass
class Proto:
    """What ROLL's DataProto has in it."""

    batch: TensorDict
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class Cache:
    env_id: int
    group_id: int
    tag: str
    history: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    terminated: bool = False
    truncated: bool = False


def aggregate(metrics: list[dict[str, Any]], modes: dict[str, str]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for one in metrics:
        for name, value in one.items():
            found.setdefault(name, []).append(float(value))
    how = {"mean": np.mean, "sum": np.sum, "last": lambda values: values[-1], "max": max, "min": min}
    return {name: float(how[modes.get(name, "mean")](values)) for name, values in found.items()}


def ids_of(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def sampled(reply: str | None) -> SimpleNamespace:
    """What ROLL's llm proxy gives: the ids of a reply, its end and padding; or nothing, where there is no room."""
    if reply is None:
        return SimpleNamespace(batch=None)
    ids = [*ids_of(reply), LetterTokenizer.eos_token_id, LetterTokenizer.pad_token_id]
    return SimpleNamespace(batch={"responses": torch.tensor([ids])})


class Manager:
    """What the two have in common."""

    def __init__(self, worker_config: Any, pipeline_config: Any, env_config: Any, policy: Reply) -> None:
        self.worker_config, self.pipeline_config, self.env_config = worker_config, pipeline_config, env_config
        self.policy = policy
        self.tokenizer = LetterTokenizer()
        if "seed" in env_config["config"]:
            env_config["config"]["seed"] = env_config["group_seed"]
        self.env = gem.make(env_id=env_config["env_type"], **env_config["config"])
        self.rollout_cache = self._cache()

    def _cache(self) -> Cache:
        return Cache(self.env_config["env_id"], self.env_config["group_id"], self.env_config["tag"])

    def _meta(self) -> dict[str, Any]:
        history = self.rollout_cache.history
        found = aggregate([one.get("metrics", {}) for one in history], history[-1].get("metrics_agg_mode", {}))
        return {"metrics": {f"env/{self.rollout_cache.tag}/{name}": value for name, value in found.items()}}


class Traj(Manager):
    """One token history an episode; observations are text, put one after another."""

    def run_episode(self, seed: int) -> Proto | None:
        self.rollout_cache = cache = self._cache()
        observation, info = self.env.reset(seed=seed)
        if observation is None:
            return None
        most = self.env_config.max_steps
        cache.history.append({"observation": observation, "actions_left": most, "messages": None, **info})
        stopped = False
        while not (cache.terminated or stopped):
            content = self._format()
            reply = self.policy([message for one in cache.history for message in one["messages"]])
            stopped = reply is None
            if reply is not None:
                output = sampled(reply)
                content["response_ids"] = output.batch["responses"][0].tolist()
                content["messages"].append({"role": "assistant", "content": reply})
                self.step(output)
        return self.formulate_rollouts(cache)

    def _format(self) -> dict[str, Any]:
        history, content, config = self.rollout_cache.history, self.rollout_cache.history[-1], self.env_config
        messages = []
        text = ""
        if content["actions_left"] == config.max_steps:
            messages.append({"role": "system", "content": config.agent_system_template})
            if "env_instruction" in history[0]:
                text = history[0]["env_instruction"] + "\n"
        if len(history) > 1 and history[-2].get("use_tool", False):
            messages.append({"role": "tool", "content": content["observation"]})
        else:
            text += config.agent_template.format(observation=content["observation"])
            messages.append({"role": "user", "content": text})
        content["messages"] = messages
        content["prompt_ids"] = ids_of("".join(f"<{one['role']}>{one['content']}" for one in messages))
        return content

    def step(self, llm_output: Any) -> None:
        cache = self.rollout_cache
        action = self.tokenizer.batch_decode(llm_output.batch["responses"], skip_special_tokens=False)[0]
        observation, reward, terminated, truncated, info = self.env.step(action=action)
        suffix = info.pop("suffix", None)
        cache.step += 1
        cache.terminated, cache.truncated = terminated, truncated
        if cache.step >= self.env_config.max_steps:
            cache.terminated = True
            cache.truncated = cache.truncated or not terminated
        cache.history[-1]["reward"] = reward
        cache.history[-1]["llm_response"] = action
        cache.history[-1].update(info)
        left = self.env_config.max_steps - cache.step
        cache.history.append({"observation": observation, "actions_left": left, "messages": None})
        if suffix is not None:
            cache.history[-1]["suffix"] = suffix

    def formulate_rollouts(self, rollout_cache: Cache) -> Proto:
        history = rollout_cache.history
        if "observation" in history[-1]:
            history.pop(-1)
        rewards = [one["reward"] for one in history]
        prompts = [(one["prompt_ids"], one["response_ids"]) for one in history]
        ids = [token for prompt_ids, reply in prompts for token in (*prompt_ids, *reply)]
        mask = [flag for prompt_ids, reply in prompts for flag in (*[0] * len(prompt_ids), *[1] * len(reply))]
        scores = [0.0] * len(ids)
        scores[-1] = sum(rewards)
        return Proto(
            rows([ids], [mask], [scores]),
            {
                "episode_scores": np.array([sum(rewards)], dtype=object),
                "step_scores": np.array([rewards], dtype=object),
            },
            self._meta(),
        )


class Native(Manager):
    """One sample a step; observations are all the messages."""

    def run_episode(self, seed: int) -> Proto | None:
        self.rollout_cache = cache = self._cache()
        observation, info = self.env.reset(seed=seed)
        if observation is None:
            return None
        self.tools = info.get("tools", [])
        if self.env.env_reset_failed:
            assert json.dumps(observation)
            self.failure_mode = info.get("failure_mode", "")
            return None
        cache.history.append({"observation": copy.deepcopy(observation), "messages": None, **info})
        while not cache.terminated:
            content = cache.history[-1]
            content["messages"] = content["observation"]
            content["prompt_ids"] = ids_of(json.dumps([self.tools, content["messages"]]))
            reply = self.policy(content["observation"])
            output = sampled(reply)
            if output.batch is not None:
                content["response_ids"] = output.batch["responses"][0].tolist()
                content["messages"].append({"role": "assistant", "content": reply})
            self.step(output)
        return self.formulate_rollouts(cache)

    def step(self, llm_output: Any) -> None:
        cache, batch, action = self.rollout_cache, llm_output.batch, EpisodeStopReason.MAX_LENGTH
        if batch is not None:
            action = self.tokenizer.batch_decode(batch["responses"], skip_special_tokens=False)[0]
        observation, reward, terminated, truncated, info = self.env.step(action=action)
        cache.step += 1
        cache.terminated, cache.truncated = terminated, truncated
        cache.history[-1]["reward"] = reward
        cache.history[-1]["llm_response"] = action
        cache.history[-1].update(info)
        cache.history.append({"observation": copy.deepcopy(observation), "actions_left": 0, "messages": None})

    def formulate_rollouts(self, rollout_cache: Cache) -> Proto:
        history = rollout_cache.history
        last = history.pop(-1)["observation"]
        rewards = [one["reward"] for one in history]
        steps = [one for one in history if "response_ids" in one]
        ids = [[*one["prompt_ids"], *one["response_ids"]] for one in steps]
        masks = [[*[0] * len(one["prompt_ids"]), *[1] * len(one["response_ids"])] for one in steps]
        scores = [[*[0.0] * (len(row) - 1), one["reward"]] for row, one in zip(ids, steps, strict=True)]
        data = {"env_info": {"env_id": 0, **self.env.env_info}, "last_observation": last}
        data["metrics"] = {"env_timeout": getattr(self.env, "env_timeout", False)}
        return Proto(
            rows(ids, masks, scores),
            {
                "episode_scores": np.array([sum(rewards)] * len(steps), dtype=object),
                "step_scores": np.array([one["reward"] for one in steps], dtype=object),
                "trajectory_data": json.dumps(data),
            },
            self._meta(),
        )


def rows(ids: list[list[int]], masks: list[list[int]], scores: list[list[float]]) -> TensorDict:
    def padded(columns: list[list[Any]], dtype: torch.dtype) -> torch.Tensor:
        made = torch.zeros(len(columns), LENGTH, dtype=dtype)
        for row, column in enumerate(columns):
            made[row, : len(column)] = torch.tensor(column, dtype=dtype)
        return made

    made = {
        "input_ids": padded(ids, torch.long),
        "attention_mask": padded([[1] * len(row) for row in ids], torch.long),
        "response_mask": padded(masks, torch.bool),
        "scores": padded(scores, torch.float),
    }
    return TensorDict(made, batch_size=len(ids))


OurTraj: Any = managers.adapted(Traj, "delta")
OurNative: Any = managers.adapted(Native, "messages")


def manager(
    policy: Reply, *, of: Any = OurTraj, group_size: int = 1, env_id: int = 0, max_steps: int = 8,
    group_filter: str = managers.FILTER, system: str = "You are helpful.", pipeline: Mapping[str, Any] | None = None,
    **env_config: Any,
) -> Any:  # fmt: skip
    """One member as a ROLL worker makes it, of a DictConfig."""
    if issubclass(of, Native):
        env_config.setdefault("observation", "messages")
    config = OmegaConf.create(
        {
            "env_type": "atropos", "tag": "Tag", "group_id": env_id // group_size, "env_id": env_id, "group_seed": 11,
            "max_steps": max_steps, "agent_system_template": system, "agent_template": "{observation}", "config": env_config,
        }
    )  # fmt: skip
    worker = SimpleNamespace(group_filter_cls=group_filter, group_size=group_size)
    estimator = "step_reinforce" if issubclass(of, Native) else "grpo"
    known = {"adv_estimator": estimator, "step_reward_gamma": 1.0, "sequence_length": LENGTH, **(pipeline or {})}
    return of(worker, SimpleNamespace(**known), config, policy)
